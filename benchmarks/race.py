"""Racing: what share of the steps finds the best of 8 arms, and how often the best one is dropped.

    python benchmarks/race.py simulate [--races 2000]        error rate and steps on made-up learning curves, without a model
    python benchmarks/race.py train [--root FOLDER]          one real race: 8 learning rates on the quickstart's task
    python benchmarks/race.py full [--root FOLDER]           the same 8 arms, all trained to the end, to see who is the best

Results go to benchmarks/results/race.json, the tables into docs/sweep.md. `train` and `full` go on where they were
stopped; `full` makes what the results lack.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kit.studies.race import Evidence, dropped

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/race.json", ROOT / "docs/sweep.md"
BEGIN, END = "<!-- measured: benchmarks/race.py -->", "<!-- end of measured -->"
ARMS, LOOKS, PROBLEMS, SAMPLES, START = 8, 11, 200, 4, 0.2
"""The defaults of an evaluation, at every twelfth of a run; a look at the end is no test."""
SPREAD = np.array([0.75, 0.70, 0.65, 0.60, 0.50, 0.40, 0.30, 0.20])
CASES: dict[str, dict[str, Any]] = {
    "all alike": {"final": np.full(ARMS, 0.6)},
    "one is 0.25 better": {"final": np.array([0.75] + [0.5] * 7)},
    "one is 0.10 better": {"final": np.array([0.6] + [0.5] * 7)},
    "one is 0.10 better, 8 samples a problem": {"final": np.array([0.6] + [0.5] * 7), "samples": 8},
    "scores of 0.75, 0.70, 0.65, 0.60, 0.50, 0.40, 0.30, 0.20": {"final": SPREAD},
    "one is 0.02 better": {"final": np.array([0.62] + [0.6] * 7)},
    "the best one learns four times as slowly": {"final": SPREAD, "speed": np.array([1.0] + [0.25] * 7)},
    "wrong on purpose: the same completions at every look, all alike": {"final": np.full(ARMS, 0.6), "fresh": False},
}
LEARNING_RATES = [3.0e-6, 1.0e-5, 3.0e-5, 1.0e-4, 3.0e-4, 1.0e-3, 3.0e-3, 1.0e-2]
STEPS, EVERY = 24, 4


def means(t: float, final: Any, speed: Any) -> Any:
    """Expected score of each arm after the share t of its training: an exponential approach to its final one."""
    return START + (final - START) * (1 - np.exp(-t / speed))


def chances(look: int, hardness: Any, final: Any, speed: Any) -> Any:
    """(arms, problems): how likely each arm solves each problem. Problems differ in difficulty, alike for all arms."""
    mean = means(look / (LOOKS + 1), final, speed)
    return 1 / (1 + np.exp(-(1.2 * np.log(mean / (1 - mean))[:, None] + hardness)))


def one_race(
    rng: np.random.Generator, final: Any, speed: Any, *, fresh: bool, samples: int, error: float = 0.05
) -> Any:
    """The look at which each arm is dropped (LOOKS + 1: never)."""
    evidence, left, out = Evidence(ARMS), list(range(ARMS)), np.full(ARMS, LOOKS + 1)
    hardness, once = rng.normal(0, 1, PROBLEMS), rng.random((ARMS, PROBLEMS, samples))
    for look in range(1, LOOKS + 1):
        draws = rng.random((ARMS, PROBLEMS, samples)) if fresh else once
        scores = (draws < chances(look, hardness, final, speed)[..., None]).mean(axis=-1)
        evidence.see(left, scores[left])
        gone = dropped(evidence, left, error)
        out[gone] = look
        left = [arm for arm in left if arm not in gone]
        if len(left) == 1:
            break
    return out


def all_known(rng: np.random.Generator, final: Any, speed: Any, *, samples: int, error: float = 0.05) -> Any:
    """As `one_race`, by a gambler who knows all chances: whom to bet on, and the stake for which capital grows fastest.

    No test that bets on differences does better: what `Evidence` needs beyond it is the price of not knowing.
    """
    hardness, capital, out = rng.normal(0, 1, PROBLEMS), np.zeros(ARMS), np.full(ARMS, LOOKS + 1)
    for look in range(1, LOOKS + 1):
        chance = chances(look, hardness, final, speed)
        scores, apart = rng.binomial(samples, chance) / samples, chance[0] - chance
        spread = (chance * (1 - chance) + chance[0] * (1 - chance[0])) / samples
        stake = np.clip(apart.mean(axis=1) / (spread + apart**2).mean(axis=1), 0, 0.95)
        capital += np.log1p(stake[:, None] * (scores[0] - scores)).sum(axis=1)
        out[(capital >= -np.log(error)) & (out > LOOKS)] = look
    return out


def simulate(races: int) -> list[dict[str, Any]]:
    """One row a case. An arm that is alone goes on to the end, which is counted."""
    rows = []
    for name, case in CASES.items():
        rng = np.random.default_rng(0)
        final, speed, samples = case["final"], case.get("speed", 0.25), case.get("samples", SAMPLES)
        fresh = case.get("fresh", True)
        found = np.array([one_race(rng, final, speed, fresh=fresh, samples=samples) for _ in range(races)])
        least = np.array([all_known(rng, final, speed, samples=samples) for _ in range(races)])
        row = {
            "case": name,
            "races": races,
            "best_dropped": float((found[:, 0] <= LOOKS).mean()),
            "decided": float(((found > LOOKS).sum(axis=1) == 1).mean()),
            "steps": float((found / (LOOKS + 1)).mean()),
            "steps_all_known": float((least / (LOOKS + 1)).mean()) if fresh and "speed" not in case else None,
            "fastest_tenth": float(np.quantile((found / (LOOKS + 1)).mean(axis=1), 0.1)),
            "slowest_tenth": float(np.quantile((found / (LOOKS + 1)).mean(axis=1), 0.9)),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def arms(root: Path, rates: list[float], *, race: bool) -> dict[str, Any]:
    """A sweep over learning rates on the quickstart's task: how it ended, arm by arm."""
    from kit.studies.sweep import carry_out
    from kit.studies.sweep_config import SweepConfig, check

    sweep = SweepConfig.model_validate({
        "name": "race" if race else "full",
        "config": "quickstart",
        "overrides": [
            f"optimisation.steps={STEPS}", f"evaluation.every={EVERY}", "evaluation.before=false", "run.threads=1",
            "run.save_completions=false", "evaluation.keep_best=false", f"run.save_every={STEPS}",
            *([] if race else ["evaluation.seed=null", f"evaluation.every={STEPS}"]),
        ],
        "trials": len(rates),
        "sampler": {"name": "grid"},
        "metric": "pass@1",
        "race": race,
        "space": {"optimisation.learning_rate": rates},
    })  # fmt: skip
    check(sweep)
    found = carry_out(sweep, root)
    rows = [
        {
            "learning_rate": row["params"]["optimisation.learning_rate"],
            **{key: row[key] for key in ("state", "value", "step", "reason")},
        }
        for row in found["trials"]
    ]
    rows.sort(key=lambda row: row["learning_rate"])
    kept = {key: found["race"][key] for key in ("steps", "steps_of_all", "error")} if race else {}
    return {"arms": rows, "best": found["best"]["params"]["optimisation.learning_rate"], **kept}


