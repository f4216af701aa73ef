"""The embedded models: two tiny Qwen3 that come with the kit, so that everything can be tried without a GPU or a hub.

They lie in the package, in Hugging Face's layout; nothing is ever written there. What they can do and how they were made
stands in the README.md beside each; `benchmarks/embedded_models.py` makes them again.
"""

from __future__ import annotations

from pathlib import Path

from kit.config import EMBEDDED_MODELS

MODELS = Path(__file__).parent / "shipped"


def source_of(name: str, revision: str | None = None) -> str:
    """The folder or hub id that a `model.name` is loaded from.

    GGUF files are converted at their first use; a name that is neither such a file nor an embedded model is its own source.
    Raises `ModelError` for a file of an unsupported kind.
    """
    if name in EMBEDDED_MODELS:
        return str(MODELS / name)
    from kit.models.gguf import converted, file_of

    file = file_of(name, revision)
    return name if file is None else str(converted(file))
