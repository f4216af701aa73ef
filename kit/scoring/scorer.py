"""Compute log-probabilities of completions in the cheapest layout that is exact for the model.

There are three layouts:

    packed          rows without padding, concatenated; completions of one prompt share it (`score_packs`)
    padded          TRL's layout: padding, prompt, completion, padding (`score_padded`)
    right-padded    all padding at the end, for backbones that ignore the attention mask in training (`score_right_padded`)

All of them end in `ModelPass`, the model's forward pass into TRL's fused head, and return scores of shape (B, T) in nats,
with 0 at padding.

`Scorer` chooses the layout of a model at its first rows. It first reads the model's configuration. Then it scores a few short
rows, cut from the first real ones, both padded and packed, and compares the log-probabilities. It also changes one completion
of a pack and checks that the scores of the others stay the same. Rows with pictures or other extra inputs are never packed.
`Scorer.report` says which layout is used and why.
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
from kit.scoring.head import Projection, request_outputs
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
from kit.scoring.unsloth_packs import has_unsloth_layers, install_in_layers, pack_inputs
from kit.scoring.unsloth_packs import install as install_unsloth_packs

TOKEN_INPUTS = ("token_type_ids", "mm_token_type_ids")
"""Model inputs with one value for each token id."""
OFFLOAD_MIN_BYTES = 2**20
"""Smallest hidden state that is moved to main memory."""
OFFLOAD_FROM = "cuda"


@dataclass(frozen=True)
class Rows:
    """B rows in TRL's layout: prompts padded in front, completions behind."""

    ids: Tensor  # (B, L)
    mask: Tensor  # (B, L) 1 for tokens
    completion: int  # T, the number of columns of the completions
    fields: Mapping[str, Any] = field(default_factory=dict)  # model inputs other than text, as in a micro-batch
    copy: tuple[Tensor, Tensor] | None = None  # ids and mask on the host, if they are already there

    @property
    def on_host(self) -> tuple[Tensor, Tensor]:
        """Ids and mask (bool) on the host. Waits for the device unless `copy` is set."""
        return self.copy if self.copy is not None else (self.ids.detach().cpu(), self.mask.detach().cpu().bool())

    @property
    def width(self) -> int:
        """Columns of the prompts."""
        return self.ids.shape[1] - self.completion

    @property
    def live(self) -> Tensor:
        """(B, T) bool: true at the tokens of completions."""
        return self.mask[:, self.width :].bool()

    def chunks(self, size: int | None) -> Iterator[Rows]:
        """Yield the rows in batches of `size`."""
        count = len(self.ids)
        if size is None or size >= count:
            yield self
            return
        for start in range(0, count, size):
            part = range(start, min(start + size, count))
            chunk = slice(part.start, part.stop)
            copy = self.copy and (self.copy[0][chunk], self.copy[1][chunk])
            yield Rows(self.ids[chunk], self.mask[chunk], self.completion, take(self.fields, part, count), copy)

    def model_inputs(self) -> dict[str, Any]:
        """The inputs other than text as keyword arguments of the model."""
        device = self.ids.device
        inputs = {
            name: joined(value, device) if isinstance(value, list) else value
            for name, value in self.fields.items()
            if name not in COUNTS
        }
        return {name: value for name, value in inputs.items() if value is not None}


@dataclass(frozen=True)
class ExtraOutputs:
    """The outputs of a scoring pass in addition to log-probabilities."""

    entropy: bool = False
    entropy_gradient: bool = False  # the entropy carries a gradient, which costs one more matrix product
    aux_loss: bool = False  # the load-balancing loss of a mixture of experts
    hidden: bool = False  # the hidden states before the head, for the value head and the full KL


@dataclass(frozen=True)
class Scores:
    """The result of one scoring pass over (B, T) completions."""

    logps: Tensor  # (B, T) nats
    entropy: Tensor | None = None  # (B, T) nats
    aux_loss: Tensor | None = None  # ()
    head: Projection | None = None
    """The head, and the hidden states (N, H) of all N live tokens, completion by completion."""
    tokens: int = 0  # number of tokens that went through the model

    @property
    def projection(self) -> Projection:
        """`head`, for hooks that need the hidden states. Raises `ObjectiveError` if the pass did not return them."""
        if self.head is None:
            raise ObjectiveError(
                "A hook needs the hidden states of a scoring pass (full KL, or values), but the backend's own scoring did "
                "not return them. Set model.backend: transformers."
            )
        return self.head

    def map(self, function: Callable[[Tensor], Tensor]) -> Scores:
        """A copy with `function` applied to log-probabilities and entropies."""
        entropy = None if self.entropy is None else function(self.entropy)
        return replace(self, logps=function(self.logps), entropy=entropy)


