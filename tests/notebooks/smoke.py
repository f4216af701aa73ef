"""Write short versions of the notebooks: `python tests/notebooks/smoke.py FOLDER`.

The cells are the same with fewer steps. Model, data, reward and engine are replaced if they need a GPU or the network.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SHORT = [
    "optimisation.steps=4",
    "optimisation.batch_size=16",
    "generation.num_generations=4",
    "evaluation.prompts=10",
    "evaluation.k=2",
    "evaluation.every=2",
    "run.save_every=2",
    "run.threads=1",
]
"""A run of seconds. One thread: the tiny model gains nothing from more, and loses by them on a machine that is busy."""
EMBEDDED = [
    "model={name: embedded, dtype: float32}",
    "data={source: 'reasoning-gym:chain_sum', task_params: {min_terms: 2, max_terms: 4, min_digits: 1, max_digits: 1}, "
    "limit: 220, heldout: 20}",
    "reward={preset: reasoning-gym}",
    "generation={engine: hf, max_completion_tokens: 64}",
    "objective.weights=[]",
    "optimisation={learning_rate: 5.0e-4}",
]
"""Without the weights of the objective, since some of them ask for an engine's own log-probabilities."""
SUMS = """from datasets import Dataset
from kit.models.embedded import source_of
name = source_of("embedded")
question = "State the final answer to the following arithmetic problem: {} + {} ="
sums = [(number % 10, (number + number // 10) % 10) for number in range(32)]
dataset = Dataset.from_list([{"question": question.format(a, b), "answer": str(a + b)} for a, b in sums])
"""
SETTINGS = (r"(?ms)^SETTINGS = \[(.*?)^\]", rf"SETTINGS = [\g<1>    *{EMBEDDED + SHORT},\n]")
EDITS: dict[str, list[tuple[str, str]]] = {
    "01": [(r'(kit\.(train|start)\("[\w-]+".*?)\)', rf"\g<1>, overrides={SHORT})")],
    "02": [SETTINGS],
    "03": [(r'"optimisation.steps=40",', f"*{SHORT},")],
    "04": [(r"seeds=3", "seeds=1"), (r'"optimisation.steps=30"', f"*{SHORT}")],
    "05": [SETTINGS],
    "06": [
        (r'(?m)^name = "Qwen.*\n^dataset = .*\n', SUMS),
        (r"(?m)^system = .*$", "system = []"),  # the tiny model needs no prompt
        (r"max_steps=100", "max_steps=4"),
        (r"max_completion_length=256", "max_completion_length=64"),
        (r"learning_rate=1e-5", "learning_rate=1e-4"),
    ],
    "07": [
        (r'(?m)^MODEL = "allenai.*$', 'MODEL = "unlisted"'),
        (r"(?ms)^SETTINGS = \[(.*?)^\]", rf"SETTINGS = [\g<1>    *{SHORT},\n]"),
    ],
    "08": [(r"steps=30\)", f"overrides={SHORT})")],
    "09": [SETTINGS],
    "10": [SETTINGS],
}
"""Patterns by notebook, each of which stands in some cell, and what takes their place."""


def edited(path: Path) -> str:
    """The notebook with the edits for the smoke test. Raises `ValueError` if an edit matches nothing."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for pattern, text in EDITS[path.name[:2]]:
        counts = []
        for cell in code:
            source, count = re.subn(pattern, text, "".join(cell["source"]))
            cell["source"] = source
            counts.append(count)
        if not any(counts):
            raise ValueError(
                f"{path.name}: no cell has {pattern}; tests/notebooks/smoke.py says what is to be changed."
            )
    return json.dumps(notebook)


def write_tiny_olmo(folder: Path) -> None:
    """Write a tiny OLMo 2 with random weights and the embedded model's tokenizer, for the notebook of an unlisted model."""
    from transformers import AutoConfig, AutoTokenizer

    from kit.model_check.tiny import tiny_config, tiny_model
    from kit.models.embedded import source_of

    tokenizer = AutoTokenizer.from_pretrained(source_of("embedded"))
    config = tiny_config(AutoConfig.for_model("olmo2"), len(tokenizer))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    tiny_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(folder: Path) -> None:
    """Write all edited notebooks into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_olmo(folder / "unlisted")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        (folder / path.name).write_text(edited(path), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
