"""Pushing a verified folder to the Hugging Face hub: one commit, whole or not there."""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.errors import ConfigError, EnvironmentUnsupported, RunError
from kit.runs.secrets import redact

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
WEIGHTS = ("*.safetensors", "*.index.json", "adapter_config.json", "adapter_model.*", "*.gguf")
ATTEMPTS = 3
WAIT = 2.0
"""Seconds before the second attempt; twice as many before the third."""


def check_push(repo: str | None) -> str:
    """The token of the environment. Raises `KitError` where a push could not even begin. Says nothing of the token."""
    import re

    if repo is None or not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", repo):
        raise ConfigError(
            f"--repo: {repo!r} is no repository; expected OWNER/NAME of letters, digits, '.', '_' and '-'."
        )
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise EnvironmentUnsupported(
            "HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it, and give the command again."
        )
    token = next((os.environ[name] for name in TOKENS if os.environ.get(name)), None)
    if token is None:
        raise ConfigError(
            "A push to the hub needs a token that may write, in the environment variable HF_TOKEN (made at "
            "https://huggingface.co/settings/tokens). It is read from there only, and written nowhere."
        )
    return token


def push(
    folder: Path, repo: str, token: str, *, private: bool, message: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Uploads every file of `folder` in one commit, and checks what is there then. Returns address and commit.

    Weights of an earlier push that are not among them go in that commit: a reader would load them in place of the new. A
    repository that is public stays unwritten where a private one was asked for.

    Asked again after a failure it sends only what the hub does not have. Raises `RunError` in words of its own.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]

    def commit() -> Any:
        # Not upload_folder: where hf_xet is installed that one commits in parts, and a reader may see half an export.
        parts: list[Any] = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
        parts += [CommitOperationDelete(name, is_folder=False) for name in stale]
        return api.create_commit(repo, operations=parts, commit_message=message)

    def create() -> None:
        try:
            api.create_repo(repo, private=private, exist_ok=True)
        except ValueError:  # it is there, at an address that huggingface_hub does not take for a hub's
            if not api.repo_exists(repo):
                raise

    _tried("creating the repository", repo, create, say)
    before = _tried("looking at the repository", repo, lambda: api.model_info(repo), say)
    if private and not before.private:
        raise RunError(
            f"{repo} exists and is public, and a private one was asked for; nothing was pushed. Make it private in its settings "
            f"({api.endpoint}/{repo}/settings), give another --repo, or leave --private out."
        )
    new = {path.relative_to(folder).as_posix() for path in files}
    stale = sorted(
        name for name in (each.rfilename for each in before.siblings or []) if name not in new and _is_ours(name)
    )
    if stale:
        say(f"Removing from {repo} in the same commit, as they are of an earlier push: {', '.join(stale)}")
    done = _tried("the upload", repo, commit, say)
    there = _tried("looking at the repository", repo, lambda: api.model_info(repo, files_metadata=True), say)
    sizes = {each.rfilename: each.size for each in there.siblings or []}
    wrong = [path.name for path in files if sizes.get(path.relative_to(folder).as_posix(), -1) != path.stat().st_size]
    if wrong:
        raise RunError(f"{repo} does not hold what was sent: {', '.join(sorted(wrong)[:4])}. Give the command again.")
    return {"url": f"{api.endpoint}/{repo}", "commit": getattr(done, "oid", None), "private": there.private,
            "removed": stale}  # fmt: skip


def _is_ours(name: str) -> bool:
    """Whether a loader of the repository would take that file for its weights; those in folders nobody loads by themselves."""
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in WEIGHTS)


def _tried(what: str, repo: str, call: Callable[[], Any], say: Callable[[str], None]) -> Any:
    """Calls; what may pass by itself (the network, a busy hub) is tried again. Raises `RunError`."""
    import httpx

    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            passing = status in (429, 500, 502, 503, 504) or (
                status is None and isinstance(error, (httpx.TransportError, OSError, TimeoutError))
            )
            if not passing and status is None:
                raise
            if not passing or attempt == ATTEMPTS:
                raise RunError(_explain(what, repo, status, error)) from None
            say(
                f"{what} of {repo} did not get through ({status or type(error).__name__}); again in {WAIT * attempt:g} s"
            )
            time.sleep(WAIT * attempt)
    raise AssertionError("the last attempt returns or raises")


def _explain(what: str, repo: str, status: int | None, error: Exception) -> str:
    first = redact(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
    if status == 401:
        return f"The hub does not accept the token in HF_TOKEN (401, {what} of {repo}). Make a new one that may write."
    if status == 403:
        return (
            f"The token in HF_TOKEN may not write to {repo} (403). Give it write access to that owner's repositories."
        )
    if status == 404:
        return f"{repo} does not exist, or the token in HF_TOKEN may not see it (404, {what})."
    if status in (409, 412):
        return f"{repo} has changed while it was written to ({status}, {what}). Nothing was replaced; give the command again."
    if status is None or status >= 500 or status == 429:
        return (
            f"The hub could not be reached ({what} of {repo}: {first}). Give the command again: files that arrived are not "
            "sent twice."
        )
    return f"The hub refused {what} of {repo} ({status}: {first})."
