"""`grpo-kit import`: the structure of public notebooks, scripts and YAML files, written by hand, as configurations that load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.config import load_config
from kit.errors import ConfigError
from kit.planning.importing import Imported, import_file, write
from kit.runner.prepare import build_reward

UNSLOTH = """
%%capture
!pip install unsloth
====
from unsloth import FastLanguageModel
import torch
max_seq_length = 1024
lora_rank = 32
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="meta-llama/Llama-3.1-8B-Instruct", max_seq_length=max_seq_length, load_in_4bit=True,
    fast_inference=True, max_lora_rank=lora_rank, gpu_memory_utilization=0.6)
model = FastLanguageModel.get_peft_model(
    model, r=lora_rank, target_modules=["q_proj", "v_proj"], lora_alpha=lora_rank * 2,
    use_gradient_checkpointing="unsloth", random_state=3407)
====
import re
from datasets import load_dataset
SYSTEM_PROMPT = "Answer in tags."
def extract(text):
    return re.search("<answer>(.*)</answer>", text).group(1)
def get_questions(split="train"):
    data = load_dataset("openai/gsm8k", "main")[split]
    return data.map(lambda x: {"prompt": x["question"]})
def correctness_reward_func(prompts, completions, answer, **kwargs):
    return [2.0 if extract(c[0]["content"]) == a else 0.0 for c, a in zip(completions, answer)]
def format_one(completions, **kwargs):
    return [1.5 for _ in completions]
def format_two(completions, **kwargs):
    scores = []
    for c in completions:
        score = 0
        score += 0.75
        scores.append(score)
    return scores
====
from trl import GRPOConfig, GRPOTrainer
max_prompt_length = 256
training_args = GRPOConfig(
    learning_rate=5e-6, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.1, warmup_ratio=0.1, lr_scheduler_type="cosine",
    optim="paged_adamw_8bit", logging_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=1,
    num_generations=6, max_prompt_length=max_prompt_length, max_completion_length=max_seq_length - max_prompt_length,
    max_steps=250, save_steps=250, max_grad_norm=0.1, report_to="none", output_dir="outputs")
trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[format_one, format_two, correctness_reward_func],
                      args=training_args, train_dataset=get_questions())
trainer.train()
"""

SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
from datasets import load_dataset
{head}
dataset = load_dataset("{data}", split="train")
args = GRPOConfig(output_dir="x", {args})
trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B", reward_funcs={rewards}, args=args, train_dataset=dataset{more})
trainer.train()
"""

LENGTH = "def reward_len(completions, **kwargs):\n    return [-abs(20 - len(c)) for c in completions]\n"
VERL: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_files": "~/gsm8k/train.parquet", "train_batch_size": 64, "max_prompt_length": 512,
             "max_response_length": 1024},
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen2.5-3B-Instruct", "lora_rank": 32, "lora_alpha": 32},
        "actor": {"optim": {"lr": 3e-6}, "ppo_mini_batch_size": 32, "use_kl_loss": True, "kl_loss_coef": 0.001,
                  "clip_ratio": 0.2, "loss_agg_mode": "seq-mean-token-mean", "ppo_epochs": 2},
        "rollout": {"name": "vllm", "n": 5, "max_model_len": "${data.max_response_length}", "temperature": 0.9},
    },
    "trainer": {"save_freq": 20, "test_freq": 5, "total_epochs": 15, "total_training_steps": 300},
}  # fmt: skip
EASY: dict[str, Any] = {
    "data": {"train_files": "hiyouga/math12k@train", "prompt_key": "problem", "answer_key": "answer",
             "max_prompt_length": 2048, "max_response_length": 2048, "rollout_batch_size": 128},
    "algorithm": {"adv_estimator": "grpo", "use_kl_loss": True, "kl_coef": 0.01},
    "worker": {
        "actor": {"model": {"model_path": "Qwen/Qwen2.5-7B-Instruct"}, "optim": {"lr": 1e-6}, "clip_ratio_low": 0.2,
                  "clip_ratio_high": 0.3},
        "rollout": {"n": 5, "temperature": 1.0, "top_p": 0.99},
        "reward": {"reward_function": "./math.py:compute_score"},
    },
    "trainer": {"max_steps": 100, "val_freq": 5},
}  # fmt: skip
TRL: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B", "dataset_name": "trl-lib/DeepMath", "learning_rate": 1e-6,
    "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "num_generations": 16, "beta": 0.04,
    "max_completion_length": 1024, "max_steps": 500, "use_peft": True, "lora_r": 8, "lora_alpha": 16,
    "lora_target_modules": ["all-linear"], "reward_funcs": ["format_reward", "tag_count_reward"], "use_vllm": True,
    "epsilon_high": 0.28, "temperature": 0.8, "top_k": 0, "seed": 7,
}  # fmt: skip


