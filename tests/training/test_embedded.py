"""kit.training.embedded: the model that the kit builds itself, its tokenizer, and its place in the cache."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.errors import RunError
from kit.training import embedded
from kit.training.embedded import EmbeddedRecipe, build_tokenizer, cache_folder, embedded_model_folder, exercise

TINY = EmbeddedRecipe(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16, skill_steps=1, steps=2, batch=2)
TOKENIZER = build_tokenizer(TINY)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRPO_KIT_CACHE", str(folder))
    return folder


def test_the_build_is_deterministic(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        embedded.build(TINY, tmp_path / name)
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_every_field_of_the_recipe_gives_another_place_in_the_cache() -> None:
    keys = {EmbeddedRecipe().key}
    for part in dataclasses.fields(EmbeddedRecipe):
        value = getattr(EmbeddedRecipe(), part.name)
        other = (1, 9) if isinstance(value, tuple) else value + 1
        keys.add(dataclasses.replace(EmbeddedRecipe(), **{part.name: other}).key)
    assert len(keys) == 1 + len(dataclasses.fields(EmbeddedRecipe))


def test_it_is_built_once_with_progress_and_found_again(cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = embedded_model_folder(TINY, lambda done, total, loss: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert folder == cache / f"embedded-{TINY.key}"
    assert embedded_model_folder(TINY, lambda *_: pytest.fail("built twice")) == folder


def test_two_that_ask_at_once_build_it_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flock holds between open files, so two threads stand for two processes here."""
    built, both = [], threading.Barrier(2)

    def build(recipe: Any, folder: Path, progress: Any) -> None:
        built.append(folder)
        (folder / "config.json").write_text("{}")

    def ask() -> None:
        both.wait()
        folders.append(embedded_model_folder(TINY))

    folders: list[Path] = []
    monkeypatch.setattr(embedded, "build", build)
    workers = [threading.Thread(target=ask) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(built) == 1
    assert folders == [cache / f"embedded-{TINY.key}"] * 2


def test_the_lock_holds_between_processes(cache: Path) -> None:
    """While another process holds the lock nobody builds; afterwards its result is taken."""
    cache.mkdir()
    folder = cache / f"embedded-{TINY.key}"
    code = (
        "import fcntl, pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "lock = open(str(folder) + '.lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX); print('held', flush=True)\n"
        "time.sleep(0.5); folder.mkdir(); (folder / 'config.json').write_text('theirs')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert embedded_model_folder(TINY, lambda *_: pytest.fail("built beside the other")) == folder
    assert (folder / "config.json").read_text() == "theirs"


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("planted")])
def test_an_interrupted_build_leaves_nothing(cache: Path, failure: BaseException) -> None:
    def interrupt(done: int, total: int, loss: float) -> None:
        raise failure

    with pytest.raises(type(failure)):
        embedded_model_folder(TINY, interrupt)
    assert [path.name for path in cache.iterdir()] == [f"embedded-{TINY.key}.lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RunError, match=r"cannot be kept in .*file/cache: Not a directory.*GRPO_KIT_CACHE"):
        embedded_model_folder(TINY)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_KIT_CACHE", "/a")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("GRPO_KIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/grpo-kit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "grpo-kit"


# --- tokenizer --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text


@given(st.integers(0, 10**12))
def test_every_digit_is_a_token(number: int) -> None:
    assert TOKENIZER.tokenize(str(number)) == list(str(number))


def test_answer_tags_are_single_tokens_that_survive_decoding() -> None:
    text = "<think>1 + 1 = 2</think><answer>2</answer>"
    ids = TOKENIZER(text + TOKENIZER.eos_token, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text
    for tag in embedded.TAGS:
        assert len(TOKENIZER(tag, add_special_tokens=False)["input_ids"]) == 1


def test_the_chat_template_is_chatml() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rendered = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert len(TOKENIZER) <= TINY.vocabulary
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id


# --- exercises --------------------------------------------------------------------------------------------------------


@given(st.integers())
def test_careful_answers_are_right_and_show_their_working(seed: int) -> None:
    question, answer = exercise(EmbeddedRecipe(), random.Random(seed), careful_share=1.0)
    sum_ = question.removeprefix("State the final answer to the following arithmetic problem: ").removesuffix(" =")
    thought, _, rest = answer.removeprefix("<think>").partition("</think>")
    total = eval(sum_)  # digits, + and - only
    assert rest == f"<answer>{total}</answer>"
    for step in thought.split(", "):
        left, right = step.split(" = ")
        assert eval(left) == int(right)


def test_careless_answers_are_right_as_often_as_the_recipe_says() -> None:
    rng, right = random.Random(0), 0
    for _ in range(2000):
        question, answer = exercise(EmbeddedRecipe(), rng, careful_share=0.0)
        sum_ = question.removeprefix("State the final answer to the following arithmetic problem: ").removesuffix(" =")
        assert answer.startswith("<think>a guess</think>")
        right += answer.endswith(f"<answer>{eval(sum_)}</answer>")
    assert right / 2000 == pytest.approx(0.15, abs=0.03)  # standard error 0.008
