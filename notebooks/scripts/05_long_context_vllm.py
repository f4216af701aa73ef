# ---
# jupyter:
#   accelerator: GPU
#   colab:
#     gpuType: L4
# ---

# %% [markdown]
# # Long completions with vLLM
#
# Reasoning over thousands of tokens is slow to sample, so vLLM samples here. This notebook needs an L4 (24 GB) or an A100. The
# problems are Countdown puzzles (reach 24 with 3, 7 and 9), generated and checked by programs; the model is
# Qwen3-4B-Instruct-2507 in 4-bit.
#
# **This run has not been made on a GPU yet.** CI runs every cell on a tiny model without vLLM and checks the settings against
# the kit's rules and its memory plan for both cards.

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
# ## The configuration
#
# The preset `countdown` with vLLM and longer completions. vLLM shares the GPU with training (`colocate`).
# `gpu_memory_utilization` is its share; with `standby` it sleeps during updates, which can then use its memory. Unsloth
# runs vLLM on the 4-bit weights that it trains. Completions have up to 4,096 tokens; those that are cut get weight 0 in the
# update (`drop_truncated`).
#
# Lengths, and with them memory, differ from step to step. `token_budget` bounds it: one pass holds at most 9,216 tokens.
# Held-out scores are made by transformers' `generate`, whose cache grows with the length, so 16 run at a time. `validate`
# checks everything that can be checked without training.

# %%
import kit

LARGE = "A100" in GPU or "H100" in GPU
SETTINGS = [
    "model.name=Qwen/Qwen3-4B-Instruct-2507",
    "model.backend=unsloth",
    "generation.engine=vllm",
    "generation.max_completion_tokens=4096",
    f"generation.vllm={{gpu_memory_utilization: {0.5 if LARGE else 0.4}, standby: true}}",
    "objective.weights=[sampler_correction, drop_truncated]",
    "optimisation.micro_batch_size=8",
    "optimisation.token_budget=9216",
    "optimisation.steps=100",
    "evaluation.batch_size=16",
]
Path("countdown-long.yaml").write_text(kit.load_config("countdown", SETTINGS).to_yaml())
# !grpo-kit validate countdown-long.yaml

# %% [markdown]
# ## Will it fit?
#
# The plan assumes the worst case: every completion reaches the limit. The real time is shorter, and the run shows a measured
# estimate after ten steps.

# %%
# !grpo-kit plan countdown-long.yaml

# %% [markdown]
# ## Train
#
# What to expect: some minutes until the engine is loaded. Completions often grow over the first hundred steps, and the
# share that is cut at the limit with them; if it stays above a fifth, raise the limit.

# %%
run = kit.train("countdown-long.yaml", run_id="countdown-long")

# %%
run.plot()

# %% [markdown]
# ## Where does the time go, and do engine and trainer agree?
#
# The engine's log-probabilities differ slightly from the trainer's. The difference is logged (vLLM only), `sampler_correction`
# corrects for it, and an alert appears if it is too large. `env.json` in the run's folder has the engine with its
# version and settings. Keys and figures: `docs/vllm.md`.

# %%
import pandas as pd

metrics = pd.DataFrame(run.metrics()).set_index("step")
metrics.filter(regex="step_time|mean_length|clipped_ratio|sampler/|^reward$").tail()
