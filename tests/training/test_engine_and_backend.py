"""Engine and backend chosen together, and an engine that does not start, without vLLM and GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kit.config import ModelConfig, RunConfig, load_config
from kit.errors import ConfigError, EngineError, EnvironmentUnsupported, KitError, ModelError, ObjectiveError
from kit.generation import engine
from kit.generation.engine import Engine, Installed, choose_engine, resolve
from kit.generation.vllm import WatchedGeneration, stop_ids
from kit.model_check.tiny import tiny_config
from kit.models import loading as loading_of_models
from kit.models import unsloth as unsloth_model
from kit.models.backend import Backend, Machine
from kit.models.failures import EngineSettings
from kit.models.unsloth import Loading, loading, model_arguments
from kit.objective import Objective
from kit.planning.plan import plan
from kit.runner.prepare import prepare
from kit.scoring.unsloth_packs import has_unsloth_layers
from kit.trainer.arguments import engine_settings

A100 = Machine((8, 0), "A100", "2026.10.9")
UNSLOTH = Backend("unsloth", "cuda", "")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RunConfig, Engine]]:
    """Return `settled(overrides, columns)`: the configuration and engine of a run on an A100 with vLLM and Unsloth."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(engine, "installed", lambda: Installed("vllm", "0.31.0"))

    def choose(*overrides: str, columns: Any = (), objective: Objective | None = None) -> tuple[RunConfig, Engine]:
        requested = load_config("quickstart", ["model.dtype=auto", "generation.engine=auto", *overrides])
        config, chosen = resolve(requested, choose_engine(requested), (), objective, A100)
        return resolve(config, chosen, columns, objective, A100) if columns else (config, chosen)

    return choose


UNDER_UNSLOTH = "model.backend=unsloth"


@pytest.mark.parametrize(
    ("overrides", "columns", "words"),
    [
        ([UNDER_UNSLOTH, "model.lora=null"], [], "adapters only"),
        ([UNDER_UNSLOTH, "model.revision=abc"], [], "model.revision: abc"),
        (["model.backend=unsloth-cpu"], [], "needs a GPU"),
        (["model.backend=transformers"], ["prompt", "images"], "pictures"),
        (["model.backend=auto"], ["prompt", "images"], "pictures"),
    ],
)
def test_a_default_engine_yields_to_configured_settings(
    settled: Callable[..., Any], overrides: list[str], columns: list[str], words: str
) -> None:
    config, chosen = settled(*overrides, columns=columns)
    assert (config.generation.engine, chosen.name) == ("hf", "hf")
    assert words in chosen.reason
    assert words in (chosen.note or "")
    with pytest.raises(KitError, match=words):
        settled("generation.engine=vllm", *overrides, columns=columns)


def test_a_default_backend_yields_to_vllm(settled: Callable[..., Any]) -> None:
    config, chosen = settled("model.lora=null")
    assert (config.generation.engine, chosen.name, config.model.backend) == ("vllm", "vllm", "transformers")


def test_an_objective_that_reads_the_engine_does_not_go_on_without_it(settled: Callable[..., Any]) -> None:
    reads = Objective.from_spec({"recipe": "grpo", "weights": ["sampler_correction"]})
    with pytest.raises(ConfigError, match="adapters only"):
        settled(UNDER_UNSLOTH, "model.lora=null", objective=reads)


# --- arguments of Unsloth's engine ------------------------------------------------------------------------------------


def test_keys_of_the_engine_reach_unsloths_engine() -> None:
    keys = ["generation.engine=vllm", "data.max_prompt_tokens=100", "generation.max_completion_tokens=28"]
    settings = loading(load_config("quickstart", keys), UNSLOTH, None)
    assert settings.max_seq_length == 128
    assert "enforce_eager" not in settings.fast_inference, "Unsloth's loader refuses it without an engine"
    keys += ["generation.vllm.eager=true"]
    settings = loading(load_config("quickstart", keys), UNSLOTH, 4096)
    assert settings.max_seq_length == 128
    assert model_arguments("m", None, ModelConfig(), torch.bfloat16, settings)["enforce_eager"] is True
    assert settings.fast_inference["max_lora_rank"] == load_config("quickstart").model.lora.rank
    assert not loading(load_config("quickstart", keys), Backend("transformers", "cuda", ""), 4096).fast_inference
    hf = loading(load_config("quickstart", [*keys, "generation.engine=hf"]), UNSLOTH, 4096)
    assert (hf.max_seq_length, hf.fast_inference) == (128, {})


