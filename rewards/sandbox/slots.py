"""User ids for programs that run at the same time, if this process is root.

Programs of different slots cannot signal one another, and limits on the number of processes count per slot.
"""

import itertools
import os
import socket
import threading
from typing import TypeAlias

# 60578-61183 are assigned to nobody by Debian and by systemd (UIDS-GIDS), and small enough for mapped containers.
FIRST_UID = 60578
SLOTS = 600

_lock = threading.Lock()
Slot: TypeAlias = tuple[int, socket.socket]  # the user id, and the socket that claims it
_free: list[Slot] = []
_claims: list[socket.socket] = []  # of all slots of ours, also those in use


def give_slot(slot: Slot | None) -> None:
    """Free a slot for the next program; all processes of its user id have ended."""
    if slot is not None:
        with _lock:
            _free.append(slot)


def take_slot() -> Slot | None:
    """Return a free slot of this process, or a new one; None if this process is not root. Slots are claimed across processes by
    the name of a socket, which the kernel frees when its owner ends, and which leaves no file behind.

    Raises:
        OSError: all slots are taken.
    """
    if os.geteuid() != 0:
        return None
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
            _claims.append(claim)
            return FIRST_UID + number, claim
    raise OSError(f"all {SLOTS} sandbox user ids are taken; run fewer programs at the same time")


def _forget() -> None:
    """Drop the slots in a forked child: they are its parent's."""
    global _lock
    _lock = threading.Lock()
    for claim in _claims:
        claim.close()  # a copy: the parent's holds
    _claims.clear()
    _free.clear()


os.register_at_fork(after_in_child=_forget)
