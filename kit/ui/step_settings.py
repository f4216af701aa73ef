"""Step 4: the keys that matter most, and every key there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gradio as gr

from kit.config import RunConfig
from kit.ui import markup as m

if TYPE_CHECKING:
    from kit.ui.screen import Screen

FIRST = (
    {
        "objective.recipe": "Algorithm",
        "optimisation.steps": "Training steps",
        "optimisation.learning_rate": "Learning rate",
    },
    {
        "generation.num_generations": "Completions of each prompt",
        "optimisation.batch_size": "Completions in a step",
        "generation.max_completion_tokens": "Longest completion, in tokens",
    },
    {
        "evaluation.every": "Evaluate every so many steps",
        "run.seed": "Seed",
        "run.save_every": "Checkpoint every so many steps",
    },
)
"""Keys and what they are called."""
FILTER = """(text) => {
  const words = text.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const one of document.querySelectorAll('#every-key [id^="key-"]')) {
    const said = (one.id + ' ' + one.textContent).toLowerCase();
    one.dataset.out = words.every(word => said.includes(word)) ? '' : 'yes';
    one.style.display = one.dataset.out ? 'none' : '';
  }
  for (const box of document.querySelectorAll('#every-key .key-row, #every-key .key-section')) {
    const keys = [...box.querySelectorAll('[id^="key-"]')];
    box.style.display = keys.length && keys.every(one => one.dataset.out) ? 'none' : '';
  }
}"""


def build(screen: Screen) -> None:
    """The step."""
    how = gr.Radio(["The keys that matter most", "Every key"], value="The keys that matter most", label="Settings")
    with gr.Column(visible=True) as few:
        for names in FIRST:
            with gr.Row():
                for name, words in names.items():
                    screen.fields.add(
                        name, label=f"{words} ({breakable(name)})", elem_id=f"first-{name.replace('.', '-')}"
                    )
    with gr.Column(visible=False, elem_id="every-key") as all_keys:
        search = gr.Textbox(label="Find a key", placeholder="kl, checkpoint, seed …", elem_id="find-key")
        for name, field in RunConfig.model_fields.items():
            with gr.Accordion(name, open=True, elem_classes="key-section"):
                words = (field.annotation.__doc__ or "") if field.annotation is not None else ""
                gr.HTML(m.page(m.tag("small", words.strip().partition("\n")[0])))
                _section(screen, name)
    how.change(
        lambda choice: [gr.Column(visible=choice != "Every key"), gr.Column(visible=choice == "Every key")],
        [how],
        [few, all_keys],
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )
    search.input(None, [search], [], js=FILTER)


def breakable(name: str) -> str:
    """A dotted key that a narrow label breaks after its dots, at zero-width spaces, and not within a word."""
    return name.replace(".", ".\u200b")


def _section(screen: Screen, section: str) -> None:
    """All keys of a section, two in a row."""
    names = [key.name for key in screen.fields.known.values() if key.section == section]
    for at in range(0, len(names), 2):
        with gr.Row(elem_classes="key-row"):
            for name in names[at : at + 2]:
                screen.fields.add(name)
