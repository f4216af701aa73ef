"""What is kept of a scoring pass, and how it is laid over completions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kit.scoring.full_kl import Projection
from kit.scoring.hidden_states import ScoringPass, apart, capturing, in_order_of, is_apart, record, spread


def projection(rows: int) -> Projection:
    return Projection(torch.full((rows, 2), float(rows)), torch.zeros(5, 2), None)


def test_every_open_block_of_this_thread_takes_what_is_recorded_and_no_other() -> None:
    first, second = projection(1), projection(2)
    record(first)  # nobody asked
    with capturing() as outer:
        record(first)
        with capturing() as inner, capturing(wanted=False) as nothing:
            record(second)
        other = threading.Thread(target=record, args=(projection(3),))
        other.start()
        other.join()
    record(first)
    assert [outer, inner, nothing] == [[first, second], [second], []]


def test_a_block_that_fails_is_closed() -> None:
    with pytest.raises(RuntimeError), capturing() as taken:
        raise RuntimeError
    record(projection(1))
    assert taken == []


def test_a_pass_apart_is_seen_by_nobody_outside() -> None:
    with capturing() as outer:
        with apart():
            record(projection(1))
            assert is_apart()
            with capturing() as inner:
                record(projection(2))
        record(projection(3))
    assert not is_apart()
    with pytest.raises(RuntimeError), apart():
        raise RuntimeError
    assert not is_apart()
    assert [len(one.hidden) for one in outer] == [3]
    assert [len(one.hidden) for one in inner] == [2]


def test_calls_in_another_order_are_shown_as_one_in_the_order_of_places() -> None:
    places: list[torch.Tensor] = []
    with capturing() as outer, in_order_of(places):
        for rows in ([4, 5], [1], [0, 7]):
            places.append(torch.tensor(rows))
            record(Projection(torch.tensor(rows).float().unsqueeze(1), torch.zeros(5, 1), None))
    assert [one.hidden.flatten().tolist() for one in outer] == [[0, 1, 4, 5, 7]]
    with in_order_of([]):  # nobody looks
        record(projection(1))


def test_blocks_that_hold_the_same_are_told_apart() -> None:
    """Two open lists may be equal, as empty ones are: each block closes its own."""

    def nested() -> int:
        with capturing() as outer:
            with capturing():
                pass
            record(projection(1))
        return len(outer)

    with ThreadPoolExecutor(1) as fresh:  # what a defect leaves open stays in that thread
        assert fresh.submit(nested).result() == 1


def test_rows_are_laid_over_live_tokens_in_order_with_gradient() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    rows = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    laid = spread(rows, mask)
    assert laid.tolist() == [[1, 2, 0], [0, 0, 0], [0, 3, 4]]
    (laid * torch.arange(9.0).view(3, 3)).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [0, 1, 7, 8]
    wide = torch.stack([rows.detach(), -rows.detach()], dim=1)
    laid = spread(wide, mask)
    assert laid.shape == (3, 3, 2)
    assert laid[..., 1].tolist() == [[-1, -2, 0], [0, 0, 0], [0, -3, -4]]
    assert torch.equal(laid[mask.bool()], wide)


def test_chunks_of_a_pass_follow_each_other() -> None:
    scored = ScoringPass(torch.zeros(3, 1), [projection(1), projection(2)])
    assert scored.hidden().tolist() == [[1, 1], [2, 2], [2, 2]]
    assert scored.head is scored.projections[0]
