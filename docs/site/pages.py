"""Reference pages that are generated from the code when the site is built: keys, verbs, hooks, reward presets, files."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]

INTRODUCTION = """# Configuration

One YAML file (or a mapping in Python, or the web form) describes a run. Every key is optional. `grpo-kit init run.yaml`
writes this page as a file to edit, `grpo-kit validate run.yaml` checks it, and `-o section.key=value` changes any key from
the command line. An unknown key is refused with the nearest valid name.
"""


def configuration() -> str:
    """Every key with its default, range and meaning, section by section."""
    from kit.config import RunConfig

    return "\n".join([INTRODUCTION, *_section(RunConfig(), "", 2)])


def _section(section: Any, prefix: str, level: int) -> Iterator[str]:
    from kit.config import Section
    from kit.config.schema import document, valid_values

    fields = type(section).model_fields
    nested = {name: value for name in fields if isinstance(value := getattr(section, name), Section)}
    rows = []
    for name, field in fields.items():
        if name in nested:
            continue
        meaning = document(field).removesuffix(f" [{valid_values(field)}]")
        default = section.model_dump(mode="json", include={name})[name]
        rows.append(f"| `{prefix}{name}` | `{_written(default)}` | {_cell(valid_values(field))} | {_cell(meaning)} |")
    if rows:
        yield from ("| key | default | values | meaning |", "|---|---|---|---|", *rows, "")
    for name, value in nested.items():
        yield from (f"{'#' * level} {prefix}{name}", "", _cell(type(value).__doc__ or ""), "")
        yield from _section(value, f"{prefix}{name}.", level + 1)


def command_line() -> str:
    """Every verb with its arguments and options."""
    from typer.main import get_command

    from kit.cli.app import app

    parts = [
        "# Command line",
        "",
        f"{app.info.help}",
        "",
        "Exit codes: 0 success, 1 crash, 2 user error, 130 Ctrl-C.",
        "",
    ]
    return "\n".join([*parts, *_verbs(get_command(app), "grpo-kit")])


def _verbs(group: Any, path: str) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{path} {name}")
            continue
        usage = command.make_context(f"{path} {name}", [], resilient_parsing=True).get_usage().removeprefix("Usage: ")
        yield from (f"## {path} {name}", "", command.help or "", "", "```text", usage, "```", "")
        options = [p for p in command.params if p.param_type_name == "option" and not p.hidden and p.name != "help"]
        if options:
            yield from ("| option | default | meaning |", "|---|---|---|", *map(_option, options), "")


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    default = option.default
    shown = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
    return f"| {names} | {shown} | {_cell(option.help or '')} |"


HOOK_KINDS = {
    "advantage": "From the rewards (N,) of a batch of completions: one advantage per completion (N,) or per token (N, T).",
    "clip": "Per-token surrogate loss (B, T), to be minimised.",
    "weight": "Multiplier (B, T) of the clip, detached from the graph.",
    "regularizer": "Penalty (B, T) or scalar, added to the loss times `coef`. Logged without the coefficient.",
    "reduction": "From the per-token loss (B, T) to the scalar loss.",
}


def hooks() -> str:
    """Every recipe, hook, schedule and controller, from their registrations."""
    from kit import objective
    from kit.cli.objective import _call, _call_of
    from kit.objective.recipes import recipe, recipe_names
    from kit.objective.schedules import schedules

    parts = ("advantage", "clip", "reduction")
    lines = [
        "# Recipes and hooks",
        "",
        "The same on the command line: `grpo-kit objective list`, `grpo-kit objective show NAME`. Symbols are explained in",
        "[The objective](../objective.md#symbols).",
        "",
        "## Recipes",
        "",
        "| recipe | advantage | clip | reduction | other parts |",
        "|---|---|---|---|---|",
    ]
    for name in recipe_names():
        spec = recipe(name)
        terms = [_call(term) for key in ("weights", "regularizers") for term in spec.get(key, [])]
        cells = [f"`{_call(spec[part])}`" for part in parts]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {', '.join(f'`{term}`' for term in terms)} |")
    for kind, meaning in HOOK_KINDS.items():
        lines += ["", f"## {kind.capitalize()}s", "", meaning, ""]
        lines += ["| hook and defaults | formula | needs | source |", "|---|---|---|---|"]
        registry = getattr(objective, f"{kind}s")
        for name in registry:
            hook = registry.build(name)
            formula = re.sub(r"\{(\w+)\}", r"\1", hook.factory.formula)
            needs = ", ".join(f"`{need}`" for need in sorted(hook.needs))
            row = (f"`{_call(hook.to_spec())}`", _cell(formula), needs, _cell(hook.factory.source))
            lines.append(f"| {' | '.join(row)} |")
    lines += ["", "## Schedules and controllers", ""]
    lines += [
        "Any numeric hyper-parameter and any `coef` may be a schedule of the optimiser step, counted from 0. A `coef`"
    ]
    lines += ["may also be a controller, which follows a measured value and is saved in checkpoints.", ""]
    lines += ["| name and parameters | value |", "|---|---|"]
    for name in schedules:
        summary = (inspect.getdoc(schedules[name]) or "").partition("\n\n")[0].replace("`", "")
        lines.append(f"| `{_call_of(schedules[name])}` | {_cell(' '.join(summary.split()))} |")
    return "\n".join(lines) + "\n"


PRESET_SECTIONS = ("Formula", "Range", "Checker", "Columns", "Source", "Attacks")
_SECTION = re.compile(rf"(?:^|(?<=\s))({'|'.join(PRESET_SECTIONS)}):\s")
_ARXIV = re.compile(r"(?<![\d./])(\d{4}\.\d{5})(?!\d)")


class PresetDoc(NamedTuple):
    """The parts of a preset's docstring; `parameters` are name, default and meaning."""

    summary: str
    sections: dict[str, str]
    parameters: list[tuple[str, str, str]]
    raises: str
    example: str


