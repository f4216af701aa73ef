"""The embedded models: two tiny Qwen3 that come with the kit, so that everything can be tried without a GPU or a hub.

They lie in the package, in Hugging Face's layout; nothing is ever written there. What they can do and how they were made
stands in the README.md beside each; `benchmarks/embedded_models.py` makes them again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from kit.config import EMBEDDED_MODELS
from kit.errors import ModelError

MODELS = Path(__file__).parent / "shipped"
CHECKSUMS = "SHA256SUMS"
"""In each folder, as `sha256sum` writes and checks it: every file that is loaded."""
CARD = "README.md"
AGAIN = (
    "Install grpo-kit again (pip install --force-reinstall --no-deps, and what it was installed from; "
    "in a clone: git checkout -- kit/models/shipped)."
)


def source_of(name: str, revision: str | None = None) -> str:
    """The folder or hub id that a `model.name` is loaded from.

    Embedded models are checked, GGUF files converted at their first use; any other name is its own source. Raises
    `ModelError` for a file that is missing, damaged, not the one that was shipped, or of an unsupported kind.
    """
    if name in EMBEDDED_MODELS:
        return str(checked(MODELS / name))
    from kit.models.gguf import converted, file_of

    file = file_of(name, revision)
    return name if file is None else str(converted(file))


def checked(folder: Path) -> Path:
    """The folder, when it holds the files of its list with their checksums, and no others. Raises `ModelError`."""
    listed = _listed(folder / CHECKSUMS)
    for name, expected in listed.items():
        digest = hashlib.sha256(_read(folder / name)).hexdigest()
        if digest != expected:
            raise ModelError(
                f"{folder / name} is not the file that came with the kit: its SHA-256 is {digest[:12]}…, expected is "
                f"{expected[:12]}…. {AGAIN}"
            )
    for path in sorted(folder.iterdir()):
        if path.name not in {*listed, CHECKSUMS, CARD} and not path.name.startswith("."):
            raise ModelError(
                f"{path} is not among the files that came with the kit, and could change how the embedded model is loaded. "
                f"If it was put there, take it away; else: {AGAIN}"
            )
    return folder


def _listed(path: Path) -> dict[str, str]:
    """SHA-256 by file name."""
    try:
        return {name: digest for digest, name in (line.split("  ") for line in _read(path).decode().splitlines())}
    except ValueError as error:
        raise ModelError(f"{path}, the checksums of the embedded model, is damaged. {AGAIN}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"{path}, a file of the embedded model, cannot be read: {error.strerror or error}. {AGAIN}"
        ) from error
