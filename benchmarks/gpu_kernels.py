"""Time implementations of attention and of the head on the same inputs, for the rows of gpu_check.py.

On a GPU the shapes are those of Llama-3.1-8B. On a CPU they are small and only show that the code works.
"""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
LIKE: dict[str, Any] = {"device": "cpu"}
if ON_GPU:  # a T4 has no bfloat16
    LIKE = {
        "device": "cuda",
        "dtype": torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16,
    }
HEADS = (32, 8, 128) if ON_GPU else (4, 2, 16)
"""Heads of queries, heads of keys, head size."""
HEAD = (8192, 4096, 128256) if ON_GPU else (64, 32, 512)
"""Tokens, hidden size, vocabulary."""


def attention(arm: str, prompt: int, lengths: Callable[[int], list[list[int]]], reference: Path) -> dict[str, Any]:
    """Time one layer's attention over a pack, forward and backward.

    Args:
        arm: `varlen` for one call of torch's `varlen_attn`; any other name for the kit's packed attention.
        prompt: tokens of each prompt.
        lengths: function from a seed to the completion lengths of each prompt.
        reference: file of the first arm's gradient, see `compare_gradients`.

    Returns:
        The values of `time_passes`, and `new_seconds`: the mean over lengths that the kernel did not have before, as in every
        step of training.
    """
    from kit.scoring.packing import Group, Layout, packed_attention

    heads, shared, size = HEADS

    def problem(seed: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
        groups, start = [], 0
        for completions in lengths(seed):
            groups.append(Group(start, prompt - 1, tuple(sorted(completions, reverse=True))))
            start += groups[-1].tokens
        inputs = [random_normal(seed, 1, n, start, size).requires_grad_() for n in (heads, shared, shared)]
        # As in a step, which builds indices once for all layers. On a GPU `Layout` builds them at once.
        if arm == "varlen":
            attend = varlen(groups, inputs[0].device)
            return lambda: attend(*inputs), inputs
        layout = Layout(groups, inputs[0].device)
        return lambda: packed_attention(*inputs, layout), inputs

    run_pass(*problem(99))
    new = statistics.mean(run_pass(*problem(seed)) for seed in range(1, 5))
    return time_passes(*problem(0), reference) | {"new_seconds": new}


def varlen(groups: Sequence[Any], device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return (1, h, S, d) -> (1, S, h, d): attention of each segment over its prompt and itself, one call of `varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn

    positions: list[Tensor] = []
    queries, keys = [], []
    for group in groups:
        start = group.start + group.prompt
        for number, length in enumerate(group.lengths):
            positions += [torch.arange(group.start, group.start + group.prompt), torch.arange(start, start + length)]
            keys.append(group.prompt + length)
            queries.append(length if number else group.prompt + length)
            start += length
    ends = [torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32) for sizes in (queries, keys)]
    index = torch.cat(positions).to(device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        k, v, options = k[index], v[index], {"enable_gqa": True}
        if "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # torch 2.11 and older
            k, v, options = *(tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v)), {}
        output: Tensor = varlen_attn(q, k, v, *ends, max(queries), max(keys), window_size=(-1, 0), **options)
        return output[None]

    return attend


def head(arm: str, reference: Path) -> dict[str, Any]:
    """Time log-probabilities of 8,192 tokens over 128,256 words by a frozen head, forward and backward: `TRL` or `kit`."""
    from kit.scoring.head import DEFAULT_CHUNK, ChunkedLogProb

    tokens, width, words = HEAD
    hidden, weight = random_normal(0, tokens, width).requires_grad_(), random_normal(1, words, width) / width**0.5
    targets = torch.randint(words, (tokens,), generator=torch.Generator().manual_seed(2)).to(LIKE["device"])
    # As in a step: the entropy is a metric only.
    function, chunk, outputs = ChunkedLogProb, DEFAULT_CHUNK, (("log_probs", "entropy"), False)
    if arm == "TRL":
        from trl.kernels import ChunkedLogProbFunction  # the name in `trl.trainer.utils` may be patched by the kit
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

        function, chunk, outputs = ChunkedLogProbFunction, _CHUNKED_LOGPROB_CHUNK_SIZE, (("log_probs", "entropy"),)
    arguments = (hidden, weight, None, targets, 1.0, chunk, None, 1.0, *outputs)
    return time_passes(lambda: function.apply(*arguments)[0], [hidden], reference)


def random_normal(seed: int, *shape: int) -> Tensor:
    """The same normal numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(**LIKE)


def run_pass(call: Callable[[], Tensor], inputs: Sequence[Tensor]) -> float:
    """Run one forward and backward pass and return its seconds."""
    for tensor in inputs:
        tensor.grad = None
    wait()
    began = time.perf_counter()
    call().float().square().mean().backward()  # type: ignore[no-untyped-call]
    wait()
    return time.perf_counter() - began


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def time_passes(call: Callable[[], Tensor], inputs: Sequence[Tensor], reference: Path) -> dict[str, Any]:
    """Median seconds of a pass, peak bytes above those allocated before, and the values of `compare_gradients`."""
    run_pass(call, inputs)
    for tensor in inputs:
        tensor.grad = None
    allocated = torch.cuda.memory_allocated() if ON_GPU else 0
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    result: dict[str, Any] = {"seconds": statistics.median(run_pass(call, inputs) for _ in range(5))}
    if ON_GPU:
        result["peak_bytes"] = torch.cuda.max_memory_allocated() - allocated
    gradient = {str(n): tensor.grad.float().cpu() for n, tensor in enumerate(inputs)}  # type: ignore[union-attr]
    return result | compare_gradients(gradient, reference)


def compare_gradients(gradient: Mapping[str, Tensor], reference: Path) -> dict[str, float]:
    """The norm of a gradient and its relative distance from the one in the file `reference`. The first call writes the file."""
    if not reference.is_file():
        torch.save(dict(gradient), reference)
        return {"gradient_norm": norm(gradient)}
    first, none = torch.load(reference), torch.zeros(())
    off = {name: gradient.get(name, none) - first.get(name, none) for name in first.keys() | gradient.keys()}
    return {"gradient_norm": norm(gradient), "gradient_off": norm(off) / norm(first)}


def norm(gradient: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in gradient.values()))
