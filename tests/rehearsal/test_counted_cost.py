"""benchmarks/counted_cost.py: its numbers against hand counts, and exactly for two small shapes.

A change of the cost of training changes `EXPECTED`; copy the printed numbers there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(300)]
COMMAND = Path(__file__).parents[2] / "benchmarks" / "counted_cost.py"
EXPECTED: dict[str, dict[str, int]] = {
    "qwen2.5-0.5b": {
        "attention": 586_663_168,
        "lora": 2_114_158_592,
        "linear": 58_778_976_256,
        "head": 161_183_432_704,
        "launches": 692,
        "peak": 400_201_216,
    },
    "gemma-3-4b": {
        "attention": 1_341_077_504,
        "lora": 5_104_992_256,
        "linear": 412_216_197_120,
        "head": 794_762_936_320,
        "launches": 1_012,
        "peak": 1_813_481_472,
    },
}
"""Of our arm, by shape, of two layers: FLOPs by kind, launches, and bytes at the peak."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of the command by model and arm."""
    file = tmp_path_factory.mktemp("counted") / "rows.jsonl"
    options = ["--models", *EXPECTED, "--works", "small", "--shallow", "--arms", "ours", "trl", "--out", str(file)]
    done = subprocess.run([sys.executable, str(COMMAND), *options], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return {(row["model"], row["arm"]): row for row in map(json.loads, file.read_text().splitlines())}


@pytest.fixture
def counted_cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(COMMAND.parent))
    import counted_cost

    return counted_cost


@pytest.mark.parametrize("model", EXPECTED)
def test_the_counts_of_a_small_shape(counted: Any, model: str) -> None:
    row = counted[model, "ours"]
    peak = int(max(row["peaks"].values()))
    assert {**row["flops"], "launches": row["launches"], "peak": peak} == EXPECTED[model]


def linear_weights(shape: dict[str, Any]) -> int:
    """The number of weights in the linear layers of two layers."""
    hidden, size = shape["hidden_size"], shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    query, key = size * shape["num_attention_heads"], size * shape["num_key_value_heads"]
    return 2 * (hidden * (2 * query + 2 * key) + 3 * hidden * shape["intermediate_size"])


@pytest.mark.parametrize("model", EXPECTED)
def test_products_of_trls_rows_are_those_of_the_tokens_that_it_forwards(
    counted: Any, counted_cost: Any, model: str
) -> None:
    """Two FLOPs a weight and token: forward, recomputed, and the gradient of the input."""
    shape, groups = counted_cost.MODELS[model], counted_cost.workload("small")
    width, longest = max(prompt for prompt, _ in groups), max(max(lengths) for _, lengths in groups)
    forwarded = sum(len(lengths) for _, lengths in groups) * (width + longest)
    assert counted[model, "trl"]["launches"] == {"qwen2.5-0.5b": 860, "gemma-3-4b": 1_203}[model]  # with its own head
    linear = counted[model, "trl"]["flops"]["linear"]
    assert linear == 2 * linear_weights(shape) * forwarded * 3
