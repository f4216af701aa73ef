"""Scores a run's weights on its held-out problems again, in a child process: `python -m kit.runner.evaluate REQUEST`.

Keys of the request: run_dir, overrides (`section.key=value` strings), checkpoint (`best`, `last`, a step, or null for the
run's result) and name (the result is written to eval/NAME.json).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kit.evaluation.checker import build_checker
from kit.runs.lock import held_gpu
from kit.runs.store import RunDir


def evaluate_run(request: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Scores a run's weights with its own data, reward and settings, changed by `overrides`."""
    from kit.runner.console import LogCapture, Reporter
    from kit.runner.trained import open_source

    run, logs, reporter = RunDir(Path(request["run_dir"])), LogCapture(), Reporter(quiet)
    name = request.get("name", "again")
    with held_gpu("an evaluation"), logs.collecting(), logs.written_to(run.log):
        source, _ = open_source(run, request.get("checkpoint"), overrides=request.get("overrides", []))

        from kit.evaluation.heldout import HeldOut
        from kit.models.failures import BatchSizeBackoff
        from kit.runner.prepare import build_reward

        preset = build_reward(source.config)
        checker = build_checker(source.config, preset)
        heldout = source.heldout(HeldOut, source.heldout_rows(), preset, checker, BatchSizeBackoff())
        with reporter.bar(f"Held-out score, {name}") as advance:
            result = heldout.score(source.load(), advance, step=source.step)
        run.write_json(f"eval/{name}.json", result)
        after = run.evaluations().get("after", {})
        same = after.keys() >= {key for key, value in result.items() if isinstance(value, dict)}  # kinds of scores
        reporter.scores(({"after": after} if same else {}) | {name: result})
        reporter.say(f"{result['problems']} problems, weights of step {source.step}: {run.eval / name}.json")
    return result


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(evaluate_run))
