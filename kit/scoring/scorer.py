"""The part of the trainer that scores each token once: no padding, and a prompt that several completions share only once.

The way of a model is found at its first rows (`kit.scoring.packing_proof`):

    packed    rows without padding, behind one another (`kit.scoring.packing`)
    trimmed   batches of rows of like length, their common padding cut off (`kit.scoring.trimmed`)
    plain     TRL's layout, as it comes

Everything with inputs beside text is scored plainly. `packing_report` says which way it is, and why.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from kit.models.backend import is_unsloths
from kit.objective import Mean
from kit.scoring.hidden_states import is_apart
from kit.scoring.packed import score_packs
from kit.scoring.packed_attention import install_packed_attention
from kit.scoring.packing import NotPackable, lay_out, unique_tokens
from kit.scoring.packing_proof import Rows, Verdict, examine
from kit.scoring.trimmed import score_trimmed

_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is
log = logging.getLogger("kit")
PACK_TOKENS = {"cpu": 2048}
"""Tokens of a pack, at most, by device."""
GPU_PACK_TOKENS = 8192
LONG_PROMPT = 4
"""A pack may take so many prompts' tokens all the same: a group that is divided forwards its prompt once more."""
USEFUL = "tokens/useful"
"""Metric: live tokens, a prompt that completions share counted once, over all that were forwarded to train on them."""


class PackedScoring(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, right before `FamilySide`. Does nothing without an objective, or under Unsloth.

    packing: score in packs where that is exact, else trimmed or plainly. share_prompts: a prompt once for all completions in
    a pack.
    """

    objective: Any
    pack_tokens: int
    """Tokens of a pack, at most; more only beside a long prompt, and for a single longer row."""

    def __init__(self, *given: Any, packing: bool = True, share_prompts: bool = True, **keywords: Any) -> None:
        self._verdicts: dict[int, Verdict] = {}  # by model: the policy's, and that of a reference with its own weights
        self.packing, self.share_prompts = packing and self.objective is not None, share_prompts
        super().__init__(*given, **keywords)
        self.packing = self.packing and not is_unsloths(type(self))
        self.pack_tokens = PACK_TOKENS.get(self.accelerator.device.type, GPU_PACK_TOKENS)
        if self.packing:
            install_packed_attention()

    @property
    def packing_report(self) -> dict[str, Any]:
        """The way that scoring takes: `packing` (None before the first rows), `share_prompts`, and `reason` if not packed."""
        if not self.packing:
            return {"packing": "plain", "share_prompts": False, "reason": "turned off"}
        found = list(self._verdicts.values())
        worst = next((one for way in ("plain", "trimmed", "packed") for one in found if one.way == way), None)
        if worst is None:
            return {"packing": None, "share_prompts": self.share_prompts, "reason": ""}
        shared = worst.way == "packed" and self.share_prompts
        return {"packing": worst.way, "share_prompts": shared, "reason": worst.reason}

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **inputs: Any,
    ) -> Any:
        plain = super()._get_per_token_logps_and_entropies
        given = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss)
        if self.objective is None:
            return plain(*given, **inputs)
        rows = Rows(input_ids, attention_mask, logits_to_keep)
        tally = self._tally(rows)
        beside = any(value is not None for value in inputs.values()) or bool(self._further)
        way = "plain" if beside or not self.packing else self._way(model, plain, rows)
        if way == "packed" and not compute_aux_loss:  # which counts tokens, and so would see a shared prompt once
            found = self._packed(model, rows, batch_size, compute_entropy, tally)
            if found is not None:
                return found
        if way != "plain":
            return score_trimmed(plain, *given, tally=tally, as_they_come=_waits(model))
        tally(input_ids.numel())
        return plain(*given, **inputs)

    def _way(self, model: Any, plain: Any, rows: Rows) -> str:
        """How the rows of this model are scored; plainly, as long as none of them has a completion."""
        model = self.accelerator.unwrap_model(model)  # another process may look at another time, or not at all
        key = id(model)
        if key not in self._verdicts:
            width = rows.ids.shape[1] - rows.completion
            if width < 1 or not bool((rows.live.any(1) & rows.mask[:, :width].any(1)).any()):
                return "plain"
            self._verdicts[key] = verdict = examine(self, model, plain, rows)
            if verdict.way != "packed":
                told = "with its padding trimmed" if verdict.way == "trimmed" else "in padded rows"
                log.warning("%s is scored %s: %s", type(model).__name__, told, verdict.reason)
        return self._verdicts[key].way

    def _packed(self, model: Any, rows: Rows, batch_size: int | None, compute_entropy: bool, tally: Any) -> Any:
        """The scores, or None where these rows do not go into packs."""
        limit = max(self.pack_tokens, LONG_PROMPT * (rows.ids.shape[1] - rows.completion))
        if batch_size is not None:  # a bound on memory: what so many rows would have taken
            limit = min(limit, batch_size * rows.ids.shape[1])
        most = None if _waits(model) else limit
        try:
            packs = lay_out(rows.ids, rows.mask, rows.completion, share=self.share_prompts, limit=most)
        except NotPackable as reason:
            log.info("these rows are not packed: %s", reason)
            return None
        if not packs:  # without any completion: a graph is wanted all the same
            return None
        shape = (len(rows.ids), rows.completion)
        return *score_packs(self, model, packs, shape, rows.ids.device, compute_entropy, tally), None

    def _tally(self, rows: Rows) -> Any:
        """Counts what is forwarded for the metric: for training at once, and beforehand for old and reference policy."""
        if not self.model.training or is_apart():
            return lambda tokens: None
        useful = unique_tokens(rows.ids, rows.mask, rows.completion) if torch.is_grad_enabled() else 0
        self._add_means({USEFUL: _mean(useful, 0)})
        return functools.partial(_count, self)


def _waits(model: Any) -> bool:
    """Whether every forward pass waits for one of each other process, which may have another number of packs."""
    return isinstance(model, DistributedDataParallel)


def _count(trainer: Any, tokens: int) -> None:
    trainer._add_means({USEFUL: _mean(0, tokens)})


def _mean(total: int, count: int) -> Mean:
    return Mean(torch.tensor(float(total)), torch.tensor(float(count)))
