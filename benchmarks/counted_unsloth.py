"""Unsloth's way of a train phase, on tensors without data, for `counted_cost.py`: `grpo_accumulated_loss` of Unsloth 2026.10.

Its trainer packs the rows of a micro-batch into one (a prompt with each completion), runs its patched decoder, and takes
log-probabilities in tiles of 4,096 rows by 16,384 columns. Its LoRA functions are its own code (`unsloth.kernels.fast_lora`);
its Triton kernels for norms and rotary embeddings are stood in for by what they allocate.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

HEAD_ROWS, HEAD_COLUMNS = 4096, 16384
METERS: list[Any] = []
"""The one that counts, last."""


def kernel(*tensors: Tensor) -> None:
    """What a kernel touches that is stood in for."""
    METERS[-1].launch(tensors)


class Head(torch.autograd.Function):
    """Two products a tile: logits in float32, and row gradients, which the backward pass scales."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        count, size = hidden.shape
        statistics = [torch.empty(count, device=hidden.device) for _ in range(7)]
        rows, columns = min(count, HEAD_ROWS), min(len(weight), HEAD_COLUMNS)
        tile = torch.empty(rows, columns, device=hidden.device)
        total = torch.empty(rows, size, device=hidden.device)
        kept = torch.empty_like(hidden)
        for start in range(0, count, rows):
            some = hidden[start : start + rows]
            for first in range(0, len(weight), columns):
                part = weight[first : first + columns]
                logits = tile[: len(some), : len(part)]
                torch.mm(some, part.t(), out_dtype=torch.float32, out=logits)
                likely = tile.view(hidden.dtype)[: len(some), : len(part)]
                kernel(logits, likely)
                torch.addmm(total[: len(some)], likely, part, out_dtype=torch.float32, out=total[: len(some)])
            kept[start : start + rows].copy_(total[: len(some)])
        ctx.save_for_backward(kept)
        return statistics[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return kept * grad.to(kept.dtype)[:, None], None


class Norm(torch.autograd.Function):
    """One kernel each way; the gradient takes the place of the one that came in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], device=x.device))
        kernel(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kernel(ctx.saved_tensors[0], grad, grad.view_as(grad))  # read and written
        return grad, None


class Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return Rotary.rotated(query, key)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> Any:
        return Rotary.rotated(query, key)

    @staticmethod
    def rotated(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.empty_like(query), torch.empty_like(key)
        kernel(query, key, *found)
        return found


def gated(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    kernel(gate, up, out)
    return out


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three are read, and written in their places."""
    kernel(grad, gate, up, *(one.view_as(one) for one in (grad, gate, up)))
    return grad, gate, up


class Offloaded(torch.autograd.Function):
    """A layer whose input waits in main memory; it runs again within the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: Any, hidden: Tensor, *rest: Any) -> Any:
        ctx.run, ctx.rest, ctx.shape, ctx.dtype = run, rest, hidden.shape, hidden.dtype
        with torch.no_grad():
            return run(hidden, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden = torch.empty(ctx.shape, dtype=ctx.dtype, device=grad.device).requires_grad_()
        with torch.enable_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            out = ctx.run(hidden, *ctx.rest)
        torch.autograd.backward(out, grad)
        return (None, hidden.grad, *(None for _ in ctx.rest))


def lora_functions() -> Any:
    """`unsloth.kernels.fast_lora`, without the package around it, which wants a GPU."""
    os.environ["UNSLOTH_IS_PRESENT"], os.environ["UNSLOTH_COMPILE_DISABLE"] = "1", "1"
    root = Path(torch.__file__).parents[1]
    for name in ("unsloth", "unsloth.kernels"):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")))]
            package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = package
    import unsloth.kernels.fast_lora as found

    return found


def patch(model: Any, *, checkpointing: bool) -> None:
    """Its functions in the place of the model's."""
    functions = lora_functions()

    def parts(layer: Any) -> tuple[Any, ...]:
        lora = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        return layer.base_layer.weight, None, *lora, layer.scaling["default"]

    def linear(layer: Any, x: Tensor) -> Tensor:
        found, bias = functions.LoRA_W.apply(x, *parts(layer)), layer.base_layer.bias
        return found if bias is None else found + bias

    def mlp(block: Any, x: Tensor) -> Tensor:
        layers = (part for layer in (block.gate_proj, block.up_proj, block.down_proj) for part in parts(layer))
        return functions.LoRA_MLP.apply(x, *layers, gated, gated_backward, True)

    for module in list(model.modules()):
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = lambda x, norm=module: Norm.apply(x, norm.weight)
        elif kind.endswith("MLP"):
            module.forward = lambda x, block=module: mlp(block, x)
        elif hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            module.forward = lambda x, layer=module: linear(layer, x)
        elif checkpointing and hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = lambda run, *args: Offloaded.apply(run, *args)


def attention(lengths: list[int]) -> Any:
    """Of transformers' layers over one packed row."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    places = torch.tensor(ends, dtype=torch.int32, device="cuda")

    def attend(_: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
        sliding_window = given.get("sliding_window")
        q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
        window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
        grouped = q.shape[1] != k.shape[1]
        longest = max(lengths)
        out = varlen_attn(
            q,
            k,
            v,
            places,
            places,
            longest,
            longest,
            scale=given.get("scaling"),
            window_size=window,
            enable_gqa=grouped,
        )
        return out[None], None

    return attend


def run(case: Any, model: Any, mode: Any, meter: Any, parts: Any) -> None:
    """Loss and backward pass of every micro-batch. parts: their groups."""
    from transformers import AttentionInterface

    METERS[:] = [meter]
    meter.mark_head(Head)
    base = model.get_base_model()
    module = sys.modules[type(base).__module__]
    rotary, forward, backward = module.apply_rotary_pos_emb, Head.forward, Head.backward
    module.apply_rotary_pos_emb = lambda query, key, *_, **__: Rotary.apply(query, key)
    try:
        patch(model, checkpointing=case.checkpointing)
        for groups in parts:
            rows = [(prompt, length) for prompt, lengths in groups for length in lengths]
            tokens, scored = sum(map(sum, rows)), sum(length for _, length in rows)
            with mode, meter:
                AttentionInterface.register("sdpa", attention([sum(row) for row in rows]))
                room = (tokens, base.config.hidden_size)  # through which checkpoints come back
                buffers = [
                    torch.empty(room, dtype=torch.bfloat16, device="cuda") for _ in range(2 * case.checkpointing)
                ]
                inputs = {
                    name: torch.zeros(1, tokens, dtype=torch.long, device="cuda")
                    for name in ("input_ids", "position_ids")
                }
                done = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="cuda")
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    hidden = base.model(**inputs, attention_mask=done, use_cache=False).last_hidden_state
                    picked = hidden[0].index_select(0, torch.zeros(scored, dtype=torch.long, device="cuda"))
                    logps = Head.apply(picked, base.get_output_embeddings().weight)
                    del hidden, picked
                logps.sum().backward()
                del logps, buffers, inputs, done
    finally:
        module.apply_rotary_pos_emb = rotary
        Head.forward, Head.backward = staticmethod(forward), staticmethod(backward)
