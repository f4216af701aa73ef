"""Drafts change how often the model is called, and nothing about what is sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import rest_in_matrix
from torch import Tensor

from kit.config import load_config
from kit.errors import ConfigError
from kit.generation import drafts as module
from kit.generation.decoding import fast_decoding
from kit.generation.drafts import Drafts, Guesser

from .test_decoding import END, SIZES, prompts, settings, tiny

HOW: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": [END, 2, 3]}


def sample(model: Any, given: dict[str, Tensor], drafts: Drafts | None, seed: int, **how: Any) -> list[list[int]]:
    """Completions without what is behind the token that ends them."""
    torch.manual_seed(seed)
    with fast_decoding(model, drafts), torch.no_grad():
        out = model.generate(**given, generation_config=settings(do_sample=True, **HOW | how))
    rows = [row[given["input_ids"].shape[1] :].tolist() for row in out]
    ends = set((HOW | how)["eos_token_id"] or ())
    return [ids[: next((n + 1 for n, token in enumerate(ids) if token in ends), len(ids))] for ids in rows]


def asked(given: dict[str, Tensor]) -> list[list[int]]:
    return [ids[seen.bool()].tolist() for ids, seen in zip(given["input_ids"], given["attention_mask"], strict=True)]


@pytest.mark.parametrize("how", [{}, {"top_p": 0.9}, {"top_k": 5, "temperature": 0.7}, {"min_p": 0.05}])
@pytest.mark.parametrize("kind", rest_in_matrix(2, ["qwen3", "llama"]))
def test_the_same_numbers_give_the_same_completions_whatever_the_drafts(
    kind: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOLES", 5)  # the cache is packed often
    model, given = tiny(kind), prompts(copies=1)
    none, same, wrong = Drafts(), Drafts(), Drafts()
    plain = sample(model, given, none, 3, **how)
    same.remember(asked(given), plain)
    wrong.remember(asked(given), [[5, 7, 9] * 9 for _ in plain])
    for drafts in (same, wrong):
        assert sample(model, given, drafts, 3, **how) == plain
    assert len({len(ids) for ids in plain}) > 1
    assert none.counts() == {module.CALLS: max(map(len, plain)), module.PLAIN_CALLS: max(map(len, plain))}
    assert same.calls < same.plain_calls
    assert wrong.calls == wrong.plain_calls


def test_one_past_completion_serves_a_whole_group_that_stays_independent() -> None:
    model, given = tiny(), prompts(groups=1, copies=12)
    drafts = Drafts()
    drafts.remember(asked(given)[:1], sample(model, given, Drafts(), 0, temperature=0.6)[:1])
    assert sample(model, given, drafts, 1, temperature=0.6) == sample(model, given, Drafts(), 1, temperature=0.6)


def test_no_position_is_asked_for_behind_the_end_of_the_context() -> None:
    """The first prompt is the longest: its drafts bring it to the end while the others, whose guesses are wrong, go on."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.6}
    config = AutoConfig.for_model("gpt2", n_positions=7 + 30 - 1, bos_token_id=1, eos_token_id=1, **sizes)
    model, given, drafts = AutoModelForCausalLM.from_config(config).eval(), prompts(copies=1), Drafts()
    plain = sample(model, given, Drafts(), 3, eos_token_id=None)
    drafts.remember(asked(given), [plain[0][:20], *([(place + 1) % 61 for place in row] for row in plain[1:])])
    assert sample(model, given, drafts, 3, eos_token_id=None) == plain


VOCABULARY, DEEP, ROWS = 4, 3, 80


def exact(model: Any, prompt: list[int], how: dict[str, float]) -> dict[tuple[int, ...], float]:
    """The probability of every completion of at most `DEEP` tokens."""
    found: dict[tuple[int, ...], float] = {}
    open_ones: dict[tuple[int, ...], float] = {(): 1.0}
    while open_ones:
        ids, mass = open_ones.popitem()
        with torch.no_grad():
            z = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, -1] / how["temperature"]
        if "top_k" in how:
            z = z.masked_fill(z < z.topk(int(how["top_k"])).values[-1], -torch.inf)
        for token, p in enumerate(torch.softmax(z, -1).tolist()):
            if p:
                over = token == END or len(ids) + 1 == DEEP
                (found if over else open_ones)[(*ids, token)] = mass * p
    return found


def p_values(draws: list[list[list[int]]], chances: dict[tuple[int, ...], float]) -> Tensor:
    """Of chi-squared tests, one a seed; completions that are expected fewer than 5 times are one class."""
    likely = [ids for ids, p in chances.items() if p * ROWS >= 5]
    expected = torch.tensor([chances[ids] * ROWS for ids in likely], dtype=torch.float64)
    expected = torch.cat([expected, ROWS - expected.sum(0, keepdim=True)])
    values = []
    for rows in draws:
        seen = torch.tensor([sum(tuple(ids) == one for ids in rows) for one in likely], dtype=torch.float64)
        seen = torch.cat([seen, ROWS - seen.sum(0, keepdim=True)])
        values.append(
            torch.special.gammaincc(torch.tensor(len(likely) / 2.0), ((seen - expected) ** 2 / expected).sum() / 2)
        )
    return torch.stack(values)


