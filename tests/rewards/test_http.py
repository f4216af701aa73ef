import asyncio
import time

import fake_judge
import pytest
from fake_judge import failing, saying

from rewards import PresetError
from rewards.http import Chat, Endpoint

SECRET = "sk-secret-123456"


@pytest.fixture
def judge():
    with fake_judge.running() as running:
        yield running


def ask(judge, times=1, may_ask=lambda: True, **settings):
    endpoint = Endpoint(**{"base_url": judge.url, "backoff": 0.01, "timeout": 0.5, **settings})

    async def converse():
        async with Chat(endpoint, 0, may_ask) as chat:
            return await asyncio.gather(*(chat.ask({"n": n}) for n in range(times)))

    replies = asyncio.run(converse())
    return replies[0] if times == 1 else replies


@pytest.mark.parametrize(
    "step",
    [
        failing(500),
        failing(503),
        failing(429),
        failing(408),
        failing(200, b"<html>"),
        failing(200, b"{}"),
        saying(None),
    ],
)
def test_transient_errors_are_retried(judge, step):
    judge.steps = [step, step, saying("third")]
    reply = ask(judge)
    assert (reply.content, reply.attempts) == ("third", 3)


@pytest.mark.parametrize("step", [fake_judge.hanging, fake_judge.dripping])
def test_servers_that_hang_or_drip_are_cut_off_at_the_deadline(judge, step):
    judge.steps = [step, saying("second")]
    start = time.monotonic()
    reply = ask(judge, timeout=0.3)
    assert reply.content == "second"
    assert time.monotonic() - start < 1.5
    judge.steps = [step] * 2
    reply = ask(judge, timeout=0.2, retries=1)
    assert (reply.content, reply.attempts) == (None, 2)
    assert "no reply within 0.2 s" in reply.problem


def test_retry_after_is_kept_in_seconds_and_capped(judge):
    judge.steps = [failing(429, Retry_After="0.4"), saying("ok")]
    assert ask(judge).content == "ok"
    assert judge.times[1] - judge.times[0] >= 0.4
    judge.steps = [failing(503, Retry_After="3600"), saying("ok")]
    assert ask(judge, max_wait=0.1).content == "ok"
    assert judge.times[3] - judge.times[2] < 1.0


@pytest.mark.parametrize("status", [400, 401, 404, 422, 302])
def test_permanent_errors_are_not_retried(judge, status):
    judge.steps = [failing(status, b"reason given")]
    reply = ask(judge)
    assert (reply.content, reply.attempts) == (None, 1)
    assert f"HTTP {status}: reason given" in reply.problem


def test_a_refused_key_stops_the_batch(judge):
    judge.steps = [failing(401)] * 20
    replies = ask(judge, times=20, concurrency=1)
    assert len(judge.bodies) == 1
    assert {reply.problem for reply in replies} == {"HTTP 401: no"}


def test_a_server_that_is_not_there_is_a_problem_not_an_exception():
    reply = asyncio.run(_unreachable())
    assert reply.content is None
    assert "ConnectError" in reply.problem


async def _unreachable():
    async with Chat(Endpoint(base_url="http://127.0.0.1:9/v1", retries=1, backoff=0.01)) as chat:
        return await chat.ask({})


def test_no_more_than_the_allowed_number_is_under_way(judge):
    judge.delay = 0.03
    judge.steps = [saying("ok")] * 12
    assert all(reply.content == "ok" for reply in ask(judge, times=12, concurrency=3, timeout=5))
    assert judge.most_under_way == 3


def test_the_budget_counts_retries(judge):
    judge.steps = [failing(500)] * 10
    left = iter([True, True, False])
    reply = ask(judge, may_ask=lambda: next(left))
    assert reply.attempts == 2
    assert "budget" in reply.problem


def test_the_key_is_sent_and_shown_nowhere(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    judge.steps = [failing(400, f"bad key {SECRET}".encode())]
    reply = ask(judge, api_key_env="JUDGE_KEY")
    assert judge.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert reply.problem == "HTTP 400: bad key ***"
    assert SECRET not in repr(Endpoint(base_url=judge.url, api_key_env="JUDGE_KEY"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"base_url": "localhost:8000"}, "Pass a URL such as"),
        ({"base_url": "http://me:pass@host/v1"}, "api_key_env"),
        ({"base_url": "http://host/v1?key=1"}, "api_key_env"),
        ({"base_url": "http://host/v1", "api_key_env": "SURELY_NOT_SET"}, "is not set"),
        ({"base_url": "http://host/v1", "timeout": 0}, "timeout > 0"),
        ({"base_url": "http://host/v1", "concurrency": 0}, "concurrency >= 1"),
    ],
)
def test_endpoints_that_cannot_work_are_refused(settings, says):
    with pytest.raises(PresetError, match=says) as refusal:
        Endpoint(**settings)
    assert "pass@" not in str(refusal.value)
