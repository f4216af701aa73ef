"""The part of the trainer that knows model families: inputs that TRL has no place for, and those it forgets.

TRL 1.15 hands a list of names from the processor to the scorer and stops at any other (`TypeError: unexpected keyword
argument`). Here every further input that the model takes is kept from the rollout on, a piece a sample, and scored with it;
what the model does not take is dropped. Text-only models take none of these ways.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kit.generation.decoding import fast_decoding
from kit.generation.prompts import text_of, without_pictures
from kit.models.family import FamilyAdapter, adapter_of
from kit.models.inputs import COUNTS, extended, joined, pieces, take

_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is
KEPT = "extra_inputs"
"""Prefix in a micro-batch of the inputs that TRL has no place for: each a list with a tensor a completion."""


class FamilySide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, right before TRL's class."""

    fast_decoding: bool = False
    """Generate on a CPU with `kit.generation.decoding`: the same distribution, other draws than TRL's of the same seed."""
    _further: dict[str, list[Any]] | None = None  # of the rollout in progress: pieces of the prompts' further inputs

    @functools.cached_property
    def family(self) -> FamilyAdapter:
        """What is known of this trainer's model."""
        return adapter_of(self.accelerator.unwrap_model(self.model), self.processing_class)

    @functools.cached_property
    def _trl_names(self) -> frozenset[str]:
        return frozenset(inspect.signature(super()._get_per_token_logps_and_entropies).parameters)

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, *rest: Any, **keywords: Any
    ) -> Any:
        given = {name: value for name, value in multimodal_fields.items() if self.family.rule(name) != "drop"}
        self.note_further(given, images, len(prompt_ids))
        if self.family.placeholders and not self.use_vllm:
            self.generation_config.suppress_tokens = list(self.family.placeholders)
        make = super()._generate_single_turn
        if not self.fast_decoding or self.use_vllm or self.use_transformers_continuous_batching:
            return make(prompt_ids, images, given, *rest, **keywords)
        with fast_decoding(self.accelerator.unwrap_model(self.model)):
            return make(prompt_ids, images, given, *rest, **keywords)

    def note_further(self, fields: Mapping[str, Any], images: Any, samples: int) -> None:
        """Keeps, of the first turn of a rollout, the prompts' parts of the inputs that TRL has no place for."""
        if self._further is None:
            taken = {name: value for name, value in fields.items() if self.family.rule(name) != "drop"}
            self._further = self._pieces(taken, images, samples)

    def _pieces(self, fields: Mapping[str, Any], images: Any, samples: int) -> dict[str, list[Any]]:
        """Of each input without a place in TRL: its part of every prompt."""
        counts: dict[str, Any] = {"image_grid_thw": fields.get("image_grid_thw")}
        if images is not None:
            counts["num_images"] = [len(group) if group else 0 for group in images]
        further = {name: value for name, value in fields.items() if name not in self._trl_names}
        return {
            name: list(value) if self.family.rule(name) == "extend" else pieces(name, value, samples, counts)
            for name, value in further.items()
        }

    def fields_of(self, fields: Mapping[str, Any], images: Any, rows: range, samples: int) -> dict[str, Any]:
        """Of the inputs of prompts, unpadded, those of some prompts alone."""
        counts = {"num_images": [len(group) if group else 0 for group in images]} if images is not None else {}
        lists = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == samples}
        rest = {name: value for name, value in fields.items() if name not in lists}
        taken = take(rest | counts, rows, samples)
        taken.pop("num_images", None)
        return taken | {name: [value[row] for row in rows] for name, value in lists.items()}

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Rewards see text: no pictures among the columns, and no parts in the messages."""
        rows, prompts = without_pictures(inputs), [text_of(prompt) for prompt in prompts]
        return super()._calculate_rewards(rows, prompts, completions, completion_ids_list)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._further = None
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            if self._further:
                width, completion = output["prompt_ids"].shape[1], output["completion_ids"].shape[1]
                for name, parts in self._further.items():
                    output[f"{KEPT}.{name}"] = self._whole(name, parts, width, completion)
            return output
        finally:
            self._further = None

    def _whole(self, name: str, parts: list[Any], width: int, completion: int) -> list[Any]:
        return extended(parts, width, completion) if self.family.rule(name) == "extend" else parts

    def further_inputs(self, inputs: Mapping[str, Any]) -> dict[str, list[Any]]:
        """By name, the inputs of a micro-batch that TRL has no place for."""
        return {name.removeprefix(f"{KEPT}."): value for name, value in inputs.items() if name.startswith(f"{KEPT}.")}

    def scoring_inputs(self, inputs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
        """What the scorer is given of some completions of a micro-batch, beside ids and masks."""
        from kit.trainer.rollout import MODEL_INPUTS

        given = {name: inputs[name] for name in MODEL_INPUTS if inputs.get(name) is not None}
        return take(given | self.further_inputs(inputs), rows, len(inputs["completion_ids"]))

    def plain_inputs(self, inputs: Mapping[str, Any], row: int, seen: Any) -> dict[str, Any]:
        """What the model itself is given of one completion, unpadded: `seen` (L,) bool chooses its tokens."""
        given = {name: value for name, value in self.scoring_inputs(inputs, [row]).items() if name not in COUNTS}
        device, whole = inputs["completion_ids"].device, {}
        for name, value in given.items():
            tensor = joined(value, device) if isinstance(value, list) else value
            if tensor is not None:
                whole[name] = tensor[:, seen] if self.family.rule(name) == "extend" else tensor
        return whole

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: Any,
        batch_size: Any = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **given: Any,
    ) -> Any:
        score = super()._get_per_token_logps_and_entropies
        whole = self.family.completed(model)
        further = {name: given.pop(name) for name in list(given) if name not in self._trl_names}
        further = {
            name: value for name, value in further.items() if value is not None and self.family.rule(name) != "drop"
        }
        given = {
            name: value for name, value in given.items() if not _is_field(name) or self.family.rule(name) != "drop"
        }
        if not further and not self._further:
            return score(
                whole, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, **given
            )
        given |= {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        held = self._further or {}
        if not all(isinstance(value, list) for value in further.values()) or held:  # in a rollout: as TRL batched them
            width = input_ids.shape[1] - logits_to_keep
            further = {name: self._whole(name, parts, width, logits_to_keep) for name, parts in held.items()}
        return self._in_chunks(score, whole, (input_ids, attention_mask, logits_to_keep), batch_size, given, further)

    def _in_chunks(
        self, score: Any, model: Any, of: tuple[Any, Any, int], size: int | None, given: dict[str, Any], further: Any
    ) -> Any:
        """Scores `size` completions at a time, each with its own part of every input."""
        ids, mask, keep = of
        samples, found = len(ids), []
        fields = {name: given.pop(name) for name in list(given) if not name.startswith("compute_")} | further
        for start in range(0, samples, size or samples):
            rows = range(start, min(start + (size or samples), samples))
            chunk = take(fields, rows, samples)
            more = {name: joined(chunk.pop(name), ids.device) for name in further if name in chunk}
            more = {name: value for name, value in more.items() if value is not None}
            call = functools.partial(_with, model, more)
            part = slice(rows.start, rows.stop)
            found.append(score(call, ids[part], mask[part], keep, None, **given, **chunk))
        logps, entropies, losses = zip(*found, strict=True)
        return (
            torch.cat(logps),
            torch.cat(entropies) if entropies[0] is not None else None,
            torch.stack(losses).mean() if losses[0] is not None else None,
        )


def _is_field(name: str) -> bool:
    """Whether an argument of the scorer goes to the model."""
    return name not in ("compute_entropy", "compute_aux_loss", *COUNTS)


def _with(model: Any, more: Mapping[str, Any], **given: Any) -> Any:
    return model(**given, **more)
