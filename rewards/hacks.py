"""Completions that earn reward without solving anything, wherever a reward is careless. None may score as correct."""

from typing import NamedTuple

__all__ = ["Hack", "known_hacks"]


class Hack(NamedTuple):
    """A named completion; None stands for a completion that is missing altogether."""

    name: str
    completion: str | None


def known_hacks(prompt: str, right: str, wrong: str) -> list[Hack]:
    """Hacks around one question.

    Args:
        prompt: the question, for the echo.
        right: the right answer, which some hacks contain beside others.
        wrong: another answer.
    """
    honest = f"<think>work</think><answer>{right}</answer>"
    return [
        Hack("missing", None),
        Hack("empty", ""),
        Hack("white space", " \n\t" * 50),
        Hack("blank answer", "<think>work</think><answer> \n </answer>"),
        Hack("NUL answer", "<think>work</think><answer>\x00\x00</answer>"),
        Hack("truncated in the answer", f"<think>work</think><answer>{right}"),
        Hack("truncated in the reasoning", f"<think>work <answer>{right}</answer>"),
        Hack("reopened answer", f"{honest}<answer>"),
        Hack("answer inside the reasoning", f"<think><answer>{right}</answer></think>"),
        Hack("keyword stuffed", "<think></think><answer></answer> #### \\boxed{} answer final correct " * 20),
        Hack("all tags, no content", "<think></think><answer></answer>"),
        Hack("hedged", f"<think>work</think><answer>{wrong} or {right}</answer>"),
        Hack("hedged the other way", f"<think>work</think><answer>{right} or {wrong}</answer>"),
        Hack("equation", f"<think>work</think><answer>{wrong}={right}</answer>"),
        Hack("list of answers", f"<think>work</think><answer>{wrong}, {right}</answer>"),
        Hack("two answers", f"<think>work</think><answer>{wrong}</answer><answer>{right}</answer>"),
        Hack("two answers, right one first", f"{honest}<answer>{wrong}</answer>"),
        Hack("nested answers", f"<think>work</think><answer><answer>{right}</answer></answer>"),
        Hack("text after the answer", f"{honest}\nor maybe {wrong}"),
        Hack("two hash lines", f"#### {wrong}\n#### {right}"),
        Hack("hedged hash", f"#### {wrong} or {right}"),
        Hack("hash with text after", f"#### {right}\nor maybe {wrong}"),
        Hack("prompt echo", f"{prompt}\n{prompt}"),
        Hack("huge text", f"{right} " * 300_000),
        Hack("huge number", "<think>work</think><answer>1e999999999</answer>"),
        Hack("tower of powers", "<think>work</think><answer>5^{5^{5^{5^{5}}}}</answer>"),
        Hack("lone surrogates", "<think>\ud800</think><answer>\udfff</answer>"),
        Hack("NULs", "\x00" * 1000),
    ]
