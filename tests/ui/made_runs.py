"""Run directories written by hand with the contents of the Run and Compare screens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from study_runs import common_metrics

from kit.config import load_config
from kit.runs.store import RunDir, RunStore

MESSAGE = "The KL divergence to the reference policy jumped to 0.4 nats per token."


def line(step: int, steps: int) -> dict[str, Any]:
    """The metrics of a step, with as many keys as in a real run."""
    up, (wave, common) = 1 - math.exp(-4 * step / steps), common_metrics(step)
    metrics = common | {
        "reward": 0.2 + 0.7 * up + 0.05 * wave,
        "rewards/accuracy/mean": up,
        "entropy": 1 - 0.5 * up,
        "seconds/generation": 1.0 + wave,
        "seconds/rewards": 0.25,
        "seconds/scoring": 0.0,
        "seconds/update": 0.5,
        "seconds/saving": 1.0 if step % 10 == 0 else 0.0,
        "seconds/other": 0.25,
        "memory/process": 1.5,
        "tokens/per_second": 900 + wave,
    }
    return metrics | {f"other/{number}": wave for number in range(30)}


def score(share: float, step: int, problems: int = 40) -> dict[str, Any]:
    """An evaluation in which `share` of the problems was solved."""
    right = [place < share * problems for place in range(problems)]
    value = sum(right) / problems
    spread = {"value": value, "low": max(0.0, value - 0.1), "high": min(1.0, value + 0.1)}
    return {
        "step": step, "problems": problems, "k": 4, "temperature": 1.0, "seed": 0, "checker": "exact",
        "greedy_accuracy": spread, "pass@1": spread, "greedy_reward": spread,
        "per_problem": {
            "id": [f"{place:016x}" for place in range(problems)],
            "greedy_correct": right, "sampled_correct": [4 * solved for solved in right],
            "greedy_reward": [float(solved) for solved in right], "greedy_tokens": [20] * problems,
            "sampled_tokens_mean": [20.0] * problems,
        },
    }  # fmt: skip


def batch(folder: Path, step: int, prompts: list[str], group: int = 4, text: str = "<answer>{0}</answer>") -> Path:
    """The completions of one step: the second half of each group is right, and all of the last prompt are."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, prompt in enumerate(prompts):
        for place in range(group):
            right = float(place >= group // 2 or number == len(prompts) - 1)
            rows.append({
                "step": step, "prompt": prompt, "reference": "4", "completion": text.format(place),
                "tokens": 5 + place, "finish_reason": "length" if place == 0 else "stop",
                "advantage": 0.0 if number == len(prompts) - 1 else (1.0 if right else -1.0),
                "reward/accuracy": right, "reward/format": 1.0,
                "reward/accuracy/status": "timeout" if place == 1 and not right else "ok" if right else "wrong",
                "reward/accuracy/extracted": str(place), "reward/format/status": "ok",
            })  # fmt: skip
    path = folder / f"step-{step:05d}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def make(root: Path, run_id: str = "one", steps: int = 20, *, share: float = 0.8, state: str = "finished",
         overrides: tuple[str, ...] = ()) -> RunDir:  # fmt: skip
    """Write a finished run."""
    run = RunStore(root).create(run_id)
    names = [f"optimisation.steps={steps}", f"run.id={run_id}", f"run.root={root}", "generation.num_generations=4"]
    run.write_text("config.yaml", load_config("quickstart", [*names, *overrides]).to_yaml())
    run.write_json("data.json", {"source": "sums", "sha256": "ab" * 32})
    run.write_json("env.json", {"python": "3.11", "trainer_arguments": {"reward_weights": [1.0, 0.2]}})
    run.metrics_file.write_text("".join(json.dumps(line(step, steps)) + "\n" for step in range(1, steps + 1)))
    run.write_json("eval/before.json", score(0.1, 0))
    run.write_json("eval/after.json", score(share, steps))
    for step in (1, steps):
        batch(run.completions, step, ["2 + 2 =", "3 + 1 ="])
    run.append_event("alert", step=steps // 2, name="kl_spike", severity="warning", message=MESSAGE)
    run.append_event("checkpoint", step=steps)
    run.log.write_text("a line of the log\n")
    run.write_status(state, step=steps, total_steps=steps, exit=0)
    return run
