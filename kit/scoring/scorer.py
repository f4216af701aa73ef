"""Scores completions in the way that costs least and is exact for the model at hand.

The way of a model is found at its first rows:

    packed    rows without padding, behind one another, a prompt that several completions share only once (`score_packs`)
    plain     TRL's layout: prompts padded in front, completions behind (`score_padded`); or every row pushed to the left, for
              backbones that leave the attention mask out of training (`score_right_padded`)

Every one of them ends in `ModelPass`: the model's forward pass into TRL's fused head. Scores of a completion stand where
its tokens stand, (B, T) in nats and 0 where there is none, whatever the way.

What the configuration tells is asked first. Then a few short rows, made of the first real ones, are scored in TRL's layout,
with more padding than they need, and in the other: both must give the same log-probabilities. In a pack nothing may
pass from one completion to another: when the tokens of one change, the scores of all others must not.

Everything with inputs beside text is scored plainly. `Scorer.report` says which way it is, and why.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from kit.errors import ModelError, ObjectiveError
from kit.models.failures import first_line, raise_fatal
from kit.models.family import TOKEN_FIELD, FamilyAdapter
from kit.models.fused import Fused
from kit.scoring.head import Projection, asking_head
from kit.scoring.packing import (
    EAGER,
    KEYWORD,
    NO_LABEL,
    TEXT_OF_TOKEN,
    WRAPPED,
    Layout,
    NotPackable,
    Pack,
    install_packed_attention,
    install_packed_eager,
    install_recurrent_packs,
    lay_out,
)
from kit.scoring.unsloth_packs import has_unsloths_layers, install_in_layers, pack_inputs
from kit.scoring.unsloth_packs import install as install_unsloth_packs

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


# --- the way that scoring takes ---------------------------------------------------------------------------------------


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


# --- whether a model may be scored in packs ---------------------------------------------------------------------------


PROMPT, COMPLETION, PADDING = 64, 24, 3
"""Tokens of a row of the proof, at most, and columns of padding in front of the longest."""
LEAK = 2e-3, 0.05
"""Nats that a change in one completion may move a score of another by, in single and in half precision: rounding."""
ATTENTION = {"full_attention", "sliding_attention", "attention", "hybrid", "hybrid_sliding"}
RECURRENT = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"}
STATELESS = {"mlp", "moe"}
WINDOWED = {"sliding_attention", "hybrid_sliding"}
"""Kinds of layers, as configurations name them; a hybrid one has attention and a state."""
STRETCHED = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the longest text of a batch."""
SCORE_TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3}
"""Nats that two ways of scoring may be apart by rounding."""
HALF_TOLERANCE = 0.15
"""Nats, mean over tokens. Half precision rounds padded and unpadded rows apart by some hundredths; a scorer that
misreads padding is wrong by whole nats."""

Plain = Callable[[ModelPass, Rows], Scores]


@dataclass(frozen=True)
class Verdict:
    """How a model's rows are scored, and why not in a way that costs less."""

    way: Literal["packed", "plain"]
    reason: str = ""
    shared: bool = True  # a prompt is read once for all its completions, where rows are packed


@dataclass(frozen=True)
class Examined:
    """A model that is looked at. bare: without wrappers of accelerate; base: without adapters, too."""

    run: ModelPass
    bare: Any
    base: Any
    half: bool  # computes in half precision

    @property
    def text(self) -> Any:
        """The configuration of its language model."""
        return self.base.config.get_text_config()


def fuse(run: ModelPass, bare: Any, rows: Rows, *, plain: Plain, half: bool) -> Fused | None:
    """Puts fewer kernels under this model, and takes them away again where the first completion's scores then differ.

    Arguments as of `examine`. None while no row has a completion.
    """
    row = next((one for one in rows.chunks(1) if bool(one.live.any())), None)
    if row is None:
        return None
    model, training = _examined(run, bare, half), bare.training
    try:
        bare.train(training and not has_dropout(model.base))
        with torch.no_grad():
            wanted = plain(run, row).logps
            fused = Fused(bare)
            reason = _attempt(lambda: _difference(model, plain(run, row).logps, wanted, row)) if fused.names else None
    finally:
        bare.train(training)
    if reason is not None:
        fused.remove()
        log.warning("%s keeps its own operations, without %s: %s", type(model.base).__name__, fused, reason)
    elif fused.names:
        log.info("%s: %s", type(model.base).__name__, fused)
    return fused


