"""What libraries say as soon as they are imported, and nobody can act on, is left out by name."""

from __future__ import annotations

import logging

NO_NEWS = {
    # of every Enum that torchao registers, which comes with transformers and peft
    "torch.utils._pytree": "register_constant() on Enum subclasses is deprecated",
    # of a faster 4-bit product on the CPU, wherever bitsandbytes is installed
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}
"""What libraries say as soon as they are imported, by logger: nobody here can act on it."""


def without_no_news() -> None:
    """Leaves out `NO_NEWS`, which even a verb would print that uses none of it. All else of these loggers is said."""
    for name in NO_NEWS:
        logger = logging.getLogger(name)
        if _is_news not in logger.filters:
            logger.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return NO_NEWS[record.name] not in record.getMessage()
