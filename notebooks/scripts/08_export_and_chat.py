# %% [markdown]
# # Chat with the result, and export it
#
# A training run saves an adapter. This notebook compares its answers with those of the base model, merges it into complete
# weights, and verifies that the exported model answers like the trained one.

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
# ## Something to export
#
# Any finished run will do: `run = kit.Run("its-name")`.

# %%
import kit

run = kit.train("quickstart", steps=30)

# %% [markdown]
# ## Compare answers
#
# The base model and the trained one answer the same question with the same seed.

# %%
import pandas as pd

pd.set_option("display.max_colwidth", 120)
question = "State the final answer to the following arithmetic problem: 5 + 7 + 3 ="
answers = run.chat(question, temperature=0)
pd.DataFrame({side: answers[side] for side in ("base", "tuned")}).T[["text", "tokens", "finish"]]

# %% [markdown]
# For a held-out problem the right answer is known, so the reward scores each answer.

# %%
heldout = run.chat(heldout=2, temperature=0)
print(heldout["prompt"])
answered = pd.DataFrame({side: heldout[side] for side in ("base", "tuned")}).T
answered.assign(reward=[reward["total"] for reward in answered.reward])[["text", "tokens", "reward"]]

# %% [markdown]
# ## The adapter
#
# The adapter is small and needs the base model. `export` checks that the file gives the same answers as the run: on 16 held-out
# prompts, the share of tokens and of whole answers that agree, how far log-probabilities lie apart (nats), how much
# training has changed them (`training_effect`), and which share of that the file keeps (`effect_kept`).

# %%
adapter = run.export("adapter")
print(adapter["path"])
pd.Series(adapter["verification"]["comparison"], name="adapter").to_frame()

# %% [markdown]
# ## Merged weights
#
# Adapter and base merged in 16 bit, for vLLM, TGI and other programs that load a model folder. Merging rounds the weights; the
# result says how far log-probabilities moved, and an export that differs from the trained model raises `NotVerified`.

# %%
merged = run.export("merged_16bit")
print(merged["path"])
pd.Series(merged["verification"]["comparison"], name="merged").to_frame()

# %% [markdown]
# ## transformers loads the folder

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(merged["path"])
model = AutoModelForCausalLM.from_pretrained(merged["path"])
messages = [{"role": "user", "content": question}]
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
said = model.generate(**ids, max_new_tokens=48, do_sample=False)
print(tokenizer.decode(said[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))

# %% [markdown]
# GGUF for llama.cpp and Ollama, 4-bit weights, and a repository on the hub: `docs/export.md`. In a terminal:
# `grpo-kit chat RUN_ID`, `grpo-kit export RUN_ID --to gguf`.