def script(
    args: str, rewards: str = "reward_len", head: str = LENGTH, more: str = "", data: str = "trl-lib/tldr"
) -> str:
    return SCRIPT.format(args=args, rewards=rewards, head=head, more=more, data=data)


PEFT = "from peft import LoraConfig\nlora = LoraConfig(r=16, lora_alpha=64, lora_dropout=0.1, task_type='CAUSAL_LM')\n"
FILES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "unsloth.ipynb": (
        UNSLOTH,
        {"model.name": "meta-llama/Llama-3.1-8B-Instruct", "model.load_in_4bit": True, "model.lora.rank": 32,
         "model.lora.alpha": 64, "data.source": "openai/gsm8k", "data.subset": "main", "generation.num_generations": 6,
         "generation.max_completion_tokens": 768, "optimisation.batch_size": 6, "optimisation.warmup_steps": 25,
         "optimisation.optimizer": "adamw_8bit", "optimisation.betas": (0.9, 0.99), "data.system_prompt": "Answer in tags.",
         "run.save_every": 250},
        ["outweigh a right one", "6 completions a step (1 prompt)"],
    ),
    "small.py": (script("num_generations=2, per_device_train_batch_size=2, max_completion_length=64"),
                 {"model.lora": None, "optimisation.batch_size": 2, "data.source": "trl-lib/tldr"},
                 ["groups of 2", "58% of them", "at most 64 tokens", "no reward function says whether an answer is right"]),
    "peft.py": (script("num_generations=8, per_device_train_batch_size=64, max_completion_length=1024", head=LENGTH + PEFT,
                       more=", peft_config=lora"),
                {"model.lora.rank": 16, "model.lora.alpha": 64, "model.lora.dropout": 0.1}, []),
    "loss.py": (script("loss_type='dr_grpo', beta=0.04, epsilon=0.1, epsilon_high=0.3, num_iterations=2, max_steps=7, "
                       "max_completion_length=2048, per_device_train_batch_size=64"),
                {"objective.recipe": "dr_grpo", "objective.clip": {"eps_low": 0.1, "eps_high": 0.3},
                 "objective.regularizers": [{"name": "kl", "coef": 0.04}], "optimisation.iterations": 2,
                 "optimisation.steps": 7}, []),
    "imported_reward.py": (script("max_completion_length=1024, per_device_train_batch_size=64", rewards="format_reward",
                                  head="from trl.rewards import format_reward\n"),
                           {"reward.functions": ["rewards.compat:format_reward"]}, []),
    "main.py": ("import os\nos.environ['SEEN'] = 'executed'\nraise SystemExit\n" + script(
                    "max_completion_length=1024, per_device_train_batch_size=8, gradient_accumulation_steps=4 * 2, seed=3, "
                    "mask_truncated_completions=True, report_to=['wandb']"),
                {"optimisation.batch_size": 64, "run.seed": 3, "run.report_to": ["wandb"],
                 "objective.weights": ["drop_truncated"]}, []),
    "room.py": ("from unsloth import FastModel\nmodel, tok = FastModel.from_pretrained('unsloth/gemma-3-1b-it', "
                "max_seq_length=1024)\n" + script("max_prompt_length=512, max_completion_length=1024, "
                                                  "per_device_train_batch_size=64").replace('"Qwen/Qwen2.5-0.5B"', "model"),
                {"model.name": "unsloth/gemma-3-1b-it", "data.max_prompt_tokens": 512},
                ["more than max_seq_length 1024"]),
    "trl.yaml": (yaml.safe_dump(TRL),
                 {"model.name": "Qwen/Qwen2.5-1.5B", "optimisation.batch_size": 64, "generation.num_generations": 16,
                  "model.lora.targets": "all-linear", "run.seed": 7, "generation.engine": "auto",
                  "reward.functions": ["rewards.compat:format_reward", "rewards.compat:tag_count_reward"]}, []),
    "verl.yaml": (yaml.safe_dump(VERL),
                  {"model.name": "Qwen/Qwen2.5-3B-Instruct", "model.lora.rank": 32, "optimisation.batch_size": 320,
                   "generation.num_generations": 5, "generation.max_completion_tokens": 1024, "optimisation.steps": 600,
                   "objective.reduction": "sequence_mean",
                   "objective.regularizers": [{"name": "kl", "coef": 0.001}], "evaluation.every": 10, "run.save_every": 40}, []),
    "easyr1.yaml": (yaml.safe_dump(EASY),
                    {"model.name": "Qwen/Qwen2.5-7B-Instruct", "model.lora": None, "data.source": "hiyouga/math12k",
                     "data.split": "train", "data.prompt_column": "problem", "data.reference_column": "answer",
                     "objective.clip": {"eps_low": 0.2, "eps_high": 0.3}, "optimisation.batch_size": 640,
                     "optimisation.learning_rate": 1e-6, "generation.top_p": 0.99}, []),
}  # fmt: skip


