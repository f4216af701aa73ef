"""Generated problems: same seed, same problems; no question twice; errors for unknown names and parameters."""

from __future__ import annotations

import json

import pytest
import reasoning_gym

from kit.data import load_data, tasks


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "leg_counting"])
def test_a_task_gives_rows_that_its_own_scorer_accepts(config, task):
    split = load_data(config(f"reasoning-gym:{task}", limit=30, heldout=10))
    assert (len(split.train), len(split.heldout)) == (20, 10)
    assert split.train.column_names == ["prompt", "reference", "task", "entry"]
    score = reasoning_gym.get_score_answer_fn(task)
    for row in split.train:
        entry = json.loads(row["entry"])
        assert set(entry) == {"question", "answer", "metadata"}
        assert row["prompt"] == [{"role": "user", "content": entry["question"]}]
        assert (row["task"], row["reference"]) == (task, entry["answer"])
        assert score(row["reference"], entry) == 1.0


def test_rows_follow_from_the_seed_alone(config):
    tasks._generate.cache_clear()
    first, known, other = (
        load_data(config("reasoning-gym:chain_sum", limit=50, heldout=5, seed=seed)) for seed in (3, 3, 4)
    )
    assert (tasks._generate.cache_info().hits, known.info) == (1, first.info), "the page asks at each change of a key"
    tasks._generate.cache_clear()
    again = load_data(config("reasoning-gym:chain_sum", limit=50, heldout=5, seed=3))
    assert first.train.to_list() == again.train.to_list()
    assert first.heldout.to_list() == again.heldout.to_list()
    assert first.info == again.info
    # Neighbouring seeds share no stretch of problems, as they would if reasoning-gym got the seed as it is.
    shared = {row["reference"] + str(row["prompt"]) for row in first.train} & {
        row["reference"] + str(row["prompt"]) for row in other.train
    }
    assert len(shared) <= 2


def test_a_small_task_gives_what_it_has_and_says_so(config):
    # One digit each side, two terms, + or -: 10 * 10 * 2 = 200 questions at most.
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    split = load_data(config("reasoning-gym:chain_sum", task_params=params, limit=500, heldout=400))
    used = split.info["rows"]["used"]
    assert 150 <= used <= 200
    assert len(split.heldout) == used // 2
    assert f"chain_sum has {used} different questions" in split.info["notes"][0]
    assert "data.heldout is 400" in split.info["notes"][1]
    assert split.info["task"]["params"] == params
