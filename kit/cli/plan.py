"""The verbs `doctor`, `plan` and `model check`: check the machine, a run before it starts, and an architecture."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kit.cli.options import AsJson, Config, Overrides, print_json, print_table
from kit.runs.files import duration, one_line
from kit.runs.worker import environment

if TYPE_CHECKING:
    from kit.model_check.check import Findings

GIB = 1024**3


def doctor(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="Also check whether this configuration will learn.")
    ] = None,
    override: Overrides = None,
    prompts: Annotated[int, typer.Option(min=2, help="Training prompts to sample.")] = 32,
    as_json: AsJson = False,
    root: Annotated[Path | None, typer.Option(help="Folder of the runs.")] = None,
) -> None:
    """Check this machine, and with CONFIG whether the run will learn.

    For that the model is sampled, to measure whether the rewards of the task differ.
    """
    from kit.config import load_config
    from kit.planning.machine import check_machine, failed

    loaded = load_config(config, override or []) if config is not None else None
    folder, model = (loaded.run.root, loaded.model) if loaded is not None else ("runs", None)
    checks = check_machine(root or folder, model)
    result: dict[str, Any] = {"machine": {"failed": failed(checks), "checks": list(map(asdict, checks))}}
    if not as_json:
        print_table(["check", "", "result", "what to do"], [[c.name, c.level, c.result, c.fix] for c in checks])
    if loaded is not None and not failed(checks):
        from kit.planning.signal import check

        result["signal"] = check(loaded, prompts=prompts, progress=not as_json)
        if not as_json:
            _show_signal(result["signal"])
    if as_json:
        print_json(result)
    if failed(checks):
        raise typer.Exit(1)


def plan(
    config: Config,
    override: Overrides = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Plan for this GPU, e.g. 't4' or '16 GB'.")] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Train 2 steps of the worst case here and measure.")] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate memory and time of CONFIG, and settings with which it fits. Exits with 1 if it does not fit or start."""
    from kit.config import load_config
    from kit.planning.plan import find_gpu
    from kit.planning.plan import plan as make_plan

    loaded = load_config(config, override or [])
    name = " ".join([config, *(f"-o {change}" for change in override or [])]) if override else config
    planned_for, measured = find_gpu(gpu) if gpu else None, None
    if probe:
        from kit.planning.probe import probe as measure

        # Before `make_plan`, which takes GPU memory for a CUDA context.
        measured = measure(loaded, progress=not as_json)
    memory_plan = make_plan(loaded, gpu=planned_for)
    if measured is not None:
        memory_plan["seconds_per_step"]["measured"] = measured["seconds"][-1]
        memory_plan["run_seconds"]["steps"] = measured["seconds"][-1] * loaded.optimisation.steps
        memory_plan["hours"] = sum(memory_plan["run_seconds"].values()) / 3600
        memory_plan |= {"time_is": "measured", "probe": measured}
    if as_json:
        print_json(memory_plan)
    else:
        _show_plan(name, memory_plan)
    if not probe and not (memory_plan["fits"] and memory_plan["starts"]):
        raise typer.Exit(1)


