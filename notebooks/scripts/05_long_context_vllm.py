# ---
# jupyter:
#   accelerator: GPU
#   colab:
#     gpuType: L4
# ---

# %% [markdown]
# # Long completions with vLLM
#
# Reasoning that takes thousands of tokens is slow to sample, and most of a step is sampling: here vLLM does it. For an L4
# (24 GB) or an A100. The problems are Countdown puzzles (reach 24 with 3, 7 and 9), made by a program and checked by one, as many
# as you like; the model is Qwen3-4B-Instruct-2507 in 4-bit.
#
# **Known of its result: nothing yet.** Every cell is run by CI on a tiny model without vLLM, and the settings are held against
# the kit's rules and its memory plan for both cards; the run itself has not been made on one.

# %%
# Installs the kit, unless it is there already: once a session, and the cell prints how long it took.
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

# Where the kit comes from: git+https://ADDRESS of its repository, its folder, or its wheel. `python notebooks/make.py --source
# ADDRESS` writes the address of your copy here for all notebooks. Left empty in a clone, the clone is installed.
GRPO_KIT = ""  # @param {type: "string"}
GRPO_KIT = os.environ.get("GRPO_KIT") or GRPO_KIT or (".." if Path("../kit/train.py").is_file() else "")
HOST = "Kaggle" if "KAGGLE_KERNEL_RUN_TYPE" in os.environ else "Colab" if "COLAB_RELEASE_TAG" in os.environ else "local"
query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
GPU = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0] if shutil.which(query[0]) else ""
# A T4 has no bfloat16 and little memory: Unsloth generates there by itself. L4, A100 and newer cards get vLLM, too.
# `tested` pins torch, transformers, TRL and what else matters to the versions that the kit was tested with.
EXTRAS = "[tested,unsloth]" if "T4" in GPU else "[tested,unsloth,vllm]" if GPU else "[tested]"
if importlib.util.find_spec("kit") is None:
    if not GRPO_KIT:
        sys.exit("The kit is not installed: set GRPO_KIT in this cell to its git address, its folder or its wheel.")
    GRPO_KIT = f"grpo-kit{EXTRAS} @ {GRPO_KIT}" if "://" in GRPO_KIT else f"{os.path.abspath(GRPO_KIT)}{EXTRAS}"
    began, before = time.monotonic(), {package.name: package.version for package in importlib.metadata.distributions()}
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", GRPO_KIT], check=True)
    importlib.invalidate_caches()
    print(f"installed in {time.monotonic() - began:.0f} s")
    # A process of its own, since this kernel keeps what it has imported, says what is older now and whether torch sees the GPU.
    check = [sys.executable, "-m", "kit.planning.machine", json.dumps(before)]
    if subprocess.run(check).returncode and GPU:
        sys.exit(f"torch does not see the {GPU}: the lines above say what to do.")
# So that `!grpo-kit` below is the one of this kernel, also where its environment is not activated.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
os.environ.setdefault("COLUMNS", "110")  # width of the tables that commands print
print(f"{HOST}: {GPU or 'no GPU; of these notebooks only 02, 05, 09 and 10 need one'}")

# %% [markdown]
# ## The configuration
#
# The preset `countdown`, with another engine and room to think. vLLM shares the GPU with training (`colocate`).
# `gpu_memory_utilization` is its share; with `standby` it sleeps while the weights are updated, and its memory is free for the
# update. Unsloth drives vLLM here, on the weights in 4-bit that it trains. Completions of up to 4,096 tokens: those
# that are cut there weigh 0 in the update (`drop_truncated`), since nobody knows where they would have ended.
#
# Lengths differ from step to step, and memory with them. `token_budget` bounds it: one pass holds at most 9,216 tokens, be
# it two of the longest completions with their prompts or eight short ones. Held-out scores are made by transformers'
# `generate`, whose cache grows with the length, therefore 16 at a time. `validate` checks all that can be checked without
# training.

# %%
import kit
from kit.api.notebook import smoke

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
    *smoke(everything=True),  # nothing, unless KIT_SMOKE=1 asks for a tiny model and no vLLM: so the notebook is tested
]
Path("countdown-long.yaml").write_text(kit.load_config("countdown", SETTINGS).to_yaml())
# !grpo-kit validate countdown-long.yaml

# %% [markdown]
# ## Will it fit?
#
# The plan reckons with the worst: every completion as long as the limit allows. So its time, for 100 steps on an L4 most of
# a day, shrinks with the length of what is really written; after ten steps the card of the run knows better.

# %%
# !grpo-kit plan countdown-long.yaml

# %% [markdown]
# ## Train
#
# What to expect: some minutes until the engine is loaded. Completions often grow over the first hundred steps, and the
# share that is cut at the limit with them; where it stays above a fifth, raise the limit, or the reward has nothing to judge.

# %%
run = kit.train("countdown-long.yaml", run_id="countdown-long")

# %%
run.plot()

# %% [markdown]
# ## Where does the time go, and do the two agree?
#
# The engine computes log-probabilities in its own way. Their difference to the trainer's is logged (vLLM only), and
# `sampler_correction` weighs it out; the run says so when it is too large. `env.json` in the run's folder has the engine with its
# version and settings. Keys, modes (a server on another GPU) and figures: `docs/vllm.md`.

# %%
import pandas as pd

metrics = pd.DataFrame(run.metrics()).set_index("step")
metrics.filter(regex="step_time|mean_length|clipped_ratio|sampler/|^reward$").tail()
