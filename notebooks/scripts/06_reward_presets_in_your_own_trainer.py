# %% [markdown]
# # Reward presets in your own trainer
#
# `rewards` is a separate library that needs neither the kit's trainer nor its runs. Here it rewards TRL's `GRPOTrainer`. Then
# the same script gets the kit's loss by another class name and one argument.

# %%
# Installs the kit if it is missing, once per session, and prints how long that took.
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

# Source of the kit: git+https://ADDRESS of its repository, a folder, or a wheel. `python notebooks/make.py --source ADDRESS`
# writes an address here for all notebooks. Leave it empty in a clone to install the clone.
GRPO_KIT = ""  # @param {type: "string"}
GRPO_KIT = os.environ.get("GRPO_KIT") or GRPO_KIT or (".." if Path("../kit/train.py").is_file() else "")
HOST = "Kaggle" if "KAGGLE_KERNEL_RUN_TYPE" in os.environ else "Colab" if "COLAB_RELEASE_TAG" in os.environ else "local"
query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
GPU = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0] if shutil.which(query[0]) else ""
# On a T4 (no bfloat16, little memory) Unsloth generates. L4, A100 and newer cards also get vLLM.
# `tested` pins torch, transformers, TRL and others to the versions that the kit was tested with.
EXTRAS = "[tested,unsloth]" if "T4" in GPU else "[tested,unsloth,vllm]" if GPU else "[tested]"
if importlib.util.find_spec("kit") is None:
    if not GRPO_KIT:
        sys.exit("The kit is not installed: set GRPO_KIT in this cell to its git address, its folder or its wheel.")
    GRPO_KIT = f"grpo-kit{EXTRAS} @ {GRPO_KIT}" if "://" in GRPO_KIT else f"{os.path.abspath(GRPO_KIT)}{EXTRAS}"
    began, before = time.monotonic(), {package.name: package.version for package in importlib.metadata.distributions()}
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", GRPO_KIT], check=True)
    importlib.invalidate_caches()
    print(f"installed in {time.monotonic() - began:.0f} s")
    # A new process, because this kernel keeps its imported modules, reports downgraded packages and whether torch sees the GPU.
    check = [sys.executable, "-m", "kit.planning.machine", json.dumps(before)]
    if subprocess.run(check).returncode and GPU:
        sys.exit(f"torch does not see the {GPU}: the lines above say what to do.")
# Makes `!grpo-kit` below use this kernel's environment, even if it is not activated.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
os.environ.setdefault("COLUMNS", "110")  # width of the tables that commands print
# For this kernel and `!grpo-kit`, as for runs of the kit: the first GPU only, and Colab's secret HF_TOKEN.
from kit.runs.worker import environment

os.environ.update(environment())
print(f"{HOST}: {GPU or 'no GPU; of these notebooks only 02, 05, 09 and 10 need one'}")

# %% [markdown]
# ## The presets
#
# `grpo-kit reward show NAME` has the components, weights and parameters of one.

# %%
# !grpo-kit reward list

# %% [markdown]
# ## Score a few completions
#
# A preset explains each score: every component has a value and a status. `ok` is a right answer, `wrong` a wrong one, and
# `format` a missing one. An answer with two numbers does not count as right.

# %%
import pandas as pd
import rewards

preset = rewards.load("gsm8k-reasoning")
texts = [
    "<think>6 x 12 = 72</think><answer>72</answer>",
    "<think>6 x 12 = 72</think><answer>$72.00</answer>",
    "<think>hm</think><answer>70 or 72</answer>",
    "The answer is 72.",
]
scored = preset.score(rewards.build_samples(["What is 6 x 12?"] * 4, texts, answer=["72"] * 4))
pd.DataFrame({"completion": texts, "total": scored.totals, **scored.statuses})

# %% [markdown]
# ## Known attacks
#
# A policy exploits careless rewards with hedged answers, empty tags and repeated answers. The test scores good and bad
# completions and then such attacks; none may score as high as a right answer.

# %%
# !grpo-kit reward test gsm8k-reasoning

# %% [markdown]
# ## TRL's trainer
#
# The functions share one evaluation per batch, and the weights go into TRL's arguments. A dataset needs a reference column
# (`reference`, `answer`, `solution` or `ground_truth`). The prompt must describe the format that the reward reads; otherwise
# every completion gets 0 and nothing is learned.

# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "Qwen/Qwen2.5-0.5B-Instruct"
dataset = load_dataset("openai/gsm8k", "main", split="train[:512]")
layout = "Think between <think> and </think>, then give the final number between <answer> and </answer>."
system = [{"role": "system", "content": layout}]
tokenizer = AutoTokenizer.from_pretrained(name)
dataset = dataset.map(lambda row: {"prompt": [*system, {"role": "user", "content": row["question"]}]})
dataset[0]

# %%
import torch
from peft import LoraConfig
from trl import GRPOConfig

reward_functions = preset.trl()
settings = GRPOConfig(
    output_dir="own-trainer",
    reward_weights=reward_functions.reward_weights,
    max_steps=100,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=256,
    learning_rate=1e-5,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    use_cpu=not torch.cuda.is_available(),
    bf16=False,  # a T4 has none; the model below is small enough for float32
)

# %%
from kit.scoring.head import install_torch_logprob_kernel
from trl import GRPOTrainer

install_torch_logprob_kernel()  # TRL 1.15 scores with a Triton kernel; without a GPU this puts torch in its place
plain = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained(name, dtype="float32"),
    reward_functions,
    settings,
    train_dataset=dataset,
    processing_class=tokenizer,
    peft_config=LoraConfig(target_modules="all-linear"),
)
plain.train()

# %% [markdown]
# ## The same script with the kit's loss
#
# `HookedGRPOTrainer` takes what TRL's takes. Without `objective` it is numerically equal to it, and it also runs without
# a GPU; with one, every part of the loss can be replaced, and padding, repeated prompts and groups with equal rewards are not
# computed. What is active for this model is in `trainer.packing_report` and `trainer.savings_report`.

# %%
from kit import HookedGRPOTrainer, Objective

trainer = HookedGRPOTrainer(
    AutoModelForCausalLM.from_pretrained(name, dtype="float32"),
    reward_functions,
    settings,
    train_dataset=dataset,
    processing_class=tokenizer,
    peft_config=LoraConfig(target_modules="all-linear"),
    objective=Objective.from_spec("dr_grpo"),
)
trainer.train()

# %% [markdown]
# A step in which all groups have equal rewards has a loss of 0 and no entropy, because nothing was scored.

# %%
history = pd.DataFrame(trainer.state.log_history)
history.dropna(subset=["reward"]).filter(regex="^(step|loss|reward|completions/mean_length|entropy)$")

# %% [markdown]
# Other trainers (verl, EasyR1) and a preset of your own: `docs/rewards.md`.
