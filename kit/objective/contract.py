"""What a user's own hook must keep: right shape, finite where it counts, attached to the graph, inputs left alone.

The kit's own hooks keep it by their tests, and are not checked at run time (each check waits for the device).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kit.errors import ObjectiveError
from kit.objective.batch import RewardBatch, TokenBatch
from kit.objective.hook import REMEDIES, Hook


def check_present(hook: Hook, batch: TokenBatch | RewardBatch) -> None:
    """Raises `ObjectiveError` if the batch lacks something that the hook needs."""
    for need in sorted(hook.needs):
        if getattr(batch, need, None) is None:
            raise ObjectiveError(f"{hook.short_name} needs {need}, but {REMEDIES[need]}, or remove the {hook.kind}.")


def call_on_tokens(hook: Hook, batch: TokenBatch) -> Tensor:
    """A hook's per-token output (B, T); of the user's own, checked, and 0 at padding. Raises `ObjectiveError`.

    A regularizer may also return a scalar (): a penalty on the whole rather than on tokens.
    """
    if not hook.factory.custom:
        return hook(batch)
    batch = batch.shielded
    out = guarded(hook, lambda: hook(batch), vars(batch))
    if hook.kind == "regularizer":
        _check_term(hook, out, batch)
    if hook.kind == "regularizer" and out.dim() == 0:  # a penalty on the whole, e.g. on the weights
        check_finite(hook, out)
        return out
    check_shape(hook, out, batch.mask.shape)
    if hook.kind == "clip":
        check_attached(hook, out, batch.logps)
    out = torch.where(batch.mask, out, torch.zeros_like(out))
    if not torch.isfinite(out).all():
        raise ObjectiveError(_blame_non_finite(hook, batch))
    return out


def guarded(hook: Hook, call: Callable[[], Any], inputs: Mapping[str, Any]) -> Tensor:
    """The result of a user's function. Raises `ObjectiveError` if it is no tensor, or edited an input in place."""
    before = {name: value._version for name, value in inputs.items() if _tracked(value)}
    try:
        out = call()
    except ObjectiveError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        absent = [name for name, value in inputs.items() if value is None]
        raise ObjectiveError(
            f"{hook.title} raised {type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno}). "
            f"It declares needs={sorted(hook.needs)}; what no hook needs is None in the batch, now: {', '.join(absent)}. "
            f'A field is asked for by {hook.short_name}.needs = {{"..."}}.'
        ) from error
    edited = [name for name, version in before.items() if inputs[name]._version != version]
    if edited:
        raise ObjectiveError(f"{hook.title} edited {', '.join(edited)} in place. Make a new tensor instead.")
    if not isinstance(out, Tensor):
        hint = " If it is a factory, give its parameters defaults." if callable(out) else ""
        raise ObjectiveError(f"{hook.title} returned {type(out).__name__}, expected a tensor.{hint}")
    return out


def check_shape(hook: Hook, out: Tensor, expected: torch.Size) -> None:
    """Raises `ObjectiveError` unless the output has the expected shape."""
    if out.shape != expected:
        hint = " Use .expand(-1, T) on a value per sequence." if out.dim() == 2 and out.shape[-1] == 1 else ""
        raise ObjectiveError(f"{hook.title} returned shape {tuple(out.shape)}, expected {tuple(expected)}.{hint}")


def check_attached(hook: Hook, out: Tensor, source: Tensor) -> None:
    """Raises `ObjectiveError` if `source` carries gradient and `out` does not."""
    if torch.is_grad_enabled() and source.requires_grad and not out.requires_grad:
        raise ObjectiveError(
            f"{hook.title} returned a tensor that carries no gradient, so nothing would be learned. "
            f"Compute it from batch.logps without .detach(), .item() or torch.no_grad()."
        )


def _check_term(hook: Hook, out: Tensor, batch: TokenBatch) -> None:
    """Raises `ObjectiveError` for a regularizer that is added to the loss and pulls on nothing.

    It may pull on the log-probabilities, or on what else it needs that carries gradient.
    """
    others = [getattr(batch, name) for name in ("entropy", "full_kl", "weight_norm") if name in hook.needs]
    sources = [value for value in others if value is not None] or [batch.logps]
    if torch.is_grad_enabled() and any(value.requires_grad for value in sources) and not out.requires_grad:
        raise ObjectiveError(
            f"{hook.title} returned a tensor that carries no gradient, so that adding it to the loss changes nothing but "
            "the number. Compute it from batch.logps without .detach(), .item() or torch.no_grad(), or set coef: 0 to "
            "log it only."
        )


def check_finite(hook: Hook, out: Tensor) -> None:
    """Raises `ObjectiveError` if the output holds NaN or infinity."""
    if not torch.isfinite(out).all():
        raise ObjectiveError(f"{hook.title} returned NaN or infinity.")


def _blame_non_finite(hook: Hook, batch: TokenBatch) -> str:
    fields = ("logps", "old_logps", "advantages", "ref_logps", "entropy")
    given = {name: getattr(batch, name) for name in fields}
    broken = [name for name, value in given.items() if value is not None and not torch.isfinite(value).all()]
    if broken:
        return f"{hook.title} returned NaN or infinity at live tokens: the batch holds some in {', '.join(broken)}."
    return (
        f"{hook.title} returned NaN or infinity at live tokens, from a finite batch. "
        f"Bound what it exponentiates and what it divides by."
    )


def _tracked(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()
