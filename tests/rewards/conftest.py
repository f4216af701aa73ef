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
    """A pool of the test alone, for a test that kills a worker; shared workers would have to load SymPy again."""
    pool = Pool(2)
    for module in (isolation, component):
        monkeypatch.setattr(module, "shared_pool", lambda: pool)
    yield pool
    pool.close()


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections():
    """Exclude objects of other tests from garbage collections, which would add half a second to measured times."""
    gc.collect()
    gc.freeze()