def examine(run: ModelPass, bare: Any, rows: Rows, *, plain: Plain, half: bool) -> Verdict:
    """How this model is scored.

    run: brings rows through it. bare: the module itself. rows: real ones, at least one with a completion. plain: the way that
    is taken for right. half: mixed precision in 16 bits.
    """
    model = _examined(run, bare, half)
    hindrance = _hindrance(model)
    if hindrance is not None:
        return Verdict("plain", hindrance)
    probe, training = probe_rows(rows), bare.training
    try:
        bare.train(training and not has_dropout(model.base))
        with torch.no_grad():
            wanted = plain(run, probe).logps
            hindrance = _attempt(lambda: _packs_differ(model, probe, wanted))
            if hindrance is None:
                return Verdict("packed")
            if run.unsloths and _attempt(lambda: _packs_differ(model, probe, wanted, share=False)) is None:
                return Verdict("packed", hindrance, shared=False)
    finally:
        bare.train(training)
    return Verdict("plain", hindrance)


def _examined(run: ModelPass, bare: Any, half: bool) -> Examined:
    base = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    weights = (weight.dtype for weight in base.parameters() if weight.is_floating_point())
    return Examined(run, bare, base, half or next(weights, torch.float32).itemsize < 4)


def probe_rows(rows: Rows) -> Rows:
    """Five rows of four lengths and two prompts, made of one or two of the given: (5, at most 3 + 65 + 26)."""
    live, ids = rows.mask.bool(), rows.ids
    width = ids.shape[1] - rows.completion

    def cut(row: int) -> tuple[Tensor, Tensor]:
        return ids[row, :width][live[row, :width]][-PROMPT:], ids[row, width:][live[row, width:]][:COMPLETION]

    held = live[:, width:].any(1) & live[:, :width].any(1)
    prompt, completion = cut(int(torch.where(held, live[:, width:].sum(1), -1).argmax()))
    completion = torch.cat([completion, prompt]).repeat(3)[:COMPLETION]  # 6 or more, so that order matters
    others = (cut(row) for row in torch.nonzero(held).flatten().tolist())
    other = next((one for one, _ in others if not torch.equal(one, prompt)), torch.cat([prompt[-1:], prompt]))
    made = [
        (prompt, completion),
        (prompt, torch.cat([completion.flip(0), completion[:1]])),
        (prompt, completion[:1]),
        (prompt, completion[1:]),
        (other, torch.cat([completion[-1:], completion[:-1]])),
    ]
    before, after = max(len(one) for one, _ in made) + PADDING, max(len(one) for _, one in made) + 1
    whole, mask = (
        ids.new_full((len(made), before + after), int(prompt[0])),
        rows.mask.new_zeros(len(made), before + after),
    )
    for row, (start, end) in enumerate(made):
        place = slice(before - len(start), before + len(end))
        whole[row, place], mask[row, place] = torch.cat([start, end]), 1
    return Rows(whole, mask, after)


def _hindrance(model: Examined) -> str | None:
    """Why this model cannot be scored in packs, as far as its configuration tells; None if it may."""
    if getattr(getattr(model.bare, "active_peft_config", None), "is_prompt_learning", False):
        return "the adapter puts tokens of its own in front"
    text = model.text
    named = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    ropes: list[dict[str, Any]] = [rope for rope in named if isinstance(rope, dict)]
    ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)]
    kinds = {kind for rope in ropes for kind in (rope.get("rope_type"), rope.get("type")) if kind}
    if kinds & STRETCHED:
        return f"rotary positions ({', '.join(sorted(kinds & STRETCHED))}) depend on the longest text of a batch"
    kinds = set(layers := _kinds(text) or [])
    recurrent = sum(kind in RECURRENT for kind in layers)
    unknown = kinds - ATTENTION - STATELESS - RECURRENT
    if model.run.unsloths or install_recurrent_packs(model.base) < recurrent:
        unknown |= kinds & RECURRENT
    if unknown:
        return (
            f"layers other than attention ({', '.join(sorted(map(str, unknown)))}) would carry a text on into the next"
        )
    if not model.run.unsloths and text._attn_implementation not in (*WRAPPED, EAGER):
        return f"attention '{text._attn_implementation}' has no place for it (model.attention: sdpa has)"
    install_packed_eager(model.base)
    install_in_layers(model.base)
    if getattr(text, "output_router_logits", False):
        return "the balancing loss of its experts counts tokens"
    if getattr(text, "is_causal", True) is False:
        return "its attention is not causal"
    return None