def offload_checkpointed() -> AbstractContextManager[Any]:
    """Context in which autograd stores hidden states (B, S, H), the inputs of checkpointed blocks, in main memory.

    Tensors that a block stores while it is recomputed have other shapes and stay on the device. The copies are queued in the
    device's stream, so nothing waits for them.
    """

    def pack(tensor: Tensor) -> Any:
        moves = tensor.dim() == 3 and tensor.is_floating_point() and tensor.nbytes >= OFFLOAD_MIN_BYTES
        if not moves or tensor.device.type != OFFLOAD_FROM:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        device, host = saved
        tensor: Tensor = host.to(device, non_blocking=True)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class ModelPass:
    """A forward pass of `model` into TRL's fused head, which returns a score for every label.

    autocast: Returns the context of the run's precision. outputs: Outputs in addition to log-probabilities. remedy: Advice if the
    model has lost the head. offload: Keep the inputs of checkpointed blocks in main memory. unsloth: The model's layers are
    Unsloth's own (`kit.scoring.unsloth_packs`).
    """

    model: Callable[..., Any]
    autocast: Callable[[], AbstractContextManager[Any]]
    outputs: ExtraOutputs = field(default_factory=ExtraOutputs)
    remedy: str = ""
    offload: bool = False
    unsloth: bool = False

    def __call__(self, **inputs: Any) -> Scores:
        """Scores with the shape of the labels less the first column; `head.hidden` in the order of the labels.

        Raises `ModelError` if the model has lost TRL's head.
        """
        if self.outputs.aux_loss:
            inputs["output_router_logits"] = True
        offloading = offload_checkpointed() if self.offload and torch.is_grad_enabled() else nullcontext()
        with (
            request_outputs(self.outputs.entropy_gradient, keep=self.outputs.hidden) as head,
            self.autocast(),
            offloading,
        ):
            output = self.model(**inputs, fused_lm_head=True)
        if getattr(output, "log_probs", None) is None:
            model = self.model.args[-1] if isinstance(self.model, functools.partial) else self.model
            raise ModelError(
                f"{type(model).__name__} returned no log-probabilities for fused_lm_head=True: a wrapper has replaced the "
                f"forward method into which TRL puts its head. {self.remedy}"
            )
        return Scores(
            output.log_probs,
            output.entropy if self.outputs.entropy else None,
            output.aux_loss if self.outputs.aux_loss else None,
            head.projection,
            inputs["input_ids"].numel(),
        )


def score_padded(run: ModelPass, rows: Rows, size: int | None = None) -> Scores:
    """Score rows in TRL's layout, `size` rows for each forward pass."""
    parts = []
    for chunk in rows.chunks(size):
        labels = chunk.ids.masked_fill(chunk.mask == 0, NO_LABEL)
        labels[:, : chunk.width] = NO_LABEL
        scores = run(input_ids=chunk.ids, attention_mask=chunk.mask, labels=labels, **chunk.model_inputs())
        parts.append(scores.map(lambda values: values[:, -rows.completion :]))
    return join_scores(parts)


