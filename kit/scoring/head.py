"""Log-probabilities and entropies of chosen tokens, straight from hidden states, without the (N, V) logits.

The vocabulary is scanned in tiles with running statistics, as in online softmax. Two ways to the gradient:

- frozen head (LoRA on the backbone): the forward folds the tiles into the row gradients d logp/d hidden (N, H), and
  d entropy/d hidden (N, H) if asked for, so that the backward only scales rows. The running sums are rescaled when a
  row meets a larger logit.
- trainable head: the backward recomputes each tile once, and each slice of the weight's gradient is written once.

Every running sum leaves the target out and lets it join at the end: 1 - p(target) is then a sum of small positive
terms instead of a cancelling difference, and stays exact when p(target) is 1 to machine precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kit.errors import EnvironmentUnsupported
from kit.models.libraries import TESTED_TRL

OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
DEFAULT_CHUNK = 8192

LogProbOutputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]

# --- tiles of the (N, V) logits: the projection, the transform, and the walk over vocabulary and rows --------------

TILE_ROWS = 1024
TILE_ELEMENTS = 1 << 21  # 8 MiB of float32 per buffer, two buffers (three with a softcap)


@dataclass(frozen=True)
class Head:
    """The projection and the logit transform: z = softcap(scale * (h @ w.T + b)) / temperature."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V)
    temperature: float
    softcap: float | None
    scale: float
    compute_dtype: torch.dtype  # of the projection
    stat_dtype: torch.dtype  # of everything after it

    @property
    def slope(self) -> float:
        """dz / d(projection), up to the softcap's own slope."""
        return self.scale / self.temperature

    def columns(self, cols: slice) -> tuple[Tensor, Tensor | None]:
        bias = None if self.bias is None else self.bias[cols].to(self.compute_dtype)
        return self.weight[cols].to(self.compute_dtype), bias

    def rows_of(self, targets: Tensor) -> Tensor:
        """(N) -> (N, H), rounded like the columns are."""
        return self.weight[targets].to(self.compute_dtype).to(self.stat_dtype)

    def logits_(self, out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, slope: Tensor | None) -> None:
        """Fill `out` (n, k) with z, and `slope` (n, k), if given, with the softcap's slope 1 - tanh^2."""
        if out.dtype == hidden.dtype:
            torch.mm(hidden, weight.t(), out=out)
            if bias is not None:
                out.add_(bias)
        else:
            projected = torch.mm(hidden, weight.t())
            out.copy_(projected if bias is None else projected.add_(bias))
        if self.softcap is None:
            if self.slope != 1.0:
                out.mul_(self.slope)
            return
        out.mul_(self.scale / self.softcap).tanh_()
        if slope is not None:
            torch.mul(out, out, out=slope).neg_().add_(1.0)
        out.mul_(self.softcap / self.temperature)