def preset_doc(name: str) -> PresetDoc:
    """Parse the docstring of a reward preset. Raises `ValueError` where a part is missing."""
    from rewards.parameters import parameters_of
    from rewards.presets import _builder

    build = _builder(name)
    text, _, example = (inspect.getdoc(build) or "").partition("\n>>>")
    text, _, raises = text.partition("\nRaises:\n")
    prose = text.partition("\nArgs:\n")[0]
    heads = list(_SECTION.finditer(prose))
    sections = {
        head[1]: prose[head.end() : following.start() if following else None].strip()
        for head, following in zip(heads, [*heads[1:], None], strict=True)
    }
    parameters = [
        (each.name, "required" if each.required else f"`{each.default!r}`", each.words) for each in parameters_of(build)
    ]
    missing = [section for section in PRESET_SECTIONS if not sections.get(section)]
    missing += [f"the meaning of {parameter}" for parameter, _, meaning in parameters if not meaning]
    missing += [] if example else ["an example"]
    if missing:
        raise ValueError(f"The docstring of {name!r} lacks {', '.join(missing)}.")
    summary = prose[: heads[0].start()].strip()
    return PresetDoc(summary, sections, parameters, " ".join(raises.split()), ">>>" + example.rstrip())


def preset_page(name: str) -> str:
    """The page of one reward preset."""
    doc = preset_doc(name)
    parts = [f"# `{name}`", _prose(doc.summary)]
    parts += [f"**{section}:** {_prose(doc.sections[section])}" for section in PRESET_SECTIONS if section != "Attacks"]
    if doc.parameters:
        rows = [f"| `{name}` | {default} | {_cell(_prose(meaning))} |" for name, default, meaning in doc.parameters]
        parts += ["## Parameters", "| name | default | meaning |\n|---|---|---|\n" + "\n".join(rows)]
    if doc.raises:
        parts.append(f"Raises {_prose(doc.raises)}")
    parts += ["## Example", f"```python\n{doc.example}\n```", *_golden_row(name)]
    parts += ["## Known attacks", _prose(doc.sections["Attacks"])]
    return "\n\n".join(parts) + "\n"


