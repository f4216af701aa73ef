"""The draft of New run: a preset and the changes to it.

A browser may send anything: `Draft.read` checks the shape of a draft, and `Draft.config` validates and guards its
configuration.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from kit.config import RunConfig, load_config, preset_names
from kit.config.loading import lookup, parse_value, parse_yaml, set_value
from kit.errors import ConfigError
from kit.objective.recipes import changed_parts
from kit.runs.files import to_json
from kit.ui import guard
from kit.ui.settings import Settings

KEY = re.compile(r"[a-z_]{1,40}(?:\.[A-Za-z0-9_@-]{1,60}){1,6}")
MOST_CHANGES, LONGEST_CHANGE, LONGEST_YAML, DEEPEST = 200, 20_000, 100_000, 12
FIRST = "quickstart"
UNREADABLE = "The draft of this page cannot be read; press 'Start over'."
Tree = dict[str, Any]


@dataclass(frozen=True)
class Draft:
    """A preset and changes by dotted key, those of a section before those of its keys.

    `aside` is the draft that this one replaced, if that had changes.
    """

    preset: str = FIRST
    changes: dict[str, Any] = field(default_factory=dict)
    aside: Draft | None = field(default=None, compare=False)

    @classmethod
    def read(cls, value: Any) -> Draft:
        """Read a draft that a browser sent, as `as_text` or a mapping. Raises `ConfigError` if it is malformed."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise ConfigError(UNREADABLE) from None
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ConfigError(UNREADABLE)
        preset, changes = value.get("preset", FIRST), value.get("changes", {})
        if preset not in preset_names():
            raise ConfigError(f"There is no preset '{str(preset)[:60]}'. Presets: {', '.join(preset_names())}.")
        if not isinstance(changes, Mapping) or len(changes) > MOST_CHANGES:
            raise ConfigError(f"Expected at most {MOST_CHANGES} changes by key.")
        for key, change in changes.items():
            if not isinstance(key, str) or not KEY.fullmatch(key):
                raise ConfigError(f"'{str(key)[:60]}' is no key of the configuration.")
            if deeper(change, DEEPEST):
                raise ConfigError(f"{key}: nested deeper than {DEEPEST} levels.")
            if len(json.dumps(change, default=str)) > LONGEST_CHANGE:
                raise ConfigError(f"{key}: longer than {LONGEST_CHANGE} characters.")
        aside = None
        if isinstance(old := value.get("aside"), Mapping):
            with suppress(ConfigError):
                aside = cls.read({name: old[name] for name in ("preset", "changes") if name in old})
        return cls(preset, dict(changes), aside)

    def as_text(self) -> str:
        """Return the draft as JSON. The browser compares texts by value, but mappings by identity."""
        return json.dumps(self.as_dict())

    def as_dict(self) -> Tree:
        """Return the draft as plain values."""
        tree: Tree = {"preset": self.preset, "changes": self.changes}
        return tree | ({"aside": self.aside.as_dict()} if self.aside else {})

    def instead_of(self, other: Draft) -> Draft:
        """Return this draft with `other` put aside, or with what `other` had put aside if it has no changes."""
        aside = replace(other, aside=None) if other.changes and other != self else other.aside
        return replace(self, aside=None if aside == self else aside)

    def change(self, key: str, value: Any) -> Draft:
        """Return the draft with one key set. A value equal to the preset's is no change."""
        below = {name: old for name, old in self.changes.items() if name != key and not name.startswith(f"{key}.")}
        if lookup(replace(self, changes=below).tree(), key) == value:
            return replace(self, changes=below)
        return replace(self, changes={**below, key: value})

    def tree(self) -> Tree:
        """Return all values with the changes, not validated: the form shows them even if some are wrong."""
        tree = copy.deepcopy(preset_tree(self.preset))
        for key, value in self.changes.items():
            set_value(tree, key, copy.deepcopy(value))
        return tree

    def apply(self, overrides: list[str]) -> Draft:
        """Return the draft with overrides in the form of the command line, as plan and signal check suggest them."""
        draft = self
        for override in overrides:
            key, _, text = override.partition("=")
            draft = draft.change(key.strip(), parse_value(text))
        return draft

    def overrides(self) -> list[str]:
        """Return the changes as `section.key=value` for the command line. The values are JSON, which is valid YAML."""
        texts = ((key, json.dumps(value, ensure_ascii=False)) for key, value in self.changes.items())
        return [f"{key}=" + _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) for key, text in texts]

    def _rooted(self, settings: Settings) -> list[str]:
        """Return the overrides, with the folder of runs if it is not the default."""
        rooted = [] if str(settings.root) == "runs" else [f"run.root={to_json(str(settings.root))}"]
        return [*self.overrides(), *rooted]

    def config(self, settings: Settings) -> RunConfig:
        """Return the configuration, validated and guarded. Raises `ConfigError`."""
        if any(key.startswith("run.root") for key in self.changes):
            raise ConfigError(f"run.root: runs of this page lie in {settings.root}; start it with --root for others.")
        config = load_config(self.preset, self._rooted(settings))
        guard.check(config, settings)
        return config

    def command(self, settings: Settings) -> str:
        """Return the command that trains this draft, for a POSIX shell."""
        options = (f"-o {shlex.quote(option)}" for option in self._rooted(settings))
        return " ".join(["grpo-kit", "train", self.preset, *options])


