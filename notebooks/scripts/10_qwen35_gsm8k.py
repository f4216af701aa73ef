# ---
# jupyter:
#   accelerator: GPU
#   colab:
#     gpuType: L4
# ---

# %% [markdown]
# # A hybrid model of 2026: Qwen3.5-4B on an L4 or A100
#
# Three of four layers of Qwen3.5 are gated delta nets, which carry a state from token to token; the fourth is attention. The
# kit packs their completions with separate rows for the recurrent layers (`docs/models.md`). Here Qwen3.5-4B, in 4-bit and
# without its thinking mode, learns to answer GSM8K. Colab: Runtime → Change runtime type → L4 or A100.
#
# **This run has not been made on a GPU yet, and the weights have not been loaded.** CI runs every cell on a tiny model, and the
# tests train tiny models of this architecture with random weights. `plan` below estimates the memory from the model's
# configuration before training.

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
# The preset `qwen35-gsm8k`: LoRA of rank 32, 8 problems with 8 completions each per step, `dapo`, a reward for the right number
# and a little for the format. `gemma4-gsm8k` and `granite4-gsm8k` are similar presets. If installed, flash-linear-attention and
# causal-conv1d make the recurrent layers faster.

# %%
import kit

SETTINGS = [
    "evaluation.every=50",
    "run.save_every=25",
]
Path("qwen35.yaml").write_text(kit.load_config("qwen35-gsm8k", SETTINGS).to_yaml())
# !grpo-kit validate qwen35.yaml
# !grpo-kit plan qwen35.yaml

# %% [markdown]
# ## Will it learn?
#
# A strong model may solve most of GSM8K before any training, and a group whose completions are all right teaches nothing.
# `doctor` samples the model and reports whether its groups differ. If they do not, use harder problems, not more steps.

# %%
# !grpo-kit doctor qwen35.yaml --prompts 8

# %% [markdown]
# ## Train
#
# Expect a held-out accuracy that does not fall, and a mean reward that rises within 100 steps, first by the format. If memory
# runs out, the run continues with smaller parts of the same step. After a disconnect, `kit.resume("qwen35")` continues from the
# last checkpoint, as long as the folder `runs` still exists.

# %%
run = kit.train("qwen35.yaml", run_id="qwen35")

# %%
run.plot()
