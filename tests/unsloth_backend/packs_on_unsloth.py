"""Models with Unsloth's forward functions on the CPU, scored in packs and in padded rows, in a separate process.

`main(FOLDER)`, in a fork of `worker.py unsloth`, reads the rollouts of `worker.py stock` and writes `packs.pt`. Unsloth's Triton
kernels run in Triton's interpreter, and its fused LoRA functions unchanged, in float32.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from worker import Bench, objectives

FAMILIES = {
    "llama": "FastLlamaModel",
    "mistral": "FastMistralModel",
    "qwen2": "FastQwen2Model",
    "qwen3": "FastQwen3Model",
    # transformers' models, except for the parts that unsloth_zoo replaces
    "gemma3_text": None,
    "gemma4_text": None,
    "qwen3_5_text": None,
    "qwen3_moe": None,
    "gpt_oss": None,
}
FUSED = ("mistral", "qwen2", "qwen3")
"""Families with Unsloth's fused LoRA functions; the others have PEFT's."""
WINDOW = 6
"""Sliding window of the tiny Mistral and Gemma in tokens; most rows are longer."""
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class PatchedBench(Bench):
    """Builds trainers of tiny models as `FastLanguageModel` returns them, but in float32."""

    kind, fused, layers = "qwen3", True, 2

    def model(self) -> Any:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM

        from kit.model_check.tiny import tiny_config

        patches = FAMILIES[self.kind]
        if patches:
            getattr(importlib.import_module(f"unsloth.models.{self.kind}"), patches).pre_patch()
        config = tiny_config(AutoConfig.for_model(self.kind), len(self.tokenizer))
        config.num_hidden_layers, config.initializer_range = self.layers, 0.3
        if self.kind in ("mistral", "gemma3_text"):
            config.sliding_window = WINDOW
        torch.manual_seed(0)
        with device_of_tables("cpu"):
            model = AutoModelForCausalLM.from_config(config)
        for module in model.modules():
            module.max_seq_length, module._unsloth_allow_packed_overlength = 64, True
        for layer in model.model.layers if patches else ():
            layer.self_attn.rotary_emb = model.model.rotary_emb
        torch.manual_seed(0)
        lora = LoraConfig(r=4, lora_alpha=4, target_modules=LINEAR, init_lora_weights=False, task_type="CAUSAL_LM")
        wrapped = get_peft_model(model, lora)
        wrapped.for_training = types.MethodType(lambda self, *_, **__: self.train(), wrapped)
        wrapped.for_inference = types.MethodType(lambda self, *_, **__: self.eval(), wrapped)
        if self.fused:
            fuse(wrapped)
        return wrapped


@contextmanager
def device_of_tables(device: Any) -> Iterator[None]:
    """Let Unsloth's rotary embeddings create their first tensors on this device, instead of device 0."""
    from unsloth.models import gemma, llama

    llama.get_current_device = gemma.get_current_device = lambda: device
    try:
        yield
    finally:
        llama.get_current_device = gemma.get_current_device = lambda: 0


def one_device() -> None:
    """Make the CPU the only device, number 0, of Unsloth's rotary embeddings, which store a table per GPU."""
    import torch
    from unsloth.kernels import rope_embedding
    from unsloth.models import gemma, gemma2, llama

    for module, kind in ((llama, llama.LlamaRotaryEmbedding), (gemma, gemma.GemmaFixedRotaryEmbedding)):

        def on_the_cpu(self: Any, seq_len: int, device: Any, dtype: Any, make: Any = kind._set_cos_sin_cache) -> Any:
            return make(self, seq_len=seq_len, device=torch.device("cpu", 0), dtype=dtype)

        module.DEVICE_COUNT, kind._set_cos_sin_cache = 1, on_the_cpu
    gemma.DEVICE_TYPE_TORCH = gemma2.DEVICE_TYPE_TORCH = llama.DEVICE_TYPE_TORCH = "cpu"
    rope_embedding._eviction_hints_ok = lambda device: False  # it asks CUDA for the device's number


def interpreted_tanh() -> None:
    """Replace CUDA's `tanh`, which Gemma's activation calls and Triton's interpreter lacks."""
    import triton.language as tl
    from unsloth.kernels import geglu

    geglu.triton_tanh = lambda x: 1 - 2 / (tl.exp(2 * x) + 1)


