"""Packs: rows without their padding, every prompt once; and attention and recurrent layers within each text of a pack.

Rows with the same prompt are a group. Several groups lie behind one another in a pack, a single row of S tokens:

    prompt p1 .. pP, completions c1 c2 c3 and d1 d2        p1 .. pP-1 | pP c1 c2 | pP d1
    positions                                              0  .. P-2  | P-1 P P+1 | P-1 P
    what each token predicts                               -       -  | c1 c2 c3 | d1 d2

A completion's last token predicts nothing and is not forwarded, the prompt's last one opens every segment: a group of
completions of C tokens takes P - 1 + sum(C). `lay_out` is index arithmetic on the CPU.

The function that transformers' attention layers call is wrapped once, for the life of the process (gradient checkpointing
calls it again in the backward pass). A call that carries a `Layout` is computed here from the same keys and values; any
other goes to the original function as it came. There are three ways, and the first that works on the device is taken:

    flash      torch's varlen_attn, one call a pack: 16 bits, compute capability 8.0 and newer
    efficient  the memory-efficient kernel, one call a pack: any CUDA device
    grouped    torch's scaled_dot_product_attention, group by group: the CPU, and dropout

Attention whose scores are capped (Gemma 2) or that has sinks (GPT-OSS: a learned score a head that takes its share of the
softmax and gives nothing) is written out, group by group.

The kernels of the first two know the causal mask, windows, and the lengths; each is tried on a small pack before it is
used, its gradients included, and one that fails or is wrong is left out with a line in the log.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import embedding_bag, pad, scaled_dot_product_attention

from kit.models.failures import first_line, raise_fatal

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
    # Rows with completions by prompt, in the order of each prompt's first row.
    groups: dict[object, list[int]] = {}
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


# --- attention --------------------------------------------------------------------------------------------------------

KEYWORD = "packed_layout"
"""Under which a `Layout` is handed through the model's layers to its attention."""
WRAPPED = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Implementations of transformers that are known to mean softmax(scaling * q k) v within the causal window; caps and sinks
come as keywords."""
BY_NAME = "flex_attention"
"""The one implementation that layers replaced by unsloth_zoo take from transformers' table (`kit.scoring.unsloth_packs`)."""
IGNORED_BY = {"sdpa": frozenset({"softcap", "s_aux"})}
"""Keywords of other implementations that models hand to this one too, which leaves them out."""
NOT_UNDERSTOOD = ("position_bias", "sinks", "alibi_slopes", "block_table", "cu_seq_lens_q")
EAGER = "eager"
"""Written out in the module of each architecture (`install_packed_eager`)."""
KERNELS_ON = "cuda"
"""The kind of device whose kernels know the causal mask of more keys than queries."""
FILLED = 0.75
"""Least share of tokens in a batch of segments of unequal lengths."""
FROM_THE_END = 2
"""The efficient kernel's name of the causal mask by which the last query sees the last key."""
ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Of a kernel's results, relative to their norm; 0.02 in 16 bits. A window that is one token off is wrong by a tenth."""

Function = Callable[..., tuple[Tensor, Tensor | None]]
log = logging.getLogger("kit")


