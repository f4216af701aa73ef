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
    """The folder, when it holds the files of its list with their checksums. Raises `ModelError`."""
    path = folder / CHECKSUMS
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            expected, _, name = line.partition("  ")
            path = folder / name
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if digest != expected:
                raise ModelError(
                    f"{path} is not the file that came with the kit: its SHA-256 is {digest[:12]}…, expected is "
                    f"{expected[:12]}…. {AGAIN}"
                )
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"{path}, a file of the embedded model, cannot be read: {reason}. {AGAIN}") from error
    return folder