class Tiles:
    """Walk over the (N, V) logits, vocabulary outside, so that each slice of the weight is cast once."""

    def __init__(self, head: Head, hidden: Tensor, targets: Tensor, chunk_size: int, with_slope: bool) -> None:
        self.head, self.hidden, self.targets = head, hidden, targets
        self.n, self.vocab = hidden.shape[0], head.weight.shape[0]
        self.rows = max(1, min(self.n, TILE_ROWS))
        self.width = max(1, min(self.vocab, chunk_size, TILE_ELEMENTS // self.rows))
        size = self.rows * self.width
        self.x_buffer = hidden.new_empty(size, dtype=head.stat_dtype)
        self.e_buffer = hidden.new_empty(size, dtype=head.stat_dtype)
        self.slope_buffer = hidden.new_empty(size, dtype=head.stat_dtype) if with_slope else None

    def column_slices(self) -> Iterator[slice]:
        return (slice(start, min(start + self.width, self.vocab)) for start in range(0, self.vocab, self.width))

    def row_slices(self) -> Iterator[slice]:
        return (slice(start, min(start + self.rows, self.n)) for start in range(0, self.n, self.rows))

    def logits(
        self, rows: slice, cols: slice, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """z (n, k), scratch of the same shape, and the softcap's slope where there is one."""
        shape = (rows.stop - rows.start, cols.stop - cols.start)
        count = shape[0] * shape[1]
        x, e = self.x_buffer[:count].view(shape), self.e_buffer[:count].view(shape)
        slope = None if self.slope_buffer is None else self.slope_buffer[:count].view(shape)
        self.head.logits_(x, self.hidden[rows], weight, bias, slope)
        return x, e, slope

    def hits(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """Row and column indices, inside the tile, of the targets that lie in it."""
        local = self.targets[rows] - cols.start
        row = ((local >= 0) & (local < cols.stop - cols.start)).nonzero().squeeze(1)
        return row, local[row]


@dataclass(frozen=True)
class Projection:
    """A language-model head and the hidden states that go through it.

    z = softcap(scale * (hidden @ weight.T + bias)) / temperature, with softcap(a) = softcap * tanh(a / softcap).
    """

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V)
    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    @property
    def transform(self) -> tuple[float, float | None, float]:
        return self.temperature, self.softcap, self.scale

    def bare(self) -> Projection:
        """The head alone, with hidden states of no token."""
        return replace(self, hidden=self.hidden.new_empty(0, self.hidden.shape[-1]))


# --- statistics of every row, and its gradient ---------------------------------------------------------------------


class _Scan:
    """Running statistics of every row, and the row gradients when they are to be stored."""

    def __init__(self, tiles: Tiles, outputs: tuple[str, ...], store_logp: bool, store_entropy: bool) -> None:
        self.tiles, self.outputs = tiles, outputs
        n, hidden_size = tiles.hidden.shape

        def column(value: float = 0.0) -> Tensor:
            return tiles.hidden.new_full((n, 1), value, dtype=tiles.head.stat_dtype)

        self.best = column(torch.finfo(tiles.head.stat_dtype).min)  # max z; finite, so that 0 * rescale is 0
        self.others = column()  # sum of e^(z - best), target left out
        self.shifted = column()  # sum of e^(z - best) * (z - best), target left out
        self.squares = column()  # sum of e^(2 (z - best)), target left out
        self.total = column()  # sum of z
        self.z_target = column()
        self.slope_target = column(1.0)
        self.argmax = torch.full((n, 1), -1, dtype=torch.long, device=tiles.hidden.device)
        shape = (n, hidden_size)
        self.logp_rows = tiles.hidden.new_zeros(shape, dtype=tiles.head.stat_dtype) if store_logp else None
        self.entropy_rows = tiles.hidden.new_zeros(shape, dtype=tiles.head.stat_dtype) if store_entropy else None

    def run(self) -> None:
        for cols in self.tiles.column_slices():
            weight, bias = self.tiles.head.columns(cols)
            values = weight.to(self.tiles.head.stat_dtype) if self.logp_rows is not None else weight
            for rows in self.tiles.row_slices():
                self._fold(rows, cols, weight, bias, values)

    def _fold(self, rows: slice, cols: slice, weight: Tensor, bias: Tensor | None, values: Tensor) -> None:
        x, e, slope = self.tiles.logits(rows, cols, weight, bias)
        hit_row, hit_col = self.tiles.hits(rows, cols)
        self.z_target[rows][hit_row] = x[hit_row, hit_col].unsqueeze(1)
        if slope is not None:
            self.slope_target[rows][hit_row] = slope[hit_row, hit_col].unsqueeze(1)
        if "mean_logits" in self.outputs:
            self.total[rows] += x.sum(1, keepdim=True)
        self._raise_best(rows, cols, x)

        x.sub_(self.best[rows])
        torch.exp(x, out=e)
        e[hit_row, hit_col] = 0.0
        self.others[rows] += e.sum(1, keepdim=True)
        if "log_sum_sq_probs" in self.outputs:
            self.squares[rows] += torch.linalg.vector_norm(e, dim=1, keepdim=True).square_()
        if "entropy" in self.outputs:
            x.mul_(e)
            self.shifted[rows] += x.sum(1, keepdim=True)
        if self.logp_rows is not None:
            self.logp_rows[rows].addmm_(e if slope is None else e.mul_(slope), values)
        if self.entropy_rows is not None:
            self.entropy_rows[rows].addmm_(x if slope is None else x.mul_(slope), values)

    def _raise_best(self, rows: slice, cols: slice, x: Tensor) -> None:
        """Move the sums to the larger of the old and the new maximum m: e^(z-m') = e^(z-m) * e^(m-m')."""
        old = self.best[rows]
        if "is_top1" in self.outputs:
            tile_best, index = x.max(1, keepdim=True)  # the first of equal maxima
            self.argmax[rows] = torch.where(tile_best > old, index + cols.start, self.argmax[rows])
        else:
            tile_best = x.amax(1, keepdim=True)
        new = torch.maximum(old, tile_best)
        shift = old - new  # <= 0
        factor = shift.exp()
        self.best[rows] = new
        # sum of e (x + shift) = sum of e x + shift * sum of e
        self.shifted[rows].addcmul_(self.others[rows], shift).mul_(factor)
        self.others[rows].mul_(factor)
        self.squares[rows].mul_(factor * factor)
        if self.entropy_rows is not None and self.logp_rows is not None:
            self.entropy_rows[rows].addcmul_(self.logp_rows[rows], shift).mul_(factor)
        if self.logp_rows is not None:
            self.logp_rows[rows].mul_(factor)

    def finish(self) -> LogProbOutputs:
        """Let the target join the sums; the outputs are (N)."""
        x_target = self.z_target - self.best  # <= 0
        e_target = x_target.exp()
        self.sum_exp = self.others + e_target
        is_best = x_target >= 0
        log_sum = torch.where(is_best, torch.log1p(self.others), torch.log(self.sum_exp))
        self.mean_shifted = (self.shifted + e_target * x_target) / self.sum_exp  # E[z - best]
        self._finish_rows(x_target, e_target)

        logps = (x_target - log_sum).squeeze(1)
        entropy = log_sq = mean = top1 = None
        if "entropy" in self.outputs:
            entropy = (log_sum - self.mean_shifted).squeeze(1)
        if "log_sum_sq_probs" in self.outputs:
            log_sq = (torch.log(self.squares + e_target.square()) - 2 * log_sum).squeeze(1)
        if "mean_logits" in self.outputs:
            mean = (self.total / self.tiles.vocab).squeeze(1)
        if "is_top1" in self.outputs:
            top1 = self.argmax.squeeze(1) == self.tiles.targets
        return logps, entropy, log_sq, mean, top1

    def _finish_rows(self, x_target: Tensor, e_target: Tensor) -> None:
        if self.logp_rows is None:
            return
        head = self.tiles.head
        scale = head.slope / self.sum_exp
        for rows in self.tiles.row_slices():
            w_target = head.rows_of(self.tiles.targets[rows])  # (n, H)
            logp_rows = self.logp_rows[rows]
            if self.entropy_rows is not None:
                # dH/dz_j = -p_j (log p_j + H) = -p_j (x_j - E[x]), as x = z - best is log p plus a constant
                centred = x_target[rows] - self.mean_shifted[rows]
                entropy_rows = self.entropy_rows[rows].addcmul_(logp_rows, self.mean_shifted[rows], value=-1.0)
                entropy_rows.addcmul_(centred * e_target[rows] * self.slope_target[rows], w_target)
                entropy_rows.mul_(-scale[rows])
            # dlogp/dz_target = 1 - p_target = others / sum, dlogp/dz_j = -p_j
            logp_rows.neg_().addcmul_(self.others[rows] * self.slope_target[rows], w_target).mul_(scale[rows])


class ChunkedLogProb(torch.autograd.Function):
    """Per-token statistics of softmax(z), z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature.

    Takes the place of TRL's Triton function on any device, with the same call:
    `apply(hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)`, and
    one argument more.

    Args:
        hidden: (N, H).
        weight: (V, H).
        bias: (V) or None.
        targets: (N), token ids in [0, V).
        temperature: divides the logits, last.
        chunk_size: upper limit of a tile's width in vocabulary entries.
        final_logit_softcapping: cap * tanh(z / cap), or None.
        logit_scale: multiplies the projection, first.
        outputs: which of `OPTIONAL_OUTPUTS` to compute; the others are None. Other names are ignored.
        entropy_gradient: whether the entropy is differentiable. With a frozen head that costs one more matrix product per
            tile and one more (N, H) buffer, and the forward cannot see whether a loss will use it.

    Returns:
        (logps, entropy, log_sum_sq_probs, mean_logits, is_top1), each (N). Nats; float32, or float64 for float64
        inputs. Only logps and entropy are differentiable, once, with respect to hidden, weight and bias.

    Raises:
        IndexError: a target lies outside the vocabulary.
    """

    @classmethod
    def apply(cls, hidden: Tensor, *args: Any) -> LogProbOutputs:
        # Inside `forward` the grad mode is always off and `needs_input_grad` ignores it: without this, row gradients
        # would be stored under `no_grad` too.
        source = hidden if torch.is_grad_enabled() else hidden.detach()
        result: LogProbOutputs = super().apply(source, *args)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,
        entropy_gradient: bool = True,
    ) -> LogProbOutputs:
        ctx.set_materialize_grads(False)
        if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < weight.shape[0]:
            raise IndexError(f"targets must lie in [0, {weight.shape[0]}), saw {targets.min()} to {targets.max()}")
        device = hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        stat = torch.float64 if compute == torch.float64 else torch.float32
        head = Head(weight, bias, temperature, final_logit_softcapping, logit_scale, compute, stat)

        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        store = needs_hidden and not (needs_weight or needs_bias)
        keep_entropy = "entropy" in outputs and entropy_gradient
        with torch.autocast(device, enabled=False):
            with_slope = store and final_logit_softcapping is not None
            tiles = Tiles(head, hidden.to(compute), targets, chunk_size, with_slope)
            scan = _Scan(tiles, outputs, store_logp=store, store_entropy=store and keep_entropy)
            scan.run()
            results = scan.finish()

        ctx.hidden_dtype, ctx.stored = hidden.dtype, store
        if store:
            ctx.save_for_backward(scan.logp_rows, scan.entropy_rows)
        elif needs_weight or needs_bias:
            ctx.head_args = (temperature, final_logit_softcapping, logit_scale, compute, stat)
            ctx.chunk_size = chunk_size
            ctx.save_for_backward(hidden, weight, bias, targets, results[0], scan.best, scan.sum_exp, scan.mean_shifted)
        constant = results[2:] if keep_entropy else results[1:]
        ctx.mark_non_differentiable(*(value for value in constant if value is not None))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_logps is None and grad_entropy is None:
            return (None,) * 10
        if not ctx.stored:
            return (*_recompute_gradients(ctx, grad_logps, grad_entropy), *(None,) * 7)
        grad_hidden = None
        for grad, rows in zip((grad_logps, grad_entropy), ctx.saved_tensors, strict=True):
            if grad is not None:
                part = grad.unsqueeze(1) * rows  # (N, 1) * (N, H)
                grad_hidden = part if grad_hidden is None else grad_hidden.add_(part)
        assert grad_hidden is not None
        return (grad_hidden.to(ctx.hidden_dtype), *(None,) * 9)


def _recompute_gradients(
    ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, one tile of d loss/d projection at a time, summed in `stat_dtype`."""
    hidden, weight, bias, targets, logps, best, sum_exp, mean_shifted = ctx.saved_tensors
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    head = Head(weight, bias, *ctx.head_args)
    stat = head.stat_dtype
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=stat) if needs_hidden else None
    grad_weight = torch.empty_like(weight) if needs_weight else None
    grad_bias = torch.empty_like(bias) if needs_bias else None
    on_logp = torch.zeros_like(best) if grad_logps is None else grad_logps.to(stat).unsqueeze(1)
    on_entropy = None if grad_entropy is None else grad_entropy.to(stat).unsqueeze(1)
    miss = -torch.expm1(logps).unsqueeze(1)  # 1 - p_target

    with torch.autocast(hidden.device.type, enabled=False):
        tiles = Tiles(head, hidden.to(head.compute_dtype), targets, ctx.chunk_size, head.softcap is not None)
        inputs = tiles.hidden.to(stat)
        for cols in tiles.column_slices():
            w, b = head.columns(cols)
            values = w.to(stat)
            weight_sum, bias_sum = torch.zeros_like(values), values.new_zeros(values.shape[0])
            for rows in tiles.row_slices():
                x, grad, slope = tiles.logits(rows, cols, w, b)
                hit = tiles.hits(rows, cols)
                torch.exp(x.sub_(best[rows]), out=grad).mul_(-head.slope / sum_exp[rows])  # -p, scaled
                # d loss/dz_j = on_logp (1[j = target] - p_j) - on_entropy p_j (x_j - E[x])
                at_target = head.slope * (on_logp * miss)[rows][hit[0]].squeeze(1)
                if on_entropy is None:
                    grad.mul_(on_logp[rows])
                else:
                    x.sub_(mean_shifted[rows]).mul_(on_entropy[rows])
                    at_target = at_target + grad[hit] * x[hit]
                    grad.mul_(x.add_(on_logp[rows]))
                grad[hit] = at_target
                if slope is not None:
                    grad.mul_(slope)
                if grad_hidden is not None:
                    grad_hidden[rows].addmm_(grad, values)
                if grad_weight is not None:
                    weight_sum.addmm_(grad.t(), inputs[rows])
                if grad_bias is not None:
                    bias_sum.add_(grad.sum(0))
            if grad_weight is not None:
                grad_weight[cols] = weight_sum
            if grad_bias is not None:
                grad_bias[cols] = bias_sum
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def token_logps_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = True,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target and entropy of each next-token distribution, without (N, V) logits.

    Args:
        hidden: (N, H) last hidden states, the row for position t predicting the token at t + 1.
        weight: (V, H) of the language-model head.
        targets: (N) token ids in [0, V); drop masked positions before the call.
        bias: (V) of the head, or None.
        temperature: the sampler's; divides the logits after scale and softcap.
        softcap: `final_logit_softcapping` of Gemma-like models, or None.
        logit_scale: multiplier of the projection, before the softcap.
        entropy: whether to compute the entropy as well.
        entropy_gradient: whether it is differentiable, or a constant, which costs less.

    Returns:
        logps (N) and entropy (N) or None, in nats: float32, or float64 for float64 inputs. Both are differentiable
        once, with respect to hidden, weight and bias; N = 0 gives empty tensors that are still differentiable.

    Raises:
        IndexError: a target lies outside the vocabulary.
    """
    outputs = ("entropy",) if entropy else ()
    logps, entropies, *_ = ChunkedLogProb.apply(
        hidden, weight, bias, targets, temperature, DEFAULT_CHUNK, softcap, logit_scale, outputs, entropy_gradient
    )
    return logps, entropies


# --- under TRL's fused head -------------------------------------------------------------------------------------------

_NAME = "_ChunkedLogProbFunction"


@dataclass
class HeadRequest:
    """What a scoring pass asks of the head beyond TRL's arguments, and what it is shown."""

    entropy_gradient: bool = True
    keep: bool = False
    seen: Projection | None = None  # the head and the hidden states (N, H) that it was given, if they are kept


# The head is reached through the model's own forward pass, which has no argument for it.
_request: ContextVar[HeadRequest | None] = ContextVar("head_request", default=None)


@contextmanager
def asking_head(entropy_gradient: bool = True, *, keep: bool = False) -> Iterator[HeadRequest]:
    """Inside, the head that a forward pass ends in is asked for this.

    entropy_gradient: whether entropies carry a gradient. TRL asks for entropies on every step, mostly to log them; with a
    frozen head their gradient costs a matrix product more a tile. keep: the hidden states that go into it.
    """
    request = HeadRequest(entropy_gradient, keep)
    token = _request.set(request)
    try:
        yield request
    finally:
        _request.reset(token)


class LogProbDispatcher:
    """Has the `apply` that TRL calls: the GPU kernel for CUDA tensors if there is one, else `ChunkedLogProb`.

    Does what `asking_head` asks for.
    """

    def __init__(self, gpu_kernel: Any | None) -> None:
        self.gpu_kernel = gpu_kernel

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,
        *rest: Any,
    ) -> LogProbOutputs:
        request = _request.get() or HeadRequest()
        if request.keep:
            request.seen = Projection(hidden, weight, bias, temperature, final_logit_softcapping, logit_scale)
        args = (weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
        if hidden.device.type == "cuda" and self.gpu_kernel is not None:
            result: LogProbOutputs = self.gpu_kernel.apply(hidden, *args, *rest)
            return result
        return ChunkedLogProb.apply(hidden, *args, request.entropy_gradient)


def install_torch_logprob_kernel() -> None:
    """Install the dispatcher under TRL's fused head for the rest of the process; calling it again changes nothing.

    Call it after `import unsloth`, if that is used: Unsloth's own CUDA kernel is then the one that is dispatched to.

    Raises:
        EnvironmentUnsupported: this TRL has no such head.
    """
    module = _trl_module()
    current = getattr(module, _NAME)
    if not isinstance(current, LogProbDispatcher):
        setattr(module, _NAME, LogProbDispatcher(current))


def _trl_module() -> ModuleType:
    import trl
    from trl.trainer import utils

    for name in (_NAME, "add_fused_lm_head"):
        if hasattr(utils, name):
            continue
        raise EnvironmentUnsupported(
            f"trl {trl.__version__} has no trainer.utils.{name}; grpo-kit was tested with trl {TESTED_TRL}.*. "
            "Install trl>=1.15,<1.16."
        )
    module: ModuleType = utils
    return module