@dataclass(frozen=True)
class Segments:
    """A pack as kernels take it: n segments, whose keys are the prompt's and their own, K in all.

    The prompt's queries belong to the first segment of its group. Token indices are of the pack, int32.
    """

    query_starts: Tensor  # (n + 1,)
    key_starts: Tensor  # (n + 1,)
    longest: tuple[int, ...]  # queries and keys of a segment
    token_of: Tensor | None  # (K,) the token of each key; None: there is one key a token, in their order
    keys_by_token: Tensor  # (K,)
    token_starts: Tensor  # (S,) where the keys of each token begin in `keys_by_token`

    @classmethod
    def of(cls, groups: Sequence[Group], device: torch.device) -> Segments:
        """Computed on the CPU, and copied to the device at once, without waiting for it."""
        queries, keys, pieces = [0], [0], []
        for group in groups:
            prompt, start = torch.arange(group.start, group.start + group.prompt), group.start + group.prompt
            for number, length in enumerate(group.lengths):
                pieces += [prompt, torch.arange(start, start + length)]
                queries.append(queries[-1] + length + (0 if number else group.prompt))
                keys.append(keys[-1] + group.prompt + length)
                start += length
        token_of = torch.cat(pieces)
        counts = torch.bincount(token_of, minlength=queries[-1])
        by_token = token_of.argsort(stable=True), counts.cumsum(0) - counts
        parts = (torch.tensor(queries), torch.tensor(keys), token_of, *by_token)
        whole = torch.cat(parts).int()
        if device.type == KERNELS_ON and torch.cuda.is_available():
            whole = whole.pin_memory()
        found = torch.split(whole.to(device, non_blocking=True), [len(part) for part in parts])
        longest = tuple(max(end - start for start, end in itertools.pairwise(ends)) for ends in (queries, keys))
        return cls(found[0], found[1], longest, found[2] if keys[-1] > queries[-1] else None, found[3], found[4])


class Layout:
    """The groups of a pack, as its attention needs them, and what calls it has seen.

    device: that of the model, where what its kernels need is copied to before it computes.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device | None = None) -> None:
        self.groups = tuple(groups)
        self.tokens = sum(group.tokens for group in groups)
        self.windows: list[int | None] = []
        """The sliding window of every call so far, in order: one a layer."""
        self._masks: dict[tuple[int, int, int | None, torch.device], Tensor] = {}
        self._segments: dict[torch.device, Segments] = {}
        if device is not None and device.type == KERNELS_ON:
            self.segments(device)

    def segments(self, device: torch.device) -> Segments:
        """The pack as kernels take it."""
        if device not in self._segments:
            self._segments[device] = Segments.of(self.groups, device)
        return self._segments[device]

    def mask(
        self, queries: int, keys: int, window: int | None, device: torch.device, *, written_out: bool = False
    ) -> Tensor:
        """(queries, keys) bool: which keys each of the last `queries` of `keys` tokens in a row sees.

        Without a window that matters, on CUDA, torch's name for it, with which the flash kernel needs no mask; not where it
        is asked for `written_out`.
        """
        window = None if window is not None and window >= keys else window
        if window is None and device.type == KERNELS_ON and not written_out:
            return causal_lower_right(queries, keys)
        key = (queries, keys, window, device)
        if key not in self._masks:
            behind = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
            self._masks[key] = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        return self._masks[key]


def install_packed_attention() -> None:
    """Wraps the attention functions of transformers that are in `WRAPPED` or `BY_NAME`; calling it again changes nothing.

    And those that another package has put in their place (Unsloth does), where models look first.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for mapping in (AttentionInterface._global_mapping, ALL_ATTENTION_FUNCTIONS._local_mapping):
        for name in (*WRAPPED, BY_NAME):
            original = mapping.get(name)
            if original is not None and not hasattr(original, "unpacked"):
                mapping[name] = _with_packs(name, original)


def install_packed_eager(model: Any) -> None:
    """Wraps the function of that name in the modules of this model's layers; calling it again changes nothing."""
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        original = getattr(module, "eager_attention_forward", None)
        if original is not None and not hasattr(original, "unpacked"):
            module.eager_attention_forward = _with_packs(EAGER, original)  # type: ignore[attr-defined]


def _with_packs(name: str, original: Function) -> Function:
    @functools.wraps(original)
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **keywords: Any) -> Any:
        layout = keywords.pop(KEYWORD, None)
        if layout is None:
            with without_cudnn(query):
                return original(module, query, key, value, *rest, **keywords)
        _check(query, key, layout, keywords)
        scaling, dropout, window = (keywords.get(one) for one in ("scaling", "dropout", "sliding_window"))
        ignored = IGNORED_BY.get(name, frozenset())
        more = {to: None if one in ignored else keywords.get(one) for to, one in (("softcap",) * 2, ("sinks", "s_aux"))}
        layout.windows.append(window)
        return packed_attention(query, key, value, layout, scaling, dropout or 0.0, window, **more), None

    attend.unpacked = original  # type: ignore[attr-defined]
    return attend


