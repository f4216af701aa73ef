"""Functions that the tests of isolation run in worker processes."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path


def double(value):
    return 2 * value


def pair(value):
    return value, {"twice": 2 * value}


def fail(message):
    raise ValueError(message)


class Late(BaseException):
    overrun = True


def give_up(seconds=0.0):
    time.sleep(seconds)
    raise Late


def not_a_number():
    return [1.0, float("nan")]


def crash():
    ctypes.string_at(0)


def hang_in_c():
    return str(9 ** (9**9))  # one C call that holds the interpreter's lock


def ignore_signals():
    import signal

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(60)


def eat(megabytes):
    return len(bytearray(megabytes << 20))


KEPT = []


def leak(megabytes):
    KEPT.append(bytearray(megabytes << 20))
    return len(KEPT)


def ask():
    return input()


def wait(seconds):
    time.sleep(seconds)
    return seconds


def pid():
    return os.getpid()


def main_module():
    return sys.modules["__main__"].__file__


def limits():
    import resource

    return resource.getrlimit(resource.RLIMIT_CORE)


def with_child(file):
    child = subprocess.Popen(["sleep", "60"])
    Path(file).write_text(str(child.pid))
    time.sleep(60)


def unreadable():
    return {1, 2}


def huge():
    return "x" * 20_000_000


def count(file):
    """Append a mark to the file at each call."""
    with open(file, "a") as marks:
        marks.write("x")
    return True
