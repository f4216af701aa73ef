"""Two processes with gloo on the CPU train one policy: the same weights on both, and the gradient of one process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .rollouts import assert_gradients_close

pytestmark = [pytest.mark.survival, pytest.mark.slow]

# Forks after its imports, which take longer than all the rest; then repeats the last step alone.
SCRIPT = '''
import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig

from kit.trainer.policy_loss import average_gradients
from kit.trainer.trainer import HookedGRPOTrainer
from tiny_qwen import VOCABULARY, tiny_qwen, tiny_tokenizer
from training.conftest import PROMPTS, SPOKEN, TARGETS
from training.rollouts import adapter, drift

OUT = Path(sys.argv[1])
PPO = {
    "recipe": "ppo",
    "regularizers": [{"name": "kl", "coef": "adaptive_kl(target=0.001, horizon=40, start=0.1)"}],
}


def placed_ids(completion_ids, **_):
    return [sum(place * token for place, token in enumerate(ids, 1)) % 101 / 101 for ids in completion_ids]


def new_trainer(objective, **changes):
    tokenizer = tiny_tokenizer()
    spoken = {tokenizer.eos_token_id, *range(20, 20 + SPOKEN - 1)}
    given = {
        "output_dir": str(OUT / "run"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 8,
        "max_steps": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "generation_kwargs": {"suppress_tokens": [t for t in range(VOCABULARY) if t not in spoken]},
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    model = tiny_qwen(tokenizer)
    torch.manual_seed(0)
    return HookedGRPOTrainer(
        model=model,
        reward_funcs=placed_ids,
        args=GRPOConfig(**given | changes),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False),
        objective=objective,
    )


def head(trainer):
    return {name: value.detach().clone() for name, value in trainer.critic.head.state_dict().items()}


def gradients(trainer, model, batches):
    """Of LoRA and head, over the micro-batches of a step, as the optimiser would get them."""
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.critic.head.zero_grad()
    trainer.current_gradient_accumulation_steps = len(batches)
    for inputs in batches:
        trainer.compute_loss(model, dict(inputs)).backward()
    average_gradients(trainer.accelerator, trainer.model)
    trainer.callback_handler.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
    found = {name: value.grad.clone() for name, value in trainer.model.named_parameters() if value.requires_grad}
    return found | {f"head.{name}": value.grad.clone() for name, value in trainer.critic.head.named_parameters()}


def one_of_two(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", f"file://{OUT}/rendezvous", rank=rank, world_size=2)
    sink = []
    trainer = new_trainer(PPO, num_iterations=2)
    trainer.rollout_sinks = (sink.append,)
    start = adapter(trainer)
    trainer.train()
    found = {
        "backend": torch.distributed.get_backend(),
        "wrapped": type(trainer.model_wrapped).__name__,
        "completions": [each.completion_ids for each in sink],
        "start": start,
        "adapter": adapter(trainer),
        "head": head(trainer),
        "state": trainer.objective.state_dict(),
        "log": trainer.state.log_history,
    }
    trainer.model.train()
    torch.manual_seed(10 + rank)
    rows = next(iter(trainer.get_train_dataloader()))
    batches = []
    for trainer._step in range(trainer.args.steps_per_generation):
        batches.append(trainer._prepare_inputs(rows))
    drift(trainer)
    found["batches"], found["drifted"] = batches, adapter(trainer)
    found["gradients"] = gradients(trainer, trainer.model_wrapped, batches)
    torch.save(found, OUT / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def widened(name, parts):
    """Rows of both processes in one tensor; prompts are padded on the left."""
    if not parts[0].dim():
        assert parts[0] == parts[1], name
        return parts[0]
    width = max(part.shape[-1] for part in parts)
    side = (lambda gap: (gap, 0)) if name.startswith("prompt_") else (lambda gap: (0, gap))
    pad = torch.nn.functional.pad
    return torch.cat([pad(part, side(width - part.shape[1])) if part.dim() == 2 else part for part in parts])


def alone():
    """The gradient of one process on the completions of both."""
    ranks = [torch.load(OUT / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    trainer = new_trainer(PPO, num_iterations=2, per_device_train_batch_size=8)
    trainer.model.load_state_dict(ranks[0]["drifted"], strict=False)
    trainer.critic.head.load_state_dict(ranks[0]["head"])
    trainer.objective.load_state_dict(ranks[0]["state"])
    batches = [
        {name: widened(name, [part[name] for part in parts]) for name in parts[0]}
        for parts in zip(*[rank["batches"] for rank in ranks], strict=True)
    ]
    torch.save(gradients(trainer, trainer.model, batches), OUT / "alone.pt")


if __name__ == "__main__":
    torch.multiprocessing.start_processes(one_of_two, nprocs=2, start_method="fork")
    alone()
'''


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found, and `alone`, the gradient of one process, beside the first."""
    folder = tmp_path_factory.mktemp("two")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    found[0]["alone"] = torch.load(folder / "alone.pt", weights_only=False)
    return found


def test_both_processes_end_with_the_same_weights_and_controllers(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert (first["backend"], first["wrapped"]) == ("gloo", "DistributedDataParallel")
    assert first["completions"] != second["completions"]
    for part in ("start", "adapter", "head"):
        assert first[part].keys() == second[part].keys()
        assert all(torch.equal(value, second[part][name]) for name, value in first[part].items()), part
    assert all(not torch.equal(value, first["start"][name]) for name, value in first["adapter"].items())
    assert all(value.any() for value in first["head"].values())
    assert first["state"] == second["state"]
    assert first["state"]["regularizers.0.coef"]["coef"] != 0.1


def test_what_the_first_process_logs_is_finite_and_of_both(ranks: list[dict[str, Any]]) -> None:
    logs = [log for log in ranks[0]["log"] if "loss" in log]
    assert [log["step"] for log in logs] == [1, 2, 3, 4]
    assert all(math.isfinite(value) for log in logs for value in log.values())
    assert {"objective/kl", "value/loss", "value/explained_variance", "ratio/p50", "coef/kl"} <= logs[0].keys()
    assert [log["ratio/abs_log"] > 1e-5 for log in logs] == [False, True, False, True]
    assert len({log["coef/kl"] for log in logs}) == 4
    lengths = [len(ids) for rank in ranks for ids in rank["completions"][0]]
    assert logs[0]["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))


def test_the_gradient_is_that_of_one_process_with_the_completions_of_both(ranks: list[dict[str, Any]]) -> None:
    tokens = [sum(int(batch["completion_mask"].sum()) for batch in rank["batches"]) for rank in ranks]
    assert tokens[0] != tokens[1]  # a mean over the tokens of each process would be another one
    assert_gradients_close(ranks[0]["gradients"], ranks[0]["alone"])
    assert_gradients_close(ranks[1]["gradients"], ranks[0]["alone"])
