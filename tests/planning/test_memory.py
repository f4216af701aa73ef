"""kit.models.memory: every term against arithmetic, activations against autograd."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.config import load_config
from kit.models.memory import (
    GIB,
    Workload,
    certain_bytes,
    choose_budget,
    engine_bytes,
    fixed_terms,
    layer_bytes,
    loaded_bytes,
    plan_memory,
    rollout_terms,
    update_terms,
    workload,
)
from kit.models.shape import ModelShape, shape_of

ROOT = Path(__file__).parents[2]
WORK = Workload(
    device="cpu", weight_bytes=4, compute_bytes=4, four_bit=False, rank=8, targets="all-linear",
    eight_bit_optimiser=False, batch=8, micro_batch=3, group=4, prompt=30, completion=20, checkpointing=False,
    reference=False, old_logps=False, entropy_gradient=False, hidden_rows=0, divergence=False,
    evaluation=0,
)  # fmt: skip


def saved_bytes(layers: int, *, lora: bool, bf16: bool, padded: bool) -> int:
    """Bytes that autograd saves in a forward pass of 3 x 50 tokens, without the weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config).to(torch.bfloat16 if bf16 and lora else torch.float32)
    if lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        for weight in model.parameters():
            weight.data = weight.data.float() if weight.requires_grad else weight.data
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.ones(3, 50, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, : 10 if padded else 0] = 0
    base = model.get_base_model() if lora else model
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        output = base.model(input_ids=ids, attention_mask=mask, use_cache=False)
    assert output is not None
    return sum(size for size, _ in saved.values())


@pytest.mark.parametrize(
    ("lora", "bf16", "padded"),
    [(True, False, True), (True, False, False), (False, False, True), (True, True, True), (False, True, True)],
)
def test_activations_are_what_autograd_keeps(shape: ModelShape, lora: bool, bf16: bool, padded: bool) -> None:
    measured = saved_bytes(2, lora=lora, bf16=bf16, padded=padded) - saved_bytes(1, lora=lora, bf16=bf16, padded=padded)
    if bf16:  # autocast's half-precision copies of the weights are counted separately; those of adapters are negligible
        measured -= 2 * (shape.lora_parameters(8, "all-linear") if lora else shape.linear) // 2
    work = replace(WORK, compute_bytes=2 if bf16 else 4, rank=8 if lora else None)
    assert layer_bytes(shape, work, padded) * 150 == pytest.approx(measured, rel=0.01)


def test_shapes_are_read_from_the_configuration_alone(shape: ModelShape) -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    norms = 2 * (2 * 128 + 2 * 32) + 128
    assert shape_of(config) == replace(shape, parameters=shape.parameters + norms)


def test_fixed_terms_are_bytes_times_weights(shape: ModelShape) -> None:
    # LoRA of rank 8: 8 x (in + out) a layer; in float32, with two moments of AdamW
    lora = 2 * 8 * (128 + 192 + 2 * (128 + 64) + 192 + 128 + 2 * (128 + 352) + 352 + 128)
    assert fixed_terms(shape, WORK) == {
        "weights": 4 * shape.parameters, "adapters": 4 * lora, "optimiser states": 8 * lora,
    }  # fmt: skip
    full = replace(WORK, rank=None, reference=True)
    assert fixed_terms(shape, full) == {
        "weights": 4 * shape.parameters, "reference copy": 4 * shape.parameters, "optimiser states": 8 * shape.parameters,
    }  # fmt: skip
    assert certain_bytes(shape, full) == 20 * shape.parameters  # and 4 for gradients
    assert fixed_terms(shape, replace(WORK, eight_bit_optimiser=True))["optimiser states"] == 2 * lora


def test_a_gpu_needs_16_bytes_a_weight_when_all_train(shape: ModelShape, tree: Any) -> None:
    from kit.objective import Objective

    # weights 4, gradients 4, AdamW's two moments 8: in float32 whatever the GPU computes in
    work = workload(load_config(tree, ["model.lora=null", "model.dtype=auto"]), "cuda", Objective.from_spec("grpo"), 77)
    assert certain_bytes(shape, work) == 16 * shape.parameters


