"""Rows without their padding, and every prompt once: which token of a scoring call is forwarded where.

Rows with the same prompt are a group. Several groups lie behind one another in a pack, a single row of S tokens:

    prompt p1 .. pP, completions c1 c2 c3 and d1 d2        p1 .. pP-1 | pP c1 c2 | pP d1
    positions                                              0  .. P-2  | P-1 P P+1 | P-1 P
    what each token predicts                               -       -  | c1 c2 c3 | d1 d2

A completion's last token predicts nothing and is not forwarded, the prompt's last one opens every segment: a group of
completions of C tokens takes P - 1 + sum(C). What may look at what is in `kit.scoring.packed_attention`. All of this is
index arithmetic on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_LABEL = -100


class NotPackable(Exception):
    """Why these rows, or this model, cannot be scored in packs."""


@dataclass(frozen=True)
class Group:
    """A prompt and completions that share it, in a pack."""

    start: int  # of the prompt
    prompt: int  # tokens before the first segment: the prompt without its last token
    lengths: tuple[int, ...]  # of the segments, the longest first

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.lengths)


@dataclass(frozen=True)
class Pack:
    """A row of S tokens, of whole groups or of parts of one, of which N predict a token that is scored."""

    ids: Tensor  # (1, S)
    positions: Tensor  # (1, S) of each token in its own text
    labels: Tensor  # (1, S) what each token predicts, else -100
    groups: tuple[Group, ...]
    places: Tensor  # (N,) where the scores of (B, T) completions stand, row by row, in the order of the labels

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]


@dataclass(frozen=True)
class _Part:
    """Rows that share a prompt and go into one pack."""

    prompt: Tensor  # (P,)
    rows: tuple[int, ...]
    lengths: tuple[int, ...]  # of the completions

    @property
    def tokens(self) -> int:
        return len(self.prompt) - 1 + sum(self.lengths)


def lay_out(ids: Tensor, mask: Tensor, completion: int, *, share: bool = True, limit: int | None = None) -> list[Pack]:
    """The packs of (B, L) rows, the last `completion` columns of which are completions; none for rows without any token there.

    The mask says what a token is. share: rows with the same prompt have it once, wherever they stand. limit: tokens of a
    pack; a group above it is divided, and a single row above it has a pack of its own. Raises `NotPackable` for rows with
    gaps (their positions count the gap) and for completions without a prompt.
    """
    ids, live = ids.detach().cpu(), mask.detach().cpu().bool()
    width = ids.shape[1] - completion
    before, after = live[:, :width], live[:, width:]
    if (before[:, 1:] < before[:, :-1]).any() or (after[:, 1:] > after[:, :-1]).any():
        raise NotPackable("a row has padding between its tokens")
    if (after.any(1) & ~before.any(1)).any():
        raise NotPackable("a completion has no prompt")
    groups: dict[
        object, list[int]
    ] = {}  # rows with completions by prompt, in the order in which each prompt is first seen
    for row in torch.nonzero(after.any(1)).flatten().tolist():
        key = ids[row, :width][before[row]].numpy().tobytes() if share else row
        groups.setdefault(key, []).append(row)
    parts: list[_Part] = []
    for rows in groups.values():
        prompt = ids[rows[0], :width][live[rows[0], :width]]
        lengths = live[rows, width:].sum(1).tolist()
        order = sorted(range(len(rows)), key=lambda index, of=lengths: -of[index])  # type: ignore[misc]
        members = [(rows[index], lengths[index]) for index in order]
        parts += _divided(prompt, members, limit)
    return [_pack(ids, chosen, width, completion) for chosen in _filled(parts, limit)]


def _divided(prompt: Tensor, members: Sequence[tuple[int, int]], limit: int | None) -> list[_Part]:
    """The members of a group, each with its length, in parts within the limit."""
    parts: list[list[tuple[int, int]]] = [[]]
    room = budget = max(0, limit - len(prompt) + 1) if limit is not None else sum(length for _, length in members)
    for member in members:
        if parts[-1] and member[1] > room:
            parts.append([])
            room = budget
        parts[-1].append(member)
        room -= member[1]
    return [_Part(prompt, tuple(row for row, _ in part), tuple(length for _, length in part)) for part in parts]


def _filled(parts: Sequence[_Part], limit: int | None) -> list[list[_Part]]:
    """Parts in their order, as many to a pack as the limit lets in."""
    packs: list[list[_Part]] = []
    room = 0
    for part in parts:
        if not packs or (limit is not None and part.tokens > room):
            packs.append([])
            room = limit or 0
        packs[-1].append(part)
        room -= part.tokens
    return packs


def _pack(ids: Tensor, parts: Sequence[_Part], width: int, completion: int) -> Pack:
    tokens, positions, labels, places, groups = [], [], [], [], []
    start = 0
    for part in parts:
        before = len(part.prompt) - 1
        groups.append(Group(start, before, part.lengths))
        tokens.append(part.prompt[:-1])
        positions.append(torch.arange(before))
        labels.append(torch.full((before,), NO_LABEL))
        for row, length in zip(part.rows, part.lengths, strict=True):
            scored = ids[row, width : width + length]
            tokens += [part.prompt[-1:], scored[:-1]]
            positions.append(torch.arange(before, before + length))
            labels.append(scored)
            places.append(torch.arange(row * completion, row * completion + length))
        start += part.tokens
    row_of = [torch.cat(pieces)[None] for pieces in (tokens, positions, labels)]
    return Pack(row_of[0], row_of[1], row_of[2], tuple(groups), torch.cat(places))
