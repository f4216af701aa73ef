import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rewards import Sample, build_samples, isolation
from rewards.isolation import Pool, component


@pytest.fixture
def samples() -> Callable[..., list[Sample]]:
    def build(*completions: Any, **columns: Any) -> list[Sample]:
        spread = {name: [value] * len(completions) for name, value in columns.items()}
        return build_samples(["6 x 12?"] * len(completions), list(completions), **spread)

    return build


@pytest.fixture
def own_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Workers of the test's own, for a test that has one killed: those that all share would load SymPy anew."""
    pool = Pool(2)
    for module in (isolation, component):
        monkeypatch.setattr(module, "shared_pool", lambda: pool)
    yield pool
    pool.close()


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections():
    """What other tests left in memory is not looked through again: a full collection would take half a second, within
    whatever is being timed."""
    gc.collect()
    gc.freeze()
