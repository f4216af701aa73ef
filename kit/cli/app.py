"""The command line. Verbs import their modules when they run, so that `grpo-kit --help` is fast.

Exit codes: 0 success, 1 crash, 2 user error (one message on stderr, a traceback only with --debug), 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from kit import __version__
from kit.cli import chat as cli_chat
from kit.cli import plan as cli_plan
from kit.cli import runs as cli_runs
from kit.cli.objective import objective_app
from kit.cli.options import Config, Detach, Overrides, print_json, print_table
from kit.runs.files import one_line
from kit.runs.worker import CRASHED, STOPPED, USER_ERROR, is_user_error

if TYPE_CHECKING:
    from kit.config import RunConfig
    from rewards import Preset
    from rewards.__main__ import DataReader


class KitGroup(TyperGroup):
    """Turns errors of all verbs into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run a verb. User errors and Ctrl-C become `typer.Exit`."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(STOPPED) from None
        except Exception as error:
            if ctx.params.get("debug") or not is_user_error(error):
                raise
            if not getattr(error, "shown", False):
                _complain(str(error))
            raise typer.Exit(USER_ERROR) from None


app = typer.Typer(
    cls=KitGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help takes three times as long to import
    add_completion=False,
    context_settings={"max_content_width": 110},
    help="Fine-tune language models with GRPO on one GPU or on a CPU. Start with: grpo-kit quickstart",
)
config_app = typer.Typer(no_args_is_help=True, help="The configuration: schema, presets, all values of a file.")
data_app = typer.Typer(no_args_is_help=True, help="Datasets.")
app.add_typer(config_app, name="config")
app.add_typer(objective_app, name="objective")
app.add_typer(data_app, name="data")
app.add_typer(cli_plan.model_app, name="model")


def _version(show: bool) -> None:
    if show:
        typer.echo(f"grpo-kit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of user errors.")] = False,
) -> None:
    """Options for all verbs."""


@app.command()
def quickstart(
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    override: Overrides = None,
    detach: Detach = False,
    real: Annotated[
        bool,
        typer.Option("--real", help="Train SmolLM2-135M to turn a sentence into JSON instead: some minutes on a CPU."),
    ] = False,
) -> None:
    """Train and score a tiny model on a CPU in about a minute, or SmolLM2 with --real."""
    step_override = [] if steps is None else [f"optimisation.steps={steps}"]
    train("quickstart-real" if real else "quickstart", [*step_override, *(override or [])], detach)


@app.command()
def train(config: Config, override: Overrides = None, detach: Detach = False) -> None:
    """Train with CONFIG. Ctrl-C saves a checkpoint and stops the run; closing the terminal does not stop it."""
    from kit.launch import launch, launch_detached
    from kit.runner import prepare

    prepared = prepare.resolve_config(config, override or [])
    if detach:
        prepare.validate(prepared)
        run = launch_detached(prepared)
        typer.echo(run.id)
        cli_runs.say_detached(run, err=True)
        return
    outcome = launch(prepared)
    if outcome.error is not None and not outcome.shown:
        _complain(str(outcome.error))
    raise typer.Exit(outcome.code)


