"""Two processes of which one has nothing to score, or less: neither waits, and both end with the weights of a run that scores
all, in as many passes as it likes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.survival, pytest.mark.slow]

SCRIPT = """
import datetime
import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig

from kit.scoring import scorer

from kit.scoring import proof
from kit.trainer.trainer import HookedGRPOTrainer
from tiny_qwen import VOCABULARY, tiny_qwen, tiny_tokenizer
from training.conftest import PROMPTS, SPOKEN, TARGETS
from training.rollouts import adapter

OUT = Path(sys.argv[1])
OFF = {"skip_flat_groups": False, "reuse_old_logps": False}
KL = {"recipe": "dapo", "regularizers": [{"name": "kl", "coef": 0.04}]}  # so that each micro-batch goes through at once


def rewards(rank):
    def only_the_second(completion_ids, **_):
        return [0.0 if rank == 0 else sum(n * t for n, t in enumerate(ids, 1)) % 101 / 101 for ids in completion_ids]

    return only_the_second


def trained(rank, objective="dapo", pack_tokens=None, **switches):
    tokenizer = tiny_tokenizer()
    spoken = {tokenizer.eos_token_id, *range(20, 20 + SPOKEN - 1)}
    args = GRPOConfig(
        output_dir=str(OUT / "run"), use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=4,
        num_generations=4, gradient_accumulation_steps=2, num_iterations=2, max_completion_length=8, max_steps=4,
        learning_rate=0.01, lr_scheduler_type="constant", weight_decay=0.1, report_to="none", logging_steps=1,
        save_strategy="no", disable_tqdm=True,
        generation_kwargs={"suppress_tokens": [t for t in range(VOCABULARY) if t not in spoken]},
    )
    model = tiny_qwen(tokenizer)
    torch.manual_seed(0)
    trainer = HookedGRPOTrainer(
        model=model, reward_funcs=rewards(rank), args=args, train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer, objective=objective, first_step_checks=True,
        peft_config=LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False), **switches,
    )
    trainer.scorer.pack_tokens = pack_tokens or trainer.scorer.pack_tokens
    scored, made = [], trainer.policy_loss._outputs
    trainer.policy_loss._outputs = lambda model, batch, *more: (scored.append(len(batch)), made(model, batch, *more))[1]
    torch.manual_seed(rank)
    trainer.train()
    return {"adapter": adapter(trainer), "scored": scored, "report": trainer.savings_report,
            "way": trainer.packing_report["packing"],
            "log": [line for line in trainer.state.log_history if "loss" in line]}


def one_of_two(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", f"file://{OUT}/rendezvous", rank=rank, world_size=2,
                                         timeout=datetime.timedelta(seconds=60))
    found = {"off": trained(rank, **OFF), "on": trained(rank, token_budget=60)}
    found["plain"] = trained(rank, KL, packing=False)
    scorer.LONG_PROMPT = 0
    found["packed"] = trained(rank, KL, pack_tokens=(4096, 1)[rank])
    proof._hindrance_to_packs = lambda text: "told to"
    found["trimmed"] = trained(rank, KL)
    torch.save(found, OUT / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(one_of_two, nprocs=2, start_method="fork")
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def test_one_that_skips_all_and_one_that_skips_nothing_make_the_same_steps(ranks: list[dict[str, Any]]) -> None:
    assert all(state == "on" for state in ranks[0]["on"]["report"].values())
    assert sum(ranks[0]["on"]["scored"]) <= 1  # one row showed which weights a pass reaches
    assert sum(ranks[0]["off"]["scored"]) == sum(ranks[1]["on"]["scored"]) == 4 * 2 * 4
    for name, value in ranks[0]["off"]["adapter"].items():
        assert torch.equal(ranks[0]["on"]["adapter"][name], ranks[1]["on"]["adapter"][name])
        torch.testing.assert_close(ranks[0]["on"]["adapter"][name], value, rtol=0, atol=5e-6, msg=name)
    pairs = zip(ranks[0]["on"]["log"], ranks[0]["off"]["log"], strict=True)
    for got, want in pairs:
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-6)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("way", ["packed", "trimmed"])
def test_a_wrapped_model_is_called_as_often_by_each(ranks: list[dict[str, Any]], way: str) -> None:
    """Each forward pass of a model in DistributedDataParallel waits for the other process; one has room for a pack only."""
    assert [rank[way]["way"] for rank in ranks] == [way, way]
    assert [rank["plain"]["way"] for rank in ranks] == ["plain", "plain"]
    assert "on" not in (ranks[0][way]["report"][name] for name in ("token_budget", "skip_flat_groups"))
    for name, value in ranks[0]["plain"]["adapter"].items():
        assert torch.equal(ranks[0][way]["adapter"][name], ranks[1][way]["adapter"][name])
        torch.testing.assert_close(ranks[0][way]["adapter"][name], value, rtol=0, atol=5e-6, msg=name)
