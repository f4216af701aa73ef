# ---
# jupyter:
#   accelerator: GPU
#   colab:
#     gpuType: T4
# ---

# %% [markdown]
# # Grade-school mathematics on a free T4
#
# Qwen3-1.7B learns to answer GSM8K without its thinking mode: weights in 4-bit, a LoRA adapter trained with GRPO, generation and
# training by Unsloth, all on one T4 with 16 GB. Colab: Runtime → Change runtime type → T4. Checkpoints go to your Drive, so that
# a disconnect costs minutes, not the run. (Kaggle gives two T4: `09_kaggle_two_t4.ipynb`.)
#
# **Known of its result: nothing yet.** Every cell is run by CI on a tiny model, and the settings are held against the kit's rules
# and its memory plan for this card; the run itself has not been made on a T4.

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
# The preset `gsm8k` (LoRA of rank 32, a reward for the right number and a little for the layout) with what a T4 needs. It has no
# bfloat16, so float16 it is. A step is 4 problems with 8 completions each, half of the preset's: it is time that a T4 lacks
# rather than memory. With fewer than 8 a problem, more groups would be all right or all wrong, and teach nothing. Qwen3's
# thinking is off, since its thoughts alone would fill 400 tokens.
#
# On Colab everything but Drive is gone when the session ends; the cell asks for access to it. A checkpoint holds the adapter
# (35 million weights, 140 MB) and the optimiser's state in 8 bit; two are kept. The file that is written has every key with its
# value; `validate` checks all that can be checked without training, and `plan` counts the memory by its parts: *Peak ... fits* is
# the line to look for. Its time is an estimate from the card's data sheet; after ten steps the card of the run knows better.

# %%
import kit
from kit.api.notebook import smoke

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
    *smoke(everything=True),  # nothing, unless KIT_SMOKE=1 asks for a tiny model: that is how this notebook is tested
]
Path("gsm8k-t4.yaml").write_text(kit.load_config("gsm8k", SETTINGS).to_yaml())
# !grpo-kit validate gsm8k-t4.yaml
# !grpo-kit plan gsm8k-t4.yaml

# %% [markdown]
# ## Will it learn?
#
# `doctor` asks the model itself: how often is it right before training, and do the answers to one problem differ? A few
# minutes that can save hours. Its last line is the verdict; it names the one thing to change.

# %%
# !grpo-kit doctor gsm8k-t4.yaml --prompts 8

# %% [markdown]
# ## Train
#
# What to expect: the first step takes longest (compilation); after it the card says how much time is left. The reward for
# the layout rises first. **The accuracy then stays flat, often for the first 100 steps; that is normal.** Look at the
# held-out score, not at single steps: four problems are a noisy sample. Worry when the run says so (alerts stand in the card),
# when completions are cut at the limit more and more, or when the held-out score falls while the reward rises. When memory runs
# out, the run goes on by itself with smaller parts of the same step (`docs/gpu.md`).
#
# **After a disconnect** run the cells above but `doctor`, then this one: it goes on from the last checkpoint on Drive. A run that
# has finished is left as it is.

# %%
if (Path(ROOT) / "gsm8k-t4").is_dir():
    run = kit.Run("gsm8k-t4", ROOT)
    run = run if run.status["state"] == "finished" else kit.resume("gsm8k-t4", ROOT)
else:
    run = kit.train("gsm8k-t4.yaml", run_id="gsm8k-t4")

# %%
run.plot()

# %% [markdown]
# Reading the curves: *Held-out problems solved* is the one that counts, with 95 % intervals. *Groups without a lesson* should
# not approach 100 %: there nothing is left to learn, or nothing is learnable yet (`selection.dynamic_sampling` makes such groups
# again from other problems: `docs/selection.md`). *Cut at the length limit* should stay low.
#
# Below is what it says now. `run.path / "adapter"` loads with PEFT or Unsloth; `08_export_and_chat.ipynb` merges it, converts it,
# and talks to it.

# %%
import pandas as pd

pd.set_option("display.max_colwidth", 200)
last = pd.DataFrame(run.completions(step=run.metrics()[-1]["step"]))
last.filter(regex=r"^(prompt|completion|reward/\w+|advantage)$").head(8)