def score_right_padded(run: ModelPass, rows: Rows, size: int | None = None) -> Scores:
    """Score rows with all padding moved behind the tokens, `size` rows for each forward pass.

    Unsloth's backbones ignore the attention mask in training. In TRL's layout their positions and their attention would
    include the padding in front, and log-probabilities would be wrong by whole nats. A causal model ignores padding that
    comes after the tokens:

        mask      0 0 1 1 | 1 1 0       a stable sort of the mask keeps the order of the tokens
        sorted    1 1 1 1   0 0 0       scored in this order
        scores        T T               each value goes back to the column of its token

    Padding is read from the mask, never from the padding id, which may be the end-of-text token. The first token of a row is
    not predicted and scores 0. Raises `ModelError` for inputs whose shape differs from that of the ids, because the backbone
    lays them out itself.
    """
    others = sorted(name for name in rows.fields if name not in TOKEN_INPUTS)
    if others:
        raise ModelError(
            f"Unsloth's models cannot be scored with inputs other than text ({', '.join(others)}). "
            "Set model.backend: transformers."
        )
    parts = []
    for chunk in rows.chunks(size):
        live, columns, longest = chunk.mask.bool(), chunk.ids.shape[1], int(chunk.on_host[1].sum(1).max())
        places = torch.argsort((~live).to(torch.int8), dim=1, stable=True)[:, : max(1, longest)]  # (B, W)
        ids, tokens = chunk.ids.gather(1, places), live.gather(1, places)
        labels = ids.masked_fill(~(tokens & (places >= chunk.width)), NO_LABEL)
        fields = {name: value.gather(1, places) for name, value in chunk.model_inputs().items()}
        # Unsloth would cut a mask to its `max_seq_length` after a generation. A load-balancing loss needs it to count tokens.
        fields |= {"attention_mask": tokens.to(chunk.mask.dtype)} if run.outputs.aux_loss else {}
        scores = run(input_ids=ids, labels=labels, **fields)

        def restore(values: Tensor, places: Tensor = places, columns: int = columns) -> Tensor:
            """(B, W - 1), value j for the token at j + 1 -> (B, T), each value at its token's column; 0 elsewhere."""
            padded = values.new_zeros(len(values), columns)
            return padded.scatter(1, places[:, 1:], values)[:, columns - rows.completion :]

        parts.append(scores.map(restore))
    return join_scores(parts)


def score_packs(run: ModelPass, packs: Sequence[Pack], rows: Rows, layouts: list[Layout] | None = None) -> Scores:
    """Score packs with one forward pass each, all in one graph. `layouts`, if set, collects the layout of each pass."""
    device, parts, columns = rows.ids.device, [], []
    # Copy everything before the first pass, so that the host never waits for the device: for each pack one tensor with ids,
    # positions and labels (S,) and the indices of the labelled tokens (N,).
    for pack in packs:
        labelled = torch.nonzero(pack.labels[0] != NO_LABEL).flatten()
        inputs = torch.cat([pack.ids[0], pack.positions[0], pack.labels[0], labelled])
        columns.append(torch.split(to_device(inputs, device), [*[pack.tokens] * 3, len(labelled)]))
    places = to_device(torch.cat([pack.places for pack in packs]), device)
    pack_layouts = [Layout(pack.groups, device) for pack in packs]
    four_dimensional = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    for layout, (ids, positions, labels, labelled) in zip(pack_layouts, columns, strict=True):
        if layouts is not None:
            layouts.append(layout)
        scores = run(
            input_ids=ids[None],
            position_ids=positions[None],
            shift_labels=PlacedLabels(labels[None], labelled),
            # transformers builds no mask of its own if it gets one with four dimensions; the layers read the layout instead.
            **(
                pack_inputs(layout)
                if run.unsloth
                else {"attention_mask": four_dimensional, KEYWORD: layout, TEXT_OF_TOKEN: layout}
            ),
        )

        def at_labels(values: Tensor, places: Tensor = labelled) -> Tensor:
            """(1, S) -> (N,)."""
            return values[0].index_select(0, places.to(values.device))

        parts.append(scores.map(at_labels))
    shape = (len(rows.ids), rows.completion)

    def to_rows(values: Tensor) -> Tensor:
        """(N,) of all packs -> (B, T), 0 elsewhere."""
        return values.new_zeros(shape[0] * shape[1]).index_copy(0, places.to(values.device), values).view(shape)

    return join_scores(parts, [pack.places for pack in packs]).map(to_rows)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without waiting for the work that is queued there."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class PlacedLabels:
    """Labels (1, S) with the indices of those that are not -100, so that TRL's head need not ask the device for them.

    TRL's head computes `mask = labels != -100`, then `hidden[mask]`, `labels[mask]` and `masked_scatter(mask, ...)`. Each of
    these waits for the device to count the mask. An object of this class takes the place of both labels and mask and indexes
    instead; in every other operation it acts as its tensor.
    """

    def __init__(self, values: Tensor, places: Tensor) -> None:
        self.values, self.places = values, places  # (1, S); (N,) of S

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)

    def __ne__(self, other: object) -> Any:
        differs: Any = self.values != other
        return PlacedLabels(differs, self.places) if other == NO_LABEL else differs

    def __getitem__(self, index: Any) -> Any:
        return select_tokens(self.values, index.places) if isinstance(index, PlacedLabels) else self.values[index]

    def to(self, *args: Any, **keywords: Any) -> PlacedLabels:
        values = self.values.to(*args, **keywords)
        return PlacedLabels(values, self.places.to(values.device))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) > 1 and isinstance(args[1], cls):
            if func is Tensor.__getitem__:
                return select_tokens(args[0], args[1].places)
            if func is Tensor.masked_scatter:
                return args[0].flatten().index_copy(0, args[1].places, args[2]).view(args[0].shape)
        tensors = [arg.values if isinstance(arg, cls) else arg for arg in args]
        return func(*tensors, **(kwargs or {}))


