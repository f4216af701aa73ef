"""A user id for each program that runs at the same time, when this process is root.

Programs of different slots cannot signal one another, and limits on the number of processes count per slot.
"""

import itertools
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["FIRST_UID", "SLOTS", "uid_slot"]

# 60578-61183 are assigned to nobody by Debian and by systemd (UIDS-GIDS), and small enough for mapped containers.
FIRST_UID = 60578
SLOTS = 600

_lock = threading.Lock()
_free: list[tuple[int, socket.socket]] = []


@contextmanager
def uid_slot() -> Iterator[int | None]:
    """A user id that no other program on this machine runs under meanwhile; None when this process is not root.

    Raises:
        OSError: all slots are taken.
    """
    if os.geteuid() != 0:
        yield None
        return
    slot = _take()
    try:
        yield slot[0]
    finally:
        with _lock:
            _free.append(slot)


def _take() -> tuple[int, socket.socket]:
    """A slot of ours that is free, or a new one. Slots are claimed across processes by the name of a socket, which the
    kernel lets go of whenever its owner ends, and which leaves no file behind."""
    with _lock:
        if _free:
            return _free.pop()
        for number in itertools.islice(itertools.cycle(range(SLOTS)), os.getpid() % SLOTS, os.getpid() % SLOTS + SLOTS):
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(f"\0rewards-sandbox-{FIRST_UID + number}")
            except OSError:
                claim.close()
                continue
            return FIRST_UID + number, claim
    raise OSError(f"all {SLOTS} sandbox user ids are taken; run fewer programs at the same time")
