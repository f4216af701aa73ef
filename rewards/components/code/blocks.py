"""Extract the program from a completion, by lines and in linear time."""

from collections.abc import Iterator

from rewards.extract import MAX_CHARS, Extracted

MAX_PROGRAM_CHARS = 100_000
_PYTHON = frozenset({"python", "py", "python3"})
_WRAPPERS = ("<answer>", "</answer>")


def code_block(text: str) -> Extracted:
    r"""Return the last fenced block after the last `</think>` that is marked as Python, else the last unmarked block.

    If a block is not closed, there is no program, even after complete blocks. Fences are lines of three or more backticks or
    tildes, indented by three spaces at most; `<answer>` may precede an opening fence and `</answer>` follow a closing one.

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
    """Yield language and content of each fenced block; the content is None if the block is not closed."""
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
    """Return the fence characters at the start of a line and the rest of the line; ("", "") for other lines."""
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
