"""The kit's decoding loop equals transformers' `generate` and does not change the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from kit.errors import ModelError
from kit.generation import decoding
from kit.generation.decoding import fast_decoding, folded_adapters
from kit.models.family import adapter_of
from kit.trainer.rollout import Generator, RolloutState

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=4, max_position_embeddings=64, initializer_range=0.6, tie_word_embeddings=False,
)  # fmt: skip
PAD, END, ENDS = 0, 1, range(2, 12)  # many end tokens, so that completions have several lengths


def tiny(kind: str = "qwen3", **more: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more)).eval()


def with_adapter(model: Any, **options: Any) -> Any:
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options)).eval()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name or "magnitude" in name:
            weight.data = torch.randn_like(weight) * 0.2
    return adapted


def prompts(groups: int = 4, copies: int = 3) -> dict[str, Tensor]:
    """Groups of equal prompts of several lengths, padded on the left."""
    torch.manual_seed(1)
    ids = torch.randint(2, 61, (groups, 7))
    mask = torch.ones_like(ids)
    for row in range(groups):
        mask[row, :row] = 0
    ids = ids * mask
    return {"input_ids": ids.repeat_interleave(copies, 0), "attention_mask": mask.repeat_interleave(copies, 0)}


def settings(**more: Any) -> Any:
    defaults: dict[str, Any] = dict(max_new_tokens=20, do_sample=False, pad_token_id=PAD, eos_token_id=[END, *ENDS])
    return GenerationConfig(**defaults | {"disable_compile": True} | more)


def both(model: Any, inputs: dict[str, Tensor], how: Any) -> tuple[Tensor, Tensor]:
    """The output of transformers' decoding loop and of the kit's."""
    reference = model.generate(**inputs, generation_config=how)
    with fast_decoding(model):
        fast = model.generate(**inputs, generation_config=how)
    return reference, fast


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the batch size of each forward pass of the model; return the list."""
    forward, batch_sizes = Qwen3Model.forward, list[int]()

    def counted(self: Any, input_ids: Any = None, *rest: Any, **keywords: Any) -> Any:
        batch_sizes.append(len(input_ids))
        return forward(self, input_ids, *rest, **keywords)

    monkeypatch.setattr(Qwen3Model, "forward", counted)
    return batch_sizes


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen3", {}),
        ("qwen3", {"attn_implementation": "eager"}),
        ("llama", {}),
        ("mistral", {"sliding_window": 6}),
        ("gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 4}),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6}),
    ],
)
def test_greedy_tokens_equal_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    reference, fast = both(tiny(kind, **more), prompts(), settings())
    assert torch.equal(fast, reference)


@pytest.mark.parametrize(
    "how",
    [
        {"repetition_penalty": 1.3},
        {"suppress_tokens": [3, 4, 8]},
        {"min_new_tokens": 9},
        {"eos_token_id": END, "max_new_tokens": 1},
        {"eos_token_id": None},
        {"num_beams": 2},  # from here on: settings that use transformers' loop
        {"no_repeat_ngram_size": 2},
        {"return_dict_in_generate": True},
    ],
)
def test_generation_settings_give_the_tokens_of_transformers(how: dict[str, Any]) -> None:
    reference, fast = both(with_adapter(tiny()), prompts(), settings(**how))
    assert torch.equal(getattr(fast, "sequences", fast), getattr(reference, "sequences", reference))


def test_prompt_copies_are_read_once_and_ended_rows_leave_the_batch(rows: list[int]) -> None:
    model, inputs = tiny(), prompts(groups=4, copies=3)
    reference = model.generate(**inputs, generation_config=settings())
    reference_rows = list(rows)
    rows.clear()
    with fast_decoding(model):
        assert torch.equal(model.generate(**inputs, generation_config=settings()), reference)
    assert set(reference_rows) == {12}
    assert len(rows) == len(reference_rows)
    assert rows[0] == 4  # the pass over the prompts
    assert rows[1:] == sorted(rows[1:], reverse=True)
    assert rows[-1] < rows[1] < 12


