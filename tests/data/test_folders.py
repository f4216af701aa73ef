"""Folders of files, saved datasets, the hub's layout, hub ids."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, DatasetDict

from kit.data import load_data
from kit.errors import DataError


def put(path, *prompts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": prompt.upper()}) + "\n" for prompt in prompts))


def prompts_of(split):
    return [prompt[0]["content"] for prompt in split.train["prompt"]]


def test_a_folder_of_files_is_read_by_name(tmp_path, config):
    put(tmp_path / "b.jsonl", "three")
    put(tmp_path / "a.jsonl", "one", "two")
    split = load_data(config(tmp_path))
    assert prompts_of(split) == ["one", "two", "three"]


def test_file_names_that_tell_splits_are_respected(tmp_path, config):
    put(tmp_path / "train-0.jsonl", "one")
    put(tmp_path / "train-1.jsonl", "two")
    put(tmp_path / "test.jsonl", "secret")
    split = load_data(config(tmp_path))
    assert prompts_of(split) == ["one", "two"]
    assert prompts_of(load_data(config(tmp_path, split="test"))) == ["secret"]
    with pytest.raises(DataError, match=r"split 'tests' of .*test"):
        load_data(config(tmp_path, split="tests"))


def test_a_saved_dictionary_of_datasets_needs_a_split_that_is_there(tmp_path, config):
    rows = Dataset.from_dict({"question": ["a", "b"]})
    DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "saved")
    assert len(load_data(config(tmp_path / "saved", split="test")).train) == 1
    with pytest.raises(DataError, match=r"no split 'tset'\. Did you mean 'test'\? Splits: train, test"):
        load_data(config(tmp_path / "saved", split="tset"))


def test_a_folder_in_hub_layout_is_read_as_the_hub_would_give_it(tmp_path, config):
    (tmp_path / "data").mkdir()
    Dataset.from_dict({"question": ["a", "b"], "answer": ["1", "2"]}).to_parquet(tmp_path / "data/train-0-of-1.parquet")
    Dataset.from_dict({"question": ["c"], "answer": ["3"]}).to_parquet(tmp_path / "data/test-0-of-1.parquet")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: data/train-*\n"
        "  - split: test\n    path: data/test-*\n---\n# Sums\n"
    )
    assert prompts_of(load_data(config(tmp_path, subset="main"))) == ["a", "b"]
    assert load_data(config(tmp_path, subset="main", split="test")).train["reference"][:] == ["3"]
    with pytest.raises(DataError, match=r"split 'dev' of subset 'main' of .*dev"):
        load_data(config(tmp_path, subset="main", split="dev"))
    with pytest.raises(DataError, match=r"subset 'mian'.*main"):
        load_data(config(tmp_path, subset="mian"))


def test_an_unknown_hub_id_is_told_from_an_unreachable_one(config, monkeypatch):
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    def refuse(*_args, **_kwargs):
        raise DatasetNotFoundError("Dataset 'some-owner/some-set' doesn't exist on the Hub or cannot be accessed.")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match="no dataset of that name, or it is private or gated"):
        load_data(config("some-owner/some-set"))


def test_a_hub_id_is_asked_for_with_subset_split_and_revision(config, monkeypatch):
    import datasets

    calls = []

    def give(*args, **kwargs):
        calls.append((args, kwargs))
        return Dataset.from_dict({"question": ["a"], "answer": ["1"]})

    monkeypatch.setattr(datasets, "load_dataset", give)
    split = load_data(config("openai/gsm8k", subset="main", split="test", revision="abc"))
    assert calls == [(("openai/gsm8k", "main"), {"split": "test", "revision": "abc"})]
    assert {key: split.info[key] for key in ("subset", "split", "revision")} == {
        "subset": "main", "split": "test", "revision": "abc",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("chain_sum", "Did you mean 'reasoning-gym:chain_sum'"),
        ("reasoning_gym:chain_sum", "Did you mean 'reasoning-gym:'"),
        ("a b", "not a file, a folder or a hub id"),
        ("./rows", "no file or folder rows"),
        ("one/two/three", "its folder one/two does not exist"),
    ],
)
def test_a_name_that_leads_nowhere_gets_a_hint(config, source, hint):
    with pytest.raises(DataError, match=hint):
        load_data(config(source))


def test_a_missing_file_lists_data_files_only(tmp_path, monkeypatch, config):
    monkeypatch.chdir(tmp_path)
    for name in (".venv", ".ci", "docs"):
        (tmp_path / name).mkdir()
    (tmp_path / "tickets.csv").write_text("a\n1\n")
    with pytest.raises(DataError) as caught:
        load_data(config("rows.jsonl"))
    assert "relative to the current folder" in str(caught.value)
    assert str(caught.value).endswith("Data files in .: tickets.csv.")
