# %% [markdown]
# # GRPO from beginning to end, in five minutes
#
# A tiny language model learns to answer small sums with GRPO (group-relative policy optimisation): it answers each
# problem several times, a program checks the answers, and answers that are better than their siblings become likelier.
# Everything here runs on a CPU or on any GPU; with a larger model the same calls are used
# (`02_gsm8k_unsloth_t4.ipynb`).
#
# Known of its result: CI runs this notebook from top to bottom, and README's table of the same run over three seeds has 8 % of
# the held-out problems solved before and 91 % after.

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
# ## Train
#
# The tiny model comes with the kit. Training takes about a minute. The card below the cell follows the run; **interrupting the
# cell saves a checkpoint and stops**, and `kit.resume(run.id)` goes on.
#
# What to expect: the reward starts near 0.5 and passes 0.8 within ten steps, because this model knows a careful way to
# answer and only has to prefer it. A real model is slower: flat for the first fifty or hundred steps is normal there.

# %%
import kit
from kit.api.notebook import smoke

run = kit.train("quickstart", overrides=smoke())  # smoke(): nothing, unless KIT_SMOKE=1 asks for a run of seconds

# %% [markdown]
# ## What it learned
#
# The run is a directory, and `run` is a handle on it: everything below reads files, also next week, by
# `kit.Run("its-name")`. Held-out problems are never trained on; each score has a 95 % interval.
#
# Three curves to look at first. *Held-out problems solved* is what counts. *Entropy* is how undecided the model is from token
# to token: it falls as it settles on a way to answer. *Groups without a lesson* are problems whose answers all earned the
# same: nothing can be learned from them, and no training is spent on them (`docs/selection.md` says how to make fewer).

# %%
run.plot()

# %% [markdown]
# ## What it wrote
#
# Every completion is kept with the value of each part of its reward: here the right number (weight 1), and the layout (weight
# 0.2). A *group* is one problem's completions; the **advantage** says how much better than its group a completion was, and that
# is what the loss learns from: above 0 it becomes likelier, below 0 less likely. Here a group of the first step and one of the
# last.

# %%
import pandas as pd

pd.set_option("display.max_colwidth", 90)
groups = {}
for step in (1, run.metrics()[-1]["step"]):
    rows = pd.DataFrame(run.completions(step=step))
    groups[f"step {step}"] = rows.loc[rows.prompt == rows.prompt[0]]
pd.concat(groups)[["prompt", "completion", "tokens", "reward/accuracy", "reward/format", "advantage"]]

# %% [markdown]
# ## Score it again, and go on in the background
#
# `evaluate` scores with other settings, for example eight samples a problem: pass@8 is the share of problems that at least one of
# eight answers solves. `kit.start` trains in the background: it returns at once, and the run goes on when the notebook is closed.
# `watch` shows its card; interrupting that ends the watching, not the run. `another.stop()` ends the run after the step in
# progress, with a checkpoint.

# %%
from IPython.display import display

scores = run.evaluate(prompts=20, k=8, progress=False)
display(pd.DataFrame({name: scores[name] for name in ("greedy_accuracy", "pass@1", "pass@8")}).T)
another = kit.start("quickstart", seed=1, steps=12, overrides=smoke())
another.watch()

# %% [markdown]
# ## Take it with you
#
# The report is one file with everything: scores, curves, samples, configuration, and how to do it again. (Where the link does
# not open, as on Colab: the folder symbol on the left shows `runs/`; download `report.html` from there.)
#
# Next: your own reward and loss (`03_custom_reward_and_hooks.ipynb`), a real model
# (`02_gsm8k_unsloth_t4.ipynb`), or which objective is better and whether that was luck (`04_compare_objectives.ipynb`).

# %%
from IPython.display import FileLink

FileLink(run.report())
