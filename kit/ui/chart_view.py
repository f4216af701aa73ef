"""A place for charts, filled with the JSON text of `kit.ui.curves.pack` and drawn by charts.js in the browser."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

SCRIPT = (Path(__file__).parent / "charts.js").read_text(encoding="utf-8")


def charts(elem_id: str) -> gr.HTML:
    """An empty place."""
    return gr.HTML("", html_template='<div class="charts"></div>', js_on_load=SCRIPT, elem_id=elem_id)
