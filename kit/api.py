"""The Python face: `kit.train(...)` starts a run in a process of its own, `Run` reads what it left on disk. No torch.

A run's directory is the only truth; a `Run` holds nothing but the path to it, so it can be made again at any time:
`kit.Run("quickstart-20260101-120000").plot()`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kit.errors import ConfigError, RunError
from kit.registry import did_you_mean
from kit.runs.child import Outcome, call
from kit.runs.store import RunDir, RunStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kit.config import RunConfig

TRAINER = "kit.train"
EVALUATOR = "kit.evaluation.heldout"
SHORTCUTS = {"steps": "optimisation.steps", "seed": "run.seed", "objective": "objective", "run_id": "run.id"}


class Run:
    """A run by its id: live while it trains, and afterwards. Raises `RunError` when there is none of that id."""

    def __init__(self, id: str, root: str | Path = "runs") -> None:
        self._dir: RunDir = RunStore(root).open(id)
        self.id = id

    def __repr__(self) -> str:
        status = self.status
        step, total = status.get("step"), status.get("total_steps")
        parts = [self.id, str(status["state"])]
        if step is not None:
            parts.append(f"step {step}/{total}" if total else f"step {step}")
        rewards = [line["reward"] for line in self.metrics() if line.get("reward") is not None]
        if rewards:
            parts.append(f"reward {rewards[-1]:.3f}")
        return f"<Run {', '.join(parts)}, in {self.path}>"

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self._dir.path

    @property
    def status(self) -> dict[str, Any]:
        """State, step, heartbeat and so on; a run whose process died reads `interrupted`."""
        return self._dir.status()

    def metrics(self) -> list[dict[str, Any]]:
        """One mapping a logged step, oldest first."""
        return self._dir.metrics()

    def events(self) -> list[dict[str, Any]]:
        """Phases, checkpoints and alerts, oldest first."""
        return self._dir.events()

    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Held-out scores by name: `before`, `step-00050` and so on, `after`, then any others."""
        from kit.figures import step_of

        found: dict[str, dict[str, Any]] = {}
        last = 2**62  # `after` comes behind every step, and names without a step behind it

        def place(path: Path) -> tuple[int, str]:
            step = step_of(path.stem, last)
            return (last + 1 if step is None else step), path.stem

        for path in sorted(self._dir.eval.glob("*.json"), key=place):
            try:
                found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise RunError(f"{path} cannot be read: {error}. Remove it and evaluate again.") from error
        return found

    def completions(self, step: int | None = None) -> list[dict[str, Any]]:
        """Saved completions with their rewards, of one step or of all; empty when none were saved."""
        import pyarrow.parquet as pq

        rows: list[dict[str, Any]] = []
        for path in sorted(self._dir.completions.glob("*.parquet")):
            try:
                rows += pq.read_table(path).to_pylist()
            except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
                raise RunError(f"{path} cannot be read: {error}.") from error
        return rows if step is None else [row for row in rows if row.get("step") == step]

    def plot(self, path: str | Path | None = None) -> Figure:
        """Reward, held-out accuracy, completion length, KL and entropy over steps, as far as there are any.

        Saves the figure to `path` when given (.png, .svg, .pdf). Raises `RunError` when there is nothing to draw yet.
        """
        from kit.figures import draw

        return draw(self.id, self.metrics(), self.evaluations(), path)

    def evaluate(self, **overrides: Any) -> dict[str, Any]:
        """Scores the trained model on held-out rows again, in a process of its own, and returns the scores.

        `overrides` are keys of the configuration's evaluation section: `run.evaluate(prompts=50, k=8)`. Raises
        `KitError` for a mistake of the user's, `RunError` when the process crashes.
        """
        request = {"run_dir": str(self.path.resolve()), "overrides": overrides}
        outcome = call(EVALUATOR, request, capture=True)
        if outcome.error is not None:
            raise outcome.error
        lines = outcome.output.strip().splitlines()
        if not lines:
            raise RunError(f"The evaluation of {self.id} was stopped before it had a result.")
        result: dict[str, Any] = json.loads(lines[-1])
        return result


def train(
    config: str | Path | Mapping[str, Any] | RunConfig = "quickstart",
    *,
    overrides: Sequence[str] = (),
    progress: bool = True,
    **shortcuts: Any,
) -> Run:
    """Trains in a process of its own, waits for it, and returns the run, finished or stopped by Ctrl-C.

    Args:
        config: a preset's name, a YAML file, a mapping, or a `RunConfig`.
        overrides: `section.key=value` strings, as on the command line.
        progress: let the process print its progress.
        shortcuts: `steps` (optimiser steps), `seed`, `objective` (a recipe's name, or a mapping like the objective
            section; either way it takes the place of the whole section), `run_id`.

    Raises:
        KitError: the kind of error that the user made, before or during the run.
        RunError: the training process crashed.
    """
    run, outcome = launch(prepare(config, overrides, **shortcuts), quiet=not progress)
    if outcome.error is not None:
        raise outcome.error
    if run is None:
        raise RunError("The run was stopped before it had begun; nothing was written.")
    return run


def prepare(
    config: str | Path | Mapping[str, Any] | RunConfig, overrides: Sequence[str] = (), **shortcuts: Any
) -> RunConfig:
    """The configuration with shortcuts and overrides applied, and with a run id. Raises `ConfigError`."""
    from kit.config import load_config

    unknown = [name for name in shortcuts if name not in SHORTCUTS]
    if unknown:
        hint = did_you_mean(unknown[0], SHORTCUTS)
        raise ConfigError(
            f"train() has no argument '{unknown[0]}'.{hint} It has: config, overrides, progress, "
            f"{', '.join(SHORTCUTS)}. Any other key goes by overrides=['section.key=value']."
        )
    given = {name: value for name, value in shortcuts.items() if value is not None}
    resolved = load_config(config, [*_as_overrides(given), *overrides])
    if resolved.run.id is None:
        stem = Path(config).stem if isinstance(config, (str, Path)) else "run"
        resolved.run.id = RunStore(resolved.run.root).new_id(stem)
    return resolved


def _as_overrides(shortcuts: Mapping[str, Any]) -> list[str]:
    if isinstance(shortcuts.get("objective"), str):
        shortcuts = {**shortcuts, "objective": {"recipe": shortcuts["objective"]}}
    try:
        return [f"{SHORTCUTS[name]}={json.dumps(value)}" for name, value in shortcuts.items()]
    except TypeError:
        raise ConfigError(
            "A shortcut of train() must be a plain value. objective= takes a recipe's name or a mapping such as "
            "{'recipe': 'dapo', 'clip': {'eps_high': 0.28}}; hooks of your own go by 'file.py:function'."
        ) from None


def launch(config: RunConfig, *, quiet: bool = False) -> tuple[Run | None, Outcome]:
    """Runs a prepared configuration, and says how it ended; the run is None when it never got a directory."""
    assert config.run.id is not None, "prepare() gives every run an id"
    outcome = call(TRAINER, {"config": config.model_dump(mode="json")}, quiet=quiet)
    try:
        return Run(config.run.id, config.run.root), outcome
    except RunError:
        return None, outcome


class CallableModule(ModuleType):
    """Lets `kit.train` be called although importing the file kit/train.py binds the module to that very name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Run:
        return train(*args, **kwargs)
