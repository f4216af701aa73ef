"""The Python face: start, follow, stop, compare runs. No torch."""

from kit.api.launch import resume, start, train

__all__ = ["resume", "start", "train"]