def _check(query: Tensor, key: Tensor, layout: Layout, keywords: dict[str, Any]) -> None:
    """Raises `NotPackable` for a call that means more than causal attention over this pack."""
    if not query.shape[2] == key.shape[2] == layout.tokens or query.shape[0] != 1:
        raise NotPackable(f"attention over {tuple(key.shape)} keys, of a pack of {layout.tokens} tokens")
    found = [one for one in NOT_UNDERSTOOD if keywords.get(one) is not None]
    if keywords.get("is_causal") is False:
        found.append("is_causal=False")
    if keywords.get("output_attentions"):
        found.append("output_attentions")
    if found:
        raise NotPackable(f"attention with {', '.join(found)}")


@contextmanager
def without_cudnn(query: Tensor) -> Iterator[None]:
    """Inside, scaled_dot_product_attention takes a kernel other than cuDNN's, which plans anew for every new shape.

    On compute capability 9.0 it comes first otherwise, and shapes change with every rollout and every generated token.
    """
    kept = query.device.type == KERNELS_ON and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    if kept:
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        if kept:
            torch.backends.cuda.enable_cudnn_sdp(True)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries (1, h, S, d), keys and values (1, h or fewer, S, d) -> (1, S, h, d), each token within its own text.

    window: how far back a token sees, itself included. dropout: share of the weights that are dropped. softcap: bound of the
    scores, which become `softcap * tanh(score / softcap)`. sinks: (h,) a further score of every head, without a value.
    """
    if softcap is not None or sinks is not None:
        attend = functools.partial(_written_out, softcap=softcap, sinks=sinks)
        return _by_groups(query, key, value, layout, scaling, dropout, window, attend)
    if query.device.type == KERNELS_ON:
        if torch.is_autocast_enabled(KERNELS_ON):  # as for scaled_dot_product_attention
            query, key, value = (one.to(torch.get_autocast_dtype(KERNELS_ON)) for one in (query, key, value))
        kernel = _kernel(query.device, query.dtype, query.shape[3], dropout > 0)
        if kernel is not None:
            return _in_one_call(kernel, query, key, value, layout.segments(query.device), scaling, window)
    with without_cudnn(query):
        return _by_groups(query, key, value, layout, scaling, dropout, window)


# --- one call a pack --------------------------------------------------------------------------------------------------


def _in_one_call(
    kernel: str, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    if segments.token_of is not None:
        k, v = (_Keys.apply(one, segments) for one in (k, v))  # type: ignore[no-untyped-call]
    return KERNELS[kernel](q, k, v, segments, scale, window)[None]


class _Keys(torch.autograd.Function):
    """Keys or values of tokens (S, h, d), as segments have them (K, h, d).

    Backward, a prompt's tokens get the sum over the segments: in float32, and in the same order every time, as the bags of
    `embedding_bag` are summed; `index_add` would round after every term, in any order.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        assert segments.token_of is not None
        return tokens.index_select(0, segments.token_of)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        segments: Segments = ctx.segments
        summed = embedding_bag(segments.keys_by_token, grad.flatten(1), segments.token_starts, mode="sum")
        return summed.view(-1, *grad.shape[1:]), None


def tokens_of_segments(tokens: Tensor, layout: Layout) -> Tensor:
    """(S, H) of a pack -> (K, H): each segment with its prompt before it, behind one another."""
    segments = layout.segments(tokens.device)
    if segments.token_of is None:
        return tokens
    found: Tensor = _Keys.apply(tokens[:, None], segments)  # type: ignore[no-untyped-call]
    return found[:, 0]


def _flash(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    more: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0), "scale": scale}
    if "enable_gqa" in _parameters(varlen_attn):
        more["enable_gqa"] = k.shape[1] < q.shape[1]
    else:
        k, v = (_for_every_head(one, q) for one in (k, v))
    found = varlen_attn(q, k, v, segments.query_starts, segments.key_starts, *segments.longest, **more)
    assert isinstance(found, Tensor)  # alone, as nothing beside it is asked for
    return found


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _efficient(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, window: int | None) -> Tensor:
    k, v = (_for_every_head(one, q) for one in (k, v))
    found: Tensor = _Efficient.apply(q, k, v, segments, scale, window)  # type: ignore[no-untyped-call]
    return found


