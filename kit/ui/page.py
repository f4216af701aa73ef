"""The page: one address a screen, each with its own file, its own timers and nothing of the others."""

from __future__ import annotations

import gradio as gr

from kit.ui import chat_screen, compare_screen, export_screen, home, new_run, run_screen
from kit.ui.site import Site

SCREENS = (
    ("New run", "new", new_run.build),
    ("Run", "run", run_screen.build),
    ("Compare", "compare", compare_screen.build),
    ("Chat", "chat", chat_screen.build),
    ("Export", "export", export_screen.build),
)


def build(site: Site) -> gr.Blocks:
    """All screens. `launch` is never called on it: `kit.ui.server` mounts it behind the gate."""
    with gr.Blocks(title="grpo-kit", analytics_enabled=False, fill_width=True) as blocks:
        gr.Navbar(main_page_name="Home")
        home.build(site, blocks)
    for title, path, screen in SCREENS:
        with blocks.route(title, f"/{path}"):
            screen(site, blocks)
    return blocks
