"""kit.planning.plan and probe: a plan, a refusal and a measurement from a configuration."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from kit.config import load_config
from kit.errors import ModelError
from kit.model_check.tiny import tiny_config
from kit.models.memory import GIB, certain_bytes, check_memory, workload
from kit.models.shape import ModelShape
from kit.objective import Objective
from kit.planning.plan import Place, Speed, estimate, find_gpu, plan, subject
from kit.runs import lock

GRPO = Objective.from_spec("grpo")
KL = Objective.from_spec({"recipe": "grpo", "regularizers": [{"name": "kl", "coef": 0.1}]})


def test_a_7b_model_is_planned_from_its_config_json(seven_billion: Any, tree: Any) -> None:
    config = load_config(
        tree, [f"model.name={seven_billion}", "generation.max_completion_tokens=1024", "model.dtype=auto"]
    )
    planned = plan(config, gpu=find_gpu("l4"))
    assert planned["model"]["parameters"] == 7_615_616_512  # of Qwen2.5-7B
    assert planned["memory"]["always"]["weights"] == 2 * 7_615_616_512
    assert planned["prompt_tokens"] == 512
    assert any("prompts were not measured" in note for note in planned["notes"])
    assert planned["time_is"] == "estimated"
    json.dumps(planned, allow_nan=False)


def test_it_fits_with_the_changes_that_are_printed(seven_billion: Any, tree: Any) -> None:
    overrides = [f"model.name={seven_billion}", "generation.max_completion_tokens=8192", "model.dtype=auto"]
    card = find_gpu("rtx 4090")
    assert plan(load_config(tree, overrides), gpu=card)["fits"]  # with the token budget that a run would choose
    overrides.append("optimisation.token_budget=0")
    planned = plan(load_config(tree, overrides), gpu=card)
    assert not planned["fits"]
    assert plan(load_config(tree, overrides + [fix["override"] for fix in planned["fixes"]]), gpu=card)["fits"]


def test_a_plan_that_leaves_no_headroom_names_the_change(seven_billion: Any, tree: Any) -> None:
    overrides = [f"model.name={seven_billion}", "model.dtype=auto", "model.load_in_4bit=true", "generation.engine=vllm"]
    overrides += ["generation.max_completion_tokens=768", "generation.vllm.gpu_memory_utilization=0.5"]
    card = find_gpu("t4")
    tight = plan(load_config(tree, overrides), gpu=card)
    assert tight["fits"]
    assert tight["is_tight"]
    assert tight["room_bytes"] - tight["memory"]["peak_bytes"] < 0.05 * tight["room_bytes"]
    wide = plan(load_config(tree, overrides + [fix["override"] for fix in tight["fixes"]]), gpu=card)
    assert (wide["fits"], wide["is_tight"], wide["fixes"]) == (True, False, None)
    assert wide["room_bytes"] - wide["memory"]["peak_bytes"] >= 0.05 * wide["room_bytes"]


def test_prompts_are_measured_where_data_and_tokenizer_are_there(tree: Any) -> None:
    planned = plan(load_config(tree))
    assert 10 < planned["prompt_tokens"] < 60
    assert planned["notes"] == []
    assert planned["fits"]
    assert planned["fixes"] is None


def test_code_of_its_own_is_refused_with_the_reason(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.planning.plan.shape_of", lambda config: None)
    with pytest.raises(ModelError, match="its own Python code"):
        plan(load_config(tree))


@pytest.mark.parametrize("override", ["run.seed=0", "model.dtype=bfloat16", "model.lora=null"])
def test_what_is_certain_not_to_fit_is_refused_before_loading(
    override: str, tree: Any, shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tree, [override])
    needed = certain_bytes(shape, workload(config, "cpu", GRPO, 512))
    monkeypatch.setattr("kit.models.memory.free_memory", lambda device: needed)
    check_memory(config, shape, "cpu", GRPO)
    monkeypatch.setattr("kit.models.memory.free_memory", lambda device: needed - 1)
    with pytest.raises(ModelError, match="needs at least") as failure:
        check_memory(config, shape, "cpu", GRPO)
    assert ("keep model.lora" in str(failure.value)) is ("null" in override)


def test_validate_says_what_is_planned_and_what_is_free(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kit.runner.prepare import validate

    assert any(line.startswith("memory: ") and "planned" in line for line in validate(load_config(tree)))
    monkeypatch.setattr("kit.models.memory.room_of", lambda device, **_: 1e8)
    assert any("It will not fit: see grpo-kit plan" in line for line in validate(load_config(tree)))


def test_memory_that_a_run_holds_is_free_for_one_that_waits_for_it(
    tree: Any, shape: ModelShape, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path))
    monkeypatch.setattr(lock, "gpus", lambda: ["0"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA L4")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (8, 9))
    contexts: list[int] = []  # mem_get_info creates a CUDA context, which takes memory from the run
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: contexts.append(1) or (1, 22 * GIB))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda: SimpleNamespace(total_memory=22 * GIB))
    held = lock.GpuLock(["0"])
    assert held.take({"run": "mine", "pid": 1}) is None
    try:
        check_memory(load_config(tree), shape, "cuda", GRPO, waits=True)
        planned = plan(load_config(tree))
        assert (planned["fits"], planned["room_bytes"]) == (True, 22 * GIB)
        assert planned["notes"][-1].startswith("GPU 0, which run 'mine' (process 1) uses, counts as free")
        assert not contexts
        with pytest.raises(ModelError, match=r"0\.0 GiB are free"):
            check_memory(load_config(tree), shape, "cuda", GRPO)
    finally:
        held.release()
    assert not plan(load_config(tree))["fits"]


@pytest.mark.parametrize(("family", "factor"), [("gemma3_text", 2.0), ("qwen3", 1.0)])
def test_a_family_that_overflows_in_float16_is_planned_in_float32_without_bfloat16(
    family: str, factor: float, tree: Any, tmp_path: Path
) -> None:
    tiny_config(AutoConfig.for_model(family), 128).save_pretrained(tmp_path)
    config = load_config(tree, [f"model.name={tmp_path}", "model.dtype=auto"])
    weights = {name: plan(config, gpu=find_gpu(name))["memory"]["always"]["weights"] for name in ("t4", "l4")}
    assert weights["t4"] == factor * weights["l4"] > 0


def test_plan_and_validate_name_one_peak(tree: Any, seven_billion: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a peak that depends on the length of prompts, which both measure, and with vLLM on the same card."""
    from kit.models import memory
    from kit.runner import prepare

    for path in Path(tree["model"]["name"]).iterdir():
        if path.name != "config.json":
            shutil.copy(path, seven_billion)
    config = load_config(tree, ["data.max_prompt_tokens=4000", f"model.name={seven_billion}", "model.lora={}"])
    plans: list[Any] = []
    monkeypatch.setattr(memory, "free_memory", lambda device: 400 * GIB)
    monkeypatch.setattr(memory, "note", lambda plan, room: plans.append(plan) or "memory")
    prepare.validate(config)
    assert plans[0].as_dict() == plan(config)["memory"]
    assert plans[0].workload.prompt < 100

    work = plans[0].workload
    assert work.vllm_bytes == 0.0
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda: SimpleNamespace(total_memory=22 * GIB))
    colocated = load_config(config, ["generation.engine=vllm"])
    assert workload(colocated, "cuda", GRPO, 20, memory.card_of("cuda")).vllm_bytes == 0.3 * 22 * GIB