def test_vllm_that_sleeps_leaves_its_memory_to_the_update(shape: ModelShape) -> None:
    share = 1e9
    work = replace(WORK, device="cuda", vllm_bytes=share)
    awake = plan_memory(shape, replace(work, vllm_sleeps=False))
    asleep = plan_memory(shape, work)
    assert awake.always["vLLM"] == share
    assert "vLLM" not in asleep.always
    assert asleep.phases["rollout"] == {"vLLM": share, "allocator": 0.0}, "a share limits all memory of the engine"
    shared = plan_memory(shape, replace(work, vllm_sleeps=False, unsloth=True))
    weights = loaded_bytes(shape, work.compute_bytes, four_bit=work.four_bit)
    assert shared.always["vLLM"] == share - weights
    # A share that is smaller than the weights: what vLLM needs at least counts.
    small = replace(shared.workload, vllm_bytes=weights / 2)
    needed = 2 * 2 * 64 * 4 * 50  # the cache of a completion: keys and values, layers, width, bytes, tokens
    needed += 2 * shape.lora_parameters(8, "all-linear") + 0.4 * GIB
    # Of 4096 tokens: residual, norm, gate, up, two products.
    needed += (2 * shape.hidden + 4 * shape.intermediate) * 4 * 4096
    assert plan_memory(shape, small).always["vLLM"] == pytest.approx(needed)
    assert plan_memory(shape, small).engine_lacks == pytest.approx(weights / 2 + needed)
    quantised = replace(small, four_bit=True)  # vllm-bnb-plugin stores a scale of 4 bytes for 64 weights
    more = engine_bytes(shape, quantised) - loaded_bytes(shape, 4, four_bit=True) - needed
    assert more == pytest.approx(shape.linear * (4 / 64 - 1 / 64 - 4 / (64 * 256)))


def test_unsloths_cache_grows_by_512_tokens(shape: ModelShape) -> None:
    work = replace(WORK, unsloth=True, prompt=256, completion=128)
    assert work.cached_tokens == 256 + 1024  # the prompt's cache, and its copy with room for 512, rounded up to 256
    assert replace(work, prompt=512, completion=1024).cached_tokens == 1792
    work = replace(work, completion=768)
    assert work.cached_tokens == 256 + 1 + 1024
    assert rollout_terms(shape, work, 3)["key-value cache"] == 2 * shape.layers * shape.key * 4 * 3 * 1281


