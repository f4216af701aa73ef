"""Precision and gradients of models from `load_model`: 4-bit weights on the CPU, float32 for trained weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer

from kit.config import LoraConfig, ModelConfig, load_config
from kit.errors import ModelError
from kit.evaluation.heldout import evaluating
from kit.models import memory
from kit.models.backend import Backend
from kit.models.failures import explained
from kit.models.loading import LoadedModel, autocast_dtype, find_model, load_model
from kit.planning.plan import plan
from kit.trainer.arguments import grpo_config

CPU = Backend("transformers", "cpu", "")


def load(folder: Path, **changes: Any) -> LoadedModel:
    config = ModelConfig(**{"name": str(folder), "lora": LoraConfig(rank=4, alpha=8)} | changes)
    return load_model(find_model(config, chat=True), config)


def gradients(model: Any) -> dict[str, Any]:
    """Gradients of the adapters for the loss on a fixed text."""
    model.zero_grad()
    ids = torch.arange(20, 52).view(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def test_an_evaluation_changes_no_gradient_of_4_bit_adapters(model_folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    loaded = load(model_folder, load_in_4bit=True, dtype="bfloat16")
    loaded.peft_config.init_lora_weights = False
    model = get_peft_model(loaded.model, loaded.peft_config).train()
    before = gradients(model)
    with evaluating(model, 0), torch.inference_mode():
        model(input_ids=torch.arange(20, 36).view(1, 16))
    after = gradients(model)
    assert before
    assert before.keys() == after.keys()
    for name, gradient in before.items():
        assert torch.equal(gradient, after[name]), name


def test_no_4_bit_weight_is_repacked_on_the_cpu(model_folder: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    layers = [m for m in load(model_folder, load_in_4bit=True).model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert layers
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)


def test_a_model_published_in_4_bits_computes_in_the_dtype_of_the_run(model_folder: Path, tmp_path: Path) -> None:
    """Its files name bfloat16 for the products, as most models with `-bnb-4bit` in their name do."""
    pytest.importorskip("bitsandbytes")
    published = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    keywords = {"quantization_config": published, "dtype": torch.float32, "device_map": {"": "cpu"}}
    AutoModelForCausalLM.from_pretrained(model_folder, **keywords).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    config = ModelConfig(name=str(tmp_path), lora=LoraConfig(rank=4, alpha=8))
    model, ids = load_model(find_model(config, chat=True), config).model.eval(), torch.arange(20, 52).view(2, 16)
    with torch.no_grad():
        expected = load(model_folder, load_in_4bit=True).model.eval()(ids).logits
        assert torch.equal(model(ids).logits, expected)
    assert config.load_in_4bit, "exports would be compared as if the run had computed in 16 bits"
    settings = ["evaluation.before=false", "evaluation.after=false"]
    names = [f"model.name={tmp_path}", f"model.name={model_folder}"]
    in_4_bits, full = (plan(load_config("quickstart", [*settings, name]))["memory"]["peak_bytes"] for name in names)
    assert in_4_bits < full


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_a_full_gpu_is_told_from_broken_files(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, load_in_4bit: bool
) -> None:
    """transformers reports any failure during quantisation as weights that it cannot convert, without the reason."""
    from bitsandbytes import functional
    from transformers import core_model_loading

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    where = (functional, "quantize_4bit") if load_in_4bit else (core_model_loading, "_materialize_copy")
    monkeypatch.setattr(*where, full)
    with pytest.raises(ModelError, match="The run is out of memory"), explained():
        load(model_folder, load_in_4bit=load_in_4bit)


@pytest.fixture
def trained_precisions(monkeypatch: pytest.MonkeyPatch) -> list[set[Any]]:
    """Record the dtypes of the trained weights at each creation of an optimiser; return the list."""
    precisions: list[set[Any]] = []
    make = Trainer.create_optimizer

    def create_optimizer(self: Any, *rest: Any, **keywords: Any) -> Any:
        precisions.append({weight.dtype for weight in self.model.parameters() if weight.requires_grad})
        return make(self, *rest, **keywords)

    monkeypatch.setattr(Trainer, "create_optimizer", create_optimizer)
    return precisions


def test_a_4_bit_run_with_evaluation_trains_float32_adapters(
    attempt: Callable[..., Any], trained_precisions: list[set[Any]]
) -> None:
    pytest.importorskip("bitsandbytes")
    result = attempt("model.load_in_4bit=true", "model.dtype=bfloat16", "evaluation.before=true", "evaluation.every=1")
    assert result.code == 0, result.message
    assert trained_precisions == [{torch.float32}]
    assert len(result.folder.metrics()) == 2
    saved = load_file(result.folder.adapter / "adapter_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}


def test_all_weights_train_in_float32(attempt: Callable[..., Any], trained_precisions: list[set[Any]]) -> None:
    assert attempt("model.lora=null", "model.dtype=auto", "optimisation.steps=1").code == 0
    assert trained_precisions == [{torch.float32}]


def test_the_reference_is_loaded_as_the_policy_was(tree: dict[str, Any], tmp_path: Path) -> None:
    pinned = ["model.revision=abc", "model.attention=eager", "run.id=it"]
    loads = grpo_config(load_config(tree, [*pinned, "model.lora=null"]), CPU, tmp_path, [1.0, 1.0]).model_init_kwargs
    assert loads["revision"] == "abc"
    assert loads["attn_implementation"] == "eager"
    assert loads["dtype"] == "float32"
    assert loads["use_safetensors"] is True
    # The adapters are disabled instead; no second model is loaded.
    assert grpo_config(load_config(tree, pinned), CPU, tmp_path, [1.0, 1.0]).model_init_kwargs is None


def test_files_that_the_kernel_keeps_at_hand_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = {
        "memory.max": "1000000\n",
        "memory.current": "900000\n",
        "memory.stat": "anon 200000\nfile 700000\ninactive_file 300000\nactive_file 350000\n",
    }
    for name, text in group.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path)
    assert memory.free_memory("cpu") == 1_000_000 - (900_000 - 300_000 - 350_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory("cpu") > 1_000_000


@pytest.mark.parametrize("bf16", [True, False])
def test_completions_of_weights_that_all_train_are_made_in_the_precision_of_a_training_pass(
    new_trainer: Callable[..., Any], bf16: bool
) -> None:
    """transformers' `generate` does not use the trainer's autocast, so it would multiply in float32."""
    trainer = new_trainer(objective="grpo", bf16=bf16, unchecked=True)
    dtypes: set[torch.dtype] = set()
    layer = next(module for name, module in trainer.model.named_modules() if name.endswith("k_proj"))
    layer.register_forward_hook(lambda module, inputs, made: dtypes.add(made.dtype))
    trainer.model.eval()
    trainer._generate_and_score_completions(trainer.train_dataset.to_list()[:1] * 4)
    assert dtypes == {torch.bfloat16 if bf16 else torch.float32}
    gpu = Backend("transformers", "cuda", "")
    assert autocast_dtype(ModelConfig(lora=None, dtype="float32"), gpu) is None
    assert autocast_dtype(ModelConfig(), gpu) is None
