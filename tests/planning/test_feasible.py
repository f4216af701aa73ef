"""kit.planning.plan: whether a run fits, and the cheapest changes with which it does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kit.config import RunConfig, load_config
from kit.errors import ConfigError
from kit.models.memory import MemoryPlan, plan_memory, workload
from kit.models.shape import ModelShape
from kit.planning.plan import FOUR_BIT, GPUS, apply, find_gpu, fixes


@pytest.fixture
def config() -> RunConfig:
    tree = {"generation": {"num_generations": 4, "max_completion_tokens": 512}, "evaluation": {"batch_size": 64}}
    return load_config(tree | {"optimisation": {"batch_size": 32}, "data": {"max_prompt_tokens": 128}})


class Planned:
    """Plan runs of one shape, and count the calls."""

    def __init__(self, shape: ModelShape, device: str = "cpu", card: float | None = None) -> None:
        from kit.objective import Objective

        self.shape, self.device, self.card, self.objective = shape, device, card, Objective.from_spec("grpo")

    def work(self, config: RunConfig) -> Any:
        return workload(config, self.device, self.objective, 128, self.card)

    def __call__(self, config: RunConfig) -> MemoryPlan:
        return plan_memory(self.shape, self.work(config))


def test_a_tie_between_phases_does_not_hide_a_fix(shape: ModelShape, config: RunConfig) -> None:
    plan = Planned(replace(shape, vocab=200_000))  # rollout and evaluation have the highest peaks
    config = load_config(config, ["evaluation.batch_size=32", "optimisation.micro_batch_size=1"])
    phases = {name: sum(terms.values()) for name, terms in plan(config).phases.items()}
    assert phases["rollout"] == phases["evaluation"] == max(phases.values())
    changes = fixes(config, plan, plan(config).peak - 1, "cpu")
    assert changes is not None
    assert [change.override for change in changes] == ["evaluation.batch_size=16", "optimisation.batch_size=16"]
    assert plan(load_config(config, [change.override for change in changes])).peak < plan(config).peak - 1


def test_a_change_is_no_larger_than_needed(shape: ModelShape, config: RunConfig) -> None:
    # Weights alone exceed the room, so every phase does, and each micro-batch lowers the excess until they are in 4 bits.
    plan = Planned(replace(shape, parameters=4 * 10**9, linear=39 * 10**8), "cuda")
    small = load_config(config, ["model.load_in_4bit=true", "model.dtype=auto", "optimisation.micro_batch_size=8"])
    changes = fixes(load_config(config, ["model.dtype=auto"]), plan, plan(small).peak, "cuda")
    assert changes is not None
    overrides = [change.override for change in changes]
    assert overrides == [
        "optimisation.token_budget=4096",
        "model.load_in_4bit=true",
    ]  # 8 completions would be 5,120 tokens


def test_weights_in_4_bits_come_with_adapters(shape: ModelShape, config: RunConfig) -> None:
    plan = Planned(replace(shape, parameters=4 * 10**9, linear=39 * 10**8), "cuda")
    config = load_config(config, ["model.lora=null", "model.dtype=auto"])
    changes = fixes(config, plan, 6 * 2**30, "cuda")
    assert changes is not None
    fixed = load_config(config, [change.override for change in changes])
    assert fixed.model.load_in_4bit
    assert fixed.model.lora is not None
    assert apply(config, [FOUR_BIT]) is None  # such a run would be refused, because nothing could be trained


def test_vllm_gets_less_of_the_card_where_its_share_leaves_too_little(shape: ModelShape, config: RunConfig) -> None:
    engine = ["generation.engine=vllm", "generation.vllm.standby=true", "generation.vllm.gpu_memory_utilization=0.95"]
    config = load_config(config, [*engine, "model.dtype=float16"])
    changes = fixes(config, Planned(shape, "cuda", 16 * 2**30), 14 * 2**30, "cuda")
    assert changes is not None
    assert [change.override for change in changes] == ["generation.vllm.gpu_memory_utilization=0.7"]


def test_vllm_gets_as_much_of_the_card_as_its_weights_need(shape: ModelShape, config: RunConfig) -> None:
    """`_check_enough_kv_cache_memory` of vLLM 0.31 fails only after the trainer has read the model."""
    large = replace(shape, parameters=4 * 10**9, linear=39 * 10**8)  # 7.5 GiB in 16 bits, of a share of 6.6 GiB
    plan, room = Planned(large, "cuda", 22 * 2**30), 22 * 2**30
    config = load_config(config, ["generation.engine=vllm", "generation.vllm.standby=true", "model.dtype=auto"])
    memory = plan(config)
    assert memory.peak < room
    needed = 2 * large.parameters + 2 * large.lora_parameters(16, "all-linear") + 0.4 * 2**30
    # The cache of a completion, and a pass of 4096 tokens.
    needed += 2 * 2 * 64 * 2 * 640 + (2 * 64 + 4 * 384) * 2 * 4096
    assert memory.engine_lacks == pytest.approx(needed - 0.3 * room)
    changes = fixes(config, plan, room, "cuda")
    assert changes is not None
    assert [change.override for change in changes] == ["generation.vllm.gpu_memory_utilization=0.4"]


def test_the_share_of_vllm_is_corrected_before_anything_else(shape: ModelShape, config: RunConfig) -> None:
    """A 7B model in 4 bits on a T4 needs a larger share and a smaller evaluation batch, but no shorter completions."""
    large = replace(shape, parameters=76 * 10**8, linear=65 * 10**8, largest=545 * 10**6, layers=28, hidden=3584)
    large = replace(large, intermediate=18944, query=3584, key=512, heads=28, vocab=152064)
    room = 14.6 * 2**30
    plan = Planned(large, "cuda", room)
    config = load_config(config, ["generation.engine=vllm", "model.load_in_4bit=true", "model.dtype=float16"])
    config = load_config(config, ["evaluation.batch_size=128", "generation.max_completion_tokens=1024"])
    assert plan(config).engine_lacks > 0
    assert plan(config).phase == "evaluation"
    changes = fixes(config, plan, room, "cuda")
    assert changes is not None
    keys = ["evaluation.batch_size", "generation.vllm.gpu_memory_utilization"]
    assert [change.key for change in changes if change.key != "optimisation.token_budget"] == keys
    assert not plan(load_config(config, [change.override for change in changes])).excess(room)


def test_a_model_that_is_too_large_has_no_fix(shape: ModelShape, config: RunConfig) -> None:
    assert fixes(config, Planned(shape), 1.0, "cpu") is None


@pytest.mark.parametrize(("words", "name"), [
    ("t4", "T4 16"), ("a100 80", "A100 80"), ("RTX-4090", "RTX 4090 24"), ("rtx 3060", "RTX 3060 12"), ("a10", "A10 24"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super 16"), ("A6000", "RTX A6000 48"), ("4060 ti 16GB", "RTX 4060 Ti 16"),
    ("16", "T4 16"), ("16gb", "T4 16"), ("16 GiB", "T4 16"), ("8", "RTX 4060 8"), ("12 GB", "RTX 5070 12"),
])  # fmt: skip
def test_cards_are_found_by_their_words(words: str, name: str) -> None:
    assert find_gpu(words).name == name


def test_a_size_alone_is_the_card_with_the_least_memory_of_that_size() -> None:
    for size in {gpu.name.split()[-1] for gpu in GPUS}:
        assert find_gpu(size).usable == min(gpu.usable for gpu in GPUS if gpu.name.endswith(f" {size}"))
    with pytest.raises(ConfigError, match="no GPU '9 GB'"):
        find_gpu("9 GB")


@pytest.mark.parametrize(("attention", "key"), [(None, "model.backend"), ("sdpa", "generation.engine")])
def test_unsloth_and_transformers_are_tried_before_nothing_fits(
    shape: ModelShape, config: RunConfig, attention: str | None, key: str
) -> None:
    """A 7B model in 4 bits on 11 GiB: two copies of the weights do not fit, and Unsloth refuses `model.attention`."""
    large = replace(shape, parameters=76 * 10**8, linear=65 * 10**8, largest=545 * 10**6, layers=28, hidden=3584)
    large = replace(large, intermediate=18944, query=3584, key=512, heads=28, vocab=152064)
    config = load_config(config, ["generation.engine=vllm", "model.load_in_4bit=true", "model.dtype=float16"])
    config.model.attention = attention
    room = 11.0 * 2**30
    plan = Planned(large, "cuda", room)
    changes = fixes(config, plan, room, "cuda")
    assert changes is not None
    assert key in [change.key for change in changes]
    experts = fixes(config, plan, room, "cuda", experts=True)
    assert "model.backend" not in [change.key for change in experts or ()], "Unsloth does not train them"
    assert not plan(load_config(config, [change.override for change in changes])).excess(room)


def test_the_largest_budget_that_fits_is_taken(shape: ModelShape, config: RunConfig) -> None:
    plan = Planned(shape)
    config = load_config(config, ["optimisation.micro_batch_size=32"])
    fitting = load_config(config, ["optimisation.token_budget=4096"])
    changes = fixes(config, plan, plan(fitting).peak, "cpu") or []
    assert [change.override for change in changes] == ["optimisation.token_budget=4096"]
    smaller = fixes(fitting, plan, plan(fitting).peak - 1, "cpu") or []
    assert [change.override for change in smaller] == ["optimisation.token_budget=2048"]
