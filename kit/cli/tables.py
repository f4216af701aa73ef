"""Tables on the terminal. rich is imported where it is used, so that `grpo-kit --help` answers at once."""

from __future__ import annotations


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Prints rows under a head; as wide as it takes where nobody looks, for grep and files."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console = Console()
    if not console.is_terminal:  # no wrapping at 80 columns
        console = Console(width=200)
    console.print(table)


def print_plain(head: list[str], rows: list[list[str]]) -> None:
    """Columns three blanks apart; without rich, whose import takes longer than listing a thousand runs."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        line = "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())