def presets() -> str:
    """The table of all reward presets."""
    import rewards

    rows = []
    for name in rewards.names():
        doc = preset_doc(name)
        bounds = doc.sections["Range"].partition(". ")[0].removesuffix(".")
        rows.append(f"| [`{name}`]({name}.md) | {_cell(_prose(doc.summary))} | {_cell(_prose(bounds))} |")
    parts = [
        "# Reward presets",
        "The same on the command line: `grpo-kit reward list`, `grpo-kit reward show NAME`. How to use them:",
        "[Rewards](../rewards.md).",
        "| preset | what it rewards | range |\n|---|---|---|\n" + "\n".join(rows),
    ]
    return "\n\n".join(parts) + "\n"


def _golden_row(name: str) -> list[str]:
    """The first row that `grpo-kit reward test` scores, with one completion that must win and one that must lose."""
    from rewards.attacks import render_answer
    from rewards.testing import golden

    if not (rows := golden(name)):
        return []
    row = rows[0]
    completions = ("good", "bad", "completion", "style", "right", "wrong")
    lines = [f"{key}: {_short(value)}" for key, value in row.items() if key not in completions]
    for kind, answer in (("good", "right"), ("bad", "wrong")):
        examples = row.get(kind)
        if isinstance(examples, list) and not (examples and isinstance(examples[0], dict)):
            example = examples[0] if examples else None
        else:
            example = examples
        if example is None and "style" in row and answer in row:
            example = render_answer(row["style"], row[answer])
        lines += [f"{kind}: {_short(example)}"] if example is not None else []
    return [
        "A row of data, with a completion that must win and one that must lose:",
        "```text\n" + "\n".join(lines) + "\n```",
    ]


def _short(value: Any, limit: int = 200) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _prose(text: str) -> str:
    """Docstring prose as Markdown: papers become links; tags and bars outside code are escaped."""
    pieces = re.split(r"(`+[^`]*`+)", text)
    for index in range(0, len(pieces), 2):
        plain = re.sub(r"<(?=[\w/])", r"\\<", pieces[index]).replace("|", "\\|")
        pieces[index] = _ARXIV.sub(r"[\1](https://arxiv.org/abs/\1)", plain)
    return "".join(pieces)


def files() -> str:
    """Every file of the two packages with the first sentence of its docstring, folder by folder."""
    parts = [
        "# Files",
        "",
        "The first sentence of each file's docstring. Start with `kit/train.py`.",
        "",
    ]
    modules = sorted(path for name in ("kit", "rewards") for path in (ROOT / name).rglob("*.py"))
    for folder in dict.fromkeys(path.parent for path in modules):
        parts += [f"## {folder.relative_to(ROOT).as_posix()}", ""]
        opening = folder / "__init__.py"
        parts += [_cell(_first_line(opening)), ""] if opening in modules else []
        named = [path for path in modules if path.parent == folder and path != opening]
        parts += ["| file | what is in it |", "|---|---|"] if named else []
        parts += [f"| `{path.name}` | {_cell(_first_line(path))} |" for path in named] + [""]
    return "\n".join(parts)


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].partition("\n   ")[0]


def _written(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1000).strip()
    return text.removesuffix("...").strip().replace("|", "\\|")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {
    "reference/configuration.md": configuration,
    "reference/cli.md": command_line,
    "reference/hooks.md": hooks,
    "reference/files.md": files,
    "rewards/index.md": presets,
}
"""Pages by path. The site also has a page `rewards/NAME.md` for each preset."""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site (a hook of mkdocs)."""
    from mkdocs.structure.files import File

    import rewards

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    for name in rewards.names():
        files.append(File.generated(config, f"rewards/{name}.md", content=preset_page(name)))
    return files