def engine_of(tokens: int, sleeps: bool) -> Any:
    """An Unsloth model with an engine: the attributes of vLLM 0.31 that Unsloth's trainer reads."""
    made = SimpleNamespace(max_model_len=tokens, enable_sleep_mode=sleeps)
    model = torch.nn.Linear(1, 1)
    model.vllm_engine = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(model_config=made)))
    return model


@pytest.mark.parametrize(
    ("model", "standby", "words"),
    [
        (engine_of(512, False), "0", "512 tokens, but the run needs 640"),
        (engine_of(640, False), "1", "no standby for multimodal models"),
        (SimpleNamespace(), "0", "cannot import vLLM"),
        (engine_of(640, False), "0", None),
    ],
)
def test_an_unsloth_engine_with_other_settings_is_refused(
    model: Any, standby: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsloth only warns; then completions would be cut, or an engine without sleep mode put to sleep."""
    shares = list[float]()
    loader = SimpleNamespace(from_pretrained=lambda **o: (shares.append(o["gpu_memory_utilization"]), (model, None))[1])
    monkeypatch.setattr(unsloth_model, "fast_language_model", lambda _: loader)
    # Another model, e.g. a teacher, has half of the card. Unsloth multiplies the share by the free memory.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20, 40))
    monkeypatch.setattr(unsloth_model, "switches", lambda *_: {"UNSLOTH_VLLM_STANDBY": standby})
    with_ = Loading(max_seq_length=640, fast_inference={"gpu_memory_utilization": 0.4})
    load = partial(unsloth_model.load, None, ModelConfig(), torch.float32, UNSLOTH, with_, "m")
    with pytest.raises(EngineError, match=words) if words else nullcontext():
        load()
        assert shares == [0.8]
        assert model._unsloth_allow_packed_overlength, "Unsloth would cut the padded rows of a teacher's longer prompt"


def test_weights_in_another_precision_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.nn.Linear(1, 1)
    wide.dtype = torch.float32  # type: ignore[assignment]
    loader = SimpleNamespace(from_pretrained=lambda **_: (wide, None))
    monkeypatch.setattr(unsloth_model, "fast_language_model", lambda _: loader)
    load = partial(unsloth_model.load, None, dtype=torch.float32, backend=UNSLOTH, with_=Loading(), source="m")
    assert load(config=ModelConfig()) is wide
    with pytest.raises(ModelError, match="did not quantise"):
        load(config=ModelConfig(load_in_4bit=True))


# --- arguments of vLLM in addition to TRL's ---------------------------------------------------------------------------


def test_the_engine_ends_completions_where_the_model_does(new_model: Callable[[], Any]) -> None:
    model = new_model()
    model.generation_config.eos_token_id = [7, 5]
    arguments = {"stop_token_ids": [300]}
    for policy in (model, get_peft_model(model, LoraConfig(target_modules=["q_proj"]))):
        assert stop_ids(policy, {}) == [5, 7]
        assert stop_ids(policy, arguments) == [5, 7, 300]
    assert arguments == {"stop_token_ids": [300]}, "TRL's arguments must not change"


def test_the_engine_reads_the_revision_that_the_trainer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.generation import vllm_generation

    keywords: dict[str, Any] = {}
    monkeypatch.setattr(vllm_generation, "LLM", lambda **arguments: keywords.update(arguments), raising=False)
    config = load_config("quickstart", ["generation.engine=vllm", "model.revision=abc"])
    args: Any = SimpleNamespace(use_vllm=True, use_cpu=True, bf16=False, fp16=False, generation_kwargs=None)
    for settings in (engine_settings(config, args, print), EngineSettings()):
        keywords.clear()
        generation: Any = WatchedGeneration.__new__(WatchedGeneration)
        generation.settings, generation.model = settings, torch.nn.Linear(1, 1)
        generation.accelerator = SimpleNamespace(process_index=0, device=torch.device("cpu"))
        with generation._making():
            vllm_generation.LLM(model="m")
        expected = ["abc", "abc"] if settings is not None and settings.revision else [None, None]
        assert [keywords.get("revision"), keywords.get("tokenizer_revision")] == expected
        assert keywords["model"] == "m"


def use_a100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.models.backend.this_machine", lambda: A100)
    monkeypatch.setattr(engine, "this_machine", lambda: A100)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (2**34, 2**34))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda *_: SimpleNamespace(total_memory=2**34, name="A100", major=8, minor=0),
    )
    monkeypatch.setattr(engine, "installed", lambda: Installed("vllm", "0.31.0"))


def test_only_models_that_unsloth_loaded_have_its_layers() -> None:
    """Unsloth replaces `forward` of the class, also for a teacher of the same architecture that transformers loaded."""

    def forward(self: Any) -> None: ...

    forward.__module__, forward._unsloth_gated = "unsloth.models.llama", True  # type: ignore[attr-defined]
    backbone = type("LlamaModel", (), {"forward": forward})
    teacher, policy = backbone(), backbone()
    policy._unsloth_fast_path = True  # type: ignore[attr-defined]
    assert [has_unsloth_layers(model) for model in (teacher, policy)] == [False, True]
    spec = find_spec("unsloth")
    if spec is not None and spec.origin is not None:
        source = (Path(spec.origin).parent / "models" / "llama.py").read_text()
        for name in ("_unsloth_gated", "_unsloth_fast_path", "_unsloth_allow_packed_overlength"):
            assert name in source


def test_a_model_published_in_4_bits_needs_vllms_plugin(
    tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`model.load_in_4bit` is false then; the model's files decide."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path / "published"
    shutil.copytree(tree["model"]["name"], folder)
    settings = json.loads((folder / "config.json").read_text())
    quantised = {"load_in_4bit": True, "quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": quantised}))
    use_a100(monkeypatch)
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    tree["model"] |= {"name": str(folder), "dtype": "auto"}
    tree["generation"]["engine"] = "auto"
    parts = prepare(load_config(tree))
    assert (parts.engine.name, parts.config.generation.engine) == ("hf", "hf")
    assert "vllm-bnb-plugin" in (parts.engine.note or "")
    assert "key-value cache" in plan(load_config(tree))["memory"]["phases"]["rollout"], "of transformers"
    with pytest.raises(ObjectiveError, match="only vLLM reports"):
        prepare(load_config(tree, ["objective.weights=[sampler_correction]"]))
    with pytest.raises(EnvironmentUnsupported, match="pip install vllm-bnb-plugin"):
        prepare(load_config(tree, ["generation.engine=vllm"]))


def test_the_backend_of_an_architecture_decides_the_hand_over(
    tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Unsloth installed, a mixture of experts still trains on transformers and hands only its adapter to vLLM."""
    folder, tokenizer = tmp_path / "experts", AutoTokenizer.from_pretrained(tree["model"]["name"])
    experts = tiny_config(AutoConfig.for_model("qwen3_moe"), len(tokenizer))
    AutoModelForCausalLM.from_config(experts).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    use_a100(monkeypatch)
    tree["model"] |= {"name": str(folder), "dtype": "auto"}
    tree["generation"]["engine"] = "vllm"
    parts = prepare(load_config(tree))
    assert (parts.files.backend.name, parts.config.model.backend) == ("transformers", "transformers")
    args = SimpleNamespace(use_vllm=True, use_cpu=False, bf16=True, fp16=False, generation_kwargs=None)
    settings = engine_settings(parts.config, args, print)
    assert settings is not None
    assert settings.adapter_alone
    args.bf16 = False  # as for a family that overflows in float16
    settings = engine_settings(parts.config, args, print)
    assert settings is not None
    assert (settings.adapter_alone, settings.dtype) == (False, None)
    suited = loading_of_models.suited
    in_float32 = lambda *arguments: replace(suited(*arguments), computes_in_float32=True)  # noqa: E731
    monkeypatch.setattr(loading_of_models, "suited", in_float32)
    with pytest.raises(ConfigError, match="16 bits only"):
        prepare(load_config(tree, ["generation.vllm.hand_over=adapter"]))
