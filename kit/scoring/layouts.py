"""Ways to bring rows of prompts and completions through a model: each gives the same scores, in fewer tokens or more.

    score_padded        TRL's layout: prompts padded in front, completions behind
    score_right_padded  every row pushed to the left, for backbones that leave the attention mask out of training
    score_packs         rows without padding, behind one another, a shared prompt once (`kit.scoring.packing`)

Every one of them ends in `ModelPass`: the model's forward pass into TRL's fused head. Scores of a completion stand where
its tokens stand, (B, T) in nats and 0 where there is none, whatever the way. `kit.scoring.scorer` finds
which way is exact for a model, and takes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kit.errors import ModelError, ObjectiveError
from kit.models.family import TOKEN_FIELD
from kit.scoring.head import Projection, asking_head
from kit.scoring.packed_attention import KEYWORD, Layout
from kit.scoring.packing import NO_LABEL, Pack
from kit.scoring.recurrent_packs import TEXT_OF_TOKEN
from kit.scoring.unsloth_packs import pack_inputs

ROWWISE = ("token_type_ids", "mm_token_type_ids")
"""Inputs beside the ids with a value for each of them."""
WORTH_MOVING = 2**20
"""Bytes of a hidden state."""
MOVED_FROM = "cuda"


@dataclass(frozen=True)
class Rows:
    """B rows in TRL's layout: prompts padded in front, completions behind."""

    ids: Tensor  # (B, L)
    mask: Tensor  # (B, L) 1 for tokens
    completion: int  # T: the last columns, which are the completion's
    fields: Mapping[str, Any] = field(default_factory=dict)  # inputs beside text, as a micro-batch holds them
    copy: tuple[Tensor, Tensor] | None = None  # ids and mask on the host, where they are known there already

    @property
    def on_host(self) -> tuple[Tensor, Tensor]:
        """Ids and mask (bool) on the host. Waits for the device where `copy` is not given."""
        return self.copy if self.copy is not None else (self.ids.detach().cpu(), self.mask.detach().cpu().bool())

    @property
    def width(self) -> int:
        """Columns of the prompts."""
        return self.ids.shape[1] - self.completion

    @property
    def live(self) -> Tensor:
        """(B, T) bool: tokens of completions."""
        return self.mask[:, self.width :].bool()

    def chunks(self, size: int | None) -> Iterator[Rows]:
        """These rows, `size` at a time."""
        count = len(self.ids)
        if size is None or size >= count:
            yield self
            return
        for start in range(0, count, size):
            part = range(start, min(start + size, count))
            own = slice(part.start, part.stop)
            copy = self.copy and (self.copy[0][own], self.copy[1][own])
            yield Rows(self.ids[own], self.mask[own], self.completion, take(self.fields, part, count), copy)

    def model_inputs(self) -> dict[str, Any]:
        """The inputs beside text, as the model takes them."""
        device = self.ids.device
        found = {
            name: joined(value, device) if isinstance(value, list) else value
            for name, value in self.fields.items()
            if name not in COUNTS
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Wanted:
    """What a scoring pass gives beside log-probabilities."""

    entropy: bool = False
    entropy_gradient: bool = False  # whether that of the entropy is needed; it costs a matrix product more
    aux_loss: bool = False  # the load balance of a mixture of experts
    hidden: bool = False  # what goes through the head, for the value head and the full KL


@dataclass(frozen=True)
class Scores:
    """One scoring of (B, T) completions."""

    logps: Tensor  # (B, T) nats
    entropy: Tensor | None = None  # (B, T) nats
    aux_loss: Tensor | None = None  # ()
    head: Projection | None = None  # hidden (N, H) of all N live tokens, completion by completion, and the head
    tokens: int = 0  # that went through the model

    @property
    def projection(self) -> Projection:
        """`head`, which a hook needs. Raises `ObjectiveError` where it was not seen."""
        if self.head is None:
            raise ObjectiveError(
                "The hidden states of a scoring pass were not seen, which a hook needs (full KL, or values): the backend "
                "scores in a way of its own."
            )
        return self.head

    def laid_out(self, place: Callable[[Tensor], Tensor]) -> Scores:
        """With every value moved by `place`."""
        entropy = None if self.entropy is None else place(self.entropy)
        return replace(self, logps=place(self.logps), entropy=entropy)


def boundaries_in_main_memory() -> AbstractContextManager[Any]:
    """Inside, hidden states (B, S, H) that a graph keeps wait in main memory: with gradient checkpointing, its blocks' inputs.

    What a block keeps once it is recomputed stays on the device. Copies take their place in the device's stream, and nobody
    waits for them.
    """

    def pack(kept: Tensor) -> Any:
        moves = kept.dim() == 3 and kept.is_floating_point() and kept.nbytes >= WORTH_MOVING
        if not moves or kept.device.type != MOVED_FROM:
            return kept
        moved = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=torch.cuda.is_available())
        return kept.device, moved.copy_(kept, non_blocking=True)

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device, moved = kept
        back: Tensor = moved.to(device, non_blocking=True)
        return back

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class ModelPass:
    """A forward pass of `model` into TRL's fused head, which gives a score for every label.

    autocast: a context for the precision of the run. remedy: what to set where the head is not there. offload: what gradient
    checkpointing keeps waits in main memory. unsloths: the model's layers are Unsloth's own (`kit.scoring.unsloth_packs`).
    """

    model: Callable[..., Any]
    autocast: Callable[[], AbstractContextManager[Any]]
    wanted: Wanted = field(default_factory=Wanted)
    remedy: str = ""
    offload: bool = False
    unsloths: bool = False

    def __call__(self, **inputs: Any) -> Scores:
        """Scores in the layout of the labels, a column less; `head.hidden` in the order of the labels.

        Raises `ModelError` where the head is not there.
        """
        if self.wanted.aux_loss:
            inputs["output_router_logits"] = True
        moving = boundaries_in_main_memory() if self.offload and torch.is_grad_enabled() else nullcontext()
        with asking_head(self.wanted.entropy_gradient, keep=self.wanted.hidden) as head, self.autocast(), moving:
            found = self.model(**inputs, fused_lm_head=True)
        if getattr(found, "log_probs", None) is None:
            model = self.model.args[-1] if isinstance(self.model, functools.partial) else self.model
            raise ModelError(
                f"{type(model).__name__} gave no log-probabilities for fused_lm_head=True: TRL's head was lost on the way "
                f"(a wrapper replaced the model's forward). {self.remedy}"
            )
        return Scores(
            found.log_probs,
            found.entropy if self.wanted.entropy else None,
            found.aux_loss if self.wanted.aux_loss else None,
            head.seen,
            inputs["input_ids"].numel(),
        )


