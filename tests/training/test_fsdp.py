"""FSDP2 spreads the weights over two processes (gloo, on the CPU): the run of one process, with packs.

accelerate takes FSDP up where the processes have accelerators and nowhere else; it is told here that they do. Everything
after that is the code that a GPU would run: accelerate's sharding, the optimiser's new parameters, clipping, saving.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from .rollouts import assert_gradients_close

pytestmark = [pytest.mark.survival, pytest.mark.slow]

SCRIPT = """
import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
from accelerate import PartialState
from accelerate.utils import DistributedType, fsdp_utils
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig

from trl.trainer import grpo_trainer

from kit.models.sharded import whole_weights
from kit.trainer.trainer import HookedGRPOTrainer
from tiny_qwen import VOCABULARY, tiny_qwen, tiny_tokenizer
from training.conftest import PROMPTS, SPOKEN, TARGETS

OUT = Path(sys.argv[1])
FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False}
WAYS = {
    "lora": {"recipe": "grpo", "regularizers": [{"name": "kl", "coef": 0.04}]},
    "full": "grpo",  # a head of its own, which accelerate puts with no norm, as in models that see pictures
    "tied": "dapo",
    "untied": "grpo",  # its head is gathered together with the last norm
    "steps": "grpo",
}
SAVED = ("lora", "full")
OWN = {
    "tied": {"num_iterations": 2, "max_steps": 4},  # a second rollout, whose first pass gives the old log-probabilities
    "untied": {"gradient_checkpointing": True},
    "steps": {"steps_per_generation": 4, "max_steps": 3},  # two steps on the first rollout, one on the second
}


def placed_ids(completion_ids, **_):
    return [sum(place * token for place, token in enumerate(ids, 1)) % 101 / 101 for ids in completion_ids]


def new_trainer(way, **changes):
    tokenizer = tiny_tokenizer()
    spoken = {tokenizer.eos_token_id, *range(20, 20 + SPOKEN - 1)}
    given = {
        "output_dir": str(OUT / way),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 8,
        "max_steps": 2,
        "learning_rate": 0.01,
        "optim": "adamw_torch",  # the kit's default; unlike TRL's it counts as a change of the weights in place
        "lr_scheduler_type": "constant",
        "adam_epsilon": 1.0,  # else its steps are the same for a gradient that is off by a factor
        "generation_kwargs": {"suppress_tokens": [t for t in range(VOCABULARY) if t not in spoken]},
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    } | OWN.get(way, {})
    model = tiny_qwen(tokenizer)
    if way in ("full", "untied"):
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model._tied_weights_keys = model.all_tied_weights_keys = {}
    torch.manual_seed(0)
    lora = LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False)
    return HookedGRPOTrainer(
        model=model,
        reward_funcs=placed_ids,
        args=GRPOConfig(**given | changes),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
        peft_config=lora if way == "lora" else None,
        objective=WAYS[way],
        skip_flat_groups=False,  # one process leaves them out, and would not count their entropy
    )


def whole(trainer):
    trained = [(name, value) for name, value in trainer.model.named_parameters() if value.requires_grad]
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in trained
    }


def trained(way, seed, checkpoint=None, orders=None, **changes):
    # orders: for each rollout, the order in which its completions are trained on; None: TRL's, each process its own.
    trainer = new_trainer(way, **changes)
    start, sink, taken = whole(trainer), [], []

    def reordered(rollout):
        size = len(rollout["prompt_ids"])
        taken.append(orders[len(taken)] if orders else torch.randperm(size).tolist())
        for name, value in rollout.items():
            if isinstance(value, list):
                rollout[name] = [value[row] for row in taken[-1]]
            elif value is not None and value.ndim:
                rollout[name] = value[taken[-1]]
        return rollout

    grpo_trainer.shuffle_sequence_dict = reordered
    trainer.rollout_sinks = (sink.append,)
    torch.manual_seed(seed)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, {
        "start": start,
        "weights": whole(trainer),
        "completions": [each.completion_ids for each in sink],
        "prompts": [[row["prompt"] for row in each.rows] for each in sink],
        "packing": trainer.packing_report["packing"],
        "log": trainer.state.log_history,
        "orders": taken,
    }


