# ---
# jupyter:
#   accelerator: GPU
# ---

# %% [markdown]
# # Two T4: two objectives at once, and which is better
#
# A Kaggle session has two T4, and a run trains on one. So each card trains one arm of a comparison: Qwen3-1.7B in 4-bit on
# GSM8K, once with `dapo` and once with `dr_grpo`, with the same seed and the same problems. Set Accelerator → GPU T4 ×2 (not
# P100: its compute capability is 6.0, Unsloth needs 7.0) and Internet on. "Save & Run All" keeps the files of the working
# folder; a session lasts at most twelve hours.
#
# **These runs have not been made on Kaggle yet.** CI runs every cell on a tiny model and checks the settings against the kit's
# rules and its memory plan for this card.

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
# As in `02_gsm8k_unsloth_t4.ipynb`, where the settings are explained, with fewer steps: both runs have to end within one
# session. `plan` estimates the memory of one arm on one card.

# %%
import kit

SETTINGS = [
    "model.name=Qwen/Qwen3-1.7B",
    "model.backend=unsloth",
    "model.dtype=float16",
    "data.chat_template_kwargs={enable_thinking: false}",
    "generation.max_completion_tokens=400",
    "optimisation.batch_size=32",
    "optimisation.steps=150",
    "evaluation.every=50",
    "evaluation.prompts=100",
    "evaluation.batch_size=64",
    "run.save_every=25",
]
Path("gsm8k-two.yaml").write_text(kit.load_config("gsm8k", SETTINGS).to_yaml())
# !grpo-kit validate gsm8k-two.yaml
# !grpo-kit plan gsm8k-two.yaml

# %% [markdown]
# ## One arm per card
#
# `kit.start` trains in a separate process and returns at once; the process sees the card in `CUDA_VISIBLE_DEVICES`. The runs
# continue when this page is closed, as long as the session lives. `watch` follows the first; both end at about the same time.

# %%
runs = []
for card, objective in enumerate(["dapo", "dr_grpo"]):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(card)
    runs.append(kit.start("gsm8k-two.yaml", objective=objective, run_id=f"two-{objective.replace('_', '-')}"))
runs[0].watch()

# %%
runs[1].watch()

# %% [markdown]
# ## Which is better?
#
# Both runs are scored on the same problems, so the comparison is paired, with 95 % intervals. One seed per arm cannot separate
# the objective from chance, and the verdict says so: run the notebook again with `seed=1` and `seed=2` in `kit.start`, then
# compare `two-dapo,two-dapo-1,two-dapo-2` with the others (`docs/compare.md`).

# %%
# !grpo-kit compare two-dapo two-dr-grpo

# %%
runs[1].plot()
