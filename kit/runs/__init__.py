"""Runs on disk: the directory, its status, its lines, the hand-over to the training process. Standard library only."""

from kit.runs.store import RunDir, RunStore

__all__ = ["RunDir", "RunStore"]
