"""Lay out rows in packs, without padding and with each prompt once, and compute attention and recurrent layers of packs.

A pack is a single row of S tokens. The rows with the same prompt form a group; a pack holds one or more groups:

    prompt p1 .. pP, completions c1 c2 c3 and d1 d2        p1 .. pP-1 | pP c1 c2 | pP d1
    positions                                              0  .. P-2  | P-1 P P+1 | P-1 P
    predicted token (label)                                -       -  | c1 c2 c3 | d1 d2

Each completion has a segment, which begins with the last token of the prompt and omits the last token of the completion,
since that predicts nothing. A group whose completions have C tokens takes P - 1 + sum(C). `lay_out` computes packs on the CPU.

The function that transformers' attention layers call is wrapped once for the life of the process, because gradient
checkpointing calls it again in the backward pass. A call with a `Layout` is computed here; any other call goes to the original
function unchanged. The first of these implementations that works on the device is used:

    flash      torch's varlen_attn, one call for each pack: 16 bits, compute capability 8.0 and newer
    efficient  the memory-efficient kernel, one call for each pack: any CUDA device
    grouped    torch's scaled_dot_product_attention, group by group: the CPU, and dropout

Attention with capped scores (Gemma 2) or with sinks (GPT-OSS: a learned score for each head that takes part in the softmax and
has no value) is computed group by group from matrix products.

Before a CUDA kernel is used, its results and gradients on a small pack are compared with the grouped implementation. A kernel
that fails or differs is skipped, with a line in the log.
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
    """These rows, or this model, cannot be scored in packs; the message says why."""


@dataclass(frozen=True)
class Group:
    """A prompt in a pack with the completions that share it."""

    start: int  # index of the prompt's first token in the pack
    prompt: int  # tokens before the first segment: the prompt without its last token
    lengths: tuple[int, ...]  # lengths of the segments, the longest first

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.lengths)


@dataclass(frozen=True)
class Pack:
    """A row of S tokens that holds groups, or a part of one. N of the tokens predict a token that is scored."""

    ids: Tensor  # (1, S)
    positions: Tensor  # (1, S) position of each token in its text
    labels: Tensor  # (1, S) the token that each token predicts, or -100
    groups: tuple[Group, ...]
    places: Tensor  # (N,) for each label, in order, the flat index of its score in (B, T)

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
    """Lay out rows (B, L), whose last `completion` columns are completions, in packs.

    mask (B, L) is 1 at tokens. share: Rows with the same prompt share it. limit: Most tokens of a pack; a larger group is
    divided, and a single row that is larger has a pack of its own. Rows without a completion token are left out.
    Raises `NotPackable` if a row has padding between its tokens or a completion has no prompt.
    """
    ids, live = ids.detach().cpu(), mask.detach().cpu().bool()
    width = ids.shape[1] - completion
    prompts, completions = live[:, :width], live[:, width:]
    if (prompts[:, 1:] < prompts[:, :-1]).any() or (completions[:, 1:] > completions[:, :-1]).any():
        raise NotPackable("a row has padding between its tokens")
    if (completions.any(1) & ~prompts.any(1)).any():
        raise NotPackable("a completion has no prompt")
    groups: dict[object, list[int]] = {}  # rows by prompt, in the order of each prompt's first row
    for row in torch.nonzero(completions.any(1)).flatten().tolist():
        key = ids[row, :width][prompts[row]].numpy().tobytes() if share else row
        groups.setdefault(key, []).append(row)
    parts: list[_Part] = []
    for rows in groups.values():
        prompt = ids[rows[0], :width][live[rows[0], :width]]
        lengths = live[rows, width:].sum(1).tolist()
        order = sorted(range(len(rows)), key=lambda index, of=lengths: -of[index])  # type: ignore[misc]
        members = [(rows[index], lengths[index]) for index in order]
        parts += _divided(prompt, members, limit)
    return [_pack(ids, pack_parts, width, completion) for pack_parts in _fill(parts, limit)]


def _divided(prompt: Tensor, members: Sequence[tuple[int, int]], limit: int | None) -> list[_Part]:
    """Divide a group into parts within the limit. members: row and length of each completion."""
    parts: list[list[tuple[int, int]]] = [[]]
    room = budget = max(0, limit - len(prompt) + 1) if limit is not None else sum(length for _, length in members)
    for member in members:
        if parts[-1] and member[1] > room:
            parts.append([])
            room = budget
        parts[-1].append(member)
        room -= member[1]
    return [_Part(prompt, tuple(row for row, _ in part), tuple(length for _, length in part)) for part in parts]


def _fill(parts: Sequence[_Part], limit: int | None) -> list[list[_Part]]:
    """Distribute parts among packs, in order, with as many in each pack as the limit allows."""
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
        prompt_tokens = len(part.prompt) - 1
        groups.append(Group(start, prompt_tokens, part.lengths))
        tokens.append(part.prompt[:-1])
        positions.append(torch.arange(prompt_tokens))
        labels.append(torch.full((prompt_tokens,), NO_LABEL))
        for row, length in zip(part.rows, part.lengths, strict=True):
            scored = ids[row, width : width + length]
            tokens += [part.prompt[-1:], scored[:-1]]
            positions.append(torch.arange(prompt_tokens, prompt_tokens + length))
            labels.append(scored)
            places.append(torch.arange(row * completion, row * completion + length))
        start += part.tokens
    ids, positions_row, labels_row = (torch.cat(pieces)[None] for pieces in (tokens, positions, labels))
    return Pack(ids, positions_row, labels_row, tuple(groups), torch.cat(places))


# --- attention --------------------------------------------------------------------------------------------------------

KEYWORD = "packed_layout"
"""The keyword argument that carries a `Layout` through the model's layers to their attention."""
WRAPPED = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Implementations of transformers that compute softmax(scaling * q k) v within the causal window, with caps and sinks as
keyword arguments."""
BY_NAME = "flex_attention"
"""The only implementation that layers replaced by unsloth_zoo look up in transformers' table (`kit.scoring.unsloth_packs`)."""
IGNORED_BY = {"sdpa": frozenset({"softcap", "s_aux"})}
"""Keyword arguments that an implementation ignores, though models pass them."""
UNSUPPORTED = ("position_bias", "sinks", "alibi_slopes", "block_table", "cu_seq_lens_q")
EAGER = "eager"
"""The implementation that each architecture defines in its own module (`install_packed_eager`)."""
KERNELS_ON = "cuda"
"""The type of device with kernels for packs."""
MIN_FILL = 0.75
"""Least length of a segment in a batch, relative to the longest."""
LOWER_RIGHT = 2
"""The efficient kernel's code of the causal mask in which the last query sees the last key."""
KERNEL_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Relative error of a kernel's results; 0.02 in 16 bits. A window that is wrong by one token gives an error of 0.1."""

