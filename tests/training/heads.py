"""Helpers of the tests of chunked heads: sizes of intermediate and saved tensors, differences of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest value of `b`."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)).item()


def saved_shapes(function: Callable[[], object]) -> list[tuple[int, ...]]:
    """Shapes of the tensors that the graph of `function()` saves for its backward pass."""
    shapes: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function()
    return shapes


class Largest(TorchDispatchMode):
    """Record the element count of the largest tensor that any operation returns, and the number of matrix products."""

    elements = products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        self.products += func in (torch.ops.aten.addmm_.default, torch.ops.aten.mm.out, torch.ops.aten.mm.default)
        return result