def one_of_two(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", f"file://{OUT}/rendezvous", rank=rank, world_size=2)
    PartialState._prepare_backend = lambda self, *given, **more: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    found, norm_of = {}, fsdp_utils._find_final_norm
    for way in WAYS:
        fsdp_utils._find_final_norm = norm_of if way != "full" else lambda model: None
        fsdp = {"fsdp": True, "fsdp_config": FSDP}
        if way in SAVED:
            fsdp |= {"save_strategy": "steps", "save_steps": 1}
        trainer, found[way] = trained(way, 10 + rank, **fsdp)
        names = [name for name, value in trainer.model.named_parameters() if value.requires_grad]
        found[way]["local"] = {
            name: value.to_local().numel() for name, value in trainer.model.named_parameters() if name in names
        }
        if way in SAVED:
            trainer.save_model(str(OUT / way / "final"))
            again = trained(way, 99, str(OUT / way / "checkpoint-1"), **fsdp)[1]
            found[way]["again"] = again["weights"], again["completions"]
        with whole_weights(trainer.model), torch.no_grad():
            if rank == 0:  # by itself: the other one makes no pass
                found[way]["generated"] = trainer.model.generate(torch.tensor([[20, 21, 22]]), max_new_tokens=4)
        assert trainer.model.is_gradient_checkpointing == (way == "untied")
        weight = next(trainer.model.parameters())
        assert hasattr(weight, "full_tensor"), "the weights were not given back"
    torch.save(found, OUT / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def joint(first, second):
    # The order of one process in which every micro-batch holds what two processes have in theirs.
    size, rows = 4, range(len(first))
    return [
        row
        for start in rows[::size]
        for row in first[start : start + size] + [len(first) + row for row in second[start : start + size]]
    ]


def alone():
    # One process trains on the completions of both.
    ranks, found = [torch.load(OUT / f"{rank}.pt", weights_only=False) for rank in (0, 1)], {}
    given = HookedGRPOTrainer._generate_single_turn
    for way in WAYS:
        both = [sum(parts, []) for parts in zip(*[rank[way]["completions"] for rank in ranks], strict=True)]
        HookedGRPOTrainer._generate_single_turn = lambda self, *_, left=iter(both), **__: (next(left), None)
        pairs = zip(*[rank[way]["orders"] for rank in ranks], strict=True)
        found[way] = trained(way, 0, orders=[joint(*pair) for pair in pairs], per_device_train_batch_size=8)[1]
    torch.save(found, OUT / "alone.pt")


if __name__ == "__main__":
    torch.multiprocessing.start_processes(one_of_two, nprocs=2, start_method="fork")
    alone()
"""

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found, Found, Found]:
    """The folder; what each of two processes found; what one process found on the completions of both."""
    folder = tmp_path_factory.mktemp("sharded")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    first, second, alone = (torch.load(folder / f"{name}.pt", weights_only=False) for name in ("0", "1", "alone"))
    return folder, first, second, alone


WAYS = pytest.mark.parametrize("way", ["lora", "full", "tied", "untied", "steps"])


@WAYS
def test_every_process_holds_a_part_of_the_weights(found: Any, way: str) -> None:
    _, first, second, _ = found
    for name, value in first[way]["weights"].items():
        assert first[way]["local"][name] + second[way]["local"][name] == value.numel(), name
        assert first[way]["local"][name] < value.numel(), name
    assert first[way]["packing"] == second[way]["packing"] == "packed"
    assert first[way]["completions"] != second[way]["completions"]
    assert first[way]["generated"].shape[1] > 3


@WAYS
def test_the_steps_are_those_of_one_process(found: Any, way: str) -> None:
    _, first, second, alone = found
    assert alone[way]["packing"] == "packed"
    assert first[way]["orders"] != second[way]["orders"]
    both = [a + b for a, b in zip(first[way]["prompts"], second[way]["prompts"], strict=True)]
    assert both == alone[way]["prompts"]

    def moved(run: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {name: value - alone[way]["start"][name] for name, value in run["weights"].items()}

    assert_gradients_close(moved(first[way]), moved(alone[way]), rtol=1e-4)
    assert_gradients_close(moved(second[way]), moved(first[way]), rtol=0.0)
    compared = {"loss", "grad_norm", "entropy", "reward", "completions/mean_length"}
    assert compared <= alone[way]["log"][0].keys()
    for ours, theirs in zip(first[way]["log"][:-1], alone[way]["log"][:-1], strict=True):  # the last line sums up
        for name in compared & theirs.keys():  # the steps after a rollout's first tell nothing of it
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("way", ["lora", "full"])
def test_a_checkpoint_holds_whole_weights_and_a_resumed_run_makes_the_same_steps(found: Any, way: str) -> None:
    folder, first, _, _ = found
    (name,) = {"lora": ["adapter_model.safetensors"], "full": ["model.safetensors"]}[way]
    saved = load_file(folder / way / "final" / name)
    for weight, value in first[way]["weights"].items():
        assert torch.equal(saved[weight.replace(".default", "")], value), weight
    assert (folder / way / "checkpoint-1" / name).is_file()
    weights, completions = first[way]["again"]
    assert completions == first[way]["completions"][1:]
    assert all(torch.equal(weights[weight], value) for weight, value in first[way]["weights"].items())
