"""Pages of the site that are written when it is built, from the code: configuration, verbs, graphics cards, files."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

INTRODUCTION = """# Configuration

One YAML file (or a mapping in Python, or the web form) decides a run. Every key is optional. `grpo-kit init run.yaml`
writes this page as a file to edit, `grpo-kit validate run.yaml` checks it, and `-o section.key=value` changes any key from
the command line. A key that does not exist is refused, with the nearest name.
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
        "Exit codes: 0 done, 1 a crash, 2 a mistake of the user's, 130 Ctrl-C.",
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


CARDS = """# Graphics cards

What `grpo-kit plan` reckons with. *Usable* is what torch reports, in GiB: less than the number on the box. Speeds are those that
the maker states: dense, half precision, tensor cores. `grpo-kit plan run.yaml --gpu l4` plans for a GPU that is not here.

*Weights in 4-bit*: how many billions would fill the card if nothing else were on it. A run also needs room for the cache,
activations, adapters and the head: [the formula](../planning.md#plan-memory).

{table}

- **The memory's bandwidth bounds sampling**, since every token reads all weights; **teraflops bound the update**. Where a step is
  mostly sampling, bandwidth tells more.
- **bfloat16** needs compute capability {bfloat16} (Ampere). Older cards compute in float16, with a loss scale;
  `model.dtype: auto` chooses. bfloat16 that is asked for on such a card is refused.
- **Unsloth** and **vLLM** need compute capability {vllm}; `generation.vllm.standby` needs {bfloat16}. A P100 (6.0) has neither.
- **Free ones**: Colab has one T4; Kaggle has T4 ×2, of which a run uses one. With a plan, Colab has L4 and A100.
- **Two cards** do not make one larger: every process holds the whole model. They share the completions of a step
  ([more than one process](../gpu.md#more-than-one-process)), or one of them generates ([a server](../vllm.md)).
"""


def graphics_cards() -> str:
    """The cards that runs are planned for, and what the kit does on which."""
    from kit.models.backend import BFLOAT16, VLLM
    from kit.planning.gpus import GPUS

    head = "| card | usable GiB | 16-bit type | TFLOP/s | GB/s | weights in 4-bit, billions |"
    rows = [
        f"| {gpu.name.rpartition(' ')[0]}, {gpu.name.rpartition(' ')[2]} GB | {gpu.usable:.1f} "
        f"| {'bfloat16' if gpu.bf16 else 'float16'} | {gpu.teraflops:,.0f} | {gpu.bandwidth:,.0f} "
        f"| {math.floor(gpu.usable * 2**30 / 0.5159 / 1e9)} |"
        for gpu in GPUS
    ]
    versions = {"bfloat16": ".".join(map(str, BFLOAT16)), "vllm": ".".join(map(str, VLLM))}
    return CARDS.format(table="\n".join([head, "|---|---|---|---|---|---|", *rows]), **versions)


def files() -> str:
    """Every file of the two packages with the first sentence of its docstring, folder by folder."""
    parts = [
        "# Files",
        "",
        "Each file begins with a sentence that says what it is for. `kit/train.py` is the one to read first.",
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
    "reference/cards.md": graphics_cards,
    "reference/files.md": files,
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the written pages to those that were found (a hook of mkdocs)."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    return files
