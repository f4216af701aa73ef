"""Completions of a generation batch, made in smaller parts after running out of memory.

TRL 1.15 hands a list of names from the processor to the scorer and stops at any other (`TypeError: unexpected keyword
argument`). Every further input that the model takes is kept here from the rollout on, a piece a sample, and scored with it;
what the model does not take is dropped. Text-only models take none of these ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from kit.errors import ModelError
from kit.generation.decoding import as_in_training, fast_decoding
from kit.models.failures import BatchSizeBackoff
from kit.models.family import FamilyAdapter
from kit.scoring.layouts import extended, pieces, take
from kit.trainer.micro_batch import MODEL_INPUTS
from kit.trainer.rollout import RolloutState

Rows = Sequence[dict[str, Any]]
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
