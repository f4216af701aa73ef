"""kit.planning.probe measures the trainer of a run: one function builds both."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit.config import load_config


class Reached(Exception):
    """Raised in place of training, when the trainer is complete."""


def plain_values(trainer: Any) -> dict[str, Any]:
    """The switches and numbers of the trainer's parts."""
    names = ("generator", "scorer", "policy_loss", "teacher")
    parts = {name: getattr(trainer, name) for name in names if getattr(trainer, name) is not None}
    values = {
        f"{name}.{key}": value
        for name, part in parts.items()
        for key, value in vars(part).items()
        if isinstance(value, (bool, int, float, str, type(None)))
    }
    return values | {"memory": dict(trainer.memory.sizes), "parts": sorted(parts)}


def test_a_probe_trains_the_trainer_of_a_run(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kit.train
    from kit.planning.probe import two_steps
    from kit.runner import build, resume
    from kit.runner.prepare import prepare
    from kit.trainer.trainer import HookedGRPOTrainer

    tree |= {"objective": {"recipe": "sdpo"}, "teacher": {"model": "self", "prompt": "{prompt} Answer: {reference}."}}
    config = load_config(
        tree,
        [
            f"run.root={tmp_path}",
            "run.id=real",
            "evaluation.before=false",
            "optimisation.gradient_checkpointing=offload",
            "optimisation.token_budget=200",
        ],
    )
    monkeypatch.setattr(build, "generation_batch_of", lambda *_: 2)
    dump: dict[str, dict[str, Any]] = {}

    def reached(name: str) -> Any:
        def stop(trainer: Any, *_: Any, **__: Any) -> None:
            dump[name] = plain_values(trainer)
            raise Reached

        return stop

    monkeypatch.setattr(resume, "train_on", reached("run"))
    with pytest.raises(Reached):
        kit.train.run(config, quiet=True)
    monkeypatch.setattr(HookedGRPOTrainer, "train", reached("probe"))
    with pytest.raises(Reached):
        two_steps(prepare(config, fresh=False), tmp_path)
    different = {
        name for name in dump["run"].keys() | dump["probe"].keys() if dump["run"].get(name) != dump["probe"].get(name)
    }
    assert different <= {"policy_loss.skip_flat"}  # the probe's rows may all be flat
    assert dump["probe"]["memory"] == {"generation": 2}
    assert dump["probe"]["scorer.offload"] is True


@pytest.mark.parametrize("who", ["run", "probe"])
@pytest.mark.parametrize(("standby", "chosen"), [(False, "expandable_segments:True"), (True, None)])
def test_the_allocator_is_chosen_before_anybody_asks_for_a_gpu(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str, standby: bool, chosen: str | None
) -> None:
    """torch reads its settings when CUDA starts, and vLLM's sleep mode needs fixed segments."""
    import torch

    import kit.train
    from kit.planning import probe

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path))
    config = load_config(tree, [f"run.root={tmp_path}", f"generation.vllm.standby={json.dumps(standby)}"])
    at_first: list[str | None] = []

    def asked(*_: Any, **__: Any) -> Any:
        at_first.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        raise Reached

    for name in ("is_available", "_lazy_init", "device_count", "get_device_capability", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, asked)
    request = {"config": config.model_dump(mode="json"), "folder": str(tmp_path)}
    begin = partial(kit.train.run, config, quiet=True) if who == "run" else partial(probe.job, request, True)
    with pytest.raises(Reached):
        begin()
    assert at_first == [chosen]