class _Efficient(torch.autograd.Function):
    """The memory-efficient kernel over segments; torch's own gradient of it forgets the window."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, window: int | None
    ) -> Tensor:
        starts = segments.query_starts, segments.key_starts, *segments.longest
        out, *stats = torch.ops.aten._efficient_attention_forward(
            q[None], k[None], v[None], None, *starts, 0.0, FROM_THE_END, True, scale=scale, window_size=window
        )
        ctx.segments, ctx.scale, ctx.window = segments, scale, window
        ctx.save_for_backward(q, k, v, out, *stats[:3])
        result: Tensor = out[0]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, logsumexp, seed, offset = ctx.saved_tensors
        segments: Segments = ctx.segments
        starts = segments.query_starts, segments.key_starts, *segments.longest
        grads = torch.ops.aten._efficient_attention_backward(
            grad[None], q[None], k[None], v[None], None, out, *starts, logsumexp, 0.0, seed, offset, FROM_THE_END, False,
            scale=ctx.scale, window_size=ctx.window,
        )  # fmt: skip
        return grads[0][0], grads[1][0], grads[2][0], None, None, None


def _for_every_head(keys: Tensor, queries: Tensor) -> Tensor:
    """(K, fewer, d) -> (K, h, d)."""
    repeats = queries.shape[1] // keys.shape[1]
    return keys.repeat_interleave(repeats, 1) if repeats > 1 else keys


KERNELS: dict[str, Callable[..., Tensor]] = {"flash": _flash, "efficient": _efficient}


@functools.lru_cache
def _kernel(device: torch.device, dtype: torch.dtype, width: int, dropout: bool) -> str | None:
    """The first kernel that is right on this device; None where none is, or takes dropout. Says so once."""
    refused: list[str] = []
    for name in () if dropout else KERNELS:
        reason = _refusal(name, device, dtype, width)
        if reason is None:
            log.info("attention of packs: %s, one call a layer%s", name, "".join(refused))
            return name
        refused.append(f"; not {name}: {reason}")
    why = "; dropout" if dropout else "".join(refused)
    log.warning("attention of packs: group by group, sliding windows as dense masks%s", why)
    return None


def _refusal(name: str, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why this kernel is not used; None where it gives what groups give, on a small pack, forward and backward."""
    layout = Layout([Group(0, 4, (9, 8, 3)), Group(24, 0, (5,)), Group(29, 6, (2, 1))])
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, heads, layout.tokens, width, generator=draw) for heads in (4, 2, 2, 4)]
    *given, pull = (one.to(device, dtype) for one in drawn)

    def results(by_kernel: bool, window: int | None) -> list[Tensor]:
        q, k, v = leaves = [one.detach().requires_grad_() for one in given]
        if by_kernel:
            found = _in_one_call(name, q, k, v, layout.segments(device), 0.3, window)
        else:
            found = _by_groups(q.float(), k.float(), v.float(), layout, 0.3, 0.0, window)
        return [found.detach(), *torch.autograd.grad(found, leaves, pull.transpose(1, 2).to(found.dtype))]

    limit = ROUNDING.get(dtype, 0.02)
    try:
        # Hooks of its own, as those of gradient checkpointing count what is saved inside.
        unhooked = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with torch.enable_grad(), torch.autocast(device.type, enabled=False), unhooked:
            for window in (None, 5):
                for ours, wanted in zip(results(True, window), results(False, window), strict=True):
                    off = float((ours.float() - wanted.float()).norm() / wanted.float().norm())
                    if not off <= limit:
                        return f"its results are off by {off:.2g} of their norm (window {window})"
    except Exception as error:  # kernels raise what they like
        raise_fatal(error)
        return first_line(error)
    return None