def test_samples_follow_the_distribution_of_transformers() -> None:
    """A chi-squared test of 6,000 first and second tokens against the exact probabilities, with temperature, top-k and top-p."""
    model = tiny()
    ids = torch.tensor([[2, 7, 11]])
    sampling = dict(do_sample=True, temperature=1.3, top_k=12, top_p=0.9, eos_token_id=None)

    def next_token(ids: Tensor) -> Tensor:
        how = settings(**sampling, max_new_tokens=1, output_scores=True, return_dict_in_generate=True)
        return torch.softmax(model.generate(ids, generation_config=how).scores[0][0], dim=-1)

    first = next_token(ids)
    torch.manual_seed(3)
    with fast_decoding(model):
        made = model.generate(ids.repeat(6000, 1), generation_config=settings(**sampling, max_new_tokens=2))[:, 3:]
    counts = torch.bincount(made[:, 0], minlength=61).float()
    assert counts[first == 0].sum() == 0
    possible = first > 0
    expected = 6000 * first[possible]
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    degrees = int(possible.sum()) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5
    for token in counts.topk(2).indices.tolist():  # the second token, given the first
        chosen = made[made[:, 0] == token][:, 1]
        second = next_token(torch.cat([ids, torch.tensor([[token]])], dim=1))
        frequencies = torch.bincount(chosen, minlength=61).float() / len(chosen)
        assert float((frequencies - second).abs().max()) < 4 * (0.25 / len(chosen)) ** 0.5


def test_adapters_are_folded_and_the_weights_restored_exactly() -> None:
    model = with_adapter(tiny())
    inputs = prompts()
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "merged_adapters")}
    weights = {name: layer.base_layer.weight.data_ptr() for name, layer in layers.items()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        apart = model(**inputs).logits
        with folded_adapters(model):
            assert all(layer.merged for layer in layers.values())
            folded = model(**inputs).logits
    torch.testing.assert_close(folded, apart, rtol=1e-4, atol=1e-5)
    assert weights == {name: layer.base_layer.weight.data_ptr() for name, layer in layers.items()}
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert not any(layer.merged for layer in layers.values())


@pytest.mark.parametrize("why", ["dropout in training", "DoRA", "half precision", "large", "switched off"])
def test_adapters_that_folding_would_change_are_not_folded(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"dropout in training": {"lora_dropout": 0.3}, "DoRA": {"use_dora": True}}.get(why, {})
    model = with_adapter(tiny(), **options)
    model.train(why == "dropout in training")
    if why == "half precision":
        model.bfloat16()
    if why == "large":
        monkeypatch.setattr(decoding, "FOLDED_BYTES", 100)
    if why == "switched off":
        model.base_model.disable_adapter_layers()
    with folded_adapters(model):
        assert not any(getattr(module, "merged", False) for module in model.modules())


def test_a_generate_of_its_own_is_not_replaced() -> None:
    model = tiny()
    model.generate = lambda **_: "mine"  # Unsloth's models replace `generate`
    with fast_decoding(model):
        assert model.generate() == "mine"
    assert model.generate() == "mine"


def test_a_streamer_receives_every_token() -> None:
    """`generate` with a streamer uses the loop of transformers, because the kit's loop does not call streamers."""
    model, how = tiny(), settings()
    inputs = {name: value[:1] for name, value in prompts().items()}

    class Heard(list[int]):
        def put(self, value: Tensor) -> None:
            self.extend(value.flatten().tolist())

        def end(self) -> None: ...

    heard = Heard()
    with fast_decoding(model):
        output = model.generate(**inputs, generation_config=how, streamer=heard)
    assert heard == output[0].tolist()
    assert len(heard) > inputs["input_ids"].shape[1]


def test_a_token_without_an_embedding_is_named_before_generation() -> None:
    """Otherwise a GPU raises a device assert that names neither the token nor the cause, and no later call works."""
    model = tiny()
    generator = Generator(adapter_of(model), model)
    made = [[2]], None
    assert generator.turn(lambda *args: made, RolloutState(), [[60]], None, {}) == made
    with pytest.raises(ModelError, match=r"the token 61, but the model only has 61 embeddings"):
        generator.turn(lambda *args: made, RolloutState(), [[5, 61], [3]], None, {})
