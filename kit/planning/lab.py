"""Fresh completions of the base model for the Reward Lab: chosen rows, sampled as in training, scored part by part.

`python -m kit.planning.lab REQUEST` does it in a process of its own: {config, rows, k, result}.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import EvaluationConfig, load_config
from kit.errors import DataError
from kit.planning.workbench import group, plain
from kit.runs.files import to_json

if TYPE_CHECKING:
    from kit.evaluation.heldout import Progress
    from kit.planning.signal import BaseModel
    from kit.runner.prepare import Parts

MOST_ROWS, MOST_EACH = 16, 16


def generate(
    parts: Parts, model: Any, places: list[int], k: int, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """k completions of each training row at `places`, scored as a group each. Raises `DataError` for a row that is not there."""
    from kit.generation.multi_turn import own_tokens
    from kit.planning.signal import BaseModel

    train, config = parts.data.train, parts.config
    missing = [place for place in places if not 0 <= place < len(train)]
    if missing or not places:
        raise DataError(
            f"There is no training row {missing[0] if missing else '-'}; there are {len(train)}, counted from 0."
        )
    rows = [train[place] for place in places]
    asked = EvaluationConfig(
        prompts=len(rows),
        k=k,
        temperature=config.generation.temperature,
        seed=config.run.seed,
        batch_size=config.optimisation.batch_size,
    )
    who = (parts.preset, parts.files.tokenizer, asked, config.generation, parts.checker)
    who = (parts.preset, parts.files.tokenizer, asked, config.generation, parts.checker)
    base = BaseModel(rows, *who, interaction=parts.interaction, processor=parts.files.processor)
    sampled = base.sample(model, progress)
    found = []
    for at, place in enumerate(places):
        drawn = sampled.completions[at * k : (at + 1) * k]
        texts = [_said(base, rows[at]["prompt"], one) for one in drawn]
        shown = group(parts.preset, rows[at], texts, sampled.verdict, sampled.correct, at * k)
        for item, one in zip(shown["items"], drawn, strict=True):
            item |= {"tokens": own_tokens(one), "cut": one[1]}
        found.append({"row": place, **shown})
    return found


def _said(base: BaseModel, prompt: Any, completion: Any) -> str:
    """What the model wrote, as text; with its turns where it called tools."""
    said = base._completion(prompt, completion)
    return plain(said)


def job(request: dict[str, Any], quiet: bool) -> None:
    """The process: prepares as a run does, loads the model, samples, and writes the result file."""
    from kit.runner.console import LogCapture, Reporter

    reporter, logs = Reporter(quiet), LogCapture()
    with logs.collecting():
        from transformers import set_seed

        from kit.models.backend import use_threads
        from kit.models.failures import explained
        from kit.models.loading import load_model
        from kit.runner.prepare import prepare

        config = load_config(request["config"])
        places = [int(place) for place in request["rows"]][:MOST_ROWS]
        use_threads(config.run.threads, config.model.name)
        parts = prepare(config, fresh=False)
        set_seed(config.run.seed)
        with explained(), reporter.bar("Writing completions") as bar:
            model = load_model(parts.files, config.model).model
            found = generate(parts, model, places, min(MOST_EACH, int(request["k"])), bar)
    Path(request["result"]).write_text(to_json(found), encoding="utf-8")


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(job))