def _attempt(compared: Callable[[], str | None]) -> str | None:
    """What a comparison found, or the error that it ended in; none of memory, which is not the model's fault."""
    try:
        return compared()
    except Exception as error:
        raise_fatal(error)
        return first_line(error)


def _packs_differ(model: Examined, probe: Rows, wanted: Tensor, *, share: bool = True) -> str | None:
    layouts: list[Layout] = []
    changed = probe.ids.clone()
    longest = int(probe.live.sum(1).argmax())
    own = changed[longest, -probe.completion :]
    own[:] = torch.where(own > 0, own - 1, own + 1)
    found = []
    for ids in (probe.ids, changed):
        packs = lay_out(ids, probe.mask, probe.completion, share=share)
        found.append(score_packs(model.run, packs, probe, layouts=layouts).logps)
    seen, expected = [layout.windows for layout in layouts], _windows(model.text)
    if model.run.unsloths:  # each call asks for the window that it has in padded rows; that it came is what counts
        expected = expected if any(len(windows) != len(expected) for windows in seen) else seen[0]
    if any(windows != expected for windows in seen):
        owners = {
            module.forward.__module__ for module in model.base.modules() if type(module).__name__.endswith("Attention")
        }
        where = f"; theirs is of {', '.join(sorted(owners))}" if owners and not seen[0] else ""
        return (
            f"{len(expected)} layers ask for attention in another way (windows {seen[0]}, expected {expected}{where})"
        )
    others = probe.live.clone()
    others[longest] = False
    leaked, limit = float((found[1] - found[0]).abs()[others].max()), LEAK[model.half]
    if not leaked <= limit:
        return f"one completion changes the scores of another, by {leaked:.2g} nats"
    return _difference(model, found[0], wanted, probe)


def _windows(text: Any) -> list[int | None]:
    """The sliding window of every layer with attention, as the configuration has it."""
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    kinds = _kinds(text)
    if kinds is None:
        return [window] * text.num_hidden_layers
    return [window if kind in WINDOWED else None for kind in kinds if kind in ATTENTION]


def _kinds(text: Any) -> list[str] | None:
    """Of every layer, where the configuration tells."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return list(map(str, kinds)) if kinds else None


def _difference(model: Examined, found: Tensor, wanted: Tensor, probe: Rows) -> str | None:
    apart_by = (found.float() - wanted.float()).abs()[probe.live]
    half = (apart_by.mean(), HALF_TOLERANCE)
    error, limit = half if model.half else (apart_by.max(), SCORE_TOLERANCE[torch.float32])
    if bool(error <= limit):
        return None
    return f"log-probabilities differ from those of the padded rows by {float(error):.2g} nats (at most {limit:g} is rounding)"


def may_be_trimmed(bare: Any) -> bool:
    """Whether columns of padding can go: positions are relative, and do not depend on the width of the batch."""
    config: Any = getattr(bare, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rotary = getattr(text, "rope_parameters", None)
    if not isinstance(rotary, Mapping) or not rotary:
        return False
    kinds = rotary.values() if all(isinstance(value, Mapping) for value in rotary.values()) else [rotary]
    return not any(kind.get("rope_type") in STRETCHED for kind in kinds)


def has_dropout(model: Any) -> bool:
    """Whether two passes over the same text may differ in training mode."""
    config = getattr(model, "config", None)
    names = ("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout")
    of_text = getattr(config, "get_text_config", None)  # a part, where it sees pictures
    text = of_text() if of_text is not None else config
    rates = (getattr(one, name, 0) for one in (config, text) for name in names)
    if any(isinstance(rate, float) and rate > 0 for rate in rates):
        return True
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
