"""What the needs of hooks cost, for people; the counterpart of `kit.objective.hook.REMEDIES`. No torch here.

B completions of a micro-batch, T completion tokens, H hidden size
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

NOTHING = "nothing worth mentioning"
ENTROPY_IN_LOSS = "one more matrix product per vocabulary tile in the scorer, as its gradient is wanted"

COSTS: Mapping[str, str] = {
    "ref_logps": "one scoring pass of the reference policy per generation batch",
    "full_kl": (
        "one scoring pass of the reference policy per generation batch, its hidden states kept (B x T x H), and one more "
        "scan over the vocabulary in forward and backward"
    ),
    "sampler_logps": "nothing, but an engine that reports them",
    "entropy": NOTHING,
    "rewards": NOTHING,
    "truncated": NOTHING,
    "all_lengths": NOTHING,
    "weight_norm": NOTHING,
    "components": NOTHING,
    "lengths": NOTHING,
    "greedy_rewards": "one greedy completion per prompt, i.e. 1/num_generations more generation, and its reward",
    "token_rewards": NOTHING,
    "values": (
        "a linear head on the policy's hidden states, and one scoring pass without gradient per generation batch unless "
        "optimisation.iterations > 1"
    ),
}
"""Each need of `REMEDIES`, with what a run does beyond a run without it."""


def costs(needs: Collection[str], *, entropy_in_loss: bool = False) -> dict[str, str]:
    """Each need with its cost, in alphabetical order. `entropy_in_loss`: a term of the loss uses the entropy."""
    found = {need: COSTS[need] for need in sorted(needs)}
    if "entropy" in found and entropy_in_loss:
        found["entropy"] = ENTROPY_IN_LOSS
    return found