Function = Callable[..., tuple[Tensor, Tensor | None]]
log = logging.getLogger("kit")


@dataclass(frozen=True)
class Segments:
    """Index tensors (int32) of a pack for variable-length kernels: n segments with K keys.

    The keys of a segment are those of its prompt and its own. The prompt's queries belong to the first segment of its group.
    """

    query_starts: Tensor  # (n + 1,)
    key_starts: Tensor  # (n + 1,)
    longest: tuple[int, ...]  # most queries and most keys of a segment
    token_of: Tensor | None  # (K,) the token of each key; None: every token has one key, in order
    keys_by_token: Tensor  # (K,) the keys, sorted by token
    token_starts: Tensor  # (S,) the first index of each token's keys in `keys_by_token`

    @classmethod
    def of(cls, groups: Sequence[Group], device: torch.device) -> Segments:
        """Compute the tensors on the CPU and copy them to the device in one transfer, without waiting for it."""
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
        indices = torch.cat(parts).int()
        if device.type == KERNELS_ON and torch.cuda.is_available():
            indices = indices.pin_memory()
        split = torch.split(indices.to(device, non_blocking=True), [len(part) for part in parts])
        longest = tuple(max(end - start for start, end in itertools.pairwise(ends)) for ends in (queries, keys))
        return cls(split[0], split[1], longest, split[2] if keys[-1] > queries[-1] else None, split[3], split[4])


