"""Generated problems: the same for the same seed, no question twice, helpful about names and parameters."""

from __future__ import annotations

import json
from datetime import date

import pytest

from kit.data import load_data
from kit.data.tasks import entry_json
from kit.errors import DataError


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "leg_counting"])
def test_a_task_gives_rows_that_its_own_scorer_accepts(config, task):
    import reasoning_gym

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
    first, again, other = (
        load_data(config("reasoning-gym:chain_sum", limit=50, heldout=5, seed=seed)) for seed in (3, 3, 4)
    )
    assert first.train.to_list() == again.train.to_list()
    assert first.heldout.to_list() == again.heldout.to_list()
    assert first.info == again.info
    # Neighbouring seeds share no stretch of problems, as they would if reasoning-gym got the seed as it is.
    shared = {row["reference"] + str(row["prompt"]) for row in first.train} & {
        row["reference"] + str(row["prompt"]) for row in other.train
    }
    assert len(shared) <= 2


def test_the_default_number_of_rows_is_2000_and_the_held_out_ones(config):
    split = load_data(config("reasoning-gym:chain_sum", heldout=100))
    assert (len(split.train), len(split.heldout)) == (2000, 100)
    assert len({str(prompt) for side in (split.train, split.heldout) for prompt in side["prompt"]}) == 2100


def test_a_small_task_gives_what_it_has_and_says_so(config):
    # One digit each side, two terms, + or -: 10 * 10 * 2 = 200 questions at most.
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    split = load_data(config("reasoning-gym:chain_sum", task_params=params, limit=500, heldout=400))
    found = split.info["rows"]["used"]
    assert 150 <= found <= 200
    assert len(split.heldout) == found // 2
    assert f"chain_sum has {found} different questions" in split.info["notes"][0]
    assert "data.heldout asks for 400" in split.info["notes"][1]
    assert split.info["task"]["params"] == params


def test_a_task_too_small_to_set_a_problem_apart_says_what_to_change(config):
    with pytest.raises(DataError, match=r"only 1 different prompt.*data\.task_params.*data\.heldout: 0"):
        load_data(config("reasoning-gym:chain_sum", limit=1, heldout=5))


def test_an_unknown_task_is_met_with_the_nearest(config):
    with pytest.raises(DataError, match=r"no task 'chain_sums'\. Did you mean 'chain_sum'"):
        load_data(config("reasoning-gym:chain_sums"))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_term": 2}, r"takes no 'min_term'\. Did you mean 'min_terms'\? It takes min_terms=2, max_terms=6"),
        ({"seed": 2}, r"takes no 'seed'\. data\.seed decides it"),
        ({"size": 2}, r"takes no 'size'\. data\.limit decides it"),
        ({"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms. It takes min_terms=2"),
        ({"min_terms": "many"}, "chain_sum refuses {'min_terms': 'many'}: .*It takes min_terms=2"),
    ],
)
def test_a_bad_parameter_is_answered_with_the_good_ones(config, params, message):
    with pytest.raises(DataError, match=message):
        load_data(config("reasoning-gym:chain_sum", task_params=params))


def test_an_entry_becomes_json_whatever_it_holds():
    entry = {"question": "q", "answer": None, "metadata": {(1, 2): {3: (4, 5)}, "day": date(2024, 1, 2)}}
    assert json.loads(entry_json(entry))["metadata"] == {"(1, 2)": {"3": [4, 5]}, "day": "2024-01-02"}