def select_tokens(values: Tensor, places: Tensor) -> Tensor:
    """Select the tokens at `places` (N,): (1, S, ...) -> (N, ...). Differentiable."""
    return values.flatten(0, 1).index_select(0, places)


def join_scores(parts: Sequence[Scores], places: Sequence[Tensor] | None = None) -> Scores:
    """Concatenate partial scores. places: flat indices (N,) of each part's live tokens, if the parts are not in row order."""
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
    """Put values (N,) or (N, H) of live tokens at their tokens: (B, T) or (B, T, H), 0 elsewhere. Differentiable."""
    live = mask.bool()
    out = rows.new_zeros((*live.shape, *rows.shape[1:]))
    if rows.dim() > 1:
        live = live.unsqueeze(-1).expand(out.shape)
    return out.masked_scatter(live, rows)


# --- model inputs other than ids and mask, divided by completions -----------------------------------------------------

# Processors return pictures as one row for each sample, one for each picture, rows of patches (counted by a grid) or tiles.
# `pieces` finds out which by comparing counts, so that a batch can be divided, shuffled and scored in parts.


COUNTS = ("num_images", "num_tiles")
"""Lists with one count for each sample: its rows in other fields."""


def pieces(name: str, value: Any, samples: int, counts: Mapping[str, Any]) -> list[Any]:
    """Split `value` into one part for each sample, in order; the part of a sample without pictures is empty.

    counts: `num_images` and `num_tiles` (one number for each sample) and `image_grid_thw` (pictures, 3), where the batch has
    them. Raises `ModelError` if none of the counts matches the length of `value`.
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
        f"The processor returned '{name}' with {total} rows for {samples} prompts and {sum(images)} pictures, which cannot be "
        "divided among the prompts. Train this model on text alone (data.image_column: none)."
    )


def _ends(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends, start = [], 0
    for size in sizes:
        ends.append((start, start + size))
        start += size
    return ends


def extended(rows: Sequence[Sequence[int]], width: int, completion: int) -> list[Tensor]:
    """Token fields of unpadded prompts as tensors (1, width + completion), with zeros at the padding and the completion."""
    return [torch.nn.functional.pad(torch.as_tensor(list(row))[None], (width - len(row), completion)) for row in rows]


def joined(parts: Sequence[Any], device: Any = None) -> Any:
    """Concatenate the parts of samples into one tensor; None if all are empty."""
    tensors = [torch.as_tensor(part) for part in parts]
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return None
    tensor = torch.cat(filled)
    return tensor if device is None else tensor.to(device)


def take(fields: Mapping[str, Any], rows: Sequence[int], samples: int) -> dict[str, Any]:
    """Select the model inputs of the samples `rows`, in that order. `fields` are those of a micro-batch; None is left out."""
    present = {name: value for name, value in fields.items() if value is not None}
    selected: dict[str, Any] = {}
    for name, value in present.items():
        if name in COUNTS or isinstance(value, list):  # a list has one entry for each sample
            selected[name] = [value[row] for row in rows]
        else:
            parts = pieces(name, value, samples, present)
            tensor = joined([parts[row] for row in rows])
            if tensor is not None:
                selected[name] = tensor
    if "pixel_values" in present and "pixel_values" not in selected:  # none of these samples has a picture
        return {name: value for name, value in selected.items() if name.endswith("token_type_ids")}
    return selected


# --- the choice of the layout -----------------------------------------------------------------------------------------


log = logging.getLogger("kit")
PACK_TOKENS = {"cpu": 2048}
"""Most tokens of a pack, by device."""
GPU_PACK_TOKENS = 8192
LONG_PROMPT = 4
"""A pack may always hold this many times the prompt's width, because every part of a divided group repeats its prompt."""
PLAIN = ExtraOutputs()
REMEDY = {"left": "Set optimisation.packing: false.", "right": "Set model.backend: transformers."}