def score_padded(run: ModelPass, rows: Rows, size: int | None = None) -> Scores:
    """In TRL's layout, `size` rows at a time."""
    parts = []
    for chunk in rows.chunks(size):
        labels = chunk.ids.masked_fill(chunk.mask == 0, NO_LABEL)
        labels[:, : chunk.width] = NO_LABEL
        found = run(input_ids=chunk.ids, attention_mask=chunk.mask, labels=labels, **chunk.model_inputs())
        parts.append(found.laid_out(lambda values: values[:, -rows.completion :]))
    return join_scores(parts)


def score_right_padded(run: ModelPass, rows: Rows, size: int | None = None) -> Scores:
    """With the padding of every row behind its tokens, `size` rows at a time.

    Unsloth's backbones leave the mask out in training: in TRL's layout their rotary positions and their attention would
    begin in the padding, and log-probabilities would be off by whole nats. Behind the tokens nothing looks at it:

        mask     0 0 1 1 | 1 1 0        a stable sort of the mask keeps the order of the tokens
        pushed   1 1 1 1   0 0 0        scored
        back         T T                each value to where its token stood

    The mask says what padding is, never the padding id, which may be a token that ends a text. The first token of a row
    has none before it to be predicted from, and scores 0. Raises `ModelError` for inputs with another shape than the ids',
    whose layout would be the backbone's own.
    """
    others = sorted(name for name in rows.fields if name not in ROWWISE)
    if others:
        raise ModelError(
            f"Inputs beside text ({', '.join(others)}) are not scored under Unsloth, whose layout of them is its own. "
            "Set model.backend: transformers."
        )
    parts = []
    for chunk in rows.chunks(size):
        live, columns, longest = chunk.mask.bool(), chunk.ids.shape[1], int(chunk.on_host[1].sum(1).max())
        places = torch.argsort((~live).to(torch.int8), dim=1, stable=True)[:, : max(1, longest)]  # (B, W)
        ids, tokens = chunk.ids.gather(1, places), live.gather(1, places)
        labels = ids.masked_fill(~(tokens & (places >= chunk.width)), NO_LABEL)
        fields = {name: value.gather(1, places) for name, value in chunk.model_inputs().items()}
        scores = run(input_ids=ids, attention_mask=tokens.to(chunk.mask.dtype), labels=labels, **fields)

        def back(values: Tensor, places: Tensor = places, columns: int = columns) -> Tensor:
            """(B, W - 1), value j of the token at j + 1 -> (B, T), each where its token stood; 0 elsewhere."""
            whole = values.new_zeros(len(values), columns)
            return whole.scatter(1, places[:, 1:], values)[:, columns - rows.completion :]

        parts.append(scores.laid_out(back))
    return join_scores(parts)


