"""Tests with the marker `verl` run only in .venv-verl (`bash .ci/verl-environment`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import warm_processes


@pytest.fixture(autouse=True, scope="session")
def _cold() -> Iterator[None]:
    """Disable warm processes, because this environment lacks some of their imports."""
    with warm_processes.cold():
        yield