def read(tmp_path: Path, name: str, text: str) -> Imported:
    path = tmp_path / name
    if name.endswith(".ipynb"):
        cells = [
            {"cell_type": "code", "source": cell.strip("\n").splitlines(keepends=True)} for cell in text.split("====")
        ]
        text = json.dumps({"cells": [{"cell_type": "markdown", "source": ["# GRPO"]}, *cells], "nbformat": 4})
    path.write_text(text)
    return import_file(path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_trainer_becomes_a_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEEN", raising=False)
    text, expected, mistakes = FILES[name]
    found = read(tmp_path, name, text)
    written = write(found, tmp_path / "out", force=False)
    config = load_config(written[0])
    for key, value in expected.items():
        place: Any = config
        for part in key.split("."):
            place = getattr(place, part)
        seen = [one.path for one in place] if key == "reward.functions" else place
        assert seen == value, key
    for words in mistakes:
        assert any(words in one for one in found.mistakes), (words, found.mistakes)
    assert bool(mistakes) == bool(found.mistakes) or name in QUIET, found.mistakes
    assert "SEEN" not in __import__("os").environ  # nothing of the file was run
    with pytest.raises(ConfigError, match="--force"):
        write(found, tmp_path / "out", force=False)


QUIET = ("peft.py", "loss.py", "main.py", "room.py")
"""Their only reward is by length, which is said."""


def test_reward_functions_bring_what_they_use_and_work(tmp_path: Path) -> None:
    import rewards

    found = read(tmp_path, "unsloth.ipynb", UNSLOTH)
    write(found, tmp_path, force=False)
    source = (tmp_path / "rewards.py").read_text()
    assert "def extract" in source
    assert "import re" in source
    assert "GRPOTrainer" not in source
    preset = build_reward(load_config(tmp_path / "run.yaml"))
    said = [[{"role": "assistant", "content": f"<answer>{n}</answer>"}] for n in (7, 8)]
    samples = rewards.build_samples([[{"role": "user", "content": "3 + 4"}]] * 2, said, answer=["7", "7"])
    assert preset.score(samples).totals == [1.5 + 0.75 + 2.0, 1.5 + 0.75]  # all that the notebook's sum would be


def test_what_is_dropped_is_told(tmp_path: Path) -> None:
    found = read(tmp_path, "unsloth.ipynb", UNSLOTH)
    told = "\n".join(found.listed())
    for words in ("taken:", "dropped:", "looks like a mistake:", "logging_steps: 1", "dataset.map"):
        assert words in told
    computed = read(tmp_path, "x.py", script("learning_rate=float(open('x').read()), max_completion_length=1024"))
    assert any("learning_rate: computed in the file" in one for one in computed.dropped)
    assert any("reward_function" in one for one in read(tmp_path, "e.yaml", yaml.safe_dump(EASY)).dropped)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", "print('hello')\n", "neither a GRPOConfig nor a GRPOTrainer"),
        ("a.py", "def (\n", "line 1"),
        ("a.ipynb.py", "", "neither"),
        ("a.yaml", "a: 1\n", "no GRPO configuration"),
        ("a.yaml", "- 1\n", "no mapping"),
        ("a.yaml", "[" * 100_000, "nested too deep"),
    ],
    ids=["script", "syntax", "notebook", "keys", "list", "brackets"],
)
def test_what_is_no_grpo_run_is_refused(name: str, text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, name, text)