def score_packs(run: ModelPass, packs: Sequence[Pack], rows: Rows, layouts: list[Layout] | None = None) -> Scores:
    """One forward pass a pack, all in one graph. layouts: takes those that attention was given."""
    device, parts, columns = rows.ids.device, [], []
    # All of it before the first pass, for none of which the device is waited for: ids, positions and labels (S,), and where
    # the tokens stand that predict one (N,), in one copy.
    for pack in packs:
        labelled = torch.nonzero(pack.labels[0] != NO_LABEL).flatten()
        whole = torch.cat([pack.ids[0], pack.positions[0], pack.labels[0], labelled])
        columns.append(torch.split(to_device(whole, device), [*[pack.tokens] * 3, len(labelled)]))
    places = to_device(torch.cat([pack.places for pack in packs]), device)
    made = [Layout(pack.groups, device) for pack in packs]
    finished = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    for layout, (ids, positions, labels, labelled) in zip(made, columns, strict=True):
        if layouts is not None:
            layouts.append(layout)
        scores = run(
            input_ids=ids[None],
            position_ids=positions[None],
            shift_labels=PlacedLabels(labels[None], labelled),
            # What has four dimensions is taken for a mask that is finished; attention and recurrent layers read the layout.
            **(
                pack_inputs(layout)
                if run.unsloths
                else {"attention_mask": finished, KEYWORD: layout, TEXT_OF_TOKEN: layout}
            ),
        )

        def at_labels(values: Tensor, places: Tensor = labelled) -> Tensor:
            """(1, S) -> (N,)."""
            return values[0].index_select(0, places.to(values.device))

        parts.append(scores.laid_out(at_labels))
    shape = (len(rows.ids), rows.completion)

    def spread(values: Tensor) -> Tensor:
        """(N,) of all packs -> (B, T), 0 elsewhere."""
        return values.new_zeros(shape[0] * shape[1]).index_copy(0, places.to(values.device), values).view(shape)

    return join_scores(parts, [pack.places for pack in packs]).laid_out(spread)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy of what the host has, for which it does not wait until the device has done what it was given before."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class PlacedLabels:
    """Labels whose places are known: TRL's head takes hidden states by them, without asking the device where labels are.

    It computes `mask = labels != -100`, takes `hidden[mask]` and `labels[mask]`, and spreads what it found by
    `masked_scatter(mask, ...)`. This stands for both of them, labels (1, S) and mask; for anything else it is the tensor.
    """

    def __init__(self, values: Tensor, places: Tensor) -> None:
        self.values, self.places = values, places  # (1, S); (N,) of S

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)

    def __ne__(self, other: object) -> Any:
        found: Any = self.values != other
        return PlacedLabels(found, self.places) if other == NO_LABEL else found

    def __getitem__(self, index: Any) -> Any:
        return _taken(self.values, index.places) if isinstance(index, PlacedLabels) else self.values[index]

    def to(self, *args: Any, **keywords: Any) -> PlacedLabels:
        values = self.values.to(*args, **keywords)
        return PlacedLabels(values, self.places.to(values.device))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) > 1 and isinstance(args[1], cls):
            if func is Tensor.__getitem__:
                return _taken(args[0], args[1].places)
            if func is Tensor.masked_scatter:
                return args[0].flatten().index_copy(0, args[1].places, args[2]).view(args[0].shape)
        plain = [one.values if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


def _taken(values: Tensor, places: Tensor) -> Tensor:
    """(1, S, ...) -> (N, ...). Differentiable."""
    return values.flatten(0, 1).index_select(0, places)


def join_scores(parts: Sequence[Scores], places: Sequence[Tensor] | None = None) -> Scores:
    """Parts of one scoring behind one another. places: where the live tokens of each stand, (N,), if not in that order."""
    first = parts[0]
    head = first.head
    if head is not None:
        hidden = torch.cat([part.head.hidden for part in parts if part.head is not None])
        if places is not None:
            hidden = hidden[torch.cat(list(places)).argsort().to(hidden.device)]
        head = replace(head, hidden=hidden)
    return Scores(
        torch.cat([part.logps for part in parts]),
        torch.cat([part.entropy for part in parts if part.entropy is not None]) if first.entropy is not None else None,
        torch.stack([part.aux_loss for part in parts if part.aux_loss is not None]).mean()
        if first.aux_loss is not None
        else None,
        head,
        sum(part.tokens for part in parts),
    )


def scatter_to_tokens(rows: Tensor, mask: Tensor) -> Tensor:
    """Rows (N,) or (N, H) of live tokens to (B, T) or (B, T, H); 0 elsewhere. Differentiable."""
    live = mask.bool()
    out = rows.new_zeros((*live.shape, *rows.shape[1:]))
    if rows.dim() > 1:
        live = live.unsqueeze(-1).expand(out.shape)
    return out.masked_scatter(live, rows)


# --- model inputs beside ids and mask, divided by completions ---------------------------------------------------------

# Processors lay pictures out in many ways: a row a sample, a row a picture, rows of patches whose number a grid tells, tiles.
# `pieces` finds the way by counting, so that a batch can be taken apart, shuffled and scored in parts.


COUNTS = ("num_images", "num_tiles")
"""Lists with an entry a sample that say how much of other fields is its."""


def pieces(name: str, value: Any, samples: int, counts: Mapping[str, Any]) -> list[Any]:
    """The part of `value` of each sample, in order; a sample without pictures has an empty one.

    counts: what is known of the batch: `num_images` (a number a sample), `num_tiles`, `image_grid_thw` (pictures, 3). Raises
    `ModelError` where no count fits.
    """
    total, options = len(value), []
    images = [int(count) for count in counts.get("num_images") or ()]
    if not TOKEN_FIELD.fullmatch(name) and len(images) == samples:
        if counts.get("num_tiles") is not None:
            options.append([int(count) for count in counts["num_tiles"]])
        if (grid := counts.get("image_grid_thw")) is not None and len(grid) == sum(images) and name != "image_grid_thw":
            patches = grid.prod(dim=-1).tolist()
            options.append([int(sum(patches[start:end])) for start, end in _ends(images)])
        options.append(images)
    options.append([1] * samples)
    for sizes in options:
        if sum(sizes) == total:
            return [value[start:end] for start, end in _ends(sizes)]
    raise ModelError(
        f"The processor gives '{name}' with {total} rows for {samples} prompts and {sum(images)} pictures, and nothing says "
        "which belong to which. Train this model on text alone (data.image_column: none)."
    )


def _ends(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends, start = [], 0
    for size in sizes:
        ends.append((start, start + size))
        start += size
    return ends


def extended(rows: Sequence[Sequence[int]], width: int, completion: int) -> list[Tensor]:
    """Token fields of prompts, unpadded, as tensors (1, width + completion): zeros over padding (left) and completion."""
    return [torch.nn.functional.pad(torch.as_tensor(list(row))[None], (width - len(row), completion)) for row in rows]


def joined(parts: Sequence[Any], device: Any = None) -> Any:
    """The pieces of some samples as one tensor; None where all are empty."""
    tensors = [torch.as_tensor(part) for part in parts]
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return None
    tensor = torch.cat(filled)
    return tensor if device is None else tensor.to(device)


def take(fields: Mapping[str, Any], rows: Sequence[int], samples: int) -> dict[str, Any]:
    """Model inputs of the chosen samples alone, in that order. `fields` as a micro-batch holds them; None is left out."""
    present = {name: value for name, value in fields.items() if value is not None}
    taken: dict[str, Any] = {}
    for name, value in present.items():
        if name in COUNTS or isinstance(value, list):  # a list is in pieces already
            taken[name] = [value[row] for row in rows]
        else:
            parts = pieces(name, value, samples, present)
            tensor = joined([parts[row] for row in rows])
            if tensor is not None:
                taken[name] = tensor
    if "pixel_values" in present and "pixel_values" not in taken:  # no picture among them
        return {name: value for name, value in taken.items() if name.endswith("token_type_ids")}
    return taken
