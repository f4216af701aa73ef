"""Reward functions as components: TRL's `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, and others.

Parameter names identify verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` and EasyR1's
`compute_score(reward_inputs)`. A path `file.py:function` or `package.module:function` may replace a function.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

from rewards.errors import FunctionPathError, nearest
from rewards.preset import Preset, Weighted, pairs
from rewards.protocol import Component, Context, Sample, Score, failure_reason, shown
from rewards.samples import REFERENCE_COLUMNS, completion_text, prompt_text


def load_function(path: str, *, base: Path | None = None) -> Callable[..., Any]:
    """Load the function at `file.py:function` or `package.module:function`. A file is executed again after it changes.

    Args:
        base: folder of relative files; by default the current directory.

    Raises:
        FunctionPathError: `path` has another form, the file or module is missing or fails to load, or it has no such
            function; the message lists its functions.
    """
    source, _, name = path.rpartition(":")
    if not source or not name.isidentifier():
        raise FunctionPathError(
            f"{path!r} is not a path to a function. Write file.py:function or package.module:function."
        )
    if source.endswith(".py"):
        module = _load_file((base or Path.cwd()) / source)
    else:
        _search_last(Path.cwd())
        try:
            module = importlib.import_module(source)
        except (Exception, SystemExit) as failure:
            raise FunctionPathError(
                f"Module {source!r} cannot be imported: {failure_reason(failure)}. "
                "For a file, write its path with .py: my_rewards.py:function."
            ) from failure
    function = getattr(module, name, None)
    if function is None:
        defined = (key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
        public = [key for key in defined if callable(vars(module)[key]) and not key.startswith("_")]
        raise FunctionPathError(f"{source} has no function {name!r}. {nearest(name, public)}")
    if not callable(function):
        raise FunctionPathError(f"{path} is of type {type(function).__name__}, not a function. Name a function.")
    result: Callable[..., Any] = function
    return result


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        near = difflib.get_close_matches(file.name, [each.name for each in file.parent.glob("*.py")], n=1, cutoff=0.7)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise FunctionPathError(f"there is no file {file}. A path is relative to the current folder.{hint}")
    # A module name per file, so that two files named rewards.py replace neither each other nor this package.
    name = f"user_file_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    previous, version = sys.modules.get(name), (file.stat().st_mtime_ns, file.stat().st_size)
    if previous is not None and vars(previous).get("__version_of_file__") == version:
        return previous
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise FunctionPathError(f"{file} cannot be loaded as a Python file.")
    _search_last(file.parent)
    module = importlib.util.module_from_spec(spec)
    vars(module)["__version_of_file__"] = version
    sys.modules[name] = module  # dataclasses and pickle look the module up during its execution
    try:
        spec.loader.exec_module(module)
    except BaseException as failure:
        del sys.modules[name]
        if previous is not None:
            sys.modules[name] = previous
        if not isinstance(failure, Exception | SystemExit):
            raise
        raise FunctionPathError(f"{file} fails to load: {failure_reason(failure)}") from failure
    return module


def _search_last(folder: Path) -> None:
    """Make modules in `folder` importable, after installed modules of the same name."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


RewardFunction: TypeAlias = Callable[..., Any]


RETRY_SECONDS = 1.0
"""Longest failed call that is repeated with half of the groups. A server that does not answer would be waited for repeatedly."""


