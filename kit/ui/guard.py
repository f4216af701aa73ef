"""Checks of a configuration that comes from a browser.

A request to Gradio's API can contain any value, so the page's lists and boxes protect nothing. Every configuration is checked
here before it is planned, tried or started:

- Code: only hooks and rewards with registered names, and functions of the files of --hooks.
- Files: only those below the folder that the server was started in, and below those of --folder.
- Rewards: none that call another machine or run without a sandbox.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kit.config import EMBEDDED, SMOLLM2, RunConfig, load_config, preset_names
from kit.data.sources import SENTENCES
from kit.errors import ConfigError
from kit.ui import uploads
from kit.ui.settings import Settings, is_loopback

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?")
COMMAND_LINE_ONLY = {
    "allow_unsafe": "it runs generated programs without a sandbox",
    "api_key_env": "it sends a key of this machine's environment",
    "prelude": "it is code",
    "python": "it names a program to run",
    "root": "it names a folder to read from",
}
"""Parameters of reward presets that the page refuses, with the reason."""
FREE = (
    "data.system_prompt",
    "data.task_params",
    "data.rename",
    "data.prompt_column",
    "data.reference_column",
    "generation.vllm.regex",
    "data.source",  # this key and the following ones are checked below
    "model.name",
    "model.chat_template",
    "data.split",
    "data.subset",
    "data.revision",
    "model.revision",
    "reward.params",
    "reward.functions.params",
    "run.root",
)
"""Keys whose values are plain texts, or have a check of their own."""
NO_PATHS = ("data.split", "data.subset", "data.revision", "model.revision")
"""Keys whose values become parts of file names in the hub's cache."""


def check(config: RunConfig, settings: Settings) -> None:
    """Raise `ConfigError` for values that the page refuses."""
    _check_texts(config, settings)
    _check_files(config, settings)
    _check_reward(config)
    if config.model.trust_remote_code:
        raise ConfigError(
            f"model.trust_remote_code runs Python code of {config.model.name} with your rights, which the page does not do. "
            "Read that repository's .py files, then use the command line."
        )
    if Path(config.run.root) != settings.root:
        raise ConfigError(f"run.root: runs of this page lie in {settings.root}; start the page with --root for others.")


def _check_texts(config: RunConfig, settings: Settings) -> None:
    """Refuse code and paths in every text except those of `FREE`. New keys are checked without a change here."""
    for key, text in _leaves(config.model_dump(mode="json")):
        if any(key == free or key.startswith(f"{free}.") for free in FREE):
            if key in NO_PATHS and _is_path(text):
                raise ConfigError(f"{key}: '{text[:200]}' is a path, which the page refuses here.")
            continue
        if text in shipped() or (key == "reward.functions.path" and text.startswith("preset:")):
            continue
        elif ":" in text or ".py" in text:
            path, _, name = text.rpartition(":")
            allowed = {_resolved(str(file), settings.folder) for file in settings.hooks}
            if not name.isidentifier() or _resolved(path, settings.folder) not in allowed:
                raise ConfigError(
                    f"{key}: '{text[:200]}': the page takes no code. Choose a registered name, or start the page "
                    f"with --hooks FILE.py and name FILE.py:function. Files: {', '.join(map(str, settings.hooks)) or 'none'}."
                )
        elif _is_path(text):
            raise ConfigError(f"{key}: '{text[:200]}' is a path, which the page refuses here.")


def _is_path(text: str) -> bool:
    return text.startswith(("/", "~", "\\")) or ".." in re.split(r"[/\\]", text)


def _is_here(text: str) -> bool:
    """Whether an address or host is this machine.

    False for a user name or a backslash in it: programs read such addresses in different ways.
    """
    if re.search(r"[@\\\s\x00-\x1f]", text):
        return False
    try:
        return is_loopback((urlsplit(text).hostname if "://" in text else text) or "")
    except ValueError:
        return False


@functools.cache
def shipped() -> frozenset[str]:
    """Return the functions and classes of this package that its presets name."""
    trees = [load_config(name).model_dump(mode="json", exclude={"reward"}) for name in preset_names()]
    return frozenset(text for tree in trees for _, text in _leaves(tree) if text.startswith("kit.") and ":" in text)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of every text, including the names in mappings."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield key, str(name)
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, key)


def _check_files(config: RunConfig, settings: Settings) -> None:
    if config.model.name not in (EMBEDDED, SMOLLM2):
        _check_source("model.name", config.model.name, settings)
    kind, colon, _ = config.data.source.partition(":")
    if colon and kind != "reasoning-gym" and config.data.source != SENTENCES:
        raise ConfigError(
            f"data.source: '{config.data.source[:200]}' names a package or a program, and the page runs neither. Give a "
            "reasoning-gym task, a file or a hub id; or use the command line."
        )
    if not colon:
        _check_source("data.source", config.data.source, settings)
    if config.model.chat_template is not None:
        _check_below("model.chat_template", config.model.chat_template, settings)


def _check_source(key: str, text: str, settings: Settings) -> None:
    """Accept a hub id, or a path below a readable folder."""
    path = Path(text)
    if HUB_ID.fullmatch(text) and not path.is_absolute() and not (settings.folder / path).exists():
        return
    _check_below(key, text, settings)


def _check_below(key: str, text: str, settings: Settings) -> None:
    path = _resolved(text, settings.folder)
    allowed = (*settings.readable, (settings.folder / uploads.folder(settings.root)).resolve())
    if path is None or text.startswith("~") or not any(path.is_relative_to(folder) for folder in allowed):
        raise ConfigError(
            f"{key}: '{text[:200]}' lies outside {', '.join(map(str, settings.readable))}. Start the page with "
            "--folder FOLDER to use what lies below another folder."
        )


def _resolved(text: str, folder: Path) -> Path | None:
    try:
        return (folder / text).resolve()  # links followed; an absolute path stays one
    except (OSError, ValueError, RuntimeError):
        return None


def _check_reward(config: RunConfig) -> None:
    all_params = [config.reward.params, *(function.params for function in config.reward.functions)]
    for name, value in [pair for params in all_params for pair in params.items()]:
        if name in COMMAND_LINE_ONLY:
            raise ConfigError(f"reward.params.{name} is refused by the page: {COMMAND_LINE_ONLY[name]}. "
                              "Use a YAML file on the command line.")  # fmt: skip
        if name == "base_url" and not ("://" in str(value) and _is_here(str(value))):
            raise ConfigError(
                f"reward.params.base_url: '{str(value)[:200]}' is another machine. The page calls only services of this "
                "machine (http://127.0.0.1:PORT); use the command line for others."
            )
        for _, text in _leaves(value):
            if text.startswith(("/", "~")) or ".." in text.split("/"):
                raise ConfigError(f"reward.params.{name}: '{text[:200]}' is a path, which the page refuses.")