# --- group by group ---------------------------------------------------------------------------------------------------


def _by_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scaling: float | None,
    dropout: float,
    window: int | None,
    attend: Callable[..., Tensor] | None = None,
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    call = functools.partial(attend or _by_torch, layout=layout, window=window, scale=scaling, dropout=dropout)
    done: list[Tensor] = []
    for group in layout.groups:
        done += _of_group(query, key, value, group, call)
    return torch.cat(done, dim=2).transpose(1, 2).contiguous()


def _by_torch(
    q: Tensor, k: Tensor, v: Tensor, *, layout: Layout, window: int | None, scale: float | None, dropout: float
) -> Tensor:
    """Queries (n, h, Q, d) of the last of K tokens, keys and values (n, h, K, d) -> (n, h, Q, d)."""
    queries, keys = q.shape[2], k.shape[2]
    plain = queries == keys and (window is None or window >= keys)
    seen = None if plain else layout.mask(queries, keys, window, q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout, is_causal=plain, scale=scale)


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    window: int | None,
    scale: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same with capped scores, and with sinks (h,)."""
    scores = (q @ k.transpose(2, 3)) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = layout.mask(q.shape[2], k.shape[2], window, q.device, written_out=True)
    scores = (
        scores.float().masked_fill(~seen, float("-inf")) if q.itemsize < 4 else scores.masked_fill(~seen, -torch.inf)
    )
    if sinks is not None:
        beside = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
        scores = torch.cat([scores, beside], dim=3)
    weights = scores.softmax(3)[..., : k.shape[2]].to(v.dtype)
    return torch.dropout(weights, dropout, train=dropout > 0) @ v


def _of_group(query: Tensor, key: Tensor, value: Tensor, group: Group, call: Callable[..., Tensor]) -> Iterator[Tensor]:
    """(1, h, n, d) of the prompt with the first segment, which follows it, and then of each further one."""
    first = slice(group.start, group.start + group.prompt + group.lengths[0])
    yield call(query[:, :, first], key[:, :, first], value[:, :, first])
    prompt = slice(group.start, group.start + group.prompt)
    start = first.stop
    for lengths in in_batches(group.lengths[1:]):
        stop = start + sum(lengths)
        q, k, v = (_rows(whole[:, :, start:stop], lengths) for whole in (query, key, value))
        k, v = (
            torch.cat([whole[:, :, prompt].expand(len(lengths), -1, -1, -1), mine], dim=2)
            for whole, mine in ((key, k), (value, v))
        )
        found = call(q, k, v)
        yield from (one[None, :, :length] for one, length in zip(found, lengths, strict=True))
        start = stop


def in_batches(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Neighbours, the longest first, that fill a batch well enough."""
    batch: list[int] = []
    for length in lengths:
        if batch and length < FILLED * batch[0]:
            yield tuple(batch)
            batch = []
        batch.append(length)
    if batch:
        yield tuple(batch)


def _rows(segments: Tensor, lengths: Sequence[int]) -> Tensor:
    """Segments behind one another (1, h, sum, d) -> (n, h, longest, d), with zeros behind each: no token sees them."""
    pieces = torch.split(segments[0], list(lengths), dim=1)
    return torch.stack([pad(piece, (0, 0, 0, lengths[0] - piece.shape[1])) for piece in pieces])


# --- recurrent layers -------------------------------------------------------------------------------------------------

# State-space layers, gated delta nets and short convolutions carry a state from token to token; in a pack it would go on from
# one text into the next. Kernels that are told where a text begins (`cu_seqlens`, `seq_idx`) are CUDA's alone, transformers'
# own functions ignore those arguments, and none continues several completions from one prompt. So for such a layer, and for
# it alone, a pack is laid out in rows:
#
#     pack    p p p | c c c | d        a prompt that two completions share
#     rows    p p p c c c              padding stands behind, where no token before it sees it
#             p p p d . .
#     back    the prompt of the first row, and of every row its own tokens
#
# Everything else of the model (attention, experts, norms, the head) sees each token once. The forward of a layer's class is
# wrapped once; a call without a `Layout` goes through as it came.

