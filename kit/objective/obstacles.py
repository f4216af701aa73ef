"""What work may be left out for the same gradient, and which term of an objective stands in the way.

Two properties of hooks decide. Both are declared where a hook is registered (the user's own say it as attributes of their
function), and tests over the registries hold every declaration:

    row_separable            the gradient of a completion depends on no other completion's log-probabilities, entropies or
                             full KL: on its own, and on what is known without scoring (masks, advantages, old
                             log-probabilities). Then a micro-batch can be scored a part at a time, in one pass.
    zero_at_zero_advantage   a completion whose advantages are all 0 has loss 0 and gradient 0. Where every term that the
                             loss has is so, and all are separable, nobody would notice if it were not scored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.objective.hook import Hook
from kit.objective.schedules import Controller

if TYPE_CHECKING:
    from kit.objective.objective import Objective

OWN = "which is not known to be otherwise for a hook of your own unless its function says {} = True"


def to_parts(objective: Objective) -> str | None:
    """Why the gradient of one completion may depend on the scores of others, in a sentence; None where it does not."""
    for hook in _terms(objective):
        if not hook.row_separable:
            own = f" ({OWN.format('row_separable')})" if hook.factory.custom else ""
            return f"{hook.title} looks across completions{own}"
    return None


def to_skipping(objective: Objective) -> str | None:
    """Why completions without an advantage must be scored, in a sentence; None where leaving them out is exact."""
    if (across := to_parts(objective)) is not None:
        return across
    for hook in (objective.clip, *_acting(objective)):
        if not hook.zero_at_zero_advantage:
            own = f" ({OWN.format('zero_at_zero_advantage')})" if hook.factory.custom else ""
            return f"{hook.title} gives completions a gradient without an advantage{own}"
    for hook in objective.regularizers:
        if isinstance(hook.values["coef"], Controller):
            return f"the coef of {hook.title} follows what is measured over all completions"
    return None


WHOLE_WINDOW = {"sequence_mean", "global_token_mean", "fixed_length", "sequence_sum"}
"""Reductions whose sum over the equal micro-batches of a step is the same in any division."""


def to_regrouping(objective: Objective) -> str | None:
    """Why it matters which completions of a step share a micro-batch, in a sentence; None where their sum does not tell."""
    if (across := to_parts(objective)) is not None:
        return across
    if objective.reduction.factory.name not in WHOLE_WINDOW:
        return f"{objective.reduction.title} divides by the tokens of a micro-batch"
    return None


def _terms(objective: Objective) -> list[Hook]:
    """The hooks that the gradient of a micro-batch goes through."""
    return [objective.clip, *objective.weights, *_acting(objective), objective.reduction]


def _acting(objective: Objective) -> list[Hook]:
    """Regularizers that are not only logged."""
    return [hook for hook in objective.regularizers if hook.values["coef"] != 0]