@contextmanager
def rowwise_in_torch() -> Iterator[None]:
    """Compute Unsloth's norms and rotary embeddings with torch, because Triton's interpreter needs some 20 ms per token."""
    import torch
    from unsloth.kernels import qk_norm_rope
    from unsloth.models import gemma2, llama, mistral, qwen3

    def norm(layernorm: Any, hidden: Any, gemma: bool = False, **_: Any) -> Any:
        weight, eps = layernorm.weight + gemma, layernorm.eps if gemma else layernorm.variance_epsilon
        return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], weight, eps)

    def rotated(heads: Any, cos: Any, sin: Any, places: Any) -> Any:
        at = torch.arange(heads.shape[2], device=heads.device)[None] if places is None else places.long()
        first, second = heads.chunk(2, dim=-1)
        return heads * cos[at][:, None] + torch.cat((-second, first), dim=-1) * sin[at][:, None]

    def rope(query: Any, key: Any, cos: Any, sin: Any, places: Any = None) -> Any:
        return rotated(query, cos, sin, places), rotated(key, cos, sin, places)

    originals = [(qk_norm_rope, "QK_NORM_ROPE_ENABLED", qk_norm_rope.QK_NORM_ROPE_ENABLED)] + [
        (module, name, getattr(module, name))
        for module in (llama, mistral, qwen3, gemma2)
        for name in ("fast_rms_layernorm", "fast_rope_embedding")
        if hasattr(module, name)
    ]
    twins = {"fast_rms_layernorm": norm, "fast_rope_embedding": rope, "QK_NORM_ROPE_ENABLED": False}
    for module, name, _ in originals:
        setattr(module, name, twins[name])
    try:
        yield
    finally:
        for module, name, own in originals:
            setattr(module, name, own)


def fuse(model: Any) -> None:
    """Install Unsloth's LoRA functions in each layer, which Unsloth itself does only for weights in half precision."""
    from unsloth.kernels import apply_lora_mlp_geglu_approx, apply_lora_mlp_swiglu, apply_lora_o, apply_lora_qkv

    mlp = apply_lora_mlp_geglu_approx if model.config.model_type == "gemma2" else apply_lora_mlp_swiglu
    for layer in model.base_model.model.model.layers:
        layer.mlp.forward = types.MethodType(mlp, layer.mlp)
        layer.self_attn.apply_o = apply_lora_o
        if layer.self_attn.q_proj.base_layer.bias is None:
            layer.self_attn.apply_qkv = apply_lora_qkv


def in_few_blocks() -> None:
    """Enlarge the blocks of activation kernels, because Triton's interpreter needs the same time for a block of any size."""
    from unsloth.kernels import geglu, swiglu

    geglu.BLOCK_SIZE = swiglu.BLOCK_SIZE = 2**14


# --- every recipe -----------------------------------------------------------------------------------------------------


def micro_batches(batches: list[dict[str, Any]], count: int, tools: bool) -> list[dict[str, Any]]:
    """Split a stored rollout into `count` micro-batches by prompt. With `tools`, `tool_mask` marks some tokens as a tool's."""
    import torch

    rollout = {n: torch.cat([batch[n] for batch in batches]) if v.dim() else v for n, v in batches[0].items()}
    rows = torch.arange(len(rollout["completion_ids"])).view(len(batches), -1).T.flatten()
    if tools:
        rollout["tool_mask"] = torch.ones_like(rollout["completion_mask"])
        rollout["tool_mask"][:, 2] = 0
        rollout["tool_mask"][3] = 0
    return [
        {name: value[own] if value.dim() else value for name, value in rollout.items()}
        for own in torch.tensor_split(rows, count)
    ]


def recipes(bench: PatchedBench, stored: dict[str, Any], kind: str) -> dict[str, Any]:
    """Compute losses and gradients of every objective, packed and padded, with a model of type `kind`.

    Accumulation, tool tokens, checkpointing and the token budget vary: any six successive objectives have each pair of values.
    """
    from pairwise import cover

    settings, results = cover([2, 2, 2, 2]), {}
    bench.kind, bench.fused = kind, True
    for number, (name, objective) in enumerate(objectives().items()):
        accumulation, tools, checkpointing, parts = settings[number % len(settings)]
        trainer = bench.trainer_of(name, objective)
        checkpoint(trainer.model, bool(checkpointing))
        batches = micro_batches(stored[name]["batches"], (1, 3)[accumulation], bool(tools))
        if name != "rloo":
            drift(trainer)
        results[name] = both_ways(trainer, batches, budget=40 if parts else None)
        results[name] |= {"accumulation": len(batches), "tools": bool(tools), "checkpointing": bool(checkpointing)}
    return results


