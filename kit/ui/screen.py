"""What the steps of the form share."""

from __future__ import annotations

from typing import Any

import gradio as gr

from kit.ui import edits
from kit.ui.draft import Draft, Fields
from kit.ui.site import Site


class Screen:
    """What the steps share: the draft, the fields, the tabs."""

    def __init__(self, site: Site, blocks: gr.Blocks) -> None:
        self.site, self.blocks, self.fields = site, blocks, Fields()
        # The secret only has to be the same after a restart of the server; what is kept is no secret.
        self.draft = gr.BrowserState(Draft().as_dict(), storage_key="grpo-kit-draft", secret="grpo-kit")
        self.problem: gr.HTML
        self.tabs: gr.Tabs

    def read(self, value: Any) -> Draft:
        """The draft that a browser sent, with what was typed just before. Raises `KitError`."""
        return edits.latest(value)
