"""The output of notebook cells: a real kernel, a real run, an interrupt."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.notebooks, pytest.mark.timeout(280)]
TINY = (
    'import kit\nTREE = {"model": {"name": %r, "dtype": "float32", "lora": {"rank": 4, "alpha": 8}}, '
    '"data": {"source": "reasoning-gym:chain_sum", "limit": 40, "heldout": 8, '
    '"task_params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}, '
    '"generation": {"num_generations": 4, "max_completion_tokens": 12}, '
    '"optimisation": {"steps": 3, "batch_size": 8}, '
    '"evaluation": {"before": False, "prompts": 4, "k": 2}, "run": {"threads": 1, "save_every": 0}}'
)


class Kernel:
    """A Jupyter kernel."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(cwd=str(folder), env={**os.environ, "FORCE_COLOR": "1"})

    def run(self, code: str, timeout: float = 200) -> list[dict[str, Any]]:
        """Execute a cell; return the messages that a front end would display."""
        shown: list[dict[str, Any]] = []
        self.client.execute_interactive(code, timeout=timeout, output_hook=shown.append)
        return shown

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path, model_folder: Path) -> Any:
    made = Kernel(tmp_path)
    made.run(TINY % str(model_folder))
    yield made
    made.close()


def of_kind(messages: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [message["content"] for message in messages if message["msg_type"] in kinds]


@pytest.mark.usefixtures("cold_processes")
def test_a_card_follows_the_run_in_one_place_and_nothing_else_is_printed(kernel: Kernel) -> None:
    messages = kernel.run("run = kit.train(TREE, run_id='it')")
    cards = of_kind(messages, "display_data", "update_display_data")
    assert len(of_kind(messages, "display_data")) == 1
    assert len(cards) > 3
    assert len({card["transient"]["display_id"] for card in cards}) == 1
    assert of_kind(messages, "stream", "error") == []
    last = cards[-1]["data"]
    assert "is finished" in last["text/html"]
    assert "Held-out accuracy" in last["text/html"]
    assert "Training  3/3" in last["text/plain"]
    assert "\x1b" not in last["text/plain"]  # no terminal codes, although the kernel sets FORCE_COLOR
    (result,) = of_kind(kernel.run("run"), "execute_result")
    assert "is finished" in result["data"]["text/html"]
    (figure,) = of_kind(kernel.run("run.plot()"), "execute_result")
    assert "image/svg+xml" in figure["data"]


def test_an_interrupt_of_the_cell_saves_a_checkpoint_and_returns_the_run(kernel: Kernel, tmp_path: Path) -> None:
    from kit.runs.store import RunDir

    folder = RunDir(tmp_path / "runs" / "it")

    def interrupt() -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end and (folder.status().get("step") or 0) < 2:
            time.sleep(0.1)
        kernel.manager.interrupt_kernel()

    person = threading.Thread(target=interrupt)
    person.start()
    messages = kernel.run("run = kit.train(TREE, run_id='it', steps=500)")
    person.join()
    assert of_kind(messages, "error") == []
    status = folder.status()
    assert (status["state"], status["reason"]) == ("stopped", "SIGINT")
    assert folder.checkpoints
    assert 2 <= status["step"] < 500
    assert "was stopped before its end" in of_kind(messages, "update_display_data")[-1]["data"]["text/html"]
    (stream,) = of_kind(kernel.run("print(run.status['state'])"), "stream")
    assert stream["text"].strip() == "stopped"


def test_a_mistake_that_the_training_process_finds_is_shown_once_and_no_other_run_in_its_place(kernel: Kernel) -> None:
    wrong = "{**TREE, 'reward': {'functions': [{'path': 'nothing.py:f'}]}}"
    messages = kernel.run(f"kit.train({wrong}, run_id='it')")
    (error,) = of_kind(messages, "error")
    assert len(error["traceback"]) == 1
    last = of_kind(messages, "display_data", "update_display_data")[-1]["data"]["text/html"]
    assert "<progress" not in last
    (made,) = of_kind(kernel.run("from kit.runs.store import RunStore\nRunStore().create('it').path"), "execute_result")
    assert "it" in made["data"]["text/plain"]
    messages = kernel.run("kit.train('quickstart', run_id='it')")
    (error,) = of_kind(messages, "error")
    assert "already a run" in error["evalue"]
    assert of_kind(messages, "display_data") == []
