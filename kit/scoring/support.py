"""Log-probabilities over the tokens that the sampler allowed: what top-p, top-k and min-p leave of the vocabulary.

A token that was sampled from a truncated distribution was likelier than the full one says: at top-p 0.8 the two differ by a
tenth on average. Ratios of trainer to sampler, and of new to old policy, compare like with like only over the same tokens.
So the allowed ids of every token (its support) are kept from sampling on, and every score of it is renormalised over them:

    log p(token | support) = z_token - logsumexp of z over the support
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kit.errors import ModelError
from kit.scoring.head import Projection

SUPPORT = "support"
"""Name of the supports among the inputs of a micro-batch: a tensor a completion, as `packed` makes them."""
ROWS = 256
"""Tokens whose supports' logits are there at once."""


def packed(supports: Sequence[Tensor]) -> Tensor:
    """The supports of a completion's T tokens as one int32 tensor: T, the T sizes, all ids."""
    sizes = torch.tensor([len(supports), *map(len, supports)], dtype=torch.int32)
    return torch.cat([sizes, *(ids.to(torch.int32) for ids in supports)])


def renormalised(head: Projection, targets: Tensor, pieces: Sequence[Tensor], live: Tensor) -> Tensor:
    """(N,) nats of the live tokens of B completions over their supports, with a gradient to the hidden states.

    targets: (N,) their ids; pieces: B of `packed`; live: (B, T) bool. Raises `ModelError` where a token was not in its support.
    """
    sizes, ids = [], []
    for piece, row in zip(pieces, live.cpu(), strict=True):
        count = int(piece[0])
        own = piece[1 : 1 + count].long()
        ends = own.cumsum(0)
        for place in row.nonzero().flatten().tolist():
            sizes.append(int(own[place]))
            ids.append(piece[1 + count + int(ends[place]) - sizes[-1] : 1 + count + int(ends[place])])
    parts = []
    for start in range(0, len(sizes), ROWS):
        rows = slice(start, start + ROWS)
        allowed = torch.nn.utils.rnn.pad_sequence(ids[rows], batch_first=True, padding_value=-1)
        parts.append(_of_rows(head, head.hidden[rows], targets[rows], allowed.long().to(targets.device)))
    return torch.cat(parts) if parts else head.hidden.sum(-1).float()


def _of_rows(head: Projection, hidden: Tensor, targets: Tensor, allowed: Tensor) -> Tensor:
    """allowed: (n, K) ids, -1 behind them."""
    hits = allowed == targets[:, None]
    if not bool(hits.any(1).all()):
        raise ModelError(
            "A token that was sampled is not among those that the sampler allowed: something changed the completion after it "
            "was made, or the sampler takes other ways. Set generation.replay_support: false."
        )
    ids, places = torch.unique(allowed.clamp(min=0), return_inverse=True)

    def score(hidden: Tensor, weight: Tensor) -> Tensor:
        z = hidden.float() @ weight[ids].float().T  # (n, U)
        if head.bias is not None:
            z = z + head.bias[ids].float()
        z = z * head.scale
        if head.softcap is not None:
            z = head.softcap * torch.tanh(z / head.softcap)
        z = (z / head.temperature).gather(1, places)
        own = z.gather(1, hits.int().argmax(1, keepdim=True)).squeeze(1)
        return own - z.masked_fill(allowed < 0, -torch.inf).logsumexp(1)

    with torch.autocast(hidden.device.type, enabled=False):
        if not torch.is_grad_enabled():
            return score(hidden, head.weight)
        found: Tensor = checkpoint(score, hidden, head.weight, use_reentrant=False)
        return found


# --- from transformers' sampling --------------------------------------------------------------------------------------


class Recorder:
    """The last of a model's logits processors: notes which tokens the others left."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []  # (B,) sizes and all ids, one a step

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        left = torch.isfinite(scores)
        self.steps.append((left.sum(1).cpu(), left.nonzero()[:, 1].to(torch.int32).cpu()))
        return scores

    def of(self, completions: Sequence[Sequence[int]]) -> list[Tensor]:
        """The supports of completions, in the order in which they were asked for."""
        split = [torch.split(ids, sizes.tolist()) for sizes, ids in self.steps]
        return [packed([split[at][row] for at in range(len(ids))]) for row, ids in enumerate(completions)]


@contextmanager
def recorded(policy: Any) -> Iterator[Recorder]:
    """Inside, `policy.generate` notes what it samples from."""
    model = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    recorder, made = Recorder(), model._get_logits_processor

    def processors(*arguments: Any, **keywords: Any) -> Any:
        found = made(*arguments, **keywords)
        found.append(recorder)
        return found

    model._get_logits_processor = processors
    try:
        yield recorder
    finally:
        del model._get_logits_processor


def recording(policy: Any, make: Any, found: dict[int, Tensor]) -> Any:
    """TRL's way to make a turn, `make`, that leaves the support of every list of ids in `found` under the list's `id`."""
    return partial(_record, policy, make, found)


def _record(policy: Any, make: Any, found: dict[int, Tensor], *given: Any) -> Any:
    with recorded(policy) as recorder:
        completions, logps = make(*given)
    found.update({id(ids): piece for ids, piece in zip(completions, recorder.of(completions), strict=True)})
    return completions, logps