def simulated_table(rows: list[dict[str, Any]]) -> str:
    """What docs/sweep.md shows of the simulation."""
    lines = [
        "| eight arms | the best was dropped | one was left "
        "| steps, of all to the end (a tenth below, above) | if all were known |"
    ]
    lines += ["|---|---|---|---|---|"]
    for row in rows:
        steps = f"{row['steps']:.2f} ({row['fastest_tenth']:.2f}, {row['slowest_tenth']:.2f})"
        least = "" if row["steps_all_known"] is None else f"{row['steps_all_known']:.2f}"
        lines.append(f"| {row['case']} | {row['best_dropped']:.1%} | {row['decided']:.0%} | {steps} | {least} |")
    return "\n".join(lines)


def trained_table(race: dict[str, Any], full: dict[str, Any] | None) -> str:
    """What docs/sweep.md shows of the real race, beside all arms trained to the end where that was done."""
    end = {row["learning_rate"]: f"{row['value']:.3f}" for row in full["arms"]} if full else {}
    lines = ["| learning rate | in the race | pass@1 then | pass@1 at the end, without a race |", "|---|---|---|---|"]
    for row in race["arms"]:
        ended = f"dropped at step {row['step']}" if row["state"] == "pruned" else f"went on to step {row['step']}"
        whole = end.get(row["learning_rate"], "not measured")
        lines.append(f"| {row['learning_rate']:g} | {ended} | {row['value']:.3f} | {whole} |")
    return "\n".join(lines)


def tables(found: dict[str, Any]) -> list[str]:
    """All that docs/sweep.md shows, of what there is."""
    shown = [simulated_table(found["simulated"])] if "simulated" in found else []
    if "race" in found:
        share = found["race"]["steps"] / found["race"]["steps_of_all"]
        words = f"The race trained {found['race']['steps']} of {found['race']['steps_of_all']} steps ({share:.0%})."
        shown += [trained_table(found["race"], found.get("full")), words]
    return shown


def write(found: dict[str, Any]) -> None:
    """Files the results, and puts the tables into the page."""
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    page = PAGE.read_text(encoding="utf-8")
    if BEGIN in page:
        head, rest = page.split(BEGIN)
        PAGE.write_text(
            head + BEGIN + "\n" + "\n\n".join(tables(found)) + "\n" + END + rest.split(END)[1], encoding="utf-8"
        )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("simulate", "train", "full"))
    parser.add_argument("--races", type=int, default=2000)
    parser.add_argument("--rates", type=float, nargs="+", default=LEARNING_RATES, help="learning rates of full")
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "race")
    given = parser.parse_args(arguments)
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if given.what == "simulate":
        found["simulated"] = simulate(given.races)
    elif given.what == "train":
        found["race"] = arms(given.root, LEARNING_RATES, race=True)
    else:
        full = found.setdefault("full", {"arms": []})
        for rate in given.rates:
            if rate not in {row["learning_rate"] for row in full["arms"]}:
                full["arms"] += arms(given.root / f"{rate:g}", [rate], race=False)["arms"]
                full["arms"].sort(key=lambda row: row["learning_rate"])
                write(found)
    write(found)


if __name__ == "__main__":
    main(sys.argv[1:])
