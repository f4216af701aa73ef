"""Finding the program in a completion: a scanner over lines, linear in their length."""

from collections.abc import Iterator

from rewards.extract import MAX_CHARS, Extracted

MAX_PROGRAM_CHARS = 100_000
_PYTHON = frozenset({"python", "py", "python3"})
_WRAPPERS = ("<answer>", "</answer>")


def code_block(text: str) -> Extracted:
    r"""The last complete fenced block after the last `</think>`: the last one marked as Python, else the last unmarked.

    A block that is opened and not closed is no answer, whatever stands before it. Fences are lines of three or more
    backticks or tildes, indented by three spaces at most; `<answer>` may stand before one, `</answer>` behind.

    >>> code_block("So:\n```python\nprint(1)\n```\nwhich prints\n```\n1\n```")
    Extracted(value='print(1)\n', reason=None)
    >>> code_block("```python\nprint(1)").reason
    'unterminated'
    """
    if len(text) > MAX_CHARS:
        return Extracted(None, "too_long")
    closed = text.rfind("</think>")
    if text.rfind("<think>") > closed:
        return Extracted(None, "unterminated_think")
    marked: str | None = None
    unmarked: str | None = None
    for language, block in _blocks(text[0 if closed < 0 else closed + len("</think>") :]):
        if block is None:
            return Extracted(None, "unterminated")
        if language in _PYTHON:
            marked = block
        elif not language:
            unmarked = block
    block = unmarked if marked is None else marked
    if block is None:
        return Extracted(None, "missing")
    if len(block) > MAX_PROGRAM_CHARS:
        return Extracted(None, "too_long")
    return Extracted(block) if block.strip() else Extracted(None, "blank")


def _blocks(text: str) -> Iterator[tuple[str, str | None]]:
    """Language and content of each fenced block; None for the content of one that is not closed."""
    fence, language = "", ""
    lines: list[str] = []
    for line in text.split("\n"):
        marks, rest = _fence(line)
        if not fence and marks:
            fence, language, lines = marks, (rest.split() or [""])[0].lower().removeprefix("{.").rstrip("}"), []
        elif fence and marks[:1] == fence[0] and len(marks) >= len(fence) and not rest:
            yield language, "".join(lines)
            fence = ""
        elif fence:
            lines.append(line + "\n")
    if fence:
        yield language, None


def _fence(line: str) -> tuple[str, str]:
    """The run of fence characters that a line begins with, and what follows; ("", "") for any other line."""
    if "```" not in line and "~~~" not in line:
        return "", ""
    line = line.strip("\r").removeprefix(_WRAPPERS[0])
    bare = line.lstrip(" ")
    if len(line) - len(bare) > 3 or not bare.startswith(("```", "~~~")):
        return "", ""
    rest = bare.lstrip(bare[0])
    marks = bare[: len(bare) - len(rest)]
    rest = rest.strip().removesuffix(_WRAPPERS[1]).strip()
    return ("", "") if bare[0] in rest else (marks, rest)