def test_a_default_backend_shares_the_weights_that_unsloths_engine_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an L4, `auto` is Unsloth; counting its weights twice would add several GiB."""
    from kit.models.backend import Machine
    from kit.objective import Objective

    def shared(backend: str, unsloth: str | None) -> bool:
        machine = Machine((8, 9), "L4", unsloth)
        monkeypatch.setattr("kit.models.backend.this_machine", lambda: machine)
        config = load_config("gsm8k", ["generation.engine=vllm", f"model.backend={backend}"])
        return workload(config, "cuda", Objective.from_spec("grpo"), 77).unsloth

    assert [shared("auto", "2026.10.9"), shared("unsloth", None)] == [True, True]
    assert [shared("auto", None), shared("transformers", "2026.10.9")] == [False, False]


def test_a_configuration_becomes_a_workload(tree: Any) -> None:
    from kit.objective import Objective

    kl = Objective.from_spec({"recipe": "grpo", "regularizers": [{"name": "kl", "coef": 0.1}]})
    config = load_config(
        tree, ["optimisation.micro_batch_size=2", "optimisation.iterations=2", "evaluation.after=true"]
    )
    work = workload(config, "cpu", kl, 77)
    assert (work.batch, work.micro_batch, work.prompt, work.completion, work.rank) == (8, 2, 77, 12, 4)
    assert work.reference
    assert work.old_logps
    assert work.evaluation == 8  # 4 prompts x 2, below the batch of 128
    assert not work.checkpointing
    assert workload(config, "cuda", kl, 77).checkpointing


def test_a_colocated_engine_takes_its_share_of_the_card_and_a_server_none(tree: Any) -> None:
    from kit.objective import Objective

    grpo, room = Objective.from_spec("grpo"), 20 * GIB

    def engine(*overrides: str, device: str = "cuda") -> tuple[float, bool]:
        config = load_config(tree, ["generation.vllm.gpu_memory_utilization=0.4", *overrides])
        work = workload(config, device, grpo, 77, room)
        return work.vllm_bytes, work.vllm_sleeps

    assert engine("generation.engine=hf") == (0.0, False)
    assert engine("generation.engine=vllm") == (0.4 * room, False)
    assert engine("generation.engine=vllm", "generation.vllm.standby=true") == (0.4 * room, True)
    assert engine("generation.engine=vllm", device="cpu") == (1.5 * GIB, False)


def test_a_model_that_scores_is_counted_beside_the_one_that_learns(
    tree: Any, shape: ModelShape, tmp_path: Path
) -> None:
    from kit.objective import Objective

    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text('{"dtype": "bfloat16"}')
    with (judge / "model.safetensors").open("wb") as file:
        file.truncate(3 * GIB)
    tree["reward"] = {"preset": "reward-model", "params": {"model": str(judge)}}
    work = workload(load_config(tree), "cuda", Objective.from_spec("grpo"), 77)
    assert plan_memory(shape, work).always["reward models"] == 3 * GIB
    on_the_cpu = load_config(tree, ["reward.params.device=cpu"])
    assert workload(on_the_cpu, "cuda", Objective.from_spec("grpo"), 77).reward_models == 0


def test_a_token_budget_bounds_what_goes_through_the_model(shape: ModelShape) -> None:
    full = replace(WORK, micro_batch=8, old_logps=True)
    bounded = replace(full, token_budget=100)  # of 8 x (30 + 20)
    before, after = plan_memory(shape, full).phases, plan_memory(shape, bounded).phases
    for term in ("activations", "transients"):
        assert after["update"][term] == pytest.approx(before["update"][term] * 100 / 400)
    assert after["update"]["scorer"] < before["update"]["scorer"]
    assert after["update"]["gradients"] == before["update"]["gradients"]
    assert after["scoring"]["transients"] == pytest.approx(before["scoring"]["transients"] * 100 / 400)
    assert {name: after[name] for name in ("rollout", "optimiser")} == {
        name: before[name] for name in ("rollout", "optimiser")
    }


def test_a_pack_has_a_prompt_once_and_ends_where_the_next_one_begins() -> None:
    packed = replace(WORK, device="cuda", packed=True, group=8, micro_batch=16, prompt=200, completion=300)
    assert packed.tokens_at_once == 16 * 300 + 2 * 200
    assert packed.tokens_of_a_pass == packed.tokens_at_once
    long = replace(packed, completion=3000)  # two completions to a pack of 8,192 tokens
    assert (long.tokens_at_once, long.tokens_of_a_pass) == (16 * 3000 + 8 * 200, 8192)
    assert replace(long, token_budget=8192).tokens_at_once == 8192
    assert replace(long, completion=20_000, token_budget=8192).tokens_of_a_pass == 20_200


def test_a_budget_is_chosen_by_the_memory(shape: ModelShape) -> None:
    def peak(work: Workload, budget: int | None) -> float:
        bound = replace(work, token_budget=budget)
        return sum(fixed_terms(shape, bound).values()) + 1060 * 2**20 + 1.1 * sum(update_terms(shape, bound).values())

    work = replace(WORK, batch=32, micro_batch=32, prompt=200, completion=300)  # 16,000 tokens, on a CPU
    assert choose_budget(shape, work, 1e15) is None
    assert choose_budget(shape, work, peak(work, None)) is None
    assert choose_budget(shape, work, peak(work, None) - 1) == 8192
    assert choose_budget(shape, work, peak(work, 2048)) == 2048
    assert choose_budget(shape, work, 1.0) == 500  # a completion goes through whole, and memory decides
    gpu = replace(work, device="cuda", packed=True, group=8)  # 10,400 tokens
    assert choose_budget(shape, gpu, 1e15) == 8192  # a graph ends with its pack
    assert choose_budget(shape, replace(gpu, completion=200), 1e15) is None  # 7,200
    assert choose_budget(shape, replace(gpu, single_pass=False), 1e15) is None  # else parts are computed twice


def test_the_trainer_divides_as_the_plan_says() -> None:
    from kit.trainer.policy_loss import SequenceLengths, TokenBudget, split_by_tokens

    rows = [SequenceLengths("prompt", 30, 20) for _ in range(8)]
    for budget in (20, 50, 120, 399, 400):
        limits = TokenBudget(budget, padded=False)
        most = max(limits.cost([rows[n] for n in part]) for part in split_by_tokens(rows, range(8), limits))
        planned = replace(WORK, micro_batch=8, token_budget=budget).tokens_at_once
        assert planned - 50 < most <= planned


COUNTED = json.loads((ROOT / "benchmarks/results/counted_memory.json").read_text())


@pytest.mark.parametrize("row", COUNTED["rows"], ids=lambda row: f"{row['model']}-{row['completion']}")
def test_what_was_counted_at_real_shapes_is_planned_within_6_per_cent(row: dict[str, Any]) -> None:
    fields = COUNTED["models"][row["model"]]
    shape = ModelShape(**fields | {"modules": tuple(map(tuple, fields["modules"])) * fields["layers"]})
    count = row["completions"]
    work = replace(
        WORK, device="cuda", weight_bytes=2, compute_bytes=2, rank=16, batch=count, micro_batch=count, group=count,
        prompt=row["prompt"], completion=row["completion"], checkpointing=row["checkpointing"],
        token_budget=row["token_budget"], packed=True, offload=row.get("offload", False),
    )  # fmt: skip
    fixed = fixed_terms(shape, work)
    del fixed["optimiser states"]  # the measured pass has no optimiser
    planned = sum(fixed.values()) + sum(update_terms(shape, work).values())
    assert planned == pytest.approx(row["peak_bytes"], rel=0.06)
    if work.offload:  # the plan without offloading differs
        assert sum(update_terms(shape, work).values()) < sum(update_terms(shape, replace(work, offload=False)).values())
        return
    padded = replace(work, packed=False, token_budget=None)
    if count > 1 and row["token_budget"] and row["completion"] > 600:  # the plan without packing differs
        assert sum(update_terms(shape, padded).values()) > 2 * sum(update_terms(shape, work).values())