def both_ways(trainer: Any, batches: list[dict[str, Any]], budget: int | None = None) -> dict[str, Any]:
    """Compute losses and gradients of the micro-batches twice: packed with all savings, and padded without any."""
    from training.steps import in_a_step, switch

    results: dict[str, Any] = {}
    for way, on in (("padded", False), ("packed", True)):
        trainer.scorer.packing = on
        switch(trainer, budget=budget if on else None, skip=on)
        tokens, score = [], trainer.scorer.score

        def counted(*args: Any, score: Any = score, tokens: list[int] = tokens) -> Any:
            scores = score(*args)
            tokens.append(scores.tokens)
            return scores

        trainer.scorer.score = counted
        losses, gradients = in_a_step(trainer, batches, len(batches))
        trainer.scorer.score = score
        results[way] = {"losses": losses, "gradients": gradients, "tokens": sum(tokens)}
    return results | {"report": trainer.packing_report, "savings": trainer.savings_report}


def drift(trainer: Any) -> None:
    from training.rollouts import drift

    drift(trainer)


def checkpoint(model: Any, on: bool) -> None:
    """Enable gradient checkpointing "unsloth" as Unsloth's `get_peft_model` does."""
    if on:
        from unsloth.models._utils import prepare_model_for_kbit_training

        prepare_model_for_kbit_training(model, use_gradient_checkpointing="unsloth", use_reentrant=True)


# --- every family, and planted defects --------------------------------------------------------------------------------


def scored(
    bench: PatchedBench,
    kind: str,
    *,
    fused: bool,
    layers: int = 2,
    sizes: tuple[Sequence[int], Sequence[int]] = ((7, 5), (1, 4, 9)),
    change: Callable[[Any], None] = lambda trainer: None,
    **arguments: Any,
) -> dict[str, Any]:
    """Score rows packed and padded, with gradients and the reports of scoring. `sizes`: lengths of prompts and completions."""
    from training.packs import plainly, rows_of, score

    bench.kind, bench.fused, bench.layers = kind, fused, layers
    trainer = bench.trainer("grpo", **arguments)
    change(trainer)
    trainer.model.train()
    rows = rows_of(*sizes)
    results = {"packed": score(trainer, rows), "padded": plainly(trainer, rows)}
    return results | {"report": trainer.packing_report, "savings": trainer.savings_report}


def families(bench: PatchedBench) -> dict[str, Any]:
    """Score rows with a model of each family. The experts' balancing loss has coefficient 0, as `grpo_config` sets it."""
    return {kind: scored(bench, kind, fused=kind in FUSED, router_aux_loss_coef=0.0) for kind in FAMILIES}


def after_generation(bench: PatchedBench) -> dict[str, Any]:
    """Score rows longer than `max_seq_length`, such as a teacher's, after a forward pass without labels."""
    import torch

    sample = {"input_ids": torch.ones(1, 3, dtype=torch.long)}
    return scored(bench, "qwen3", fused=True, sizes=((60, 50), (8, 30)), change=lambda trainer: trainer.model(**sample))


def in_triton(bench: PatchedBench) -> dict[str, Any]:
    """Score few tokens with one layer of Llama, including Unsloth's Triton kernels for norms and rotary embeddings."""
    from kit.scoring import scorer

    scorer.PROMPT = scorer.COMPLETION = 3
    return scored(bench, "llama", fused=True, layers=1, sizes=((2, 3), (1, 2)))


def read_four_bit(
    weight: Any, state: Any = None, out: Any = None, use_global_buffer: bool = False, dtype: Any = None
) -> Any:
    """Implement Unsloth's `fast_dequantize` with bitsandbytes for the CPU."""
    import bitsandbytes as bnb

    if state is None:
        return weight
    turned = weight.shape[0] == 1
    full = bnb.functional.dequantize_4bit(weight.t() if turned else weight, state)
    full = full if dtype is None else full.to(dtype)
    return full.t() if turned else full


