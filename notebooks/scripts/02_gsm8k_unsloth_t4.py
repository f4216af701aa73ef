# ---
# jupyter:
#   accelerator: GPU
#   colab:
#     gpuType: T4
# ---

# %% [markdown]
# # Grade-school mathematics on a free T4
#
# Qwen3-1.7B learns to answer GSM8K without its thinking mode: weights in 4-bit, a LoRA adapter trained with GRPO, generation
# and training by Unsloth, all on one T4 with 16 GB. Colab: Runtime → Change runtime type → T4. Checkpoints go to your Drive, so
# a disconnect costs minutes, not the run. (Kaggle gives two T4: `09_kaggle_two_t4.ipynb`.)
#
# **This run has not been made on a T4 yet.** CI runs every cell on a tiny model and checks the settings against the kit's rules
# and its memory plan for this card.

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
# The preset `gsm8k` (LoRA of rank 32, a reward for the right number and a little for the layout) with what a T4 needs. It has
# no bfloat16, so the run uses float16. A step has 4 problems with 8 completions each, half of the preset's, because a T4 is
# slow. With fewer than 8 completions per problem, more groups would have equal rewards. Qwen3's
# thinking is off, because it alone would fill 400 tokens.
#
# On Colab only Drive survives the session; the cell asks for access to it. A checkpoint holds the adapter (35 million weights,
# 140 MB) and the optimiser's state in 8 bit; two are kept. The file that is written has every key with its value; `validate`
# checks everything that can be checked without training, and `plan` lists the memory by terms: look for the line *Peak ...
# fits*. Its time is an estimate from the card's data sheet; after ten steps the run shows a measured one.

# %%
import kit

ROOT = "runs"
if HOST == "Colab":
    from google.colab import drive

    drive.mount("/content/drive")
    ROOT = "/content/drive/MyDrive/grpo-kit"
SETTINGS = [
    "model.name=Qwen/Qwen3-1.7B",
    "model.backend=unsloth",
    "model.dtype=float16",
    "data.chat_template_kwargs={enable_thinking: false}",
    "generation.max_completion_tokens=400",
    "optimisation.batch_size=32",
    "optimisation.steps=250",
    "evaluation.every=50",
    "evaluation.prompts=100",
    "evaluation.batch_size=64",
    "run.save_every=25",
    f"run.root={ROOT}",
]
Path("gsm8k-t4.yaml").write_text(kit.load_config("gsm8k", SETTINGS).to_yaml())
# !grpo-kit validate gsm8k-t4.yaml
# !grpo-kit plan gsm8k-t4.yaml

# %% [markdown]
# ## Will it learn?
#
# `doctor` samples the model: how often is it right before training, and do the answers to one problem differ? This takes a few
# minutes and can save hours. The last line is the verdict and names what to change.

# %%
# !grpo-kit doctor gsm8k-t4.yaml --prompts 8

# %% [markdown]
# ## Train
#
# What to expect: the first step takes longest (compilation); then the card shows the time left. The reward for
# the format rises first. **The accuracy then stays flat, often for the first 100 steps; that is normal.** Look at the
# held-out score, not at single steps: four problems are a noisy sample. Worry if the card shows alerts, if more and
# more completions are cut at the limit, or if the held-out score falls while the reward rises. If memory runs out, the run
# continues with smaller parts of the same step (`docs/gpu.md`).
#
# **After a disconnect** run the cells above except `doctor`, then this one: it continues from the last checkpoint on Drive. A
# finished run is not changed.

# %%
if (Path(ROOT) / "gsm8k-t4").is_dir():
    run = kit.Run("gsm8k-t4", ROOT)
    run = run if run.status["state"] == "finished" else kit.resume("gsm8k-t4", ROOT)
else:
    run = kit.train("gsm8k-t4.yaml", run_id="gsm8k-t4")

# %%
run.plot()

# %% [markdown]
# Reading the curves: *Held-out problems solved* measures success, with 95 % intervals. *Groups with equal rewards* should
# not approach 100 %: then nothing is left to learn, or nothing can be learned yet (`selection.dynamic_sampling` replaces such
# groups: `docs/selection.md`). *Cut at the length limit* should stay low.
#
# The cell below shows answers of the trained model. `run.path / "adapter"` loads with PEFT or Unsloth;
# `08_export_and_chat.ipynb` merges, converts and chats.

# %%
import pandas as pd

pd.set_option("display.max_colwidth", 200)
last = pd.DataFrame(run.completions(step=run.metrics()[-1]["step"]))
last.filter(regex=r"^(prompt|completion|reward/\w+|advantage)$").head(8)