TEXT_OF_TOKEN = "seq_idx"
"""The keyword by which short convolutions are told of texts. The layers that hand on nothing else hand on this one."""
CACHES = ("cache_params", "past_key_values", "past_key_value")


@dataclass(frozen=True)
class TextRows:
    """Rows of like length. K is the number of a pack's keys: every segment with its prompt, behind one another."""

    keys: Tensor  # (n, L) index of K; the last one of a row again, where it is padding
    kept: Tensor  # (m,) index of n * L whose result is taken
    places: Tensor  # (m,) of the pack, where it goes


def recurrent_layers(model: Any) -> list[Any]:
    """The layers of a language model that carry a state: those that hold a depthwise convolution over time."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return [
        module
        for module in decoder.modules()
        if any(isinstance(part, torch.nn.Conv1d) and part.groups == part.in_channels > 1 for part in module.children())
    ]


def install_recurrent_packs(model: Any) -> int:
    """Wraps the classes of `recurrent_layers`; calling it again changes nothing. How many layers there are."""
    found = recurrent_layers(model)
    for kind in {type(layer) for layer in found}:
        if not hasattr(kind.forward, "unpacked"):
            kind.forward = _in_rows(kind.forward)
    return len(found)


def _in_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *given: Any, **keywords: Any) -> Any:
        layout = keywords.pop(KEYWORD, None) or keywords.get(TEXT_OF_TOKEN)
        if not isinstance(layout, Layout):
            return original(self, *given, **keywords)
        if any(keywords.get(name) is not None for name in CACHES) or len(given) > 1:
            raise NotPackable("a recurrent layer with a state from before")
        hidden = given[0] if given else keywords["hidden_states"]
        keywords |= {name: None for name in ("attention_mask", TEXT_OF_TOKEN) if name in keywords}
        keywords.pop("hidden_states", None)
        keys, found, places = tokens_of_segments(hidden[0], layout), [], []
        for rows in _text_rows(layout, hidden.device):
            row = keys.index_select(0, rows.keys.flatten()).view(*rows.keys.shape, -1)
            out = original(self, row, **keywords)
            if not isinstance(out, Tensor):
                raise NotPackable(f"a recurrent layer that gives {type(out).__name__}")
            found.append(out.flatten(0, 1).index_select(0, rows.kept))
            places.append(rows.places)
        order = torch.cat(places).argsort()
        return torch.cat(found).index_select(0, order)[None]

    forward.unpacked = original  # type: ignore[attr-defined]
    return forward


def _text_rows(layout: Layout, device: torch.device) -> list[TextRows]:
    """The rows of a pack, computed once for each device."""
    known: dict[torch.device, list[TextRows]] = layout.__dict__.setdefault("recurrent_rows", {})
    if device not in known:
        known[device] = [
            TextRows(*(one.to(device, non_blocking=True) for one in (rows.keys, rows.kept, rows.places)))
            for rows in _laid_out(layout)
        ]
    return known[device]


def _laid_out(layout: Layout) -> list[TextRows]:
    segments = []  # keys before it, keys, the first of them whose result is its own, and where in the pack that goes
    before = 0
    for group in layout.groups:
        start = group.start
        for number, length in enumerate(group.lengths):
            keys, own = group.prompt + length, group.prompt if number else 0
            segments.append((before, keys, own, start))
            before, start = before + keys, start + keys - own
    segments.sort(key=lambda one: -one[1])
    made, done = [], 0
    for lengths in in_batches([one[1] for one in segments]):
        batch, done = segments[done : done + len(lengths)], done + len(lengths)
        columns = torch.arange(lengths[0])
        made.append(
            TextRows(
                torch.stack([first + columns.clamp(max=keys - 1) for first, keys, _, _ in batch]),
                torch.cat([row * lengths[0] + columns[own:keys] for row, (_, keys, own, _) in enumerate(batch)]),
                torch.cat([start + torch.arange(keys - own) for _, keys, own, start in batch]),
            )
        )
    return made
