"""Parameter matrices: the default suite covers each pair of values, the stage `matrix` the remaining combinations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def cover(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return rows of one index per axis, so that each pair of indices of two axes is in a row; greedy, close to the minimum."""
    axes = range(len(sizes))
    missing = {((a, x), (b, y)) for a, b in combinations(axes, 2) for x in range(sizes[a]) for y in range(sizes[b])}
    rows = []
    while missing:
        row = dict(min(missing))
        for axis in sorted(set(axes) - row.keys(), key=lambda axis: -sizes[axis]):
            places = [(axis, place) for place in range(sizes[axis])]
            row[axis] = max(places, key=lambda at: sum(tuple(sorted((at, old))) in missing for old in row.items()))[1]
        rows.append(tuple(row[axis] for axis in axes))
        missing -= set(combinations(enumerate(rows[-1]), 2))
    return rows


def rest_in_matrix(nth: int, cases: Iterable[Any]) -> list[Any]:
    """Return cases for `parametrize`: every `nth` one runs by default, the others in the stage `matrix`."""
    marked = []
    for place, case in enumerate(cases):
        param = case if hasattr(case, "marks") else pytest.param(case)
        marked.append(param if place % nth == 0 else param._replace(marks=[*param.marks, pytest.mark.matrix]))
    return marked


def every_pair(axes: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Return `parametrize` with every combination of the axes' values.

    Combinations that are not needed to cover each pair of values are marked `matrix`. An axis may set several parameters:
    `{"level, delta": [("token", 1.5), ...]}`.
    """
    default, cases = set(cover([len(values) for values in axes.values()])), []
    for places in product(*(range(len(values)) for values in axes.values())):
        chosen = zip(axes, (values[place] for values, place in zip(axes.values(), places, strict=True)), strict=True)
        row = [value for names, axis_value in chosen for value in (axis_value if "," in names else [axis_value])]
        cases.append(pytest.param(*row, marks=[] if places in default else pytest.mark.matrix))
    return pytest.mark.parametrize(",".join(axes), cases)
