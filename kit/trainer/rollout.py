"""The rollout of this process: its state between TRL's methods, and `Generator`, which samples the completions.

After running out of memory, completions are sampled in smaller parts. TRL 1.15 passes a fixed list of inputs from the processor
to the scorer and raises a `TypeError` for any other. `Generator` stores the further inputs that the model accepts, one piece per
sample, so that the scorer gets them, too; it drops inputs that the model does not accept. Text-only models have no such inputs.
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
    """One scored generation batch of this process, passed to `rollout_sinks`. N completions, K reward components."""

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
    prompt_ids: list[list[int]] | None = None  # input of the model
    tool_mask: list[list[int]] | None = None  # 1 for the policy's tokens, 0 for those of a tool; None: no tools


@dataclass(frozen=True)
class RewardResult:
    """Inputs and outputs of the reward functions: rewards of all processes, the other fields of this process."""

    rewards: Tensor  # (N, K)
    total: Tensor  # (N,) weighted sum, NaN where no component applied
    completions: list[Any]
    completion_ids: list[list[int]]  # complete, even if `mask_truncated_completions` excludes them from training
    extra: dict[str, list[Any]]


@dataclass(frozen=True)
class ReplayedRollout:
    """N completions, in groups, that are already generated and scored; TRL gets them instead of new ones."""

    completion_ids: list[list[int]]
    logps: list[list[float]] | None  # nats, by the engine that sampled them
    components: Tensor  # (N, K)
    extra: dict[str, list[Any]]
    metrics: dict[str, list[float]]  # logged by the reward functions


@dataclass
class RolloutState:
    """Values of the rollout in progress that one of TRL's methods computes and a later one needs."""

    rows: Sequence[dict[str, Any]] = ()
    replayed: ReplayedRollout | None = None
    prompt_ids: list[list[int]] | None = None  # input of the model
    tool_mask: list[list[int]] | None = None  # 1 for the policy's tokens, 0 for those of a tool
    extra_inputs: dict[str, list[Any]] | None = None  # pieces of the inputs that TRL does not pass on, one per prompt
    result: RewardResult | None = None
    passes: list[Scores] = field(default_factory=list)  # scoring passes with hidden states

    @property
    def rewards(self) -> RewardResult:
        """The result of the reward functions."""
        assert self.result is not None, "rewards are read before TRL has computed them"
        return self.result

    def pass_of(self, logps: Tensor) -> Scores:
        """The scoring pass that returned the tensor `logps`. Raises `ObjectiveError` if none did."""
        match = next((scores for scores in self.passes if scores.logps is logps), None)
        if match is None:
            raise ObjectiveError(
                "A hook needs hidden states of the rollout's scoring pass (for full KL, or values), but the backend replaced the "
                "kit's scorer. Set model.backend: transformers."
            )
        return match


# --- sampling ---------------------------------------------------------------------------------------------------------

Turn = Callable[..., tuple[Any, Any]]
"""TRL's signature: ids, images and further inputs of prompts -> ids of completions, and the engine's log-probabilities."""


class Generator:
    """Samples the completions of one run.

    family: properties of the model's architecture. policy: the unwrapped model. backoff: reduces the completions sampled together
    after running out of memory; None: always all. fast_decoding: generate on a CPU with `kit.generation.decoding`.
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
        """The autocast precision of training passes; None: the precision of the weights."""

    def turn(
        self,
        sample: Turn,
        state: RolloutState,
        prompt_ids: Any,
        images: Any,
        fields: Mapping[str, Any],
        *,
        divisible: bool = True,
    ) -> tuple[Any, Any]:
        """Samples one turn of all prompts. Returns ids of completions, and the engine's log-probabilities or None.

        sample: TRL's method, for some of the prompts. divisible: transformers' `generate` samples, in as many parts as memory
        requires. A replayed rollout is returned unchanged. Raises `ModelError` for a token without an embedding.
        """
        count, rows = len(prompt_ids), self.policy.get_input_embeddings().weight.shape[0]
        accepted = {name: value for name, value in fields.items() if self.family.rule(name) != "drop"}
        if state.extra_inputs is None:  # in the first turn
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
        if last >= rows:  # without this check: a device-side assert on a GPU
            raise ModelError(
                f"A prompt has the token {last}, but the model only has {rows} embeddings, 0 to {rows - 1}. Use the tokenizer "
                "that came with the model, or remove the added tokens from the chat template."
            )

        def completions(size: int) -> tuple[Any, Any]:
            with self._checkpointing_restored():
                if size >= count:
                    return sample(prompt_ids, images, accepted)
                ids: list[Any] = []
                for start in range(0, count, size):
                    part = range(start, min(start + size, count))
                    pictures = images[start : part.stop] if images is not None else None
                    ids += sample(prompt_ids[start : part.stop], pictures, fields_of(accepted, images, part, count))[0]
                return ids, None

        fast = fast_decoding(self.policy) if self.fast_decoding and divisible else nullcontext()
        half = as_in_training(self.policy, self.half) if divisible else nullcontext()
        with fast, half:
            if self.backoff is None or not divisible:
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
        """Returns the stored inputs, one tensor per sample, extended to prompts of `width` columns and their completions."""
        return {
            name: extended(parts, width, completion) if self.family.rule(name) == "extend" else parts
            for name, parts in (state.extra_inputs or {}).items()
        }


def fields_of(fields: Mapping[str, Any], images: Any, rows: range, samples: int) -> dict[str, Any]:
    """Selects the inputs of the prompts `rows`, without padding, from those of all prompts."""
    counts = {"num_images": [len(group) if group else 0 for group in images]} if images is not None else {}
    lists = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == samples}
    tensors = {name: value for name, value in fields.items() if name not in lists}
    selected = take(tensors | counts, rows, samples)
    selected.pop("num_images", None)
    return selected | {name: [value[row] for row in rows] for name, value in lists.items()}
