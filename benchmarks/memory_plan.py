"""Compare planned and measured peak memory on the CPU: `python benchmarks/memory_plan.py [--only NAME ...] [--out FILE]`.

Each configuration is a random model in Hugging Face layout that the real training process (`python -m kit.train`) trains for
2 steps. The measured memory is the peak resident memory of that process (ru_maxrss). The constants of kit/models/memory.py
were fitted to the configurations marked "calibration"; those marked "hold-out" were measured afterwards. The exit code is 1 if a
plan is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kit.config import RunConfig, load_config

LIMIT = 0.15
FILE = Path(__file__).parent / "results" / "memory_plan.json"
BASE: dict[str, Any] = {
    "family": "Qwen3", "layers": 2, "hidden": 64, "intermediate": 128, "heads": 2, "kv_heads": 1, "head_dim": 32,
    "vocab": 512, "dtype": "float32", "rank": 8, "batch": 8, "micro_batch": 8, "prompt": 8, "completion": 8,
    "checkpointing": False, "kl": False, "evaluation": 0,
}  # fmt: skip
MEDIUM = {"layers": 6, "hidden": 512, "intermediate": 1536, "heads": 8, "kv_heads": 4, "head_dim": 64, "vocab": 8192}
LONG = MEDIUM | {"batch": 16, "micro_batch": 16, "prompt": 200, "completion": 48}
SHORT = MEDIUM | {"vocab": 32768, "micro_batch": 4, "prompt": 64, "completion": 32}
LARGE = {"layers": 20, "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 8, "head_dim": 64, "vocab": 65536}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("calibration", {}),
    "activations": ("calibration", LONG),
    "checkpointing": ("calibration", LONG | {"checkpointing": True}),
    "micro-batch": ("calibration", LONG | {"micro_batch": 4}),
    "full": ("calibration", SHORT | {"rank": None}),
    "full-reference": ("calibration", SHORT | {"rank": None, "kl": True}),
    "bfloat16": (
        "calibration",
        LONG | {"layers": 8, "hidden": 768, "intermediate": 2048, "heads": 12, "dtype": "bfloat16", "completion": 16},
    ),
    "long-completions": (
        "hold-out",
        {"layers": 4, "hidden": 384, "intermediate": 1024, "heads": 6, "kv_heads": 2, "head_dim": 64, "vocab": 16384}
        | {"micro_batch": 4, "prompt": 64, "completion": 256},
    ),
    "large": ("hold-out", LARGE | {"batch": 4, "micro_batch": 4, "prompt": 96, "completion": 12}),
    "large-bfloat16": (
        "hold-out",
        LARGE | {"batch": 4, "micro_batch": 2, "prompt": 96, "completion": 12, "dtype": "bfloat16"},
    ),
    "full-checkpointing": (
        "hold-out",
        MEDIUM | {"rank": None, "kl": True, "checkpointing": True, "prompt": 160, "completion": 32, "vocab": 16384},
    ),
    "vocabulary": (
        "hold-out",
        {"layers": 4, "hidden": 256, "intermediate": 768, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 151936}
        | {"batch": 32, "micro_batch": 8, "prompt": 32, "completion": 24, "rank": 32},
    ),
    "llama": (
        "hold-out",
        {"family": "Llama", "layers": 8, "hidden": 640, "intermediate": 1792, "heads": 10, "kv_heads": 10}
        | {"head_dim": 64, "vocab": 32000, "batch": 12, "micro_batch": 12, "prompt": 120, "completion": 24},
    ),
    "full-large": (
        "hold-out",
        {"layers": 10, "hidden": 768, "intermediate": 2304, "heads": 12, "kv_heads": 4, "head_dim": 64}
        | {"vocab": 32768, "rank": None, "batch": 4, "micro_batch": 2, "prompt": 64, "completion": 12},
    ),
    "evaluation": ("calibration", MEDIUM | {"prompt": 120, "completion": 24, "micro_batch": 2, "evaluation": 64}),
}


def case_of(name: str) -> dict[str, Any]:
    """All values of a configuration, defaults included."""
    return BASE | CASES[name][1]


def model_config(case: dict[str, Any]) -> Any:
    """Return the transformers configuration of a case."""
    import transformers

    sizes = {
        "vocab_size": case["vocab"],
        "hidden_size": case["hidden"],
        "intermediate_size": case["intermediate"],
        "num_hidden_layers": case["layers"],
        "num_attention_heads": case["heads"],
        "num_key_value_heads": case["kv_heads"],
        "head_dim": case["head_dim"],
    }
    kind = getattr(transformers, f"{case['family']}Config")
    return kind(**sizes, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0)


def build(case: dict[str, Any], folder: Path) -> None:
    """Write a random model, a tokenizer, a reward and prompts to `folder`; a quarter of the prompts is shorter."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kit.models.embedded import source_of

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(case), dtype=getattr(torch, case["dtype"]))
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(source_of("embedded")).save_pretrained(folder / "model")
    length = case["prompt"]
    lengths = [length if row % 4 else length - length // 4 for row in range(48)]
    rows = [{"prompt": f"{row:02d}".ljust(count, "7"), "reference": "1"} for row, count in enumerate(lengths)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(
        "def spread(completion_ids, **_):\n    return [float(sum(ids) % 7) for ids in completion_ids]\n"
    )


def run_config(case: dict[str, Any], folder: Path) -> RunConfig:
    """Configuration of a run of two steps with the model in `folder`."""
    evaluation = {"before": bool(case["evaluation"]), "after": False, "prompts": 8, "k": 8}
    tree = {
        "model": {"name": str(folder / "model"), "dtype": case["dtype"]},
        "data": {
            "source": str(folder / "data.jsonl"),
            "heldout": 8,
            "chat": False,
            "max_prompt_tokens": case["prompt"],
        },
        "reward": {"functions": [{"path": f"{folder / 'reward.py'}:spread"}]},
        "objective": {"recipe": "grpo", "regularizers": [{"name": "kl", "coef": 0.04}] if case["kl"] else []},
        "generation": {"num_generations": 4, "max_completion_tokens": case["completion"]},
        "optimisation": {
            "steps": 2,
            "batch_size": case["batch"],
            "micro_batch_size": case["micro_batch"],
            "gradient_checkpointing": case["checkpointing"],
        },
        "evaluation": evaluation | ({"batch_size": case["evaluation"]} if case["evaluation"] else {}),
        "run": {"id": "it", "root": str(folder / "runs"), "threads": 1, "save_every": 0},
    }
    tree["model"]["lora"] = {"rank": case["rank"]} if case["rank"] else None
    return load_config(tree)


def measure(name: str) -> int:
    """Peak resident bytes of the training process.

    The model is built in another process, because the peak of a child process starts at the memory of its parent.
    """
    with tempfile.TemporaryDirectory(prefix="memory-plan-") as root:
        folder = Path(root)
        subprocess.run([sys.executable, __file__, "--build", name, root], check=True, capture_output=True)
        request = folder / "request.json"
        request.write_text(json.dumps({"config": run_config(case_of(name), folder).model_dump(mode="json")}))
        with (folder / "output").open("w+") as output:
            command = [sys.executable, "-m", "kit.train", str(request), "--quiet"]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                output.seek(0)
                raise SystemExit(f"{name} ended with {process.returncode}: {output.read()[-2000:]}")
        return usage.ru_maxrss * 1024


def predict(name: str) -> Any:
    """Return the model shape and the memory plan of a configuration, without building the model."""
    from kit.models.memory import plan_memory, workload
    from kit.models.shape import shape_of
    from kit.runner.prepare import build_objective

    case = case_of(name)
    config, shape = run_config(case, Path("/nowhere")), shape_of(model_config(case))
    assert shape is not None
    return shape, plan_memory(shape, workload(config, "cpu", build_objective(config), case["prompt"]))


def row(name: str, measured: int) -> dict[str, Any]:
    """Planned and measured memory of one configuration, for table and JSON."""
    shape, plan = predict(name)
    return {
        "name": name,
        "use": CASES[name][0],
        **case_of(name),
        "parameters": shape.parameters,
        "measured_mib": round(measured / 2**20),
        "planned_mib": round(plan.peak / 2**20),
        "error": round(plan.peak / measured - 1, 4),
        "phase": plan.phase,
    }


HEAD = (
    "| configuration | use | model | weights | batch (micro-batch) x prompt + completion | measured MiB | planned MiB | error |",
    "|---|---|---|---|---|---|---|---|",
)


def cells(row: dict[str, Any]) -> str:
    """Format a row of the printed table."""
    model = [row["dtype"], f"LoRA {row['rank']}" if row["rank"] else "all weights"]
    model += ["checkpointing"] if row["checkpointing"] else []
    model += ["reference"] if row["kl"] else []
    model += [f"evaluation of {row['evaluation']}"] if row["evaluation"] else []
    size = f"{row['batch']} ({row['micro_batch']}) x {row['prompt']} + {row['completion']}"
    figures = f"{row['measured_mib']:,} | {row['planned_mib']:,} | {100 * row['error']:+.1f} %"
    return (
        f"| {row['name']} | {row['use']} | {', '.join(model)} | {row['parameters'] / 1e6:.1f}M | {size} | {figures} |"
    )


def main() -> int:
    """Measure the chosen configurations and report all measurements, earlier ones in `--out` included."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(CASES), help="measure these; keep the others' measurements")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--build", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.build:
        build(case_of(arguments.build[0]), Path(arguments.build[1]))
        return 0
    measured = {name: measure(name) for name in arguments.only}
    if arguments.out.is_file():
        earlier = json.loads(arguments.out.read_text())["configurations"]
        measured = {old["name"]: old["measured_mib"] * 2**20 for old in earlier if old["name"] in CASES} | measured
    rows = [row(name, measured[name]) for name in CASES if name in measured]
    print("\n".join([*HEAD, *map(cells, rows)]))
    arguments.out.write_text(json.dumps({"limit": LIMIT, "configurations": rows}, indent=1) + "\n")
    return int(any(abs(line["error"]) > LIMIT for line in rows))


if __name__ == "__main__":
    sys.exit(main())
