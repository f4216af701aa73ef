"""What the checks of all kinds of hook share: the hook that is looked at, and comparisons that raise a `Fault`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kit.objective.checks.inputs import Fields, scale_of, token_batch
from kit.objective.hook import Hook
from kit.objective.objective import Objective
from kit.objective.reduction import LossScale

EXACT, CLOSE = 1e-9, 1e-5
"""Relative: of sums in another order; of central differences."""
STEP = 1e-6
"""Of central differences, in nats."""


class Fault(Exception):
    """A check failed; the message says how."""


class Note(str):
    """The detail of a check that passed, but is worth a second look."""


Check = Callable[["Subject"], str | None]  # the detail, None where it does not apply; raises `Fault`


class Subject:
    """The hook that is looked at. Calling it is calling the hook, from the state in which it was handed over."""

    def __init__(self, hook: Hook, seed: int) -> None:
        self.hook, self.kind, self.seed = hook, hook.kind, seed
        self._state = {key: copy.deepcopy(part.state_dict()) for key, part in hook.stateful().items()}
        self.muted = hook.kind == "regularizer" and hook.coef_at(0) == 0.0
        louder = hook.factory(**hook.values | {"coef": 1.0}) if self.muted else hook
        self.objective = Objective(**_parts(louder))
        self.watch: _Watch | None = None

    def restore(self) -> None:
        """Puts back the state that the hook had at first."""
        for key, part in self.hook.stateful().items():
            part.load_state_dict(copy.deepcopy(self._state[key]))

    def __call__(self, *inputs: Any) -> Tensor:
        self.restore()
        with self.watch or contextlib.nullcontext():
            out = self.hook(*inputs)
        if not isinstance(out, Tensor):
            hint = " If it is a factory, give its parameters defaults." if callable(out) else ""
            raise Fault(f"returned {type(out).__name__}, expected a tensor.{hint}")
        return out

    def loss(self, fields: Fields, scale: LossScale | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of an objective with this hook in it, and the leaves of its batch."""
        self.restore()
        batch, leaves = token_batch(fields)
        return self.objective.loss(batch, scale or scale_of(fields["mask"])).loss, leaves


def _parts(hook: Hook) -> dict[str, Any]:
    """An objective around the hook, of parts that hide nothing."""
    plain: dict[str, Any] = {"advantage": "group_mean", "clip": "reinforce", "reduction": "global_token_mean"}
    many = {"weight": "weights", "regularizer": "regularizers"}
    return plain | ({many[hook.kind]: [hook]} if hook.kind in many else {hook.kind: hook})


def declared(subject: Subject, known: Any, call: Callable[[set[str]], Any]) -> str:
    """Whether `call`, given the names of the fields to fill, runs with no more than the hook declares."""
    needs = set(subject.hook.needs)
    try:
        call(needs)
    except Exception as error:
        lacking = [name for name in known if name not in needs and _works(call, set(known) - {name}) is False]
        if not lacking:
            raise
        said = ", ".join(f"'{name}'" for name in lacking)
        raise Fault(
            f"reads {', '.join(lacking)} without declaring it; a run fills in only what is declared. Set "
            f"function.needs = {{{said}}}. ({type(error).__name__}: {error})"
        ) from None
    return f"needs {', '.join(sorted(needs))}" if needs else "needs nothing beyond what every batch has"


def _works(call: Callable[[set[str]], Any], keep: set[str]) -> bool:
    try:
        call(keep)
    except Exception:
        return False
    return True


