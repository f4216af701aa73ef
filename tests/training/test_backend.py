"""The backend of a configuration on each machine, and its environment variables. Unsloth is not imported."""

from __future__ import annotations

import ast
import os
import re
import runpy
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from kit.config import ModelConfig, load_config
from kit.errors import ConfigError, EnvironmentUnsupported, KitError, ModelError
from kit.generation.engine import resolve_backend
from kit.models.backend import (
    FLOAT32_FAMILIES,
    TESTED_UNSLOTH,
    Backend,
    Machine,
    activate_backend,
    decide,
    overflows_in_float16,
    precision,
    suited,
    switched,
    switches,
)
from kit.models.loading import autocast_dtype, weights_dtype
from kit.models.unsloth import (
    Loading,
    adapter_arguments,
    checkpointing,
    model_arguments,
)
from kit.trainer.arguments import check_precision, grpo_config

CPU, CPU_BARE = Machine(None, unsloth="2026.10.9"), Machine(None)
A100, T4 = Machine((8, 0), "A100", "2026.10.9"), Machine((7, 5), "Tesla T4", "2026.10.9")
P100 = Machine((6, 0), "P100", "2026.10.9")
UNSLOTH, UNSLOTH_CPU = Backend("unsloth", "cuda", ""), Backend("unsloth-cpu", "cpu", "")
TRANSFORMERS = Backend("transformers", "cuda", "")


@pytest.mark.parametrize(
    ("machine", "settings", "chosen", "device"),
    [
        (CPU, {}, "transformers", "cpu"),
        (CPU, {"backend": "unsloth-cpu"}, "unsloth-cpu", "cpu"),
        (A100, {}, "unsloth", "cuda"),
        (A100, {"backend": "transformers"}, "transformers", "cuda"),
        (T4, {}, "unsloth", "cuda"),
        (P100, {}, "transformers", "cuda"),
        (Machine((8, 0), "A100"), {}, "transformers", "cuda"),
        (Machine((8, 0), "A100", "2026.10.9", processes=2), {}, "transformers", "cuda"),
        (A100, {"attention": "eager"}, "transformers", "cuda"),
        (A100, {"dtype": "float32"}, "transformers", "cuda"),
        (Machine((8, 0), "A100", "2026.9.1"), {}, "transformers", "cuda"),
    ],
)
def test_decide_selects_the_backend_by_machine_and_settings(
    machine: Machine, settings: dict[str, Any], chosen: str, device: str
) -> None:
    backend = decide(ModelConfig(**settings), machine)
    assert (backend.name, backend.device) == (chosen, device)
    assert backend.reason


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        (None, "auto", "float32"),
        ((7, 5), "auto", "float16"),
        ((8, 0), "auto", "bfloat16"),
        ((9, 0), "float16", "float16"),
    ],
)
def test_precision_by_compute_capability(capability: Any, dtype: str, expected: str) -> None:
    assert precision(dtype, capability) == expected


# --- refusals before a run --------------------------------------------------------------------------------------------


def resolve(machine: Machine, *overrides: str, columns: Any = ()) -> Any:
    return resolve_backend(load_config("quickstart", ["model.dtype=auto", *overrides]), columns, machine)


ENGINE = "generation.engine=vllm"


@pytest.mark.parametrize(
    ("machine", "overrides", "words"),
    [
        (T4, ["model.dtype=bfloat16"], r"Tesla T4.*7\.5.*no bfloat16\. Use float16"),
        (CPU, ["model.backend=unsloth"], "unsloth-cpu"),
        (CPU_BARE, ["model.backend=unsloth"], "not installed.*model.backend: transformers"),
        (CPU, ["model.backend=unsloth-cpu", ENGINE], "generation.engine: hf"),
        (A100, ["model.backend=unsloth", ENGINE, "model.lora=null"], "Set model.lora"),
        (A100, ["model.backend=unsloth", ENGINE, "model.revision=abc"], "use its folder"),
        (A100, ["model.backend=unsloth", ENGINE, "model.adapter=sft"], "model.reference: none"),
        (A100, ["model.backend=unsloth", "model.attention=eager"], "model.attention: null"),
        (CPU, ["optimisation.gradient_checkpointing=unsloth"], "gradient_checkpointing: true"),
    ],
)
def test_what_a_backend_refuses_is_refused_with_the_alternative(
    machine: Machine, overrides: list[str], words: str
) -> None:
    overrides = ["model.lora.rank=16", *overrides] if "model.lora=null" not in overrides else overrides
    with pytest.raises(KitError, match=words):
        resolve(machine, *overrides)


