"""What a run stood on: configuration, objective, data, machine, and how to do it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from kit.config import RunConfig
from kit.report import html
from kit.report.comparison import shorten
from kit.report.record import Record, Tree
from kit.report.scale import number
from kit.runs.secrets import redacted

HOOKS = ("advantage", "clip", "weights", "regularizers", "reduction")
MAIN_PACKAGES = ("grpo-kit", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "reasoning-gym", "vllm")


def configuration(record: Record) -> Markup:
    """What differs from the defaults, the objective by its parts, and everything folded."""
    if not record.config:
        return html.paragraph("The configuration is not on record.", "note")
    import yaml

    changed = list(differences(record.config))
    parts: list[str] = [html.paragraph("What differs from the defaults; the full configuration is below.", "note")]
    parts.append(
        html.table(["key", "value", "default"], changed, kind="stack") if changed else html.paragraph("Nothing.")
    )
    if objective := _objective(record):
        parts += [
            Markup("<h3>Objective</h3>"),
            html.table(["part", "hook with its hyper-parameters"], objective, kind="facts"),
        ]
    text = yaml.safe_dump(redacted(record.config), sort_keys=False, allow_unicode=True, width=100)
    parts.append(html.details("Full configuration (YAML)", html.pre(text)))
    return html.join(parts)


def differences(config: Tree) -> Iterator[list[str]]:
    """Key, value and default of what was set otherwise; the objective's hooks, which every run spells out, aside."""
    defaults = dict(_flat(RunConfig().model_dump(mode="json")))
    for key, value in _flat(redacted(config)):
        if key in ("run.id", "run.root"):  # names, which change nothing
            continue
        if key.removeprefix("objective.").partition(".")[0] in HOOKS and key.startswith("objective."):
            continue
        if key not in defaults or value != defaults[key]:
            yield [key, shorten(_written(value), 400), _written(defaults[key]) if key in defaults else "–"]


def _flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value and not prefix.startswith(("data.task_params", "reward.params")):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _objective(record: Record) -> list[list[str]]:
    rows = [["recipe", str(record.value("objective.recipe"))]] if record.value("objective.recipe") else []
    for part in HOOKS:
        value = record.value(f"objective.{part}")
        hooks = value if isinstance(value, list) else [value] if value else []
        if hooks:
            rows.append([part, "; ".join(_call(hook) for hook in hooks)])
    return rows


def _call(hook: Any) -> str:
    if not isinstance(hook, dict):
        return str(hook)
    values = ", ".join(f"{key}={_written(value)}" for key, value in hook.items() if key != "name")
    name = hook.get("name", "the recipe’s")
    return f"{name}({values})" if values else str(name)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def data(record: Record) -> Markup:
    """Where the rows came from, how many there were, and the hash that tells whether they are still the same."""
    info = redacted(record.data)
    if not info:
        return html.paragraph("Nothing is on record about the data.", "note")
    counts, task = info.get("rows") or {}, info.get("task") or {}
    rows: list[list[str | Markup]] = [["source", str(info.get("source"))]]
    rows += [[key, str(info[key])] for key in ("subset", "split", "revision") if info.get(key)]
    if task:
        rows.append(["task", f"{task.get('name')} {_written(task.get('params') or {})}, seed {task.get('seed')}"])
    rows.append(["rows", ", ".join(f"{number(n, 9)} {key.replace('_', ' ')}" for key, n in counts.items() if n)])
    rows.append(["content hash (SHA-256)", html.code(str(info.get("sha256")))])
    mapping = info.get("mapping") or {}
    rows.append(["columns", f"prompt from '{mapping.get('prompt')}', reference from '{mapping.get('reference')}'"])
    rows += [["note", str(note)] for note in info.get("notes") or []]
    bad = info.get("bad_rows") or []
    rows += [["left out", f"row {row.get('row')}: {row.get('reason')}"] for row in bad[:3] if isinstance(row, dict)]
    return html.facts(rows)


def environment(record: Record) -> Markup:
    """Packages, machine, seeds and the commit."""
    env = redacted(record.env)
    if not env:
        return html.paragraph("Nothing is on record about the environment.", "note")
    backend, seeds = env.get("backend") or {}, env.get("seeds") or {}
    rows: list[list[str | Markup]] = [
        ["device", str(env.get("gpu") or backend.get("device")) + (f", CUDA {env['cuda']}" if env.get("cuda") else "")],
        [
            "backend",
            f"{backend.get('name')} ({backend.get('reason')})" if backend.get("reason") else str(backend.get("name")),
        ],
        ["threads", str(env.get("threads"))],
        ["Python", f"{env.get('python')} on {env.get('platform')}"],
        ["packages", ", ".join(f"{name} {version}" for name, version in (env.get("packages") or {}).items())],
        ["seeds", ", ".join(f"{name.replace('_', ' ')} {seed}" for name, seed in seeds.items())],
        ["code", _code(env.get("git"))],
    ]
    arguments = json.dumps(env.get("trainer_arguments") or {}, indent=1, ensure_ascii=False)
    return html.join([html.facts(rows), html.details("Effective trainer arguments (JSON)", html.pre(arguments))])


def _code(git: Any) -> str | Markup:
    if not isinstance(git, dict) or not git.get("commit"):
        return "installed package"
    dirty = ", with changes that were not committed: the exact code is not on record" if git.get("dirty") else ""
    return Markup("commit {}{}").format(html.code(str(git["commit"])), dirty)


def reproduce(record: Record) -> Markup:
    """The command that trains the same again, and what it takes for the numbers to be the same."""
    packages = record.env.get("packages") or {}
    commit = (record.env.get("git") or {}).get("commit")
    names = [name for name in MAIN_PACKAGES if name in packages and not (commit and name == "grpo-kit")]
    again = f"{record.id[:58].rstrip('-')}-again"
    lines = [f"git checkout {commit}"] if commit else []
    lines += ["pip install " + " ".join(f"{name}=={packages[name]}" for name in names)] if names else []
    lines.append(shlex.join(["grpo-kit", "train", "config.yaml", "-o", f"run.id={again}"]))
    own = [str(each) for each in _own_files(record.config)]
    parts: list[str] = [
        html.paragraph("Save the full configuration above as config.yaml (it lies in the run's directory, too), then:"),
        html.pre("\n".join(lines)),
    ]
    if own:
        parts.append(
            html.paragraph(f"The configuration names files that are not part of it: {', '.join(own)}.", "note")
        )
    parts.append(
        html.paragraph(
            "The same seed gives the same numbers in float32 on a CPU with the same packages and number of threads, as long as "
            "the data's hash is the same. On a GPU kernels sum in changing order; expect the same course, not the same digits.",
            "note",
        )
    )
    return html.join(parts)


def _own_files(tree: Any) -> Iterator[str]:
    """Texts of the form `file.py:function` anywhere in the configuration."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from _own_files(value)
    elif isinstance(tree, str) and ".py:" in tree:
        yield tree
