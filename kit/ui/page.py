"""The page: its look and its screens. Each screen has its own address, file and timers."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

from kit.ui import chat, compare, export, home, new_run, run
from kit.ui.site import Site

SANS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Noto Sans", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]
PHONE = Path(__file__).parent / "phone.css"
STYLES = tuple(Path(__file__).parent / name for name in ("style.css", "runs.css"))


def theme() -> gr.themes.Base:
    """Return the theme: grey surfaces and one blue."""
    return gr.themes.Default(
        primary_hue=gr.themes.colors.blue,
        secondary_hue=gr.themes.colors.slate,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_md,
        text_size=gr.themes.sizes.text_md,
        font=SANS,
        font_mono=MONO,
    ).set(
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_500",
        button_primary_text_color="white",
        block_shadow="none",
        block_shadow_dark="none",
        block_label_text_weight="600",
        # A contrast of 5 to 1, also on coloured notes.
        body_text_color_subdued="#56647a",
        input_placeholder_color="#64748b",
        input_placeholder_color_dark="*neutral_400",
    )


def style() -> str:
    """Return the text of the style sheets."""
    return "\n".join(path.read_text(encoding="utf-8") for path in STYLES)


def head() -> str:
    """Return the kit's part of the page's head."""
    return f"<style>{PHONE.read_text(encoding='utf-8')}</style>"


TITLE = """() => {
  const run = new URLSearchParams(location.search).get('run');
  document.title = [run, 'SCREEN', 'grpo-kit'].filter(Boolean).join(' · ');
}"""
SCREENS = (
    ("New run", "new", new_run.build),
    ("Run", "run", run.build),
    ("Compare", "compare", compare.build),
    ("Chat", "chat", chat.build),
    ("Export", "export", export.build),
)


def build(site: Site) -> gr.Blocks:
    """Build all screens. Nobody calls `launch`: `kit.ui.server` mounts the page behind the gate."""
    blocks = gr.Blocks(title="grpo-kit", analytics_enabled=False, fill_width=True)
    for title, path, _ in SCREENS:
        blocks.route(title, f"/{path}")
    with blocks:  # only once: Gradio rebuilds its whole application at the end of each `with`
        blocks.current_page = ""
        gr.Navbar(main_page_name="Home")
        home.build(site, blocks)
        for title, path, screen in SCREENS:
            blocks.current_page = path
            screen(site, blocks)
            # The title begins with the run in the address, so that browser tabs differ.
            blocks.load(None, [], [], js=TITLE.replace("SCREEN", title))
    return blocks