class Report(TypedDict):
    """The layout in use. `packing` is None before the first rows; `reason` says why rows are not packed or not shared."""

    packing: Literal["packed", "plain"] | None
    share_prompts: bool
    reason: str


class Scorer:
    """Scores the completions of one run with any model that has TRL's fused head.

    family: The architecture of the policy. autocast: Returns the context of the run's precision. unwrap: Returns a model without
    accelerate's wrappers. padding: `left` as in TRL, or `right` for backbones that ignore the attention mask. packing: Pack rows
    where that is exact. share_prompts: Read a prompt once for all its completions in a pack. half: The run uses 16-bit mixed
    precision. device: `cpu` or `cuda`.
    """

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
        """Most tokens of a pack. Long prompts (`LONG_PROMPT`) and single longer rows may exceed it."""
        self.token_budget: int | None = None
        """Most tokens of a forward pass without gradient. The caller bounds passes with a gradient."""
        self.verdicts: dict[int, Verdict] = {}  # by id(model): the policy, and a reference with weights of its own
        self.offload = False
        """Whether the inputs of checkpointed blocks are kept in main memory."""
        self.fuses = device == "cuda"
        """Whether operations of a model are fused (`kit.models.fused`) at its first rows."""
        self.fused: dict[int, Fused] = {}  # by id(model)
        install_packed_attention()
        if packing:
            install_unsloth_packs()

    @property
    def report(self) -> Report:
        """The layout in use, that of the costlier model if two models are scored."""
        if not self.packing:
            return {"packing": "plain", "share_prompts": False, "reason": "turned off"}
        verdicts = sorted(self.verdicts.values(), key=lambda verdict: verdict.layout == "packed")  # plain first
        if not verdicts:
            return {"packing": None, "share_prompts": self.share_prompts, "reason": ""}
        worst = verdicts[0]
        shared = worst.layout == "packed" and self.share_prompts and all(verdict.shared for verdict in verdicts)
        return {"packing": worst.layout, "share_prompts": shared, "reason": worst.reason}

    def score(self, model: Any, rows: Rows, outputs: ExtraOutputs = PLAIN, batch_size: int | None = None) -> Scores:
        """Score the completions of `rows` under `model`, with a gradient unless the caller has turned gradients off.

        outputs: Outputs in addition to log-probabilities. batch_size: A forward pass takes at most as many tokens as this number
        of padded rows. Raises `ModelError` if the model has lost TRL's head, or if its inputs cannot be divided among the rows.
        """
        bare, plain = self.unwrap(model), score_right_padded if self.padding == "right" else score_padded
        run = self._pass(model, bare, outputs)
        accepted = {  # inputs that are present and that the model takes
            name: value
            for name, value in rows.fields.items()
            if value is not None and (name in COUNTS or self.family.rule(name) != "drop")
        }
        rows = replace(rows, fields=accepted)
        if self.fuses and id(bare) not in self.fused:
            fused = fuse(ModelPass(self.family.completed(bare), self.autocast), bare, rows, plain=plain, half=self.half)
            if fused is not None:
                self.fused[id(bare)] = fused
        if self.token_budget is not None and not torch.is_grad_enabled() and not outputs.aux_loss:
            affordable = max(1, self.token_budget // rows.ids.shape[1])
            batch_size = affordable if batch_size is None else min(batch_size, affordable)
        verdict = self._verdict(bare, rows, plain) if self.packing and not rows.fields else None
        # A load-balancing loss counts tokens: it would count a shared prompt once instead of once for each completion.
        if verdict is not None and verdict.layout == "packed" and not outputs.aux_loss:
            limit = max(self.pack_tokens, LONG_PROMPT * rows.width)
            if batch_size is not None:
                limit = min(limit, batch_size * rows.ids.shape[1])
            try:
                share = self.share_prompts and verdict.shared
                # Rows without any completion token give no pack; the padded pass below still returns a graph for them.
                if packs := lay_out(*rows.on_host, rows.completion, share=share, limit=limit):
                    return score_packs(run, packs, rows)
            except NotPackable as reason:
                log.info("these rows are not packed: %s", reason)
        return plain(run, rows, batch_size)

    def _pass(self, model: Any, bare: Any, outputs: ExtraOutputs = PLAIN) -> ModelPass:
        completed, unsloth = self.family.completed(model), has_unsloth_layers(bare)
        return ModelPass(completed, self.autocast, outputs, REMEDY[self.padding], self.offload, unsloth)

    def _verdict(self, bare: Any, rows: Rows, plain: Plain) -> Verdict | None:
        """The layout for this model, examined at its first rows with a completion; None before those."""
        if id(bare) not in self.verdicts:
            if not rows.width or not bool((rows.live.any(1) & rows.mask[:, : rows.width].any(1)).any()):
                return None
            verdict = examine(self._pass(bare, bare), bare, rows, plain=plain, half=self.half)
            self.verdicts[id(bare)] = verdict
            if verdict.layout == "packed" and not verdict.shared:
                log.warning("%s reads a prompt again for each completion: %s", type(bare).__name__, verdict.reason)
            elif verdict.layout != "packed":
                log.warning("%s is scored in padded rows: %s", type(bare).__name__, verdict.reason)
        return self.verdicts[id(bare)]


# --- whether a model can be scored in packs ---------------------------------------------------------------------------


PROMPT, COMPLETION, PADDING = 64, 24, 3
"""Most tokens of the prompt and the completion of a probe row, and its columns of padding in front."""
LEAK = 2e-3, 0.05
"""Nats by which rounding may move a score when another completion changes, in single and in half precision."""
ATTENTION = {"full_attention", "sliding_attention", "attention", "hybrid", "hybrid_sliding"}
RECURRENT = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"}
STATELESS = {"mlp", "moe"}
WINDOWED = {"sliding_attention", "hybrid_sliding"}
"""Kinds of layers by their names in configurations. A hybrid layer has attention and a recurrent state."""
LENGTH_DEPENDENT_ROPES = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the longest text of a batch."""
SCORE_TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3}
"""Most nats by which rounding may make the scores of two layouts differ."""
HALF_TOLERANCE = 0.15
"""The same in half precision, mean over tokens. Rounding differs by some hundredths of a nat between padded and unpadded rows;
a layout that misreads padding differs by whole nats."""

Plain = Callable[[ModelPass, Rows], Scores]


@dataclass(frozen=True)
class Verdict:
    """The layout for a model's rows, and the reason if it is not the cheapest."""

    layout: Literal["packed", "plain"]
    reason: str = ""
    shared: bool = True  # packed completions share their prompt


@dataclass(frozen=True)
class Candidate:
    """A model that is examined for packing."""

    run: ModelPass
    bare: Any  # without accelerate's wrappers
    base: Any  # without adapters either
    half: bool  # computes in half precision

    @classmethod
    def of(cls, run: ModelPass, bare: Any, half: bool) -> Candidate:
        base = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
        dtypes = (weight.dtype for weight in base.parameters() if weight.is_floating_point())
        return cls(run, bare, base, half or next(dtypes, torch.float32).itemsize < 4)

    @property
    def text(self) -> Any:
        """The configuration of the language model."""
        return self.base.config.get_text_config()


def fuse(run: ModelPass, bare: Any, rows: Rows, *, plain: Plain, half: bool) -> Fused | None:
    """Fuse operations of a model, and undo that if the scores of the first completion change.

    The arguments are those of `examine`. Returns None if no row has a completion.
    """
    row = next((chunk for chunk in rows.chunks(1) if bool(chunk.live.any())), None)
    if row is None:
        return None
    model, training = Candidate.of(run, bare, half), bare.training
    try:
        bare.train(training and not has_dropout(model.base))
        with torch.no_grad():
            expected = plain(run, row).logps
            fused = Fused(bare)
            reason = (
                first_problem(lambda: score_difference(model, plain(run, row).logps, expected, row))
                if fused.names
                else None
            )
    finally:
        bare.train(training)
    if reason is not None:
        fused.remove()
        log.warning("%s runs without fused operations (%s): %s", type(model.base).__name__, fused, reason)
    elif fused.names:
        log.info("%s: %s", type(model.base).__name__, fused)
    return fused


def examine(run: ModelPass, bare: Any, rows: Rows, *, plain: Plain, half: bool) -> Verdict:
    """Find out whether a model can be scored in packs.

    run: The forward pass of the model. bare: The model without accelerate's wrappers. rows: Real rows, at least one with a
    completion. plain: Scores padded rows; its results are taken as correct. half: The run uses 16-bit mixed precision.
    """
    model = Candidate.of(run, bare, half)
    reason = unsupported(model)
    if reason is not None:
        return Verdict("plain", reason)
    probe, training = probe_rows(rows), bare.training
    try:
        bare.train(training and not has_dropout(model.base))
        with torch.no_grad():
            expected = plain(run, probe).logps
            reason = first_problem(lambda: pack_difference(model, probe, expected))
            if reason is None:
                return Verdict("packed")
            if run.unsloth and first_problem(lambda: pack_difference(model, probe, expected, share=False)) is None:
                return Verdict("packed", reason, shared=False)
    finally:
        bare.train(training)
    return Verdict("plain", reason)


def probe_rows(rows: Rows) -> Rows:
    """Five short rows of four lengths and two prompts, cut from one or two of `rows`: (5, at most 3 + 65 + 26)."""
    live, ids = rows.mask.bool(), rows.ids
    width = ids.shape[1] - rows.completion

    def cut(row: int) -> tuple[Tensor, Tensor]:
        return ids[row, :width][live[row, :width]][-PROMPT:], ids[row, width:][live[row, width:]][:COMPLETION]

    usable = live[:, width:].any(1) & live[:, :width].any(1)
    prompt, completion = cut(int(torch.where(usable, live[:, width:].sum(1), -1).argmax()))
    completion = torch.cat([completion, prompt]).repeat(3)[:COMPLETION]  # 6 or more tokens, so that their order matters
    prompts = (cut(row)[0] for row in torch.nonzero(usable).flatten().tolist())
    other = next((ids for ids in prompts if not torch.equal(ids, prompt)), torch.cat([prompt[-1:], prompt]))
    texts = [
        (prompt, completion),
        (prompt, torch.cat([completion.flip(0), completion[:1]])),
        (prompt, completion[:1]),
        (prompt, completion[1:]),
        (other, torch.cat([completion[-1:], completion[:-1]])),
    ]
    prompt_width = max(len(start) for start, _ in texts) + PADDING
    completion_width = max(len(end) for _, end in texts) + 1
    shape = (len(texts), prompt_width + completion_width)
    probe_ids, mask = ids.new_full(shape, int(prompt[0])), rows.mask.new_zeros(shape)
    for row, (start, end) in enumerate(texts):
        columns = slice(prompt_width - len(start), prompt_width + len(end))
        probe_ids[row, columns], mask[row, columns] = torch.cat([start, end]), 1
    return Rows(probe_ids, mask, completion_width)


def unsupported(model: Candidate) -> str | None:
    """The reason why a model's configuration excludes packs; None if it does not. Installs the attention that packs need."""
    if getattr(getattr(model.bare, "active_peft_config", None), "is_prompt_learning", False):
        return "the adapter adds tokens of its own before the prompt"
    text = model.text
    settings = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    ropes: list[dict[str, Any]] = [rope for rope in settings if isinstance(rope, dict)]
    ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)]
    rope_types = {kind for rope in ropes for kind in (rope.get("rope_type"), rope.get("type")) if kind}
    if excluded := rope_types & LENGTH_DEPENDENT_ROPES:
        return f"rotary positions ({', '.join(sorted(excluded))}) depend on the longest text of a batch"
    layers = layer_kinds(text) or []
    kinds = set(layers)
    recurrent = sum(kind in RECURRENT for kind in layers)
    unknown = kinds - ATTENTION - STATELESS - RECURRENT
    if model.run.unsloth or install_recurrent_packs(model.base) < recurrent:
        unknown |= kinds & RECURRENT
    if unknown:
        return f"layers other than attention ({', '.join(sorted(unknown))}) carry a state from one text into the next"
    if not model.run.unsloth and text._attn_implementation not in (*WRAPPED, EAGER):
        return f"attention '{text._attn_implementation}' cannot be packed (model.attention: sdpa can)"
    install_packed_eager(model.base)
    install_in_layers(model.base)
    if getattr(text, "output_router_logits", False):
        return "the load-balancing loss of its experts counts tokens"
    if getattr(text, "is_causal", True) is False:
        return "its attention is not causal"
    return None


