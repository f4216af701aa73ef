"""Replay of useful groups (after RePO, arXiv 2506.09340): what could be learned from is kept for steps that lack it.

RePO adds old completions to every group; here whole groups of earlier steps take the places of flat ones, with the advantages
of their own rewards. They are off-policy: the ratio of the loss is taken to the log-probabilities under the policy that made
them, kept with them, and the clip bounds it. That corrects each token given its beginning, not the chance of the beginning:
the bias of PPO's surrogate, which grows with age.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from kit.config.sections.selection import ReplayConfig
from kit.trainer.selection.group import Group
from kit.trainer.selection.pool import Pool


class Replay:
    """The useful groups of a run, the newest last. Saved with its checkpoints."""

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self.kept: list[tuple[Group, int]] = []  # and how often each was replayed

    def keep(self, group: Group, old_logps: list[list[float]]) -> None:
        """Takes in a useful group of this step; the oldest ones make room."""
        self.kept.append((replace(group, old_logps=old_logps), 0))
        del self.kept[: max(0, len(self.kept) - self.config.capacity)]

    def draw(self, count: int, step: int, taken: Collection[str]) -> list[Group]:
        """Up to `count` groups of other prompts than `taken`, the newest first; what is too old is dropped."""
        self.kept = [(group, used) for group, used in self.kept if step - group.step <= self.config.max_age]
        found: list[Group] = []
        seen = set(taken)
        for place in range(len(self.kept) - 1, -1, -1):
            group, used = self.kept[place]
            if len(found) == count or used >= self.config.uses or group.key in seen:
                continue
            found.append(group)
            seen.add(group.key)
            self.kept[place] = (group, used + 1)
        self.kept = [(group, used) for group, used in self.kept if used < self.config.uses]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain values; ids and log-probabilities packed, exact. Rows are found again in the data by their key."""
        return {"kept": [_packed(group) | {"used": used} for group, used in self.kept]}

    def load_state_dict(self, state: Mapping[str, Any], pool: Pool) -> None:
        """Groups whose prompt the data no longer has are dropped."""
        self.kept = []
        for entry in state["kept"]:
            row = pool.row(entry["key"])
            if row is not None:
                self.kept.append((_unpacked(entry, row), entry["used"]))


def _packed(group: Group) -> dict[str, Any]:
    assert group.old_logps is not None
    plain = ("key", "prompt_ids", "completions", "components", "totals", "extra", "step")
    return {name: getattr(group, name) for name in plain} | {
        "completion_ids": [_text("q", ids) for ids in group.completion_ids],
        "old_logps": [_text("d", logps) for logps in group.old_logps],
    }


def _unpacked(entry: Mapping[str, Any], row: dict[str, Any]) -> Group:
    given = {name: value for name, value in entry.items() if name != "used"}
    given["completion_ids"] = [_numbers("q", text) for text in given["completion_ids"]]
    given["old_logps"] = [_numbers("d", text) for text in given["old_logps"]]
    return Group(row=row, **given)


def _text(kind: str, values: list[Any]) -> str:
    return base64.b64encode(array(kind, values).tobytes()).decode("ascii")


def _numbers(kind: str, text: str) -> list[Any]:
    values = array(kind)
    values.frombytes(base64.b64decode(text))
    return values.tolist()
