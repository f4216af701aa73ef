# %% [markdown]
# # A model that nobody has listed
#
# The kit has no list of supported models: it looks at what a model is, and tries. This notebook checks an architecture
# in a minute, without its weights, and then trains it.

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
# ## Choose one
#
# A hub id or a folder.

# %%
from kit.api.notebook import smoke, smoke_model

MODEL = "allenai/OLMo-2-0425-1B-Instruct"
if smoke():  # KIT_SMOKE=1: the same architecture at a toy size, without the network; so the notebook is tested
    MODEL = smoke_model("olmo2", "unlisted")

# %% [markdown]
# ## Check it
#
# A tiny copy with random weights goes through everything that training does: forward, padding on the left against no padding,
# the loss, LoRA, generation, one step of GRPO. The card says what works, what fails and why, and what could not be tried
# here, each with the figure that was measured. `--weights` tries the real ones.

# %%
# !grpo-kit model check {MODEL}

# %% [markdown]
# ## The layers that get an adapter
#
# `all-linear` finds them by itself. To choose, name them.

# %%
from pathlib import Path

import kit

SETTINGS = [
    f"model.name={MODEL}",
    "model.lora={rank: 16, alpha: 32, targets: [q_proj, k_proj, v_proj, o_proj]}",
    "optimisation.learning_rate=2.0e-5",
    "generation.max_completion_tokens=64",
    *smoke(),
]
Path("unlisted.yaml").write_text(kit.load_config("quickstart", SETTINGS).to_yaml())
# !grpo-kit validate unlisted.yaml

# %% [markdown]
# ## Does the task teach it anything?
#
# Small sums may be too easy for a model of 1B, and one with random weights cannot do them: `doctor` says so before you train. Its
# last lines are the verdict and the one change that it asks for.

# %%
# !grpo-kit doctor unlisted.yaml --prompts 8

# %% [markdown]
# ## Train it
#
# Before the first step the trainer proves that the log-probabilities it learns from are those of the plain model, for a
# padded batch and for a single row, and that every part of the loss reaches the weights. An architecture that would be
# scored wrongly stops there.

# %%
run = kit.train("unlisted.yaml")

# %% [markdown]
# What it found stands among the run's events: `packing` is the way in which completions are scored without padding, or why not
# (`docs/performance.md`).

# %%
[event for event in run.events() if event["kind"] == "packing"]

# %% [markdown]
# Where introspection is wrong for an architecture, a few lines correct it: `docs/models.md`.