def first_problem(comparison: Callable[[], str | None]) -> str | None:
    """The result of a comparison, or its error as text. Out-of-memory errors are raised: they are not the model's fault."""
    try:
        return comparison()
    except Exception as error:
        raise_fatal(error)
        return first_line(error)


def pack_difference(model: Candidate, probe: Rows, expected: Tensor, *, share: bool = True) -> str | None:
    """Compare packed scores of the probe with `expected` (B, T): how they differ, or None.

    The packed attention must be called once by each attention layer, with that layer's sliding window. The pack is scored
    again with another longest completion, which must not change the scores of the other completions.
    """
    layouts: list[Layout] = []
    changed_ids = probe.ids.clone()
    longest = int(probe.live.sum(1).argmax())
    completion = changed_ids[longest, -probe.completion :]
    completion[:] = torch.where(completion > 0, completion - 1, completion + 1)
    original, changed = (
        score_packs(model.run, lay_out(ids, probe.mask, probe.completion, share=share), probe, layouts=layouts).logps
        for ids in (probe.ids, changed_ids)
    )
    windows, expected_windows = [layout.windows for layout in layouts], attention_windows(model.text)
    if model.run.unsloth and all(len(calls) == len(expected_windows) for calls in windows):
        # Unsloth's layers pass the window that they use in padded rows: count the calls only
        expected_windows = windows[0]
    if any(calls != expected_windows for calls in windows):
        owners = {
            module.forward.__module__ for module in model.base.modules() if type(module).__name__.endswith("Attention")
        }
        origin = f"; attention is computed by {', '.join(sorted(owners))}" if owners and not windows[0] else ""
        return (
            f"{len(expected_windows)} layers do not call the packed attention as expected "
            f"(windows {windows[0]}, expected {expected_windows}{origin})"
        )
    others = probe.live.clone()
    others[longest] = False
    leak = float((changed - original).abs()[others].max())
    if not leak <= LEAK[model.half]:
        return f"one completion changes the scores of another, by {leak:.2g} nats"
    return score_difference(model, original, expected, probe)