def test_time_is_arithmetic_over_speed(shape: ModelShape, tree: Any) -> None:
    work = workload(load_config(tree), "cpu", GRPO, 20)
    seconds = estimate(shape, work, Speed(flops=1e9, bandwidth=1e30, layer_seconds=0.0))
    # 8 completions of 20 + 12 tokens; update 4 operations a weight and token (frozen weights), no checkpointing
    assert seconds["update"] == pytest.approx(4 * shape.parameters * 8 * 32 / 1e9)
    assert seconds["rollout"] == pytest.approx(2 * shape.parameters * 8 * 32 / 1e9)
    assert seconds["scoring"] == 0
    launched = estimate(shape, work, Speed(flops=1e30, bandwidth=1e30, layer_seconds=0.5))
    assert launched["rollout"] == pytest.approx(12 * shape.layers * 0.5)


def test_another_model_that_teaches_is_counted(seven_billion: Any, tree: Any) -> None:
    overrides = ["objective={recipe: opd}", f"teacher={{model: {seven_billion}}}"]
    alone = plan(load_config(tree), gpu=find_gpu("a100 80"))
    taught = plan(load_config(tree, overrides), gpu=find_gpu("a100 80"))
    assert taught["memory"]["always"]["teacher"] == 2 * 7_615_616_512
    assert taught["memory"]["peak_bytes"] - alone["memory"]["peak_bytes"] > 2 * 7_615_616_512
    assert (
        taught["seconds_per_step"]["scoring"] > 1000 * alone["seconds_per_step"]["update"]
    )  # it has 15,000 times the weights
    assert not plan(load_config(tree, overrides), gpu=find_gpu("t4"))["fits"]
    packed = plan(load_config(tree, [*overrides, "teacher.load_in_4bit=true"]), gpu=find_gpu("t4"))
    assert packed["fits"]
    assert packed["memory"]["always"]["teacher"] < 0.45 * taught["memory"]["always"]["teacher"]


def test_what_the_teacher_is_shown_is_measured(tree: Any) -> None:
    def teacher(prompt: str) -> Any:
        return subject(load_config(tree, ["objective={recipe: sdpo}", f"teacher={{model: self, prompt: '{prompt}'}}"]))

    short, long = teacher("{prompt}"), teacher("{prompt} A right answer is {reference}.")
    here = Place("cpu", "here", 1e12, None)

    def reads(parts: Any, completion: int = 0) -> int:
        return parts.work(here).teacher.prompt_with_completions(completion)  # type: ignore[no-any-return]

    assert reads(short) == short.prompt
    assert long.prompt < reads(long) < long.prompt + 40
    both = teacher("{prompt} Before: {completion} Better: {demonstration}")
    assert reads(both, 100) - reads(both) == 200


def test_the_probe_runs_two_steps_of_full_length(tree: Any, tmp_path: Any) -> None:
    from kit.planning.probe import two_steps, worst_rows
    from kit.runner.prepare import prepare

    parts = prepare(load_config(tree), fresh=False)
    from kit.generation.prompts import count_tokens

    lengths = count_tokens(parts.files.tokenizer, parts.data.train["prompt"])
    chosen = count_tokens(parts.files.tokenizer, worst_rows(parts)["prompt"])
    assert chosen == sorted(lengths, reverse=True)[: len(chosen)]
    probed = two_steps(parts, tmp_path)
    assert len(probed["seconds"]) == 2
    assert probed["peak_bytes"] > 100 * 2**20


def test_an_update_reads_a_prompt_once_for_a_group_where_completions_are_packed(shape: ModelShape, tree: Any) -> None:
    work = replace(workload(load_config(tree), "cpu", GRPO, 100), prompt=100, completion=20, group=4, teacher=None)
    speed = Speed(flops=1e9, bandwidth=1e30, layer_seconds=0.0)
    padded, packed = (estimate(shape, replace(work, packed=packed), speed)["update"] for packed in (False, True))
    assert packed / padded == pytest.approx((100 / 4 + 20) / 120)
