"""Step 1: the model, and whether it fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from markupsafe import Markup

from kit.config import EMBEDDED, load_config, preset_names
from kit.errors import KitError
from kit.ui import markup as m
from kit.ui.draft import Draft
from kit.ui.edits import late, whole
from kit.ui.live import said

if TYPE_CHECKING:
    from kit.ui.screen import Screen

MOST_FOUND, DEEPEST = 40, 3
SKIPPED = {"runs", "node_modules", "__pycache__"}


def build(screen: Screen) -> None:
    """The step."""
    gr.HTML(m.page(m.tag("p", "What is trained. The embedded model needs no GPU and no download; a hub id is fetched at the "
                         "start of the run; a folder in Hugging Face layout is found below the folder that the page was "
                         "started in.")))  # fmt: skip
    fields = screen.fields
    fields.add("model.name", label="Model", choices=choices(screen), allow_custom_value=True, filterable=True)
    with gr.Row():
        fields.add("model.load_in_4bit", label="4-bit weights (QLoRA)")
        fields.add("model.lora", label="Train adapters (LoRA), not all weights")
        fields.add("model.lora.rank", label="LoRA rank")
    cards = gr.HTML()
    with gr.Accordion("Code that comes with the model", open=False):
        gr.HTML(m.page(m.note("Some models bring Python code that runs with your rights. Read the .py files of the repository "
                              "first. Then write its name here; it is asked for each repository.", "warn")))  # fmt: skip
        with gr.Row():
            name = gr.Textbox(label="Repository whose code may run", placeholder="organisation/model", scale=3)
            confirm = gr.Button("I have read it", scale=1)

    def fits(draft: Any) -> str:
        return where_it_fits(screen, draft)

    for event in (screen.draft.change, screen.blocks.load):
        event(
            fits, [screen.draft], [cards], show_progress="hidden", api_visibility="private", trigger_mode="always_last"
        )
    confirm.click(
        lambda draft, repository: said(
            lambda: [whole(trust(screen.read(draft), repository), draft), ""], lambda why: [gr.skip(), m.error(why)]
        ),
        [screen.draft, name],
        [screen.draft, screen.problem],
        js=late(2),
        queue=False,
        api_visibility="private",
    )


def trust(draft: Draft, repository: Any) -> Draft:
    """The draft with the code of its model allowed. Raises `ConfigError` unless the repository is named as it is."""
    from dataclasses import replace

    from kit.errors import ConfigError

    model = draft.tree()["model"]["name"]
    if not isinstance(repository, str) or repository.strip() != model or model == EMBEDDED:
        raise ConfigError(f"The model is '{model}'; write exactly that to let its code run.")
    return replace(draft.change("model.trust_remote_code", True), trusted=model)


def choices(screen: Screen) -> list[str]:
    """The embedded model, model folders nearby, and what the presets name."""
    named = [load_config(name).model.name for name in preset_names()]
    return list(dict.fromkeys([EMBEDDED, *folders(screen.site.settings.folder), *named]))


def folders(base: Path) -> list[str]:
    """Folders with a config.json below `base`, relative to it; hidden ones, runs and deep ones are passed over."""
    found: list[str] = []
    level = [base]
    for _ in range(DEEPEST):
        below: list[Path] = []
        for folder in level:
            try:
                inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
            except OSError:
                continue
            below += [path for path in inside if path.name not in SKIPPED and not path.name.startswith(".")]
        found += [str(path.relative_to(base)) for path in below if (path / "config.json").is_file()]
        level = below[:200]
    return found[:MOST_FOUND]


def where_it_fits(screen: Screen, value: Any) -> str:
    """A badge for each card."""
    try:
        draft = screen.read(value)
        config = draft.config(screen.site.settings)
        found = screen.site.benches.plan(config, draft.preset, draft.overrides())
    except KitError as problem:
        return m.error(problem)
    here = m.badge("fits this machine", "ok") if found["fits"] else m.badge("does not fit this machine", "fail")
    head = m.tag(
        "div",
        m.tag("h3", f"{config.model.name}: {found['model']['parameters'] / 1e6:,.1f} M weights") + here,
        class_="spread",
    )
    return m.page(m.card(head, cards_table(found["cards"])))


def cards_table(cards: list[dict[str, Any]]) -> Markup:
    """Peak and time on each listed GPU."""
    rows = [
        [
            card["card"],
            m.badge("fits", "ok") if card["fits"] else m.badge("too large", "fail"),
            f"{card['peak_gib']:.1f} of {card['usable_gib']:.0f} GiB",
            m.seconds(card["seconds_per_step"]),
        ]
        for card in cards
    ]
    fold = m.tag("summary", "On other GPUs (estimates)")
    return m.tag("details", fold + m.table(["card", "", "peak", "a step"], rows, numbers={2, 3}))
