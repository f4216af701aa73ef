"""Scoring with every row pushed to the left: for backbones that leave the attention mask out of training.

Unsloth's do. In TRL's layout, prompts padded on the left, their rotary positions and their attention would begin in the
padding, and log-probabilities would be off by whole nats. With the padding behind the tokens nothing looks at it:

    mask     0 0 1 1 | 1 1 0        a stable sort of the mask keeps the order of the tokens
    packed   1 1 1 1   0 0 0        scored
    back         T T                each value to where its token stood

TRL's layout of the result is kept: (B, T), 0 where there is no token, differentiable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kit.errors import ModelError
from kit.models.backend import is_unsloths

_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is
NO_LABEL = -100
ROWWISE = ("token_type_ids", "mm_token_type_ids")
"""Inputs beside the ids with a value for each of them."""


@dataclass(frozen=True)
class Packed:
    """Rows with their tokens first: (B, L) -> (B, W), W the longest row."""

    ids: Tensor  # (B, W)
    mask: Tensor  # (B, W) 1 for tokens
    labels: Tensor  # (B, W) the id of a completion token that is scored, else -100
    places: Tensor  # (B, W) column of each in the rows as they came
    width: int  # L


def pack(ids: Tensor, mask: Tensor, completion: int) -> Packed:
    """Moves the padding of (B, L) behind the tokens. The last `completion` columns are the completion's.

    The mask says what padding is, never the padding id, which may be a token that ends a text. The first token of a row
    has none before it to be predicted from, and scores 0.
    """
    live = mask.bool()
    places = torch.argsort((~live).to(torch.int8), dim=1, stable=True)[:, : max(1, int(live.sum(1).max()))]
    packed, tokens = ids.gather(1, places), live.gather(1, places)
    scored = tokens & (places >= ids.shape[1] - completion)
    return Packed(packed, tokens.to(mask.dtype), packed.masked_fill(~scored, NO_LABEL), places, ids.shape[1])


def unpack(values: Tensor, packed: Packed, completion: int) -> Tensor:
    """(B, W - 1), value j of the token at j + 1 -> (B, completion), each where its token stood; 0 elsewhere."""
    whole = values.new_zeros(len(values), packed.width)
    return whole.scatter(1, packed.places[:, 1:], values)[:, packed.width - completion :]


def score_packed(
    trainer: Any,
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **rowwise: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What TRL's scorer gives: log-probabilities and entropies (B, T) in nats, and a router's balancing loss.

    Through the same fused head, in chunks of `batch_size` rows. `rowwise`: further inputs (B, L) of the model. Raises
    `ModelError` where the head is not there.
    """
    size, parts = batch_size or len(input_ids), []
    for start in range(0, len(input_ids), size):
        chunk = slice(start, start + size)
        rows = pack(input_ids[chunk], attention_mask[chunk], logits_to_keep)
        further: dict[str, Any] = {name: value[chunk].gather(1, rows.places) for name, value in rowwise.items()}
        if compute_aux_loss:
            further["output_router_logits"] = True
        parts.append((_score(trainer, model, rows, further), rows))
    logps = torch.cat([unpack(found.log_probs, rows, logits_to_keep) for found, rows in parts])
    entropies = None
    if compute_entropy:
        entropies = torch.cat([unpack(found.entropy, rows, logits_to_keep) for found, rows in parts])
    aux_loss = torch.stack([found.aux_loss for found, _ in parts]).mean() if compute_aux_loss else None
    return logps, entropies, aux_loss


def _score(trainer: Any, model: Any, rows: Packed, further: dict[str, Any]) -> Any:
    with trainer.accelerator.autocast():
        found = model(input_ids=rows.ids, attention_mask=rows.mask, labels=rows.labels, fused_lm_head=True, **further)
    if getattr(found, "log_probs", None) is None:
        raise ModelError(
            f"{type(model).__name__} gave no log-probabilities for fused_lm_head=True: TRL's "
            "head was lost on the way (a wrapper replaced the model's forward). Set model.backend: transformers."
        )
    return found


class RightPacking(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, before the other scorers. Does nothing where TRL's class is its own.

    Unsloth's own scorer gives log-probabilities without a gradient, in a layout of its own: it is never called.
    """

    objective: Any

    def __init__(self, *given: Any, **keywords: Any) -> None:
        super().__init__(*given, **keywords)
        if is_unsloths(type(self)):  # its trainer turns the tokenizer round; generating needs the padding in front
            for one in (self.processing_class, getattr(self.processing_class, "tokenizer", None)):
                if one is not None and hasattr(one, "padding_side"):
                    one.padding_side = "left"

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
        given = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss)
        if self.objective is None or not is_unsloths(type(self)):
            return super()._get_per_token_logps_and_entropies(*given, **inputs)
        rowwise = {name: inputs[name] for name in ROWWISE if inputs.get(name) is not None}
        pictures = sorted(name for name, value in inputs.items() if value is not None and name not in ROWWISE)
        if pictures:
            raise ModelError(
                f"Inputs beside text ({', '.join(pictures)}) are not scored under Unsloth, whose layout of them is its own. "
                "Set model.backend: transformers."
            )
        return score_packed(self, *given, **rowwise)
