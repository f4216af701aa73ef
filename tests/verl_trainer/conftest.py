"""verl itself: what is marked `verl` here runs in .venv-verl (`bash .ci/verl-environment`), and only there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import warm_processes


@pytest.fixture(autouse=True, scope="session")
def _cold() -> Iterator[None]:
    """This environment has not all that warm processes import."""
    with warm_processes.cold():
        yield
