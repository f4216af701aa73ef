"""Is a hook sound? `check_hook` tries it on random batches and says what it found; nothing is trained.

    finding             what must hold                                                     kinds of hook
    runs                right shape; float32 and float64, on and off policy,               all
                        advantages (B, 1) and (B, T)
    needs               runs on a batch that holds no more than it declares                all but reductions
    inputs              left as they were, inference tensors, too                          all
    same again          same inputs, same output                                           all
    finite              where it counts                                                    all
    gradient            reaches what it should                                             clip, regularizer, reduction
    finite differences  autograd gives the derivative of the value, in float64             clip, regularizer, reduction
    masked tokens       gradient exactly 0, no influence, through an objective             all but advantages
    padding             more of it changes nothing                                         all
    extreme ratios      finite, gradient too, at log ratios of ±80 nats in float32         clip, weight, regularizer
    empty micro-batch   gives a differentiable 0                                           all but advantages
    sign                a note if negative                                                 weight
    advantage           it moves the gradient, on policy; a note if in the wrong direction clip
    accumulation        a note if micro-batches do not add up to the batch                 reduction
    unscorable          a NaN reward: advantage 0, and no influence on others              advantage
    order               groups interleaved, in any order, of any ids                       advantage
    no spread           finite where rewards are equal or unknown, and for one completion  advantage
    value targets       (N, T) and finite, for those with a value head                     advantage

Schedules stand at step 0. State that a hook keeps is put back before every call: with it a hook must be deterministic,
or no run could be resumed.

Finite differences: a hook may cut the graph on purpose, as cispo does with its weight. So a gradient that is not that of
the value is a note if the hook was seen to detach something (`detach`, `data`, `item`, `tolist`, `numpy`, `float`,
`torch.no_grad`). If nothing is detached, a backward of its own must be wrong, and the check fails.
"""

from __future__ import annotations

import functools
import traceback
from dataclasses import dataclass

import torch

from kit.errors import KitError
from kit.objective.checks.advantages import ADVANTAGE_CHECKS
from kit.objective.checks.reductions import REDUCTION_CHECKS
from kit.objective.checks.tokens import TOKEN_CHECKS
from kit.objective.checks.tools import Check, Fault, Note, Subject
from kit.objective.hook import Hook, underlying

__all__ = ["Finding", "check_hook"]


@dataclass(frozen=True)
class Finding:
    """What one check found. A `note` is worth knowing and no failure."""

    name: str
    passed: bool
    detail: str
    note: bool = False

    @property
    def result(self) -> str:
        """passed, failed or note."""
        return ("note" if self.note else "passed") if self.passed else "failed"


def check_hook(hook: Hook, seed: int = 0) -> list[Finding]:
    """What is found out about a hook of any kind by trying it: see the table above. Takes a tenth of a second.

    If it does not run at all, that is the only finding. Raises nothing that the hook raises: that is a finding, too.
    """
    checks = {"advantage": ADVANTAGE_CHECKS, "reduction": REDUCTION_CHECKS}.get(hook.kind, TOKEN_CHECKS)
    subject = Subject(hook, seed)
    found: list[Finding] = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for name, check in checks.items():
            finding = _tried(name, check, subject)
            found += [finding] if finding else []
            if name == "runs" and not found[0].passed:
                break
    subject.restore()
    return found


def _tried(name: str, check: Check, subject: Subject) -> Finding | None:
    try:
        detail = check(subject)
    except Fault as fault:
        return Finding(name, False, str(fault))
    except KitError as error:
        return Finding(name, False, str(error))
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}{_where(error, subject.hook)}")
    return None if detail is None else Finding(name, True, str(detail), isinstance(detail, Note))


def _where(error: Exception, hook: Hook) -> str:
    """The line of the hook's own file at which it failed, for people."""
    build = hook.factory.build
    target = underlying(build.args[0] if isinstance(build, functools.partial) and build.args else build)
    file = getattr(getattr(target, "__code__", None), "co_filename", None)
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1].lineno}: {lines[-1].line})" if lines else ""