def attention_windows(text: Any) -> list[int | None]:
    """The sliding window of each attention layer, from the configuration of a language model; None: no window."""
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    kinds = layer_kinds(text)
    if kinds is None:
        return [window] * text.num_hidden_layers
    return [window if kind in WINDOWED else None for kind in kinds if kind in ATTENTION]


def layer_kinds(text: Any) -> list[str] | None:
    """The kind of each layer, or None if the configuration does not list them."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return list(map(str, kinds)) if kinds else None


def score_difference(model: Candidate, logps: Tensor, expected: Tensor, probe: Rows) -> str | None:
    """Compare log-probabilities (B, T): how they differ by more than rounding, or None."""
    errors = (logps.float() - expected.float()).abs()[probe.live]
    in_half = (errors.mean(), HALF_TOLERANCE)
    error, limit = in_half if model.half else (errors.max(), SCORE_TOLERANCE[torch.float32])
    if bool(error <= limit):
        return None
    return (
        f"log-probabilities differ from those of padded rows by {float(error):.2g} nats (at most {limit:g} is rounding)"
    )


def may_be_trimmed(bare: Any) -> bool:
    """Whether columns of padding can be removed: positions are relative and do not depend on the width of the batch."""
    config: Any = getattr(bare, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rotary = getattr(text, "rope_parameters", None)
    if not isinstance(rotary, Mapping) or not rotary:
        return False
    kinds = rotary.values() if all(isinstance(value, Mapping) for value in rotary.values()) else [rotary]
    return not any(kind.get("rope_type") in LENGTH_DEPENDENT_ROPES for kind in kinds)


def has_dropout(model: Any) -> bool:
    """Whether a model has dropout, so that two passes over the same text may differ in training mode."""
    config = getattr(model, "config", None)
    names = ("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout")
    get_text = getattr(config, "get_text_config", None)  # for a model that sees pictures
    text = get_text() if get_text is not None else config
    rates = (getattr(part, name, 0) for part in (config, text) for name in names)
    if any(isinstance(rate, float) and rate > 0 for rate in rates):
        return True
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
