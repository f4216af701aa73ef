"""Wrong passwords are checked one after the other; the tests use no clock."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from kit.ui import security
from kit.ui.security import Gate, Refusal
from kit.ui.settings import Settings

REAL_SLEEP = asyncio.sleep


def basic(text: str) -> bytes:
    return b"Basic " + base64.b64encode(text.encode())


RIGHT = basic("ada:correct horse")


class Delays:
    """A replacement of the half second's wait, which ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = self.made = 0
        self.over = asyncio.Event()
        monkeypatch.setattr(security.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        assert seconds == security.WRONG_PASSWORD_SECONDS
        self.now, self.made = self.now + 1, self.made + 1
        self.most = max(self.most, self.now)
        await self.over.wait()
        self.now -= 1


def gate() -> Gate:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        return None

    return Gate(app, Settings(accounts={"ada": "correct horse"}))


async def ask(gate: Gate, header: bytes) -> int:
    """200, or the status of the refusal."""
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "raw_path": b"/",
             "headers": [(b"host", b"x"), (b"authorization", header)]}  # fmt: skip
    try:
        await gate._check(scope)
    except Refusal as refusal:
        return refusal.status
    return 200


async def settle() -> None:
    for _ in range(50):
        await REAL_SLEEP(0)


def test_concurrent_wrong_passwords_are_checked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        delays, guarded = Delays(monkeypatch), gate()
        assert await ask(guarded, RIGHT) == 200  # the first request waits for nothing
        wrong = [asyncio.create_task(ask(guarded, basic(f"ada:wrong {number}"))) for number in range(10)]
        await settle()
        guess = asyncio.create_task(ask(guarded, b"basic " + RIGHT.partition(b" ")[2]))  # right, not yet known
        await settle()
        assert delays.now == 1
        assert not any(task.done() for task in [*wrong, guess]), "a right password must wait like wrong ones"
        assert await ask(guarded, RIGHT) == 200, "a user who is logged in does not wait"
        delays.over.set()
        assert await asyncio.gather(*wrong, guess) == [401] * 10 + [200]
        assert (delays.most, delays.made) == (1, 10)

    asyncio.run(story())


def test_excess_login_attempts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        delays, guarded = Delays(monkeypatch), gate()
        waiting = [
            asyncio.create_task(ask(guarded, basic(f"ada:wrong {number}"))) for number in range(security.MOST_WAITING)
        ]
        await settle()
        assert await ask(guarded, basic("ada:one more")) == 429
        assert await ask(guarded, RIGHT) == 429, "a fast answer would reveal a right password"
        delays.over.set()
        assert set(await asyncio.gather(*waiting)) == {401}
        assert await ask(guarded, RIGHT) == 200

    asyncio.run(story())