class Layout:
    """The groups of a pack and the index tensors of its attention, and a record of the attention calls.

    device: The model's device. The index tensors of its kernels are copied there at once.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device | None = None) -> None:
        self.groups = tuple(groups)
        self.tokens = sum(group.tokens for group in groups)
        self.windows: list[int | None] = []
        """The sliding window of each attention call so far, in order; one call for each layer."""
        self._masks: dict[tuple[int, int, int | None, torch.device], Tensor] = {}
        self._segments: dict[torch.device, Segments] = {}
        if device is not None and device.type == KERNELS_ON:
            self.segments(device)

    def segments(self, device: torch.device) -> Segments:
        """The index tensors of the pack on a device."""
        if device not in self._segments:
            self._segments[device] = Segments.of(self.groups, device)
        return self._segments[device]

    def mask(self, queries: int, keys: int, window: int | None, device: torch.device, *, dense: bool = False) -> Tensor:
        """(queries, keys) bool: the keys that each of the last `queries` of `keys` consecutive tokens sees.

        On CUDA, a mask without an effective window is torch's `causal_lower_right`, which the flash kernel applies without
        reading a mask. dense: always return a tensor of bool.
        """
        window = None if window is not None and window >= keys else window
        if window is None and device.type == KERNELS_ON and not dense:
            return causal_lower_right(queries, keys)
        key = (queries, keys, window, device)
        if key not in self._masks:
            distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
            self._masks[key] = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return self._masks[key]


def install_packed_attention() -> None:
    """Wrap transformers' attention functions in `WRAPPED` and `BY_NAME`. Calling it again changes nothing.

    Functions that another package has registered in their place, as Unsloth does, are wrapped too.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for mapping in (AttentionInterface._global_mapping, ALL_ATTENTION_FUNCTIONS._local_mapping):
        for name in (*WRAPPED, BY_NAME):
            original = mapping.get(name)
            if original is not None and not hasattr(original, "unpacked"):
                mapping[name] = _with_packs(name, original)


def install_packed_eager(model: Any) -> None:
    """Wrap `eager_attention_forward` in the modules of a model's layers. Calling it again changes nothing."""
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
        scaling, dropout, window = (keywords.get(keyword) for keyword in ("scaling", "dropout", "sliding_window"))
        ignored = IGNORED_BY.get(name, frozenset())
        softcap, sinks = (None if keyword in ignored else keywords.get(keyword) for keyword in ("softcap", "s_aux"))
        layout.windows.append(window)
        output = packed_attention(
            query, key, value, layout, scaling, dropout or 0.0, window, softcap=softcap, sinks=sinks
        )
        return output, None

    attend.unpacked = original  # type: ignore[attr-defined]
    return attend


def _check(query: Tensor, key: Tensor, layout: Layout, keywords: dict[str, Any]) -> None:
    """Raise `NotPackable` for a call that is not plain causal attention over this pack."""
    if not query.shape[2] == key.shape[2] == layout.tokens or query.shape[0] != 1:
        raise NotPackable(f"attention over {tuple(key.shape)} keys in a pack of {layout.tokens} tokens")
    unsupported = [name for name in UNSUPPORTED if keywords.get(name) is not None]
    if keywords.get("is_causal") is False:
        unsupported.append("is_causal=False")
    if keywords.get("output_attentions"):
        unsupported.append("output_attentions")
    if unsupported:
        raise NotPackable(f"attention with {', '.join(unsupported)}")


@contextmanager
def without_cudnn(query: Tensor) -> Iterator[None]:
    """Context in which scaled_dot_product_attention does not use cuDNN, which compiles a plan for every new shape.

    torch prefers cuDNN on compute capability 9.0, and shapes change with every rollout and every generated token.
    """
    enabled = query.device.type == KERNELS_ON and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    if enabled:
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        if enabled:
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
    """Compute causal attention of each token within its own text.

    query (1, h, S, d), key and value (1, h or fewer, S, d) -> (1, S, h, d). scaling: Factor of the scores; None: 1 / sqrt(d).
    dropout: Share of the attention weights that are dropped. window: Number of tokens that a token sees, itself included; None:
    all before it. softcap: Bound of the scores, which become `softcap * tanh(score / softcap)`. sinks: (h,) an additional score
    of each head, without a value.
    """
    if softcap is not None or sinks is not None:
        attend = functools.partial(_by_products, softcap=softcap, sinks=sinks)
        return _by_groups(query, key, value, layout, scaling, dropout, window, attend)
    if query.device.type == KERNELS_ON:
        if torch.is_autocast_enabled(KERNELS_ON):  # as for scaled_dot_product_attention
            dtype = torch.get_autocast_dtype(KERNELS_ON)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        kernel = _kernel(query.device, query.dtype, query.shape[3], dropout > 0)
        if kernel is not None:
            return _in_one_call(kernel, query, key, value, layout.segments(query.device), scaling, window)
    with without_cudnn(query):
        return _by_groups(query, key, value, layout, scaling, dropout, window)