def test_pictures_are_refused_under_unsloth_and_left_to_transformers_by_auto() -> None:
    with pytest.raises(ConfigError, match=r"pictures.*model\.backend: transformers"):
        resolve(A100, "model.backend=unsloth", columns=["prompt", "image"])
    assert resolve(A100, columns=["prompt", "image"]).model.backend == "transformers"
    assert resolve(A100, columns=["prompt"]).model.backend == "auto"


def test_a_mixture_of_experts_is_left_to_transformers() -> None:
    experts = SimpleNamespace(num_experts=8)
    assert suited(UNSLOTH, ModelConfig(), experts).name == "transformers"
    with pytest.raises(ModelError, match="mixture of experts"):
        suited(UNSLOTH, ModelConfig(backend="unsloth"), experts)
    assert suited(UNSLOTH_CPU, ModelConfig(), experts) == UNSLOTH_CPU


def test_families_that_overflow_in_float16_are_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a T4: the families of Unsloth's list, except mixtures of experts and models that do not generate text."""
    place = find_spec("unsloth_zoo")
    assert place is not None
    assert place.submodule_search_locations
    unsloth_list = runpy.run_path(str(Path(place.submodule_search_locations[0]) / "model_lists.py"))["FORCE_FLOAT32"]
    assert {*FLOAT32_FAMILIES} <= {*unsloth_list}
    for kind in CONFIG_MAPPING_NAMES:  # the comparison of unsloth/models/loader.py
        forced = any(name == kind.replace("-", "").replace("_", "") or name in f"{kind}," for name in unsloth_list)
        left_out = "moe" in kind or kind == "gpt_oss" or kind.startswith("embedding_")
        assert left_out or overflows_in_float16(SimpleNamespace(model_type=kind)) is forced, kind
    qwen = AutoConfig.for_model("qwen3_5")
    monkeypatch.setattr("kit.models.backend.this_machine", lambda: T4)
    overflowing = suited(UNSLOTH, ModelConfig(), qwen)
    assert (overflowing.name, overflowing.computes_in_float32) == ("unsloth", True)
    assert "float32" in overflowing.reason
    assert not suited(UNSLOTH, ModelConfig(), AutoConfig.for_model("qwen3")).computes_in_float32
    plain = suited(TRANSFORMERS, ModelConfig(), qwen)
    assert [weights_dtype(ModelConfig(), backend) for backend in (overflowing, plain)] == [torch.float16, torch.float32]
    assert weights_dtype(ModelConfig(), plain, trains=False) is torch.bfloat16
    assert autocast_dtype(ModelConfig(lora=None), plain) is None
    config = load_config("quickstart", ["model.dtype=auto", "optimisation.learning_rate=1e-5"])
    assert grpo_config(config, UNSLOTH, Path("run"), [1.0]).fp16 is True
    assert grpo_config(config, overflowing, Path("run"), [1.0]).fp16 is False, "the trainer would use another value"
    monkeypatch.setattr("kit.models.backend.this_machine", lambda: A100)
    assert not suited(UNSLOTH, ModelConfig(), qwen).computes_in_float32


def test_unsloth_refuses_float32_and_old_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"bfloat16 or float16. Set model\.dtype: auto"):
        resolve(A100, "model.backend=unsloth", "model.dtype=float32")
    old = Machine((8, 0), "A100", "2026.9.1")
    with pytest.raises(EnvironmentUnsupported, match=r"pip install 'unsloth==2026\.10\.9'"):
        decide(ModelConfig(backend="unsloth"), old)
    monkeypatch.setenv("KIT_ALLOW_UNTESTED", "1")
    assert decide(ModelConfig(), old).name == "unsloth"
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert f"unsloth=={TESTED_UNSLOTH}" in extras["unsloth"]


def test_a_trainer_that_computes_in_another_precision_is_refused() -> None:
    check_precision({"learning_rate": [1.0, 2.0]})
    with pytest.raises(ModelError, match="bf16 False became True"):
        check_precision({"bf16": [False, True]})


# --- arguments of Unsloth's functions ---------------------------------------------------------------------------------


def parameters(file: str, function: str) -> set[str]:
    """Parameter names that all definitions of `function` in a file of the installed Unsloth share, from its source."""
    place = find_spec("unsloth")
    assert place is not None
    assert place.submodule_search_locations
    tree = ast.parse((Path(place.submodule_search_locations[0]) / "models" / file).read_text(encoding="utf-8"))
    definitions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    assert definitions
    return set.intersection(*({name.arg for name in [*node.args.args, *node.args.kwonlyargs]} for node in definitions))


