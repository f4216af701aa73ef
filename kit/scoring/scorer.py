"""Scores completions in the way that costs least and is exact for the model at hand.

The way of a model is found at its first rows:

    packed    rows without padding, behind one another, a prompt that several completions share only once
    plain     TRL's layout, as it comes, or with the padding behind

What the configuration tells is asked first. Then a few short rows, made of the first real ones, are scored in TRL's layout,
with more padding than they need, and in the other: both must give the same log-probabilities. In a pack nothing may
pass from one completion to another: when the tokens of one change, the scores of all others must not.

Everything with inputs beside text is scored plainly. `Scorer.report` says which way it is, and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from kit.models.failures import first_line, raise_fatal
from kit.models.family import FamilyAdapter
from kit.models.fused import Fused
from kit.scoring.layouts import (
    COUNTS,
    ModelPass,
    Rows,
    Scores,
    Wanted,
    score_packs,
    score_padded,
    score_right_padded,
)
from kit.scoring.packed_attention import EAGER, WRAPPED, Layout, install_packed_attention, install_packed_eager
from kit.scoring.packing import NotPackable, lay_out
from kit.scoring.recurrent_packs import install_recurrent_packs
from kit.scoring.unsloth_packs import has_unsloths_layers, install_in_layers
from kit.scoring.unsloth_packs import install as install_unsloth_packs

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
log = logging.getLogger("kit")


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