# --- one call for each pack -------------------------------------------------------------------------------------------


def _in_one_call(
    kernel: str, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if segments.token_of is not None:
        k, v = (_Keys.apply(tensor, segments) for tensor in (k, v))  # type: ignore[no-untyped-call]
    return KERNELS[kernel](q, k, v, segments, scale, window)[None]


class _Keys(torch.autograd.Function):
    """Repeat keys or values of a prompt for each of its segments: (S, h, d) -> (K, h, d).

    The backward pass sums the gradients of a token over its segments with `embedding_bag`, in float32 and in a fixed order.
    `index_add` rounds after every term and adds in any order.
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
    """Concatenate the segments of a pack, each with its prompt: (S, H) -> (K, H)."""
    segments = layout.segments(tokens.device)
    if segments.token_of is None:
        return tokens
    rows: Tensor = _Keys.apply(tokens[:, None], segments)  # type: ignore[no-untyped-call]
    return rows[:, 0]


def _flash(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    keywords: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0), "scale": scale}
    if "enable_gqa" in _parameters(varlen_attn):
        keywords["enable_gqa"] = k.shape[1] < q.shape[1]
    else:
        k, v = _for_every_head(k, q), _for_every_head(v, q)
    output = varlen_attn(q, k, v, segments.query_starts, segments.key_starts, *segments.longest, **keywords)
    assert isinstance(output, Tensor)  # a tuple only if more outputs are requested
    return output


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _efficient(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, window: int | None) -> Tensor:
    k, v = _for_every_head(k, q), _for_every_head(v, q)
    output: Tensor = _Efficient.apply(q, k, v, segments, scale, window)  # type: ignore[no-untyped-call]
    return output


class _Efficient(torch.autograd.Function):
    """The memory-efficient kernel over segments. A function of its own, because torch's gradient ignores the window."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, window: int | None
    ) -> Tensor:
        starts = segments.query_starts, segments.key_starts, *segments.longest
        out, *stats = torch.ops.aten._efficient_attention_forward(
            q[None], k[None], v[None], None, *starts, 0.0, LOWER_RIGHT, True, scale=scale, window_size=window
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
            grad[None], q[None], k[None], v[None], None, out, *starts, logsumexp, 0.0, seed, offset, LOWER_RIGHT, False,
            scale=ctx.scale, window_size=ctx.window,
        )  # fmt: skip
        return grads[0][0], grads[1][0], grads[2][0], None, None, None


def _for_every_head(keys: Tensor, queries: Tensor) -> Tensor:
    """Repeat keys or values for grouped queries: (K, fewer, d) -> (K, h, d)."""
    repeats = queries.shape[1] // keys.shape[1]
    return keys.repeat_interleave(repeats, 1) if repeats > 1 else keys


KERNELS: dict[str, Callable[..., Tensor]] = {"flash": _flash, "efficient": _efficient}


@functools.lru_cache
def _kernel(device: torch.device, dtype: torch.dtype, width: int, dropout: bool) -> str | None:
    """The first kernel that is correct on a device, or None if there is none. No kernel supports dropout. Logged once."""
    skipped: list[str] = []
    for name in () if dropout else KERNELS:
        reason = _problem(name, device, dtype, width)
        if reason is None:
            log.info("attention of packs: %s, one call for each layer%s", name, "".join(skipped))
            return name
        skipped.append(f"; not {name}: {reason}")
    why = "; dropout" if dropout else "".join(skipped)
    log.warning("attention of packs: group by group, sliding windows as dense masks%s", why)
    return None


