"""Scores completions in the way that costs least and is exact for the model at hand.

The way of a model is found at its first rows (`kit.scoring.proof`):

    packed    rows without padding, behind one another, a prompt that several completions share only once
    plain     TRL's layout, as it comes, or with the padding behind

Everything with inputs beside text is scored plainly. `Scorer.report` says which way it is, and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, TypedDict

import torch

from kit.models.family import FamilyAdapter
from kit.models.fused import Fused
from kit.models.inputs import COUNTS
from kit.scoring.layouts import (
    ModelPass,
    Rows,
    Scores,
    Wanted,
    score_packs,
    score_padded,
    score_right_padded,
)
from kit.scoring.packed_attention import install_packed_attention
from kit.scoring.packing import NotPackable, lay_out
from kit.scoring.proof import Plain, Verdict, examine, fuse
from kit.scoring.unsloth_packs import has_unsloths_layers
from kit.scoring.unsloth_packs import install as install_unsloth_packs

log = logging.getLogger("kit")
PACK_TOKENS = {"cpu": 2048}
"""Tokens of a pack, at most, by device."""
GPU_PACK_TOKENS = 8192
LONG_PROMPT = 4
"""A pack may take so many prompts' tokens all the same: a group that is divided forwards its prompt once more."""
PLAIN = Wanted()
REMEDY = {
    "left": "Set optimisation.packing: false.",
    "right": "Set model.backend: transformers.",
}


class Report(TypedDict):
    """The way that scoring takes: `packing` is None before the first rows; `reason` says why it is not packed."""

    packing: Literal["packed", "plain"] | None
    share_prompts: bool
    reason: str


class Scorer:
    """Scores the completions of one run, by any model that has TRL's fused head.

    family: what is known of the policy's architecture. autocast: a context for the precision of the run. unwrap: a model
    without accelerate's wrappers. padding: `left` as TRL has it, or `right` for backbones that leave the mask out. packing:
    leave padding out where that is exact. share_prompts: a prompt once for all completions in a pack. half: mixed precision
    in 16 bits."""

    def __init__(
        self,
        family: FamilyAdapter,
        *,
        autocast: Callable[[], AbstractContextManager[Any]],
        unwrap: Callable[[Any], Any],
        padding: Literal["left", "right"] = "left",
        packing: bool = True,
        share_prompts: bool = True,
        half: bool = False,
        device: str = "cpu",
    ) -> None:
        self.family, self.autocast, self.unwrap, self.padding = family, autocast, unwrap, padding
        self.packing, self.share_prompts, self.half = packing, share_prompts, half
        self.pack_tokens = PACK_TOKENS.get(device, GPU_PACK_TOKENS)
        """Tokens of a pack, at most; more only beside a long prompt, and for a single longer row."""
        self.token_budget: int | None = None
        """Tokens of a pass without a graph, at most. One with a graph is bounded by whoever asks for it."""
        self.verdicts: dict[int, Verdict] = {}  # by model: the policy's, and that of a reference with its own weights
        self.offload = False
        """Whether what gradient checkpointing keeps waits in main memory."""
        self.fuses = device == "cuda"
        """Whether models get fewer kernels (`kit.models.fused`) at their first rows."""
        self.fused: dict[int, Fused] = {}  # by model
        install_packed_attention()
        if packing:
            install_unsloth_packs()

    @property
    def report(self) -> Report:
        """The way that scoring takes."""
        if not self.packing:
            return {"packing": "plain", "share_prompts": False, "reason": "turned off"}
        found = list(self.verdicts.values())
        worst = next((one for way in ("plain", "packed") for one in found if one.way == way), None)
        if worst is None:
            return {"packing": None, "share_prompts": self.share_prompts, "reason": ""}
        shared = worst.way == "packed" and self.share_prompts and all(one.shared for one in found)
        return {"packing": worst.way, "share_prompts": shared, "reason": worst.reason}

    def score(self, model: Any, rows: Rows, wanted: Wanted = PLAIN, batch_size: int | None = None) -> Scores:
        """Scores of the completions. batch_size: a bound on memory, that of so many padded rows.

        With a gradient where the caller has not turned it off. Raises `ModelError` for a model without TRL's head, and for
        inputs that it cannot divide.
        """
        bare, plain = self.unwrap(model), score_right_padded if self.padding == "right" else score_padded
        run = self._pass(model, bare, wanted)
        accepted = {  # fields that are there and that the model takes
            name: value
            for name, value in rows.fields.items()
            if value is not None and (name in COUNTS or self.family.rule(name) != "drop")
        }
        rows = replace(rows, fields=accepted)
        if self.fuses and id(bare) not in self.fused:
            fused = fuse(ModelPass(self.family.completed(bare), self.autocast), bare, rows, plain=plain, half=self.half)
            if fused is not None:
                self.fused[id(bare)] = fused
        if self.token_budget is not None and not torch.is_grad_enabled() and not wanted.aux_loss:
            within = max(1, self.token_budget // rows.ids.shape[1])
            batch_size = within if batch_size is None else min(batch_size, within)
        verdict = self._verdict(bare, rows, plain) if self.packing and not rows.fields else None
        # A balancing loss counts tokens, and so would see a shared prompt once.
        if verdict is not None and verdict.way == "packed" and not wanted.aux_loss:
            limit = max(self.pack_tokens, LONG_PROMPT * rows.width)
            if batch_size is not None:
                limit = min(limit, batch_size * rows.ids.shape[1])
            try:
                share = self.share_prompts and verdict.shared
                if packs := lay_out(*rows.on_host, rows.completion, share=share, limit=limit):
                    return score_packs(run, packs, rows)  # without any, a graph is wanted all the same
            except NotPackable as reason:
                log.info("these rows are not packed: %s", reason)
        return plain(run, rows, batch_size)

    def _pass(self, model: Any, bare: Any, wanted: Wanted = PLAIN) -> ModelPass:
        completed, unsloths = self.family.completed(model), has_unsloths_layers(bare)
        return ModelPass(completed, self.autocast, wanted, REMEDY[self.padding], self.offload, unsloths)

    def _verdict(self, bare: Any, rows: Rows, plain: Plain) -> Verdict | None:
        """How the rows of this model are scored; None as long as none of them has a completion."""
        if id(bare) not in self.verdicts:  # another process may look at another time, or not at all
            if not rows.width or not bool((rows.live.any(1) & rows.mask[:, : rows.width].any(1)).any()):
                return None
            verdict = examine(self._pass(bare, bare), bare, rows, plain=plain, half=self.half)
            self.verdicts[id(bare)] = verdict
            if verdict.way == "packed" and not verdict.shared:
                log.warning("%s reads a prompt anew for every completion: %s", type(bare).__name__, verdict.reason)
            elif verdict.way != "packed":
                log.warning("%s is scored in padded rows: %s", type(bare).__name__, verdict.reason)
        return self.verdicts[id(bare)]
