"""Presets: weighted components, optional gates, and the check that shaping cannot outweigh correctness."""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from rewards.errors import PresetError, nearest
from rewards.evaluation import Evaluation, run_component
from rewards.protocol import Component, Context, Sample, Score, shown

if TYPE_CHECKING:
    from rewards.adaptors import EasyR1Reward, TrlRewards, VerlReward

T = TypeVar("T")


class Weighted(NamedTuple):
    """A component and its weight in a preset."""

    component: Component
    weight: float


def weighted(*parts: tuple[Component, float]) -> list[Weighted]:
    """Return the components whose weight is not 0."""
    return [Weighted(component, weight) for component, weight in parts if weight != 0]


class Gate(NamedTuple):
    """A condition between two components: `then` is evaluated only if `first` passed. Both are names."""

    first: str
    then: str


def gate(first: str | Component, then: str | Component) -> Gate:
    """Evaluate `then` only if `first` passed, which means status `ok` and a value above its floor.

    If `first` did not pass, `then` scores its floor with the status of `first` (`wrong` if that is `ok`). If `first` is
    `infra`, `then` is `infra` as well. If `first` is `not_applicable`, `then` is evaluated.
    """
    return Gate(*(part if isinstance(part, str) else part.name for part in (first, then)))


class Preset:
    """Weighted components that score a completion together.

    Args:
        components: pairs (component, weight); the total is the sum of native values times weights.
        name: name of the preset in errors and tables.
        gates: see `gate`.
        checker: name of the component whose status `ok` means "correct" in held-out evaluation, or None.
        thinking_opened: whether the chat template ends the prompt with an open `<think>`; None checks the end of each
            prompt.
        allow_shaping_above_correctness: accept weights with which the other components together could outweigh the
            checker.

    Raises:
        PresetError: no components, repeated names, an unusable weight or range, gates that name unknown components or
            form a cycle, or shaping that could outweigh correctness.
    """

    def __init__(
        self,
        components: Sequence[tuple[Component, float]],
        *,
        name: str = "custom",
        gates: Sequence[Gate] = (),
        checker: str | None = None,
        thinking_opened: bool | None = None,
        allow_shaping_above_correctness: bool = False,
    ) -> None:
        self.name = name
        self.thinking_opened = thinking_opened
        self.components = [Weighted(*pair) for pair in pairs(components, "component")]
        self.gates = tuple(gates)
        self.checker = checker
        self.allow_shaping_above_correctness = allow_shaping_above_correctness
        for problem in _problems(self):
            raise PresetError(problem)
        self._order = _evaluation_order(self)

    @property
    def itemwise(self) -> bool:
        """Whether every score depends on one completion alone, so that a batch may be scored in parts."""
        return all(getattr(component, "itemwise", False) for component, _ in self.components)

    @property
    def weights(self) -> dict[str, float]:
        """Weight by component name, in the order of `components`."""
        return {component.name: weight for component, weight in self.components}

    def __repr__(self) -> str:
        return f"Preset({self.name!r}: {self.parts})"

    @property
    def parts(self) -> str:
        """Components and their weights as text: `accuracy x 1, format x 0.1`."""
        return ", ".join(f"{name} x {weight:g}" for name, weight in self.weights.items())

    def score(self, samples: Sequence[Sample], ctx: Context | None = None) -> Evaluation:
        """Score B samples by every component. Never raises: failures of components become statuses."""
        ctx = ctx or Context()
        return self.evaluation(self.scores(samples, ctx), samples, ctx)

    def scores(self, samples: Sequence[Sample], ctx: Context) -> dict[str, list[Score]]:
        """Return the B scores of every component, by name, for `evaluation`. Never raises, like `score`."""
        samples = self._with_thinking(samples)
        scores: dict[str, list[Score]] = {}
        for component in self._order:
            firsts = [
                next(c for c, _ in self.components if c.name == g.first) for g in self.gates if g.then == component.name
            ]
            scores[component.name] = _run_gated(component, firsts, scores, samples, ctx)
        return {component.name: scores[component.name] for component, _ in self.components}

    def evaluation(self, ordered: dict[str, list[Score]], samples: Sequence[Sample], ctx: Context) -> Evaluation:
        """Return the evaluation of B samples from their `scores`, which may be computed in parts."""
        weights = self.weights
        totals: list[float | None] = []
        for row in zip(*ordered.values(), strict=True):
            terms = [w * s.value for w, s in zip(weights.values(), row, strict=True) if s.value is not None]
            totals.append(math.fsum(terms) if terms else None)
        tokens = {n: [s.token_values for s in c] for n, c in ordered.items() if any(s.token_values for s in c)}
        return Evaluation(
            weights=weights,
            values={name: [s.value for s in column] for name, column in ordered.items()},
            statuses={name: [s.status for s in column] for name, column in ordered.items()},
            infos={name: [s.info for s in column] for name, column in ordered.items()},
            latencies={name: [s.seconds or 0.0 for s in column] for name, column in ordered.items()},
            totals=totals,
            groups=[sample.group_id for sample in samples],
            token_values=tokens,
            token_rewards=_token_rewards(weights, tokens, samples) if tokens else None,
        )

    def is_correct(self, samples: Sequence[Sample], ctx: Context | None = None) -> list[bool]:
        """Return whether each completion is correct, which means status `ok` of the checker.

        Raises:
            PresetError: the preset has no checker.
        """
        return [score.status == "ok" for score in self.verdicts(samples, ctx)]

    def verdicts(self, samples: Sequence[Sample], ctx: Context | None = None) -> list[Score]:
        """Return the checker's score of each completion; status `ok` means correct.

        Raises:
            PresetError: the preset has no checker.
        """
        component = next((c for c, _ in self.components if c.name == self.checker), None)
        if component is None:
            raise PresetError(
                f"Preset {self.name!r} has no checker, the component that decides correctness. "
                f"Pass checker=, one of: {', '.join(self.weights)}."
            )
        return run_component(component, self._with_thinking(samples), ctx or Context())

    def _with_thinking(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the samples with `thinking_opened` of the preset, if it is None in the sample."""
        if self.thinking_opened is None:
            return samples
        return [
            sample if sample.thinking_opened is not None else replace(sample, thinking_opened=self.thinking_opened)
            for sample in samples
        ]

    def trl(self, *, seed: int = 0, reference_column: str | None = None, strict: bool = True) -> "TrlRewards":
        """Return reward functions for TRL's GRPOTrainer, with `reward_weights`; see `rewards.adaptors.TrlRewards`."""
        from rewards.adaptors import TrlRewards

        return TrlRewards.from_preset(self, seed=seed, reference_column=reference_column, strict=strict)

    def easyr1(self, *, seed: int = 0) -> "EasyR1Reward":
        """Return a reward function for EasyR1, batched or sequential; see `rewards.adaptors.EasyR1Reward`."""
        from rewards.adaptors import EasyR1Reward

        return EasyR1Reward(self, seed=seed)

    def verl(self, *, seed: int = 0, as_dict: bool = True) -> "VerlReward":
        """Return a `compute_score` for verl; see `rewards.adaptors.VerlReward`."""
        from rewards.adaptors import VerlReward

        return VerlReward(self, seed=seed, as_dict=as_dict)


def combine(presets: Sequence[tuple[Preset, float]]) -> Preset:
    """Return a preset with the components and gates of several presets; weights are multiplied by the preset's factor.

    The checker is that of the first preset that has one. A component with a repeated name is renamed `preset.component`.

    Raises:
        PresetError: see `Preset`, for example if the other components could outweigh the checker.
    """
    parts: list[Weighted] = []
    gates: list[Gate] = []
    checker = None
    weighted_presets = pairs(presets, "preset")
    for preset, factor in weighted_presets:
        names: dict[str, str] = {}
        for component, weight in preset.components:
            name = component.name
            if any(part.component.name == name for part in parts):
                component = copy.copy(component)
                object.__setattr__(component, "name", f"{preset.name}.{name}")
            names[name] = component.name
            parts.append(Weighted(component, weight * factor))
        gates += [Gate(names[inner.first], names[inner.then]) for inner in preset.gates]
        if checker is None and preset.checker is not None:
            checker = names[preset.checker]
    return Preset(
        parts,
        name=" + ".join(preset.name for preset, _ in weighted_presets),
        gates=gates,
        checker=checker,
        thinking_opened=weighted_presets[0][0].thinking_opened,
        allow_shaping_above_correctness=any(preset.allow_shaping_above_correctness for preset, _ in weighted_presets),
    )


def pairs(parts: Iterable[tuple[T, float]], kind: str) -> list[tuple[T, float]]:
    """Return pairs (part, weight) as a list; `kind` (component, preset, function) names the parts in the message.

    Raises:
        PresetError: `parts` is not a list of pairs or is empty, or a weight is not a number.
    """
    try:
        weighted_parts = [(part, float(weight)) for part, weight in parts]
    except (TypeError, ValueError):
        weighted_parts = []
    if not weighted_parts:
        raise PresetError(
            f"{shown(parts)} is not a list of ({kind}, weight). Pass at least one such pair: [({kind}, 1.0)]."
        )
    return weighted_parts


def _run_gated(
    component: Component,
    firsts: Sequence[Component],
    scores: dict[str, list[Score]],
    samples: Sequence[Sample],
    ctx: Context,
) -> list[Score]:
    if not firsts:
        return run_component(component, samples, ctx)
    blocked: dict[int, Score] = {}
    for first in firsts:
        for position, score in enumerate(scores[first.name]):
            if score.status == "not_applicable" or (
                score.status == "ok" and score.value is not None and score.value > first.floor
            ):
                continue
            status = "wrong" if score.status == "ok" else score.status
            value = None if status == "infra" else component.floor
            blocked[position] = Score(value, status, {"reason": f"gated by {first.name}"}, 0.0)
    open_positions = [position for position in range(len(samples)) if position not in blocked]
    evaluated = run_component(component, [samples[position] for position in open_positions], ctx)
    merged = {**blocked, **dict(zip(open_positions, evaluated, strict=True))}
    return [merged[position] for position in range(len(samples))]


def _token_rewards(
    weights: dict[str, float], tokens: dict[str, list[Sequence[float] | None]], samples: Sequence[Sample]
) -> list[list[float]]:
    """Return one list per completion: for each token the weighted sum over components, 0 without token values."""
    rows: list[list[float]] = []
    for position, sample in enumerate(samples):
        weighted_values = [
            (weights[name], values) for name, column in tokens.items() if (values := column[position]) is not None
        ]
        length = (
            sample.n_tokens if sample.n_tokens is not None else max((len(v) for _, v in weighted_values), default=0)
        )
        rows.append([math.fsum(w * v[i] for w, v in weighted_values if i < len(v)) for i in range(length)])
    return rows


def _evaluation_order(preset: Preset) -> list[Component]:
    """Return the components, each one after those that gate it."""
    remaining = [component for component, _ in preset.components]
    order: list[Component] = []
    while remaining:
        pending = {component.name for component in remaining}
        ready = [c for c in remaining if not any(g.then == c.name and g.first in pending for g in preset.gates)]
        if not ready:
            raise PresetError(f"Gates form a cycle through {', '.join(sorted(pending))}. Remove one of them.")
        order += ready
        remaining = [component for component in remaining if component not in ready]
    return order


def _problems(preset: Preset) -> Iterator[str]:
    """Yield the reasons why a preset is not usable, each with the change to make."""
    for component, _ in preset.components:
        if isinstance(component, type) or not isinstance(component, Component):
            yield (
                f"{shown(component)} is not a component. Pass an instance of a component class, or a function as "
                "from_function(function, weight=1.0)."
            )
    for each in preset.gates:
        if not isinstance(each, Gate):
            yield f"{shown(each)} is not a gate. Write gate('format', 'accuracy')."
    names = list(preset.weights)
    if preset.checker is not None and not isinstance(preset.checker, str):
        yield f"The checker is {shown(preset.checker)}. Pass the name of a component: {', '.join(names)}."
    if len(names) < len(preset.components):
        repeated = sorted(set(n for n, count in Counter(c.name for c, _ in preset.components).items() if count > 1))
        yield f"Component names must differ; {', '.join(repeated)} is repeated. Pass name= to one of them."
    for component, weight in preset.components:
        if not math.isfinite(weight):
            yield f"Weight of {component.name!r} is {weight}. Pass a finite number."
        if not (math.isfinite(component.floor) and component.low <= component.floor <= component.high):
            yield (
                f"{component.name!r} has floor {component.floor} outside its range [{component.low}, {component.high}]."
                " Set floor between low and high."
            )
    for role, name in [("gate", n) for g in preset.gates for n in g] + [("checker", preset.checker)]:
        if name is not None and name not in names:
            yield f"The {role} names {name!r}, which is not a component of the preset. {nearest(name, names)}"
    checker = preset.checker
    if checker is None or preset.allow_shaping_above_correctness:
        return
    if preset.weights[checker] <= 0:
        yield f"Weight of the checker {checker!r} is {preset.weights[checker]:g}. Pass a positive weight."
    spans = {c.name: abs(weight) * (c.high - c.low) if weight else 0.0 for c, weight in preset.components}
    shaping = {name: span for name, span in spans.items() if name != checker}
    if sum(shaping.values()) > spans[checker] + 1e-12:
        parts = " + ".join(f"{name} {span:g}" for name, span in shaping.items())
        yield (
            f"Shaping could outweigh correctness: {parts} = {sum(shaping.values()):g} (|weight| x range) against "
            f"{checker} {spans[checker]:g}, so a wrong answer could beat a right one. Lower the shaping weights, raise "
            f"{checker}'s, declare low= and high= where a range is unbounded, or pass allow_shaping_above_correctness=True."
        )
