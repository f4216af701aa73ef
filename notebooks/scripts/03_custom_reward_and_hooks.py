# %% [markdown]
# # A reward and a loss of your own
#
# Both are plain functions in a file. A reward sees texts and the dataset's columns; a hook sees a batch of tokens and
# returns a tensor. The kit checks both before the first step, and a hook is never silently ignored.

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
# ## A reward
#
# TRL's calling convention: lists in, one number per completion out, every column of the dataset as a keyword.
# `None` means that a completion cannot be judged.


# %% file="my_rewards.py"
def short(prompts, completions, **columns):
    """1 for an empty completion, 0 from 120 characters on. Range 0 to 1."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [max(0.0, 1 - len(text) / 120) for text in texts]


# %% [markdown]
# ## A hook
#
# A function of the batch is a *clip*: the per-token loss, (B, T) for B completions of at most T tokens. Its other parameters
# are hyper-parameters, found by name and checked. This one uses a `tanh` instead of PPO's clip: the gradient fades smoothly.
#
# The kit assumes nothing about your function. The last two lines declare two properties, so that memory can be bounded without
# extra work and groups with equal rewards are skipped (`docs/performance.md`).

# %% file="my_hooks.py"
import torch

from kit.objective import TokenBatch


def tanh_clip(batch: TokenBatch, width: float = 0.2) -> torch.Tensor:
    """Per-token surrogate -A·w·tanh(log r / w), (B, T)."""
    return -batch.advantages * width * torch.tanh(batch.log_ratio / width)


tanh_clip.row_separable = True  # the loss of a completion depends on no other completion
tanh_clip.zero_at_zero_advantage = True


# %% [markdown]
# ## Try the hook first
#
# The check uses random batches: shapes, padding, NaN, extreme ratios, and whether the gradient follows the advantages.

# %%
# !grpo-kit objective check my_hooks.py:tanh_clip

# %% [markdown]
# The check finds a wrong hook before training. This one forgets that padding is not a token:


# %% file="leaky.py"
def leaky_clip(batch):
    """Wrong on purpose: the mean runs over padding, too."""
    return -batch.advantages * batch.ratio / batch.mask.numel() * (batch.logps.sum() / batch.logps.detach().sum())


# %%
# !grpo-kit objective check leaky.py:leaky_clip || echo "refused, as it should be"

# %% [markdown]
# ## Train with both
#
# The preset's checker decides what is correct, and short answers earn a little more. Keep shaping small: it must not outweigh
# correctness.

# %%
import kit

run = kit.train(
    "quickstart",
    overrides=[
        "reward.functions=[{path: 'my_rewards.py:short', weight: 0.1}]",
        "objective.clip={name: 'my_hooks.py:tanh_clip', width: 0.3}",
        "optimisation.iterations=2",  # a second step on the same completions: only then do ratios differ from 1
        "optimisation.steps=40",
    ],
)

# %% [markdown]
# ## Look at what was rewarded
#
# Each part of the reward is a curve and a column of its own: when the total rises, it shows why.

# %%
run.plot()

# %%
import pandas as pd

pd.set_option("display.max_colwidth", 90)
pd.DataFrame(run.completions(step=1)).filter(regex=r"^(completion|tokens|reward/\w+|advantage)$").head(8)

# %% [markdown]
# ## Errors appear before anything runs
#
# `kit.train` refuses it with the same sentence.

# %%
# !grpo-kit validate quickstart -o objective.clip.name=my_hooks.py:tanh_clip -o objective.clip.widht=0.3 || echo "refused"

# %% [markdown]
# Every hook that comes with the kit, with formula and source: `grpo-kit objective list`; how they form the loss:
# `docs/objective.md`. Which objective is better: `04_compare_objectives.ipynb`.