def distance_from_uniform(values: Tensor) -> float:
    """Kolmogorov and Smirnov's."""
    ordered, n = values.sort().values, len(values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max())


def test_completions_follow_the_exact_distribution_over_100_seeds() -> None:
    """By enumeration of every completion: p-values are uniform, although the drafts are the completions of the seed before."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": VOCABULARY, "initializer_range": 0.3}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes)).eval()
    prompt, drafts = [2, 3], Drafts()
    given = {"input_ids": torch.tensor([prompt] * ROWS), "attention_mask": torch.ones(ROWS, 2, dtype=torch.long)}
    how: dict[str, Any] = {"temperature": 1.3, "top_k": 3}
    draws = []
    for seed in range(100):
        draws.append(sample(model, given, drafts, seed, max_new_tokens=DEEP, eos_token_id=[END], **how))
        drafts.remember([prompt] * ROWS, draws[-1])
    chances = exact(model, prompt, how)
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-6)
    assert distance_from_uniform(p_values(draws, chances)) < 0.163  # 1 in 100 is farther
    assert distance_from_uniform(p_values(draws, exact(model, prompt, how | {"temperature": 0.6}))) > 0.5
    assert Guesser(drafts.past[2, 3]).guess([], DEEP), "there was something to accept or reject"


def test_guesses_are_the_most_frequent_continuations() -> None:
    guesser = Guesser([[5, 6, 7, 8], [5, 6, 9], [5, 6, 9, 9]])
    assert guesser.guess([], 3) == [5, 6, 9]
    assert guesser.guess([5, 6, 7], 9) == [8]
    assert guesser.guess([4, 7], 2) == [8], "of the last token alone, where the longer context is new"
    assert guesser.guess([3], 2) == []
    assert Guesser().guess([], 4) == []


def test_what_was_kept_comes_back_with_a_checkpoint_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROMPTS", 2)
    drafts, again = Drafts(), Drafts()
    for number in range(3):
        drafts.remember([[1, number]] * 2, [[7, 8], [9]])
    drafts.remember([[1, 1]], [[4]])
    again.load_state_dict(drafts.state_dict())
    assert list(again.past.items()) == list(drafts.past.items()) == [((1, 2), [[7, 8], [9]]), ((1, 1), [[4]])]
    monkeypatch.setattr(module, "TOKENS", 4)
    drafts.remember([[1, 1]], [[4, 5]])
    assert list(drafts.past.items()) == [((1, 1), [[4, 5]])], "of long completions fewer are kept"


def test_models_whose_cache_has_no_place_for_rejected_guesses_go_without() -> None:
    model, given, drafts = tiny("mistral", sliding_window=6), prompts(), Drafts()
    assert sample(model, given, drafts, 0) == sample(model, given, None, 0)
    assert drafts.counts() == {module.CALLS: 0, module.PLAIN_CALLS: 0}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("generation.engine=vllm", "generation.vllm.speculative"),
        ("generation.repetition_penalty=1.1", "repetition_penalty: 1.1"),
        ("generation.replay_support=true", "replay_support: true"),
        ("generation.rollout=my.py:rollout", "drafts with rollout"),
    ],
)
def test_samplers_whose_probabilities_are_not_known_are_refused(key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config("quickstart", ["generation.drafts=true", key])


def test_a_resumed_run_goes_on_with_its_drafts(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kit.train

    for drawing in ("draw_curves", "draw_report"):  # another's test, and a second each
        monkeypatch.setattr(f"kit.runner.console.{drawing}", lambda *_, **__: None)
    tree["data"] |= {"limit": 8, "heldout": 4}
    tree["optimisation"]["steps"] = 4
    tree["evaluation"]["every"] = 2
    tree["generation"] |= {"drafts": True, "max_completion_tokens": 12}

    def run(name: str, **how: Any) -> list[dict[str, Any]]:
        content = tree | {"run": tree["run"] | {"id": name, "root": str(tmp_path)}}
        found = kit.train.run(load_config(content), quiet=True, **how).metrics()
        keys = ("step", "loss", "reward", "entropy", "grad_norm", module.CALLS, module.PLAIN_CALLS)
        return [{key: line[key] for key in keys} for line in found]

    whole = run("whole")
    run("parts", until=2)
    assert run("parts", resume=True) == whole
    progress = json.loads((tmp_path / "parts/checkpoint-4/progress.json").read_text())
    assert len(progress["parts"]["drafts"]["past"]) == 4, "each training prompt, with its last group"


def test_the_documented_table_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import drafts

    found = json.loads((root / "benchmarks/results/drafts.json").read_text(encoding="utf-8"))
    assert drafts.table(found) in (root / "docs/performance.md").read_text(encoding="utf-8")
    assert all(runs[1][drafts.PLAIN] / runs[1][drafts.CALLS] > 1.8 for name, runs in found.items() if "-on-" in name)
