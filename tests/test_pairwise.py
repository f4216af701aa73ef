"""The matrices that are tried in part: every pair of values meets, and nothing is lost."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import cover, every_pair, rest_in_matrix


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (3, 1, 2), (15, 3, 3, 2), (8, 4, 2, 2, 2, 2)], ids=str)
def test_every_pair_meets_in_few_rows(sizes: tuple[int, ...]) -> None:
    rows = cover(sizes)
    for (a, one), (b, two) in combinations(enumerate(sizes), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(range(one), range(two)))
    assert all(0 <= place < size for row in rows for place, size in zip(row, sizes, strict=True))
    largest = sorted(sizes)[-2:]
    assert len(rows) <= 1.2 * largest[0] * largest[-1]


def test_the_rest_of_a_matrix_is_marked_and_not_lost() -> None:
    mark = every_pair({"loss": "abc", "level, delta": [("token", 1.5), ("token", None)], "beta": [0, 1]}).mark
    assert mark.args[0] == "loss,level, delta,beta"
    values = [case.values for case in mark.args[1]]
    assert values == [(loss, "token", delta, beta) for loss, delta, beta in product("abc", (1.5, None), (0, 1))]
    kept = [case.values for case in mark.args[1] if not case.marks]
    assert 6 <= len(kept) < len(values)
    assert all(mark.name == "matrix" for case in mark.args[1] for mark in case.marks)


def test_of_one_axis_each_nth_stays_and_none_is_lost() -> None:
    cases = rest_in_matrix(2, ["a", pytest.param("b", marks=pytest.mark.slow), pytest.param("c", id="C"), ("d", "e")])
    assert [case.values for case in cases] == [("a",), ("b",), ("c",), (("d", "e"),)]
    assert [[mark.name for mark in case.marks] for case in cases] == [[], ["slow", "matrix"], [], ["matrix"]]
    assert cases[2].id == "C"