@app.command()
def validate(config: Config, override: Overrides = None) -> None:
    """Check CONFIG without starting a run."""
    loaded = _load(config, override or [])

    from kit.runner import prepare

    for note in prepare.validate(loaded):
        typer.echo(f"  {note}")
    typer.echo(f"{config} can be run.")


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("run.yaml"),
    preset: Annotated[str, typer.Option(metavar="NAME", help="Preset to start from.")] = "quickstart",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a YAML file with every key and its meaning."""
    from kit.config import load_config, preset_names
    from kit.config.schema import commented_yaml
    from kit.errors import ConfigError
    from kit.runs.files import write_atomic

    if str(path) in preset_names():
        raise ConfigError(
            f"{path} is a preset, but init expects the file to write: grpo-kit init {path}.yaml --preset {path}"
        )
    text = commented_yaml(load_config(preset))
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; expected a file name, e.g. {path / 'run.yaml'}.")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already; choose another name, or overwrite it with --force.")
    write_atomic(path, text)
    typer.echo(f"Wrote {path}. Edit it, check it with: grpo-kit validate {path}")


app.command()(cli_plan.doctor)
app.command()(cli_plan.plan)
app.command()(cli_runs.ps)
app.command()(cli_runs.logs)
app.command()(cli_runs.stop)
app.command()(cli_runs.resume)
app.command("eval")(cli_runs.evaluate)
app.command()(cli_runs.report)
app.command()(cli_chat.export)
app.command()(cli_chat.chat)
app.command()(cli_runs.compare)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    options_metavar="list|show|test|audit [OPTIONS] [ARGS]...",
)
def reward(context: typer.Context) -> None:
    """List reward presets, show one, test one with known attacks, or audit one on your own rows.

    `test` and `audit` also accept the YAML file of a run with overrides. `grpo-kit reward VERB --help` lists the options of a
    verb. Without the kit, use `python -m rewards`.
    """
    from rewards.__main__ import main as rewards_main

    def read(name: str, override: list[str]) -> tuple[Preset, DataReader] | None:
        if not name.endswith((".yaml", ".yml")):
            return None
        from kit.data import load_data
        from kit.data.sources import read_valid_rows
        from kit.runner.prepare import build_reward

        config = _load(name, override)

        def read_data(file: Path | None, prompt: str | None, reference: str | None) -> list[dict[str, Any]]:
            columns = {"source": file and str(file), "prompt_column": prompt, "reference_column": reference}
            data = config.data.model_copy(update={key: value for key, value in columns.items() if value})
            return list(load_data(data).train) if file is None else read_valid_rows(data)[2].rows

        return build_reward(config), read_data

    raise typer.Exit(rewards_main(context.args, "grpo-kit reward", read))


@app.command()
def scale(
    config: Config,
    to: Annotated[Literal["verl"], typer.Option(help="The trainer.")] = "verl",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write to.")] = Path("scaled"),
    gpus: Annotated[int, typer.Option(min=1, help="GPUs per machine.")] = 8,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    override: Overrides = None,
) -> None:
    """Convert CONFIG for a trainer for clusters.

    Writes its YAML file, the rows, the reward and the objective, and lists settings that it does not support.
    """
    from kit.planning.scaling import scale

    scaled = scale(_load(config, override or []), out, gpus=gpus, nodes=nodes)
    for path in scaled.write(out, force=force):
        typer.echo(f"written: {path}")
    for line in scaled.left:
        typer.echo(f"not converted: {line}")
    typer.echo(f"next: {scaled.command}")


@app.command()
def ui(
    host: Annotated[str, typer.Option(help="Address of the server; others than 127.0.0.1 need --auth.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 7860,
    root: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    auth: Annotated[
        str | None,
        typer.Option(
            metavar="FILE_OR_ENV", help="Lines `user:password`, in a file or in an environment variable of this name."
        ),
    ] = None,
    hooks: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Python file with rewards and hooks for the page; may be repeated."),
    ] = None,
    folder: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Also offer models and data below this folder; may be repeated."),
    ] = None,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="Trust the header X-Forwarded-Host of a proxy in front.")
    ] = False,
) -> None:
    """Serve the web page: start runs, watch them, try the results. Runs continue without the page."""
    from kit.ui.server import serve
    from kit.ui.settings import Settings, read_accounts

    settings = Settings(
        host, port, root, read_accounts(auth), tuple(hooks or ()), folders=tuple(folder or ()), proxy=proxy
    )
    serve(settings)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the configuration."""
    from kit.config.schema import json_schema

    print_json(json_schema())


@config_app.command("show")
def config_show(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="A YAML file, or a preset's name.")] = None,
    override: Overrides = None,
) -> None:
    """Print CONFIG with all defaults, or list the presets."""
    from kit.config import find_config, preset_names

    if config is not None:
        typer.echo(_load(config, override or []).to_yaml(), nl=False)
        return
    print_table(
        ["preset", "description"],
        [
            [name, find_config(name).read_text(encoding="utf-8").strip().partition("\n")[0].lstrip("# ")]
            for name in preset_names()
        ],
    )


@data_app.command("preview")
def data_preview(
    config: Config,
    override: Overrides = None,
    rows: Annotated[int, typer.Option("-n", "--rows", min=1, help="Training and held-out rows to show, each.")] = 3,
    as_seen: Annotated[
        bool, typer.Option("--as-seen", help="Also show rows as the model sees them, with lengths in tokens.")
    ] = False,
) -> None:
    """Show the data of CONFIG: counts, columns, and training and held-out rows."""
    from kit.data import load_data, preview

    loaded = _load(config, override or [])
    split = load_data(loaded.data)
    counts = {name.replace("_", " "): count for name, count in split.info["rows"].items() if count}
    typer.echo(f"{split.info['source']}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    mapping = split.info["mapping"]
    pairs = [f"{role} <- {name}" for role, name in mapping.items() if isinstance(name, str)]
    pairs += [f"{column_name} <- {source_name}" for source_name, column_name in mapping["rename"].items()]
    typer.echo(f"columns: {', '.join(pairs)}")
    for note in split.info["notes"]:
        typer.echo(f"note: {note}")
    for row in preview(split, rows):
        typer.echo(f"\n[{row.pop('side')}]")
        for column, value in row.items():
            if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
                value = " | ".join(f"{message['role']}: {message['content']}" for message in value)
            typer.echo(f"  {column}: {one_line(str(value), 300)}")
    if as_seen:
        from kit.planning.workbench import lengths

        counted = lengths(loaded, {})
        words = ", ".join(f"{name} {value}" for name, value in counted["tokens"].items())
        typer.echo(f"\nprompts in tokens: {words}; over the limit of {counted['limit']}: {counted['over']}")
        for row in counted["seen"]:
            typer.echo(f"\n[training row {row['place']}, {row['tokens']} tokens, as the model sees it]\n{row['text']}")


def _load(config: str, override: list[str]) -> RunConfig:
    from kit.config import load_config

    return load_config(config, override)


def _complain(message: str) -> None:
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    console.print("[red]error:[/red]", end=" ")
    console.print(message, markup=False, highlight=False)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except BrokenPipeError:
        sys.exit(CRASHED)