class FunctionComponent:
    """A reward function, sync or async, as a component.

    The function receives the arguments that its signature names, or all of them if it has `**kwargs`: prompts, completions,
    completion_ids, the dataset columns, `reference`, and further arguments of the trainer. A value of at least `high` (1 if
    `high` is not declared) is `ok`, a lower value is `wrong` and partial credit. None is `not_applicable`; a value outside a
    declared range is an `error`. If the function raises within a second, it is called again with each half of the groups, so
    that only the groups on which it raises are an `error`. A list instead of a value contains process rewards, one number
    for each token of the completion: it becomes `token_values`, with the value 0.
    """

    version = "1"

    def __init__(
        self,
        function: RewardFunction | str,
        *,
        name: str | None = None,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        self.path = function if isinstance(function, str) else None
        self.function = _for_trl(load_function(function) if isinstance(function, str) else function)
        if not callable(self.function):
            raise FunctionPathError(f"A reward function must be callable or a path to one, got {self.function!r}.")
        inner = _unwrapped(self.function)
        self.name = name or str(getattr(inner, "__name__", type(inner).__name__))
        self.low = _declared(self.function, "low", low, -math.inf)
        self.high = _declared(self.function, "high", high, math.inf)
        self.floor = self.low if math.isfinite(self.low) else min(0.0, self.high)

    def __repr__(self) -> str:
        return f"FunctionComponent({self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Pickle a function that was loaded from a path as the path; unpickling loads it again."""
        return {key: value for key, value in self.__dict__.items() if key != "function" or self.path is None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.path is not None:
            self.function = _for_trl(load_function(self.path))

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        token_columns: dict[str, list[Any]] = {
            "prompt_ids": [sample.prompt_ids for sample in samples],
            "logps": [sample.logps for sample in samples],
            "completion_ids": [sample.token_ids for sample in samples],
        }
        references = [sample.reference for sample in samples]
        arguments = {  # as TRL passes them; columns hold one value per sample
            "trainer_state": SimpleNamespace(global_step=ctx.step, max_steps=ctx.total_steps),
            **ctx.extras,
            **({"reference": references} if any(reference is not None for reference in references) else {}),
            **{
                name: [s.columns.get(name) for s in samples] for name in sorted({n for s in samples for n in s.columns})
            },
            "completion_ids": None,
            **{name: column for name, column in token_columns.items() if all(value is not None for value in column)},
            "prompts": [sample.prompt for sample in samples],
            "completions": [sample.text if sample.messages is None else sample.messages for sample in samples],
        }
        started = time.perf_counter()
        try:
            result = self.function(**_accepted(self.function, arguments))
            result = _wait_for(result) if inspect.isawaitable(result) else result
            if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
                raise TypeError(f"it returned {shown(result)}. Return a list with one number per completion")
            values = list(result)
        except Exception as failure:
            starts = [at for at in range(1, len(samples)) if samples[at].group_id != samples[at - 1].group_id]
            if not starts or time.perf_counter() - started > RETRY_SECONDS:
                prompt = prompt_text(samples[0].prompt)
                shown_prompt = prompt if len(prompt) <= 60 else f"...{prompt[-60:]}"
                reason = f"{failure_reason(failure)} (prompt: {shown_prompt!r})"
                return [Score(None, "error", {"reason": reason})] * len(samples)
            half = starts[len(starts) // 2]
            return [*self.score(samples[:half], ctx), *self.score(samples[half:], ctx)]
        if len(values) != len(samples):
            raise ValueError(f"{self.name!r} returned {len(values)} rewards for {len(samples)} completions")
        return [self._score(value) for value in values]

    def _score(self, value: Any) -> Score:
        if value is None:
            return Score(None, "not_applicable")
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return Score(min(max(0.0, self.low), self.high), "ok", token_values=value)
        try:
            number = float(value)
        except Exception:  # __float__ of any object may raise any error
            return Score(None, "error", {"reason": f"not a number: {shown(value)}"})
        if math.isnan(number) or math.isinf(number):
            return Score(None, "error", {"reason": f"not a finite number: {number}"})
        if not self.low <= number <= self.high:
            return Score(None, "error", {"reason": f"{number} is outside the declared range [{self.low}, {self.high}]"})
        return Score(number, "ok" if number >= (self.high if math.isfinite(self.high) else 1.0) else "wrong")


def from_function(
    fn: RewardFunction | str,
    name: str | None = None,
    weight: float = 1.0,
    *,
    low: float | None = None,
    high: float | None = None,
) -> Weighted:
    """Return a (component, weight) pair for a `Preset` from a function or a path to a function.

    Args:
        fn: a function of TRL's, verl's or EasyR1's convention, sync or async; or its path, see `load_function`.
        name: name of the component; by default the name of the function.
        weight: factor of the value in the weighted sum.
        low, high: range of the values; by default the attributes `low` and `high` of the function, else unbounded. A
            preset with a checker accepts only bounded shaping.

    Raises:
        FunctionPathError: the path cannot be loaded, or `fn` is not callable.
    """
    return Weighted(FunctionComponent(fn, name=name, low=low, high=high), weight)


def from_functions(
    functions: Sequence[tuple[RewardFunction | Component | str, float]],
    *,
    base: Preset | None = None,
    name: str = "functions",
    checker: str | None = None,
    allow_shaping_above_correctness: bool = False,
) -> Preset:
    """Return a preset of functions, or `base` with functions added.

    Args:
        functions: pairs (function, weight); a component or a path may replace the function.
        base: preset to extend; its gates and checker stay.
        name: name of the preset in errors and tables.
        checker: component that decides correctness; by default the checker of `base`, or a single function.
        allow_shaping_above_correctness: see `Preset`.

    Raises:
        FunctionPathError: a path cannot be loaded.
        PresetError: see `Preset`.
    """
    added = [
        Weighted(function, weight) if isinstance(function, Component) else from_function(function, weight=weight)
        for function, weight in pairs(functions, "function")
    ]
    names = [component.name for component, _ in (base.components if base else [])] + [c.name for c, _ in added]
    for component, _ in added:
        if isinstance(component, FunctionComponent) and names.count(component.name) > 1:
            file = component.path and Path(component.path.rpartition(":")[0]).stem
            module = file or str(getattr(_unwrapped(component.function), "__module__", "function"))
            component.name = f"{module.rpartition('.')[2]}.{component.name}"
    components = [*(base.components if base else []), *added]
    if checker is None:
        checker = base.checker if base else added[0].component.name if len(added) == 1 else None
    return Preset(
        components,
        name=base.name if base else name,
        gates=base.gates if base else (),
        thinking_opened=base.thinking_opened if base else None,
        checker=checker,
        allow_shaping_above_correctness=allow_shaping_above_correctness,
    )


def _for_trl(function: RewardFunction) -> RewardFunction:
    """Return a function of TRL's convention; parameter names identify functions of verl and EasyR1, which are wrapped."""
    names = set(_parameters(function) or ())
    if {"solution_str", "ground_truth"} <= names or {"solution_strs", "ground_truths"} <= names:
        return functools.partial(_called_by_verl, function)
    if names & {"reward_inputs", "reward_input"}:
        return functools.partial(_called_by_easyr1, function)
    return function


def _called_by_verl(function: RewardFunction, completions: Sequence[Any], **columns: Any) -> Any:
    texts, truths, size = [completion_text(each) for each in completions], _truths(columns), len(completions)
    sources, extras = (columns.get(name) or [None] * size for name in ("data_source", "extra_info"))
    extras = [dict(each) if isinstance(each, Mapping) else {} for each in extras]
    if "solution_str" not in (_parameters(function) or ()):  # called by the batch manager
        arguments = {"data_sources": sources, "solution_strs": texts, "ground_truths": truths, "extra_infos": extras}
        return _numbers(function(**_accepted(function, arguments)), "score")
    rows = zip(sources, texts, truths, extras, strict=True)
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    return _numbers([function(**_accepted(function, dict(zip(names, row, strict=True)))) for row in rows], "score")


def _called_by_easyr1(function: RewardFunction, completions: Sequence[Any], **columns: Any) -> Any:
    tokens = columns.get("completion_ids")
    rows = []
    for index, (completion, truth) in enumerate(zip(completions, _truths(columns), strict=True)):
        text = completion_text(completion)
        length = len(text.split()) if tokens is None else len(tokens[index])
        rows.append({"response": text, "response_length": length, "ground_truth": truth})
    if "reward_inputs" in (_parameters(function) or ()):
        return _numbers(function(rows), "overall")
    return _numbers([function(row) for row in rows], "overall")


def _truths(columns: Mapping[str, Any]) -> Sequence[Any]:
    truths: Sequence[Any] | None = next(
        (columns[name] for name in ("ground_truth", *REFERENCE_COLUMNS) if name in columns), None
    )
    if truths is None:
        listed = ", ".join(sorted(columns)) or "none"
        raise ValueError(f"no column ground_truth, {', '.join(REFERENCE_COLUMNS)}; columns of this batch: {listed}")
    return truths


def _numbers(scores: Sequence[Any], key: str) -> Any:
    """Return the number of each score; a coroutine if the scores come from an async function."""

    async def awaited() -> Any:
        import asyncio

        return _numbers(await asyncio.gather(*scores), key)

    if any(inspect.isawaitable(score) for score in scores):
        return awaited()
    return [score.get(key) if isinstance(score, Mapping) else score for score in scores]


def _accepted(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the signature names, or all of them if it has `**kwargs` or cannot be inspected."""
    parameters = _parameters(function)
    if parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def _parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def _wait_for(awaitable: Any) -> Any:
    """Run an awaitable to completion in another thread, because this thread may run an event loop."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    async def finish() -> Any:
        return await awaitable

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, finish()).result()


def _unwrapped(function: RewardFunction) -> Any:
    while isinstance(function, functools.partial):
        function = function.args[0] if function.func in (_called_by_verl, _called_by_easyr1) else function.func
    return function


def _declared(function: RewardFunction, attribute: str, argument: float | None, default: float) -> float:
    value = getattr(_unwrapped(function), attribute, None) if argument is None else argument
    return float(value) if isinstance(value, int | float) else default
