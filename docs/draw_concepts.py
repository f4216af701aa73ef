"""Draws the pictures of docs/concepts.md with the kit's own charts, from what the kit's own functions return.

python docs/draw_concepts.py            write docs/images/concepts-*.svg
python docs/draw_concepts.py --check    write nothing; exit with 1 if a picture is not what the code gives
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from markupsafe import Markup

FOLDER = Path(__file__).parent / "images"
STYLE = (
    "<style>svg{background:#fff}text{fill:#576172}.heading{fill:#1c2430}.grid{stroke:#dfe3e8}.axis{stroke:#576172}"
    ".mark{stroke:#576172;stroke-dasharray:4 3}</style>"
)
BLUE, ORANGE, GREEN, QUIET, EDGE = "#2563a8", "#c2570c", "#2e7d4f", "#576172", "#dfe3e8"
REWARDS = (1.2, 0.2, 1.2, 0.2, 0.2, 0.0, 1.2, 0.2)
"""Of one group: three right answers in the wanted layout, four wrong ones in it, one without it."""


def styled(svg: str, width: int) -> str:
    """A chart that stands alone: with its size and colours, on white, so that it can be read on a page of any colour."""
    head, mark, rest = svg.replace("<svg ", f'<svg width="{width}" ', 1).partition("<title>")
    return f"{head}{STYLE}{mark}{rest}\n"


def spread() -> str:
    """How likely a group has anything to teach, by how often the model is right."""
    from kit.report.charts import lines

    samples, series = 200, {}
    for size in (4, 8, 16):
        right = range(0, samples + 1, 2)
        chances = [
            1.0 - (math.comb(count, size) + math.comb(samples - count, size)) / math.comb(samples, size)
            for count in right
        ]
        series[f"{size} completions a problem"] = [
            (100 * count / samples, 100 * chance) for count, chance in zip(right, chances, strict=True)
        ]
    return lines(
        series,
        "Which problems teach something?",
        "how often the model is right (%)",
        "groups whose rewards differ (%)",
        y_range=(0.0, 100.0),
        smooth=False,
    )


def clip() -> str:
    """What PPO's clip does to one token: gain over the ratio of new to old probability."""
    import torch

    from kit.objective import TokenBatch, clips
    from kit.report.charts import lines

    ratios = torch.linspace(0.5, 1.6, 111)
    series = {}
    for name, advantage in (("better than its group (A = 1)", 1.0), ("worse than its group (A = -1)", -1.0)):
        logps, ones = ratios.log()[None, :], torch.ones(1, len(ratios), dtype=torch.bool)
        batch = TokenBatch(logps, torch.zeros_like(logps), torch.full((1, 1), advantage), ones)
        gain = -clips.build({"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28})(batch)[0]
        series[name] = [(round(r, 3), round(g, 4)) for r, g in zip(ratios.tolist(), gain.tolist(), strict=True)]
    return lines(
        series,
        "The clip: how far one batch may push a token",
        "new probability ÷ old probability",
        "what the step gains",
        marks=[(0.8, "1 - eps_low"), (1.28, "1 + eps_high")],
        smooth=False,
    )


def group() -> str:
    """One group: rewards, and the advantages that two estimators make of them."""
    import torch

    from kit.objective import RewardBatch, advantages

    batch = RewardBatch(torch.tensor(REWARDS), torch.zeros(len(REWARDS), dtype=torch.int64))
    columns = {
        "reward": (list(REWARDS), BLUE),
        "less the mean": (advantages.build("group_mean")(batch).tolist(), ORANGE),
        "divided by the deviation": (advantages.build("group_zscore")(batch).tolist(), GREEN),
    }
    body, width, left, top = [], 660, 130, 52
    body.append(_text(12, 22, "One problem, eight answers: from rewards to advantages", 14, "heading"))
    for row in range(len(REWARDS)):
        body.append(_text(12, top + 24 * row + 14, f"completion {row + 1}"))
    for column, (name, (values, color)) in enumerate(columns.items()):
        zero, scale = left + 170 * column + (12 if column == 0 else 70), 42
        body.append(_text(left + 170 * column, top - 8, name, 11))
        body.append(f'<line x1="{zero}" y1="{top}" x2="{zero}" y2="{top + 24 * len(values)}" stroke="{EDGE}"/>')
        for row, value in enumerate(values):
            x, long = (zero, value * scale) if value >= 0 else (zero + value * scale, -value * scale)
            y = top + 24 * row + 3
            body.append(f'<rect x="{x:.1f}" y="{y}" width="{long:.1f}" height="14" rx="2" fill="{color}"/>')
            body.append(_text(zero + max(value, 0) * scale + 5, y + 11, f"{value:+.2f}" if column else f"{value:.1f}"))
    words = "Rewards " + ", ".join(f"{reward:g}" for reward in REWARDS) + " become advantages around zero."
    return _svg("From rewards to advantages", words, width, top + 24 * len(REWARDS) + 10, body)


def loop() -> str:
    """A step of GRPO as boxes."""
    steps = [
        ("1  Problems", "a few prompts", "from the dataset"),
        ("2  Completions", "each one answered", "G times, by sampling"),
        ("3  Rewards", "a program scores", "every answer"),
        ("4  Advantages", "better or worse", "than its group?"),
        ("5  Update", "good answers", "become likelier"),
    ]
    width, height, gap, size = 860, 170, 24, 146
    body = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0L8,4L0,8z" fill="{QUIET}"/></marker></defs>'
    ]
    for place, (title, *rest) in enumerate(steps):
        x = 17 + place * (size + gap)
        body.append(f'<rect x="{x}" y="20" width="{size}" height="84" rx="8" fill="#f6f7f9" stroke="{EDGE}"/>')
        body.append(_text(x + 12, 44, title, 14, "heading"))
        body += [_text(x + 12, 68 + 18 * line, words, 12) for line, words in enumerate(rest)]
        if place:
            body.append(_arrow(f"M{x - gap + 3},62L{x - 4},62"))
    middle = 17 + size / 2
    far = middle + 4 * (size + gap)
    body.append(_arrow(f"M{far},106L{far},140L{middle},140L{middle},108"))
    body.append(_text((middle + far) / 2 - 130, 158, "the next step uses the model that has just learned", 12))
    words = "Problems are answered several times, answers scored, compared within their group, and the better become likelier."
    return _svg("A step of GRPO", words, width, height, body)


def _arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{QUIET}" stroke-width="1.6" marker-end="url(#tip)"/>'


def _text(x: float, y: float, text: str, size: float = 11.5, kind: str = "") -> Markup:
    look = Markup(' class="heading" font-weight="600"') if kind else ""
    return Markup('<text x="{:.1f}" y="{:.1f}" font-size="{:g}"{}>{}</text>').format(x, y, size, look, text)


def _svg(title: str, words: str, width: float, height: float, body: list[str]) -> str:
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {:g} {:g}" role="img" font-family="system-ui,sans-serif">'
        "<title>{}</title><desc>{}</desc>"
    ).format(width, math.ceil(height), title, words)
    return f"{head}{''.join(body)}</svg>"


PICTURES = {"loop": (loop, 860), "group": (group, 660), "clip": (clip, 480), "spread": (spread, 480)}
"""What draws each, and how wide it is shown, in pixels."""


def pictures() -> dict[Path, str]:
    """Every picture by the file that it belongs in."""
    return {FOLDER / f"concepts-{name}.svg": styled(str(draw()), width) for name, (draw, width) in PICTURES.items()}


def differences() -> list[Path]:
    """Files that are not what the code draws."""
    return [p for p, text in pictures().items() if not p.is_file() or p.read_text(encoding="utf-8") != text]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        stale = differences()
        for path in stale:
            print(f"{path} is not what the code draws; run: python docs/draw_concepts.py", file=sys.stderr)
        return 1 if stale else 0
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