def untouched(call: Callable[..., Any], arguments: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    """Raises `Fault` if `call(*arguments)` edits one of the tensors that it can reach."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    before = {name: (value.detach().clone(), _version(value)) for name, value in tensors.items()}
    call(*arguments)
    edited = [n for n, v in tensors.items() if _version(v) != before[n][1] or not equal(v, before[n][0])]
    if edited:
        raise Fault(f"edited {', '.join(edited)} in place: other hooks read it, too. Make a new tensor instead.")


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def equal(a: Tensor, b: Tensor) -> bool:
    """To the last bit; NaN is equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def repeated(call: Callable[[], list[Tensor]]) -> str:
    """Whether two calls give the same to the last bit."""
    if not all(equal(a, b) for a, b in zip(call(), call(), strict=True)):
        raise Fault(
            "gives something else the second time: a run could be neither repeated nor resumed. Draw from a generator "
            "seeded with batch.step, or keep what changes in state_dict() and load_state_dict()."
        )
    return "to the last bit"


def finite(values: Tensor, where: str) -> None:
    """Raises `Fault` unless every value is a finite number."""
    if not torch.isfinite(values).all():
        raise Fault(f"NaN or infinity {where}. Bound what is exponentiated, and what is divided by.")


def counted(out: Tensor, mask: Tensor) -> Tensor:
    """What of a hook's output counts: live tokens, or all of a scalar."""
    return out if out.dim() == 0 else out[mask]


COUNT_THE_MASK = "Count with the mask, not with the number of columns."


def alike(a: Tensor, b: Tensor, what: str, hint: str = COUNT_THE_MASK) -> None:
    """Raises `Fault` where two tensors differ by more than rounding."""
    if a.shape != b.shape or not torch.allclose(a, b, rtol=EXACT, atol=EXACT, equal_nan=True):
        raise Fault(f"{what}. {hint}")


def slopes_of(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a loss to those leaves (B, T) that it depends on."""
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {n: slope for n, slope in zip(leaves, found, strict=True) if slope is not None and slope.dim() == 2}


def zero_and_attached(subject: Subject, loss: Tensor, leaves: dict[str, Tensor]) -> None:
    """Raises `Fault` unless a loss without live tokens is a differentiable 0. A penalty on the weights may remain."""
    whole = subject.kind == "regularizer" and "weight_norm" in subject.hook.needs
    if not torch.isfinite(loss) or (loss != 0 and not whole):
        raise Fault(f"a micro-batch whose tokens are all masked has the loss {float(loss):g}, not 0.")
    if not loss.requires_grad:
        raise Fault("a micro-batch whose tokens are all masked gives a loss off the graph; use 0 * per_token.sum().")
    for name, slope in slopes_of(loss, leaves).items():
        if not (slope == 0).all():
            raise Fault(f"a micro-batch whose tokens are all masked gives gradient to {name}.")


def derivative(subject: Subject, value: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> str:
    """Compares the gradient of `value`, which calls the subject, to central differences along six random directions."""
    subject.watch = watch = _Watch()
    try:
        out = value(*leaves)
    finally:
        subject.watch = None
    if not out.requires_grad:
        return Note("skipped: there is no gradient to compare")
    slopes = torch.autograd.grad(out, leaves, allow_unused=True)
    for direction in range(6):
        along = [numbers(leaf.shape, subject.seed + 10 * direction + i) for i, leaf in enumerate(leaves)]
        with torch.no_grad():
            ends = [
                value(*(leaf + sign * STEP * way for leaf, way in zip(leaves, along, strict=True))) for sign in (1, -1)
            ]
        expected = float(ends[0] - ends[1]) / (2 * STEP)
        seen = sum(
            float((slope * way).nan_to_num(nan=0.0).sum())
            for slope, way in zip(slopes, along, strict=True)
            if slope is not None
        )
        if abs(seen - expected) > CLOSE * max(1.0, abs(expected)):
            if watch.cut:
                return Note(
                    "gradient is not that of the value: the hook detaches part of it; fine for cispo-like weights"
                )
            raise Fault(
                f"gradient is not that of the value ({seen:.6g} along a direction in which it rises by {expected:.6g}), "
                f"and nothing is detached: look for a torch.autograd.Function whose backward is wrong."
            )
    return "autograd agrees, along six directions in float64"


class _Watch(TorchFunctionMode):
    """Sees whether anything is taken off the graph."""

    cut = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # a property: is it `Tensor.data`?
            name = "data" if getattr(func, "__self__", None) is _DATA else name
        cuts = name in ("detach", "detach_", "data", "item", "tolist", "numpy", "__float__")
        # torch.no_grad; the forward of a torch.autograd.Function, which also runs without gradient, does not pass here.
        cuts = cuts or (name == "_set_grad_enabled" and args[:1] == (False,))
        self.cut = self.cut or cuts
        return func(*args, **(kwargs or {}))


_DATA = vars(torch._C.TensorBase)["data"]


def numbers(shape: torch.Size, seed: int) -> Tensor:
    """Normally distributed, float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
