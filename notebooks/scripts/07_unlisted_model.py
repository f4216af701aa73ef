# %% [markdown]
# # Check and train an unlisted model
#
# The kit has no list of supported models: it inspects a model and tries it. This notebook checks an architecture in a minute,
# without its weights, and then trains it.

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
# ## Choose one
#
# A hub id or a folder.

# %%
MODEL = "allenai/OLMo-2-0425-1B-Instruct"

# %% [markdown]
# ## Check it
#
# A tiny copy with random weights goes through everything that training does: forward, padding on the left against no padding,
# the loss, LoRA, generation, one step of GRPO. The card shows what works, what fails and why, and what was not
# tried, with the measured figures. `--weights` tries the real weights.

# %%
# !grpo-kit model check {MODEL}

# %% [markdown]
# ## The layers that get an adapter
#
# `all-linear` selects them. To choose others, name them.

# %%
from pathlib import Path

import kit

SETTINGS = [
    f"model.name={MODEL}",
    "model.lora={rank: 16, alpha: 32, targets: [q_proj, k_proj, v_proj, o_proj]}",
    "optimisation.learning_rate=2.0e-5",
    "generation.max_completion_tokens=64",
]
Path("unlisted.yaml").write_text(kit.load_config("quickstart", SETTINGS).to_yaml())
# !grpo-kit validate unlisted.yaml

# %% [markdown]
# ## Can the model learn from the task?
#
# Small sums may be too easy for a model of 1B, and a model with random weights cannot solve them. `doctor` reports this before
# you train. Its last lines are the verdict and the suggested change.

# %%
# !grpo-kit doctor unlisted.yaml --prompts 8

# %% [markdown]
# ## Train it
#
# Before the first step the trainer checks that its log-probabilities equal those of the plain model, for a padded batch and for
# a single row, and that every part of the loss reaches the weights. If not, the run stops.

# %%
run = kit.train("unlisted.yaml")

# %% [markdown]
# The result is among the run's events: `packing` says how completions are scored without padding, or why not
# (`docs/performance.md`).

# %%
[event for event in run.events() if event["kind"] == "packing"]

# %% [markdown]
# If detection is wrong for an architecture, a few lines correct it: `docs/architectures.md`.
