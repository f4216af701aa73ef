"""The sentence-to-JSON task: held-out names and cities never occur in training, and all references are right."""

from __future__ import annotations

import json

from kit.config import DataConfig, load_config
from kit.data import load_data
from kit.data.sources import HELDOUT_FORMS, SENTENCES
from rewards import build_samples, load


def test_held_out_rows_have_names_cities_and_forms_of_their_own() -> None:
    split = load_data(DataConfig(source=SENTENCES, heldout=50, limit=300))
    assert (len(split.train), len(split.heldout)) == (250, 50)
    sides = [[json.loads(row["reference"]) for row in side] for side in (split.train, split.heldout)]
    for key in ("name", "city"):
        trained, apart = ({row[key] for row in side} for side in sides)
        assert len(apart) > 5
        assert not trained & apart
    new = [form.split("}")[1].split("{")[0] for form in HELDOUT_FORMS]
    texts = [[row["prompt"][-1]["content"] for row in side] for side in (split.train, split.heldout)]
    assert not any(part in text for text in texts[0] for part in new)
    assert sum(any(part in text for part in new) for text in texts[1]) == 25
    prompts = [text for side in texts for text in side]
    assert len(set(prompts)) == len(prompts)


def test_the_seed_decides_the_rows() -> None:
    def rows(seed: int) -> list[str]:
        return list(load_data(DataConfig(source=SENTENCES, heldout=10, limit=40, seed=seed)).train["reference"])

    assert rows(1) == rows(1) != rows(2)
    assert not load_data(DataConfig(source=SENTENCES, heldout=0, limit=5)).heldout


def test_the_quickstart_pays_the_right_answer_in_full_and_a_part_for_a_part() -> None:
    config = load_config("quickstart-real")
    row = load_data(config.data).heldout[0]
    right = json.loads(row["reference"])
    sentence = row["prompt"][-1]["content"].partition(": ")[2]
    assert all(str(value) in sentence for value in right.values())
    answers = [right, right | {"city": "Atlantis"}, {"name": right["name"]}]
    samples = build_samples(
        ["?"] * 3,
        [json.dumps(answer) for answer in answers],
        schema=[row["schema"]] * 3,
        reference=[row["reference"]] * 3,
    )
    evaluation = load(config.reward.preset, **config.reward.params).score(samples)
    assert evaluation.totals[0] == 1.1
    assert 1.1 > evaluation.totals[1] > evaluation.totals[2]
