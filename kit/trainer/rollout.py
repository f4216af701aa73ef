"""A generation batch of this process: what TRL's methods learn of it, and how its completions are made.

After running out of memory they are made in smaller parts. TRL 1.15 hands a list of names from the processor to the scorer and
stops at any other (`TypeError: unexpected keyword argument`). Every further input that the model takes is kept here from the
rollout on, a piece a sample, and scored with it; what the model does not take is dropped. Text-only models take none of these
ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kit.errors import ModelError, ObjectiveError
from kit.generation.decoding import as_in_training, fast_decoding
from kit.models.failures import BatchSizeBackoff
from kit.models.family import FamilyAdapter
from kit.scoring.scorer import Scores, extended, pieces, take
from kit.trainer.policy_loss import MODEL_INPUTS


@dataclass(frozen=True)
class Rollout:
    """One scored generation batch of this process, as handed to `rollout_sinks`. N completions, K reward components."""

    step: int
    mode: str
    rows: list[dict[str, Any]]
    completions: list[Any]
    completion_ids: list[list[int]]
    truncated: list[bool]
    rewards: Tensor  # (N, K), NaN where a component does not apply
    reward_names: list[str]
    advantages: Tensor  # (N,) or (N, T)
    extra: Mapping[str, list[Any]]
    prompt_ids: list[list[int]] | None = None  # as the model was given them
    tool_mask: list[list[int]] | None = None  # 1 for the policy's tokens, 0 for those of a tool; None: no tools


@dataclass(frozen=True)
class RewardResult:
    """Inputs and outputs of the reward functions: rewards of all processes, the rest of this one."""

    rewards: Tensor  # (N, K)
    total: Tensor  # (N,) weighted sum, NaN where no component applied
    completions: list[Any]
    completion_ids: list[list[int]]  # whole, also where `mask_truncated_completions` keeps them from training
    extra: dict[str, list[Any]]


@dataclass(frozen=True)
class ReplayedRollout:
    """N completions, in groups, that were generated and scored before; the trainer gives them to TRL as its own."""

    completion_ids: list[list[int]]
    logps: list[list[float]] | None  # nats, of the engine that sampled them
    components: Tensor  # (N, K)
    extra: dict[str, list[Any]]
    metrics: dict[str, list[float]]  # that the reward functions logged when they were made


@dataclass
class RolloutState:
    """A generation batch while TRL makes it: what one of its methods learns and a later one needs."""

    rows: Sequence[dict[str, Any]] = ()
    replayed: ReplayedRollout | None = None
    prompt_ids: list[list[int]] | None = None  # as the model was given them
    tool_mask: list[list[int]] | None = None  # 1 for the policy's tokens, 0 for those of a tool
    extra_inputs: dict[str, list[Any]] | None = None  # of the prompts: pieces of the inputs that TRL has no place for
    result: RewardResult | None = None
    passes: list[Scores] = field(default_factory=list)  # scoring passes whose hidden states were kept

    @property
    def rewards(self) -> RewardResult:
        """The result of the reward functions."""
        assert self.result is not None, "rewards are read before TRL has computed them"
        return self.result

    def pass_of(self, logps: Tensor) -> Scores:
        """The scoring pass that gave these log-probabilities. Raises `ObjectiveError` where nobody saw it."""
        match = next((scores for scores in self.passes if scores.logps is logps), None)
        if match is None:
            raise ObjectiveError(
                "The hidden states of the rollout's scoring were not seen, which a hook needs (full KL, or values): the "
                "backend scores in a way of its own."
            )
        return match


# --- how completions are made ------------------------------------------------------------------------------------------

Turn = Callable[..., tuple[Any, Any]]
"""TRL's: ids, images and further inputs of prompts -> ids of completions, and the engine's log-probabilities."""


class Generator:
    """Makes the completions of one run.

    family: what is known of the model. policy: the bare model. backoff: completions at once, after running out of memory;
    None: all. fast_decoding: generate on a CPU with `kit.generation.decoding`.
    """

    def __init__(
        self,
        family: FamilyAdapter,
        policy: Any,
        backoff: BatchSizeBackoff | None = None,
        *,
        fast_decoding: bool = False,
    ) -> None:
        self.family, self.policy, self.backoff, self.fast_decoding = family, policy, backoff, fast_decoding
        self.half: torch.dtype | None = None
        """What training passes compute in by autocast; None: in the precision of the weights."""

    def turn(
        self,
        make: Turn,
        state: RolloutState,
        prompt_ids: Any,
        images: Any,
        fields: Mapping[str, Any],
        *,
        own: bool = True,
    ) -> tuple[Any, Any]:
        """One turn of all prompts: ids of completions, and the engine's log-probabilities if it gives any.

        make: TRL's way, of some prompts. own: transformers' generate makes them, which can be divided: into as many parts as
        memory requires. A rollout that is replayed is given back as it was sampled. Raises `ModelError` for a token without
        an embedding.
        """
        count, rows = len(prompt_ids), self.policy.get_input_embeddings().weight.shape[0]
        accepted = {name: value for name, value in fields.items() if self.family.rule(name) != "drop"}
        if state.extra_inputs is None:  # of the first turn: the prompts' parts of the inputs that TRL has no place for
            counts: dict[str, Any] = {"image_grid_thw": fields.get("image_grid_thw")}
            if images is not None:
                counts["num_images"] = [len(group) if group else 0 for group in images]
            state.extra_inputs = {
                name: list(value) if self.family.rule(name) == "extend" else pieces(name, value, count, counts)
                for name, value in accepted.items()
                if name not in MODEL_INPUTS
            }
        if state.replayed is not None:
            return [list(ids) for ids in state.replayed.completion_ids], state.replayed.logps
        last = max((max(ids, default=0) for ids in prompt_ids), default=0)
        if last >= rows:  # on a GPU an unexplained assert
            raise ModelError(
                f"A prompt has the token {last}, and the model has {rows} embeddings, 0 to {rows - 1}: its tokenizer has tokens "
                "that it does not know. Use the tokenizer that came with the model, or take them out of the chat template."
            )

        def completions(size: int) -> tuple[Any, Any]:
            with self._checkpointing_restored():
                if size >= count:
                    return make(prompt_ids, images, accepted)
                made: list[Any] = []
                for start in range(0, count, size):
                    part = range(start, min(start + size, count))
                    pictures = images[start : part.stop] if images is not None else None
                    made += make(prompt_ids[start : part.stop], pictures, fields_of(accepted, images, part, count))[0]
                return made, None

        fast = fast_decoding(self.policy) if self.fast_decoding and own else nullcontext()
        half = as_in_training(self.policy, self.half) if own else nullcontext()
        with fast, half:
            if self.backoff is None or not own:
                return completions(count)
            return self.backoff.attempt("generation", count, completions)

    @contextmanager
    def _checkpointing_restored(self) -> Iterator[None]:
        """Switches gradient checkpointing on again if it was on before: TRL leaves it off when generation raises."""
        was_on = getattr(self.policy, "is_gradient_checkpointing", False)
        try:
            yield
        finally:
            if was_on and not self.policy.is_gradient_checkpointing:
                self.policy.gradient_checkpointing_enable()

    def scored_inputs(self, state: RolloutState, width: int, completion: int) -> dict[str, list[Any]]:
        """Returns the kept inputs over prompts of `width` columns and their completions: one tensor per sample."""
        return {
            name: extended(parts, width, completion) if self.family.rule(name) == "extend" else parts
            for name, parts in (state.extra_inputs or {}).items()
        }


def fields_of(fields: Mapping[str, Any], images: Any, rows: range, samples: int) -> dict[str, Any]:
    """Selects the inputs of some prompts from those of all, unpadded."""
    counts = {"num_images": [len(group) if group else 0 for group in images]} if images is not None else {}
    lists = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == samples}
    rest = {name: value for name, value in fields.items() if name not in lists}
    taken = take(rest | counts, rows, samples)
    taken.pop("num_images", None)
    return taken | {name: [value[row] for row in rows] for name, value in lists.items()}