def _show_plan(name: str, result: dict[str, Any]) -> None:
    memory = result["memory"]
    rows = [["always", term, _gib(size)] for term, size in memory["always"].items()]
    for phase, terms in memory["phases"].items():
        label = f"{phase} (highest)" if phase == memory["phase"] else phase
        rows += [[label, term, _gib(size)] for term, size in terms.items() if size]
    typer.echo(f"{name}: {result['model']['parameters'] / 1e6:.1f}M weights, on {result['place']}")
    print_table(["phase", "memory", "GiB"], rows)
    verdict = "does not start here" if not result["starts"] else "fits" if result["fits"] else "does not fit"
    typer.echo(f"Peak {_gib(memory['peak_bytes'])} GiB of {_gib(result['room_bytes'])} GiB: {verdict}.")
    if result["is_tight"]:
        typer.echo(
            f"Only {_gib(result['room_bytes'] - memory['peak_bytes'])} GiB stay free, less than the error of the estimate."
        )
    if result["fixes"]:
        typer.echo("This leaves more room:" if result["fits"] else "It fits with:")
    for fix in result["fixes"] or []:
        typer.echo(f"  -o {shlex.quote(fix['override'])}   ({fix['harm']})")
    if result["starts"] and not result["fits"] and not result["fixes"]:
        typer.echo("None of the changes that plan tries makes it fit: choose a smaller model or a larger machine.")
    seconds = result["seconds_per_step"]
    time_is = "Measured" if "measured" in seconds else "Estimated from FLOPs for any engine and backend, often too low"
    if "measured" in seconds or (result["fits"] and result["starts"]):
        step = seconds.get("measured", seconds["step"])
        hours = duration(3600 * result["hours"])
        typer.echo(f"{time_is}: {step:.1f} s per step, {hours} in all, held-out scores included.")
    if "probe" in result:
        typer.echo(f"Measured peak: {_gib(result['probe']['peak_bytes'])} GiB.")
    for note in result["notes"]:
        typer.echo(f"note: {note}")


def _show_signal(signal: dict[str, Any]) -> None:
    from kit.evaluation.results import interval

    rows = [
        [name, interval(signal[name])] for name in signal if isinstance(signal[name], dict) and "low" in signal[name]
    ]
    rows.append(["seconds per batch", "completions {rollout:.1f}, rewards {reward:.1f}".format(**signal["seconds"])])
    print_table([f"{signal['prompts']} prompts x {signal['k']}", "value [95 % interval]"], rows)
    for sample in signal["samples"]:
        reward = "none" if sample["reward"] is None else f"{sample['reward']:.2f}"
        typer.echo(f"Sampled answer to: {one_line(sample['prompt'], 160)}")
        typer.echo(f"  {one_line(sample['completion'], 300)}")
        typer.echo(f"  reward {reward}. {sample['why']}")
    verdict = signal["verdict"]
    typer.echo(f"Verdict: {verdict['verdict']}: {verdict['because']}.")
    if verdict["change"]:
        typer.echo(f"Change: {verdict['change']}")
    if signal.get("thinking"):
        typer.echo(f"note: {signal['thinking']}")


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


model_app = typer.Typer(no_args_is_help=True, help="Models: what an architecture supports.")


@model_app.callback()
def options() -> None:
    """Verbs for models."""


@model_app.command("check")
def model_check(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or a model_type, e.g. qwen3.")],
    weights: Annotated[bool, typer.Option("--weights", help="Use real weights, not a random copy.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the model's repository.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check whether a model trains here. Exits with 1 if it does not.

    Checks forward pass, padding, loss, LoRA, 4-bit, generation and a GRPO step.
    """
    from kit.model_check.check import check_model

    os.environ.update(environment())  # one GPU, as in a run: transformers would use all
    findings = check_model(source, weights=weights, trust_remote_code=trust_remote_code)
    if as_json:
        print_json(findings.as_dict())
    else:
        _show(findings)
    if not findings.trains:
        raise typer.Exit(1)


def _show(findings: Findings) -> None:
    typer.echo(
        f"{findings.source}: {findings.architecture} (model_type {findings.model_type}); weights: {findings.weights}"
    )
    typer.echo(f"tokenizer: {findings.tokenizer}")
    print_table(
        ["property", ""],
        [[name, _text(value)] for name, value in findings.family.items() if value not in (None, [], {})],
    )
    print_table(["support", "", "why"], [list(finding) for finding in findings.findings])
    typer.echo(verdict(findings))


def verdict(findings: Findings) -> str:
    """Whether the model trains, with or without pictures."""
    if not findings.trains:
        return "It does not train; see the failing checks above and docs/models.md."
    if findings.fails_on_pictures:
        return "It trains on text, but not with pictures: see vision above and docs/models.md."
    return "It trains."


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
