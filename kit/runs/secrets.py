"""Removes secrets from everything that leaves a run: reports, and configurations that are sent to a tracker."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[hidden]"
NAMES = re.compile(
    r"(?:^|[^a-z])(?:api|access|private|secret)?[_-]?(?:key|token|secret|password|passwd|credentials?|authorization)$",
    re.I,
)
"""Names of keys and variables whose text is a secret. Numbers are not secrets: `max_completion_tokens` is a length."""
VALUES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{30,})"
)
"""Keys of well-known services."""
LOGIN = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
SHORTEST = 8
"""Shortest value of an environment variable, in characters, that is hidden: a shorter one may occur in any text."""


def redact(text: str) -> str:
    """The text without keys, logins in addresses, and values of this process's secret environment variables."""
    for value in _environment():
        escaped = html.escape(value)
        for form in (value, escaped, escaped.replace("&quot;", "&#34;").replace("&#x27;", "&#39;")):
            text = text.replace(form, HIDDEN)
    return LOGIN.sub(HIDDEN, VALUES.sub(HIDDEN, text))


def redacted(tree: Any, name: str = "") -> Any:
    """A copy of plain data in which every text is `redact`ed, and a text under a secret's name is replaced completely."""
    if isinstance(tree, Mapping):
        return {key: redacted(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [redacted(value, name) for value in tree]
    if not isinstance(tree, str) or not tree:
        return tree
    return HIDDEN if NAMES.search(name) else redact(tree)


def _environment() -> list[str]:
    """Values of the environment variables whose names mark secrets, the longest first."""
    values = {value for name, value in os.environ.items() if NAMES.search(name) and len(value) >= SHORTEST}
    return sorted(values, key=len, reverse=True)