def _problem(name: str, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Compare a kernel with attention by groups on a small pack, forward and backward: its error as text, or None."""
    layout = Layout([Group(0, 4, (9, 8, 3)), Group(24, 0, (5,)), Group(29, 6, (2, 1))])
    draw = torch.Generator().manual_seed(0)
    random = [torch.randn(1, heads, layout.tokens, width, generator=draw) for heads in (4, 2, 2, 4)]
    *inputs, output_grad = (tensor.to(device, dtype) for tensor in random)

    def results(by_kernel: bool, window: int | None) -> list[Tensor]:
        q, k, v = leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        if by_kernel:
            output = _in_one_call(name, q, k, v, layout.segments(device), 0.3, window)
        else:
            output = _by_groups(q.float(), k.float(), v.float(), layout, 0.3, 0.0, window)
        return [output.detach(), *torch.autograd.grad(output, leaves, output_grad.transpose(1, 2).to(output.dtype))]

    limit = KERNEL_TOLERANCE.get(dtype, 0.02)
    try:
        # Replace the hooks of gradient checkpointing, which count the tensors that are saved.
        unhooked = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with torch.enable_grad(), torch.autocast(device.type, enabled=False), unhooked:
            for window in (None, 5):
                for result, expected in zip(results(True, window), results(False, window), strict=True):
                    error = float((result.float() - expected.float()).norm() / expected.float().norm())
                    if not error <= limit:
                        return f"its results are off by {error:.2g} of their norm (window {window})"
    except Exception as error:  # a kernel may raise any exception
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
    outputs = [output for group in layout.groups for output in _attend_group(query, key, value, group, call)]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _by_torch(
    q: Tensor, k: Tensor, v: Tensor, *, layout: Layout, window: int | None, scale: float | None, dropout: float
) -> Tensor:
    """Attention of the last Q of K tokens: queries (n, h, Q, d), keys and values (n, h, K, d) -> (n, h, Q, d)."""
    queries, keys = q.shape[2], k.shape[2]
    plain = queries == keys and (window is None or window >= keys)
    mask = None if plain else layout.mask(queries, keys, window, q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=plain, scale=scale)


def _by_products(
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
    """The same from matrix products, with capped scores or with sinks (h,)."""
    scores = (q @ k.transpose(2, 3)) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = layout.mask(q.shape[2], k.shape[2], window, q.device, dense=True)
    scores = (scores.float() if q.itemsize < 4 else scores).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink_scores = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
        scores = torch.cat([scores, sink_scores], dim=3)
    weights = scores.softmax(3)[..., : k.shape[2]].to(v.dtype)
    return torch.dropout(weights, dropout, train=dropout > 0) @ v


def _attend_group(
    query: Tensor, key: Tensor, value: Tensor, group: Group, call: Callable[..., Tensor]
) -> Iterator[Tensor]:
    """Yield the output (1, h, n, d) of the prompt together with the first segment, then of each further segment."""
    first = slice(group.start, group.start + group.prompt + group.lengths[0])
    yield call(query[:, :, first], key[:, :, first], value[:, :, first])
    prompt = slice(group.start, group.start + group.prompt)
    start = first.stop
    for lengths in in_batches(group.lengths[1:]):
        stop = start + sum(lengths)
        q, k, v = (_rows(tensor[:, :, start:stop], lengths) for tensor in (query, key, value))
        k, v = (
            torch.cat([tensor[:, :, prompt].expand(len(lengths), -1, -1, -1), segments], dim=2)
            for tensor, segments in ((key, k), (value, v))
        )
        outputs = call(q, k, v)
        yield from (output[None, :, :length] for output, length in zip(outputs, lengths, strict=True))
        start = stop


def in_batches(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield batches of consecutive lengths, which come longest first, each at least `MIN_FILL` of its batch's longest."""
    batch: list[int] = []
    for length in lengths:
        if batch and length < MIN_FILL * batch[0]:
            yield tuple(batch)
            batch = []
        batch.append(length)
    if batch:
        yield tuple(batch)


def _rows(segments: Tensor, lengths: Sequence[int]) -> Tensor:
    """Concatenated segments (1, h, sum, d) -> (n, h, longest, d), with zeros after each, which no token sees."""
    pieces = torch.split(segments[0], list(lengths), dim=1)
    return torch.stack([pad(piece, (0, 0, 0, lengths[0] - piece.shape[1])) for piece in pieces])


# --- recurrent layers -------------------------------------------------------------------------------------------------

# State-space layers, gated delta nets and short convolutions carry a state from token to token, which must not go from one text
# of a pack into the next. Kernels with an argument for the start of each text (`cu_seqlens`, `seq_idx`) exist on CUDA only,
# transformers' own functions ignore it, and no kernel continues several completions from one prompt. Therefore these layers,
# and only these, compute a pack as padded rows:
#
#     pack      p p p | c c c | d      a prompt that two completions share
#     rows      p p p c c c            padding comes last, where no token sees it
#               p p p d . .
#     output    the prompt of the first row, and each row's own tokens
#
# The forward method of a layer's class is wrapped once. A call without a `Layout` is unchanged.

TEXT_OF_TOKEN = "seq_idx"
"""The keyword argument of short convolutions for the text of each token. Some layers pass on only this one."""
CACHES = ("cache_params", "past_key_values", "past_key_value")


@dataclass(frozen=True)
class TextRows:
    """Rows of similar length of a pack with K keys, the tokens of all segments, each with its prompt."""

    keys: Tensor  # (n, L) index into the K keys; padding repeats the last key of its row
    selected: Tensor  # (m,) index into n * L of the outputs that are used
    places: Tensor  # (m,) the index of each of these outputs in the pack


def recurrent_layers(model: Any) -> list[Any]:
    """The layers of a language model that carry a state: those with a depthwise convolution over time."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return [
        module
        for module in decoder.modules()
        if any(isinstance(part, torch.nn.Conv1d) and part.groups == part.in_channels > 1 for part in module.children())
    ]


def install_recurrent_packs(model: Any) -> int:
    """Wrap the forward methods of `recurrent_layers`, and return their number. Calling it again changes nothing."""
    layers = recurrent_layers(model)
    for kind in {type(layer) for layer in layers}:
        if not hasattr(kind.forward, "unpacked"):
            kind.forward = _in_rows(kind.forward)
    return len(layers)


def _in_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        layout = keywords.pop(KEYWORD, None) or keywords.get(TEXT_OF_TOKEN)
        if not isinstance(layout, Layout):
            return original(self, *args, **keywords)
        if any(keywords.get(name) is not None for name in CACHES) or len(args) > 1:
            raise NotPackable("a recurrent layer with an initial state")
        hidden = args[0] if args else keywords["hidden_states"]
        keywords |= {name: None for name in ("attention_mask", TEXT_OF_TOKEN) if name in keywords}
        keywords.pop("hidden_states", None)
        keys, outputs, places = tokens_of_segments(hidden[0], layout), [], []
        for rows in _text_rows(layout, hidden.device):
            padded = keys.index_select(0, rows.keys.flatten()).view(*rows.keys.shape, -1)
            output = original(self, padded, **keywords)
            if not isinstance(output, Tensor):
                raise NotPackable(f"a recurrent layer that returns {type(output).__name__}")
            outputs.append(output.flatten(0, 1).index_select(0, rows.selected))
            places.append(rows.places)
        order = torch.cat(places).argsort()
        return torch.cat(outputs).index_select(0, order)[None]

    forward.unpacked = original  # type: ignore[attr-defined]
    return forward


def _text_rows(layout: Layout, device: torch.device) -> list[TextRows]:
    """The padded rows of a pack, computed once for each device."""
    cache: dict[torch.device, list[TextRows]] = layout.__dict__.setdefault("recurrent_rows", {})
    if device not in cache:
        cache[device] = [
            TextRows(*(indices.to(device, non_blocking=True) for indices in (rows.keys, rows.selected, rows.places)))
            for rows in _padded_rows(layout)
        ]
    return cache[device]


def _padded_rows(layout: Layout) -> list[TextRows]:
    segments = []  # of each: its first key, its number of keys, its first own key, and that key's index in the pack
    first_key = 0
    for group in layout.groups:
        start = group.start
        for number, length in enumerate(group.lengths):
            keys, own = group.prompt + length, group.prompt if number else 0
            segments.append((first_key, keys, own, start))
            first_key, start = first_key + keys, start + keys - own
    segments.sort(key=lambda segment: -segment[1])
    batches, done = [], 0
    for lengths in in_batches([keys for _, keys, _, _ in segments]):
        batch, done = segments[done : done + len(lengths)], done + len(lengths)
        columns = torch.arange(lengths[0])
        batches.append(
            TextRows(
                torch.stack([first + columns.clamp(max=keys - 1) for first, keys, _, _ in batch]),
                torch.cat([row * lengths[0] + columns[own:keys] for row, (_, keys, own, _) in enumerate(batch)]),
                torch.cat([start + torch.arange(keys - own) for _, keys, own, start in batch]),
            )
        )
    return batches