def four_bit(bench: PatchedBench) -> dict[str, Any]:
    """Score with 4-bit weights, which bitsandbytes dequantises on the CPU instead of with CUDA kernels."""
    import bitsandbytes as bnb
    import torch
    from unsloth.kernels import fast_lora, utils

    def quantize(trainer: Any) -> None:
        for layer in list(trainer.model.modules()):
            base = getattr(layer, "base_layer", None)
            if isinstance(base, torch.nn.Linear):
                quantized = bnb.nn.Linear4bit(base.in_features, base.out_features, bias=False, quant_type="nf4")
                quantized.weight = bnb.nn.Params4bit(base.weight.data, requires_grad=False, quant_type="nf4").to("cpu")
                layer.base_layer = quantized

    utils.fast_dequantize = fast_lora.fast_dequantize = read_four_bit
    return scored(bench, "qwen3", fused=True, change=quantize)


def as_one_text(layout: Any) -> Any:
    """Return a layout of the same tokens in which each token attends to all earlier tokens."""
    from kit.scoring.packing import Group

    return layout.__class__([Group(0, 0, (layout.tokens,))])


def planted(bench: PatchedBench) -> dict[str, Any]:
    """Score with each defect planted in the attention; `report` has the layout that the scorer chose."""
    from kit.scoring import scorer, unsloth_packs

    attend, inputs = unsloth_packs.packed_attention, unsloth_packs.pack_inputs

    def leaking(query: Any, key: Any, value: Any, layout: Any, *rest: Any, **more: Any) -> Any:
        return attend(query, key, value, as_one_text(layout), *rest, **more)

    def one_length(layout: Any) -> Any:
        return inputs(layout) | {"packed_seq_lengths": inputs(as_one_text(layout))["packed_seq_lengths"]}

    defects = {
        "none": (attend, inputs),
        "completions of a prompt see each other": (leaking, inputs),
        "all texts see each other": (leaking, one_length),
    }
    results = {}
    for name, (attention, lengths) in defects.items():
        with (
            mock.patch.object(unsloth_packs, "packed_attention", attention),
            mock.patch.object(scorer, "pack_inputs", lengths),
        ):
            results[name] = scored(bench, "qwen3", fused=False)
    return results


def planted_in_gemma(bench: PatchedBench) -> dict[str, Any]:
    """Score as `planted` does, with a Gemma, whose attention is wrapped layer by layer."""
    from unsloth_zoo.temporary_patches import gemma

    from kit.scoring import packing

    attend, results = packing.packed_attention, {}

    def leaking(query: Any, key: Any, value: Any, layout: Any, *rest: Any, **more: Any) -> Any:
        return attend(query, key, value, as_one_text(layout), *rest, **more)

    def in_float32(trainer: Any) -> None:
        """Disable half precision, which Unsloth's arguments enable without a GPU, because these models are float32."""
        trainer.scorer.half = False

    defects = (
        ("gemma3_text", "leak", packing, "packed_attention", leaking),
        ("gemma3_text", "out of reach", gemma, "_UNSLOTH_FLEX_ATTENTION_DISABLED", True),
    )
    for kind, name, module, attribute, defect in defects:
        with mock.patch.object(module, attribute, defect):
            results[kind, name] = scored(bench, kind, fused=False, change=in_float32)
    return results


def compiled_layers(bench: PatchedBench) -> list[list[str]]:
    """Return the names of the decoder layers that Unsloth compiles on a GPU, with the kit's switches and without."""
    from unsloth.models._block_compile import patch_block_compile

    from kit.models.backend import Backend, switched, switches

    bench.kind, bench.fused, results = "gemma3_text", False, []
    variables = switches(Backend("unsloth", "cuda", ""))
    for own in (variables, {}):
        with (
            mock.patch("torch.cuda.is_available", return_value=True),
            switched(own | {"UNSLOTH_COMPILE_DISABLE": "0"}, *variables),
        ):
            results.append(patch_block_compile(bench.model()))
    return results


def main(folder: Path) -> None:
    """Compute everything and write `packs.pt`. Unsloth must have generated its class, and Triton must use its interpreter."""
    import torch

    one_device()
    interpreted_tanh()
    in_few_blocks()
    bench = PatchedBench(folder)
    stored = torch.load(folder / "stock.pt", weights_only=False)["recipes"]
    with rowwise_in_torch():
        results = {"recipes": recipes(bench, stored, "qwen3"), "families": families(bench), "planted": planted(bench)}
        results["planted in Gemma"] = planted_in_gemma(bench)
    results["triton"] = in_triton(bench)
    with rowwise_in_torch():
        results["four_bit"] = four_bit(bench)
        results["after generation"] = after_generation(bench)
    results["compiled"] = compiled_layers(bench)
    torch.save(results, folder / "packs.pt")