@functools.cache
def preset_tree(name: str) -> Tree:
    """Return a preset's values. The result is cached: do not change it."""
    return load_config(name).model_dump(mode="json")


_UNSAFE = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""Characters that YAML refuses or takes for a line end, or that a shell does not pass on."""


def from_yaml(text: str, settings: Settings) -> Draft:
    """Make a draft with the values of this YAML, from the preset that needs the fewest changes. Raises `ConfigError`."""
    if len(text) > LONGEST_YAML:
        raise ConfigError(f"A configuration has at most {LONGEST_YAML} characters here.")
    if has_aliases(text):
        raise ConfigError("Anchors and aliases (& and *) are not taken from the page.")
    tree = parse_yaml(text)
    target = load_config(tree).model_dump(mode="json")
    changed = changed_parts(target["objective"])
    target["objective"] = {
        key: value if key in ("recipe", *changed) else None for key, value in target["objective"].items()
    }
    names = [FIRST, *(name for name in preset_names() if name != FIRST)]
    drafts = [Draft(name, dict(differences(preset_tree(name), target))) for name in names]
    draft = min(drafts, key=lambda draft: len(draft.changes))
    if "run.root" in draft.changes and Path(draft.changes["run.root"]) == settings.root:
        del draft.changes["run.root"]  # `Draft.config` adds it, so the page's YAML has it
    draft.config(settings)
    return draft


def has_aliases(text: str) -> bool:
    """Whether YAML has anchors: a few lines of them can expand to gigabytes."""
    try:
        return any(isinstance(token, (yaml.AliasToken, yaml.AnchorToken)) for token in yaml.scan(text))
    except (yaml.YAMLError, RecursionError):
        return False  # the parser reports the error


def deeper(value: Any, levels: int) -> bool:
    """Whether lists and mappings are nested deeper than `levels`."""
    if not isinstance(value, (list, Mapping)):
        return False
    return levels == 0 or any(
        deeper(item, levels - 1) for item in (value.values() if isinstance(value, Mapping) else value)
    )


def differences(base: Tree, target: Tree, prefix: str = "") -> list[tuple[str, Any]]:
    """Return (key, value) of every leaf of `target` that differs. Sections with other keys than in `base` are leaves."""
    changes: list[tuple[str, Any]] = []
    for name, value in target.items():
        key, old = f"{prefix}{name}", base.get(name)
        if value == old:
            continue
        if isinstance(value, dict) and isinstance(old, dict) and value.keys() == old.keys():
            changes += differences(old, value, f"{key}.")
        else:
            changes.append((key, value))
    return changes