@pytest.mark.parametrize("lora", [True, False])
def test_unsloth_loads_the_named_model_in_the_configured_precision(lora: bool) -> None:
    config = ModelConfig(name="a/b", load_in_4bit=lora, **({} if lora else {"lora": None}))
    engine = {"gpu_memory_utilization": 0.4, "max_lora_rank": 32} if lora else {}
    arguments = model_arguments("a/b", "main", config, torch.bfloat16, Loading(640, 7, "unsloth", engine))
    assert {name: arguments[name] for name in ("dtype", "revision", "load_in_4bit", "full_finetuning", "fast_inference")} == {
        "dtype": torch.bfloat16, "revision": "main", "load_in_4bit": lora, "full_finetuning": not lora, "fast_inference": lora,
    }  # fmt: skip
    assert arguments.keys() <= parameters("loader.py", "from_pretrained")


def test_adapters_are_those_of_the_configuration() -> None:
    adapter = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["v_proj", "q_proj"], use_rslora=True)
    arguments = adapter_arguments(adapter, Loading(seed=5, checkpointing=True), None)
    assert (arguments["r"], arguments["use_rslora"], arguments["target_modules"]) == (8, True, ["q_proj", "v_proj"])
    assert arguments.keys() <= parameters("llama.py", "get_peft_model")


@pytest.mark.parametrize(
    ("setting", "backend", "expected"),
    [
        (None, UNSLOTH, "unsloth"),
        (None, TRANSFORMERS, True),
        (None, UNSLOTH_CPU, False),
        ("unsloth", UNSLOTH_CPU, True),
        ("offload", TRANSFORMERS, True),
        (False, UNSLOTH, False),
    ],
)
def test_gradient_checkpointing_by_backend(setting: Any, backend: Backend, expected: Any) -> None:
    assert checkpointing(setting, backend) == expected


# --- the process ------------------------------------------------------------------------------------------------------


def test_environment_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSLOTH_VLLM_STANDBY", "before")
    monkeypatch.delenv("UNSLOTH_COMPILE_LOCATION", raising=False)
    inside: dict[str, str] = {}

    def fail() -> None:
        with switched(switches(UNSLOTH, standby=True)):
            inside.update(os.environ)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert inside["UNSLOTH_VLLM_STANDBY"] == "1"
    assert Path(inside["UNSLOTH_COMPILE_LOCATION"]).is_absolute()
    assert os.environ["UNSLOTH_VLLM_STANDBY"] == "before"
    assert "UNSLOTH_COMPILE_LOCATION" not in os.environ
    assert switches(TRANSFORMERS) == {}
    assert switches(UNSLOTH_CPU)["UNSLOTH_FORCE_CPU"] == "1"


def test_every_switch_is_one_that_unsloth_reads() -> None:
    """Read the switches from Unsloth's source: one that it ignores would leave the choice to Unsloth or to the environment."""
    packages = [find_spec(name) for name in ("unsloth", "unsloth_zoo")]
    if not all(packages):
        pytest.skip("Unsloth is not installed")
    folders = [Path(package.origin).parent for package in packages if package and package.origin]
    source = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    read = set(re.findall(r"(?:getenv|environ\.get|environ)\W+(UNSLOTH_\w+)", source))
    constants = dict(re.findall(r'(\w+) = "(UNSLOTH_\w+)"', source))
    read |= {name for constant, name in constants.items() if f"environ.get({constant}" in source}
    assert {*switches(UNSLOTH), *switches(UNSLOTH_CPU)} - read == set()


def test_unsloth_after_trl_is_refused() -> None:
    import trl  # noqa: F401

    if "unsloth" in sys.modules:
        pytest.skip("this process has Unsloth already")
    with pytest.raises(EnvironmentUnsupported, match="has imported TRL"), activate_backend(UNSLOTH_CPU):
        pass
    assert "UNSLOTH_FORCE_CPU" not in os.environ


@pytest.mark.parametrize(
    ("cores", "omp", "processes", "model", "threads"),
    [
        (3, "1", None, "some/model", 3),
        (None, "2", None, "some/model", 2),
        (None, "x", None, "some/model", 8),
        (None, "1", "4", "some/model", 2),
        (None, "2", None, "embedded", 2),
        (None, "", None, "embedded", 1),
    ],
)
def test_threads_default_to_the_environment_then_to_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, omp: str, processes: str | None, model: str, threads: int
) -> None:
    import torch

    from kit.models import backend

    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(backend, "physical_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    if processes is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert backend.use_threads(cores, model) == threads
    assert set_to == [threads]
