# %% [markdown]
# # Which objective is better, or was it luck?
#
# Two runs with different losses give two numbers, and the larger one proves nothing: another seed may reverse it. Here every
# arm trains with the same seeds on the same prompts and is judged on the same held-out problems. The verdict says *better*,
# *worse* or *not distinguishable*, with an interval.

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
# ## The recipes
#
# An objective is made of five kinds of parts: advantage, clip, weights, regularizers, reduction. A recipe is a set of them
# that a paper or a library uses; `grpo-kit objective list` shows all of both. These are the two of this notebook.

# %%
# !grpo-kit objective show dapo
# !grpo-kit objective show dr_grpo

# %% [markdown]
# ## Compare
#
# `dapo` is the quickstart's objective; `dr_grpo` divides neither by the group's deviation nor by a completion's length. Two
# arms and three seeds are six runs, each of about 80 seconds on a CPU: eight minutes. Repeat the call, with more seeds or arms
# if you like; finished runs are reused.

# %%
import kit

comparison = kit.compare(
    "quickstart",
    ["dr-grpo:objective={recipe: dr_grpo}"],  # an arm a line; what differs, as on the command line
    seeds=3,  # three are the least that tell seeds from luck
    overrides=["optimisation.steps=30", "evaluation.every=0"],
)

# %%
comparison

# %% [markdown]
# ## Read the verdict
#
# *Not distinguishable* is the most frequent verdict. It means that these seeds and problems cannot tell the arms
# apart, not that they are equal. The sentence says which differences this budget finds. More held-out problems and more seeds
# help; longer training helps only if the arms drift apart.

# %%
for verdict in comparison.verdicts:
    print(verdict)

# %% [markdown]
# ## The runs themselves
#
# They are ordinary runs.

# %%
runs = [kit.Run(name) for arm in comparison.result["arms"] for name in arm["runs"]]
runs

# %%
runs[0].plot()

# %%
from IPython.display import FileLink

FileLink(comparison.page)  # on Colab: download it by the folder symbol on the left

# %% [markdown]
# How the verdict is computed: `docs/compare.md`. To search over many values with Optuna: `docs/sweep.md`.
