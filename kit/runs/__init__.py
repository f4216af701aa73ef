"""Runs on disk: the directory, its status, its lines, the hand-over to the training process. Imports no more than psutil."""

from kit.runs.store import RunDir, RunStore

__all__ = ["RunDir", "RunStore"]
