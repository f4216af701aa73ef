"""The fused LoRA layer against PEFT's forward pass: values, every gradient, and what gradient checkpointing recomputes."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig

from kit.model_check.tiny import tiny_config, tiny_model
from kit.models import fused
from kit.models.fused import Fused

from .packs import assert_same, rows_of, score
from .rollouts import NewTrainer

IN, HIDDEN, TOKENS = 24, 40, 200


class Block(nn.Module):
    """A gated product with a residual, as at the end of a decoder layer."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(IN, HIDDEN, bias), nn.Linear(IN, HIDDEN, bias)
        self.down = nn.Linear(HIDDEN, IN, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def adapted(
    dtype: torch.dtype = torch.float32, *, bias: bool = True, block: nn.Module | None = None, **lora: Any
) -> Any:
    """A block with non-zero adapters in float32, and base weights in `dtype`."""
    torch.manual_seed(0)
    block = Block(bias).to(dtype) if block is None else block
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["gate", "up", "down"], init_lora_weights=False, **lora)
    model = get_peft_model(block, config, autocast_adapter_dtype=False)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return model.train()


def run(model: Any, autocast: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of all adapters."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS // 2, IN, generator=draw).to(dtype).requires_grad_()
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        output = model(x)
    output.float().square().sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    return {"output": output.detach(), "input": x.grad} | gradients  # type: ignore[dict-item]


def assert_like(fused: dict[str, Tensor], peft: dict[str, Tensor], exact: dict[str, Tensor], limit: float) -> None:
    """Assert that fused results are as close to the exact ones as PEFT's, up to `limit` of the norm."""
    assert fused.keys() == peft.keys() == exact.keys()
    for name, right in exact.items():
        assert fused[name].dtype == peft[name].dtype, name
        off = [float((side[name].float() - right).norm() / right.norm()) for side in (fused, peft)]
        assert off[0] <= 1.2 * off[1] + limit, (name, off)


@pytest.mark.parametrize("precision", ["float32", "bfloat16 under autocast", "float32 under autocast"])
def test_outputs_and_gradients_are_pefts(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    autocast, dtype = "autocast" in precision, getattr(torch, precision.split()[0])
    peft_results = run(adapted(dtype), autocast, dtype)
    exact = run(adapted(dtype).float(), False, torch.float32)
    model = adapted(dtype)
    assert Fused(model).names == ["3 fused LoRA layers"]
    calls = counted(monkeypatch)
    fused_results = run(model, autocast, dtype)
    assert calls["_Adapter"] == 3
    assert_like(fused_results, peft_results, exact, 1e-3 if autocast else 1e-6)


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()
    apply = fused._Adapter.apply

    def noted(*args: Any) -> Any:
        calls["_Adapter"] += 1
        return apply(*args)

    monkeypatch.setattr(fused._Adapter, "apply", noted)
    return calls


def disabled(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def second(model: Any) -> None:
    model.add_adapter("second", LoraConfig(r=2, target_modules=["down"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])


@pytest.mark.parametrize(
    ("lora", "change"),
    [
        ({"lora_dropout": 0.5}, None),
        ({"use_dora": True}, None),
        ({"lora_bias": True}, None),
        ({}, disabled),
        ({}, second),
        ({}, lambda model: model.merge_adapter()),
    ],
)
def test_unsupported_adapters_use_pefts_forward_pass(
    lora: dict[str, Any], change: Callable[[Any], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for fuse in (False, True):
        model = adapted(**lora)
        if fuse:
            Fused(model)
            calls = counted(monkeypatch)
        if change is not None:
            change(model)
        torch.manual_seed(3)
        outputs.append(model(torch.randn(2, 5, IN, generator=torch.Generator().manual_seed(1))))
    assert torch.equal(*outputs)
    assert calls["_Adapter"] in (0, 2 if change is second else 0)  # in `second`, two layers have a single adapter


def test_fused_4_bit_layers_equal_pefts(monkeypatch: pytest.MonkeyPatch) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    results = []
    for fuse in (False, True):
        torch.manual_seed(0)
        block = Block(bias=True)
        for name in ("gate", "up", "down"):
            old = getattr(block, name)
            new = bnb.nn.Linear4bit(old.in_features, old.out_features, compute_dtype=torch.float32, quant_type="nf4")
            new.load_state_dict(old.state_dict())
            setattr(block, name, new)
        block.to("cpu").is_loaded_in_4bit = True  # type: ignore[assignment]
        model = adapted(block=block)
        if fuse:
            assert Fused(model).names == ["3 fused LoRA layers"]
            calls = counted(monkeypatch)
        results.append(run(model, False, torch.float32))
    assert calls["_Adapter"] == 3
    assert_like(results[1], results[0], results[0], 1e-5)
    with torch.no_grad():
        model(torch.ones(1, IN))
    assert calls["_Adapter"] == 3  # bitsandbytes has its own kernel for a single token


# --- the check at the first rows of a run -------------------------------------------------------------------------------


@pytest.fixture
def trainer(new_trainer: NewTrainer, tokenizer: Any) -> Any:
    """A trainer of a tiny Llama with fused kernels enabled, as on a GPU."""
    torch.manual_seed(0)
    model = tiny_model(tiny_config(AutoConfig.for_model("llama"), len(tokenizer)))
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    made = new_trainer(objective="grpo", unchecked=True, extra={"model": model, "peft_config": lora})
    made.model.train()
    made.scorer.fuses = True
    return made


def test_fused_layers_give_the_same_scores(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of()
    trainer.scorer.fuses = False
    unfused = score(trainer, rows)
    trainer.scorer.fuses = True
    with caplog.at_level("INFO", "kit"):
        passes = score(trainer, rows), score(trainer, rows)
    for scored in passes:
        assert_same(scored, unfused)
    (record,) = (line for line in caplog.records if "LoRA" in line.getMessage())
    assert record.getMessage() == "LlamaForCausalLM: 14 fused LoRA layers"
    assert trainer.packing_report["packing"] == "packed"


def test_fused_layers_that_change_scores_are_removed(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows, weight = rows_of(), fused._weight
    trainer.scorer.fuses = False
    unfused = score(trainer, rows)
    trainer.scorer.fuses = True
    monkeypatch.setattr(fused, "_weight", lambda base, dtype: 1.1 * weight(base, dtype))
    assert_same(score(trainer, rows), unfused)
    (message,) = (line.getMessage() for line in caplog.records if "LoRA" in line.getMessage())
    assert message.startswith(
        "LlamaForCausalLM runs without fused operations (14 fused LoRA layers): log-probabilities differ"
    )
    assert not any("forward" in vars(module) for module in trainer.model.get_base_model().model.modules())


def test_ligers_kernels_are_restored_on_removal(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in patches what Liger patches: instances, classes of the module, and the rotary function."""
    from transformers.models.llama import modeling_llama as module

    switches: dict[str, Any] = {}
    norm_class, rotary = module.LlamaRMSNorm, module.apply_rotary_pos_emb

    def doubled(*arguments: Any) -> Any:
        return rotary(*arguments)

    def apply(model: Any, **kernels: Any) -> None:
        switches.update(kernels)
        module.LlamaRMSNorm, module.apply_rotary_pos_emb = nn.Identity, doubled
        model.model.norm.offset, model.model.norm.forward = (
            0.0,
            lambda x: type(model.model.norm).forward(model.model.norm, x),
        )

    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        library = types.ModuleType(name)
        library.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, library)
    library.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply}  # type: ignore[attr-defined]
    sys.modules["liger_kernel.transformers"]._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)

    model = trainer.model
    norm = model.get_base_model().model.norm
    before = dict(vars(norm))
    put = Fused(model)
    try:
        assert put.names[1:] == ["Liger's norms, rotary embedding and gated products"]
        assert switches["rms_norm"] is switches["rope"] is True
        assert switches["cross_entropy"] is switches["fused_linear_cross_entropy"] is False
        assert module.LlamaRMSNorm is norm_class
        assert module.apply_rotary_pos_emb is doubled
        assert "forward" in vars(norm)
    finally:
        put.remove()
    assert module.apply_rotary_pos_emb is rotary
    assert vars(norm) == before
