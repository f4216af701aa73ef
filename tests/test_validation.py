"""kit.runner.prepare: what `grpo-kit validate` says, and what it refuses, without a run."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.config import load_config
from kit.errors import (
    ConfigError,
    DataError,
    EnvironmentUnsupported,
    KitError,
    ModelError,
    ObjectiveError,
    RewardError,
    RunError,
)
from kit.runner.prepare import check_environment, prepare, validate


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def notes_of(tree: Any, *overrides: str) -> str:
    return "\n".join(validate(load_config(tree, overrides)))


def test_notes_name_the_methods_of_selection_and_their_settings(tree: Any) -> None:
    assert "selection:" not in notes_of(tree)
    notes = notes_of(tree, "selection.cppo={keep: 2}", "selection.greso={}")
    assert "selection: cppo, keep 2" in notes
    assert "selection: greso, explore " in notes


def test_notes_tell_model_data_reward_objective_and_steps(tree: Any, tmp_path: Path) -> None:
    notes = notes_of(tree, "objective.recipe=grpo")
    line = next(line for line in notes.splitlines() if line.startswith(f"model: {tree['model']['name']}, "))
    assert "M weights, transformers + PEFT" in line
    assert " 0.00M" not in line
    assert "data: 32 training and 8 held-out rows" in notes
    assert "reward: reasoning-gym, accuracy x 1, format x 0.2" in notes
    assert "objective: grpo, needs " in notes
    # 2 steps x 2 prompts of 32 rows
    assert "steps: 2 x 2 prompts x 4 completions, 0.12 passes over the training rows" in notes
    assert not list(tmp_path.iterdir())  # nothing was written


def test_a_reference_is_named_when_it_is_needed(tree: Any) -> None:
    assert "ref_logps" in notes_of(tree, "objective.regularizers=[{name: kl, coef: 0.1}]")


def test_the_embedded_model_is_checked_like_any_other(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "model: embedded, 0.66M weights" in notes_of(tree, "model.name=embedded")
    monkeypatch.setattr("kit.models.embedded.MODELS", Path("nowhere"))
    with pytest.raises(ModelError, match=r"nowhere/embedded/SHA256SUMS.*cannot be read.*Install grpo-kit again"):
        notes_of(tree, "model.name=embedded")


def test_bad_rows_left_out_are_counted(tree: Any) -> None:
    rows = [json.dumps({"question": f"{i}?", "answer": "1"}) for i in range(8)]
    Path("rows.jsonl").write_text("\n".join([*rows, "not json"]) + "\n")
    tree["data"] = {"source": "rows.jsonl", "heldout": 2}
    tree["reward"] = {"preset": "gsm8k-hash"}
    with pytest.raises(DataError, match="row 9"):
        notes_of(tree)
    assert "6 training and 2 held-out rows, 1 bad rows left out" in notes_of(tree, "data.skip_bad_rows=true")


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("data.source=nowhere.jsonl", DataError),
        ("model.name=./nowhere", ModelError),
        ("data.max_prompt_tokens=2", DataError),
        ("generation.max_completion_tokens=9999", ConfigError),
        ("objective.clip=ppo_clop", ConfigError),
        ('reward.functions=[{"path": "mine.py:score"}]', Exception),
    ],
)
def test_what_would_keep_the_run_from_starting_is_refused(tree: Any, override: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as failure:
        notes_of(tree, override)
    assert isinstance(failure.value, KitError) or type(failure.value).__module__.startswith("rewards")


def test_a_regularizer_without_its_reference_is_refused(tree: Any) -> None:
    with pytest.raises(ObjectiveError, match=r"Set model\.reference: base"):
        notes_of(tree, "objective.regularizers=[{name: kl, coef: 0.1}]", "model.reference=none")


def test_no_held_out_rows_are_fine_when_nothing_is_evaluated(tree: Any) -> None:
    assert "40 training and 0 held-out" in notes_of(tree, "data.heldout=0")
    with pytest.raises(ConfigError, match=r"Set data\.heldout above 0"):
        notes_of(tree, "data.heldout=0", "evaluation.every=1")


# --- a reward that cannot fit the data --------------------------------------------------------------------------------


def rows_of(tree: Any, **columns: str) -> None:
    rows = [json.dumps({"question": f"{i}?", **columns}) for i in range(8)]
    Path("rows.jsonl").write_text("\n".join(rows) + "\n")
    tree["data"] = {"source": "rows.jsonl", "heldout": 2}


def test_a_preset_that_cannot_score_the_rows_is_refused_with_the_reason(tree: Any) -> None:
    rows_of(tree, answer="1")
    with pytest.raises(RewardError, match=r"'accuracy' of preset 'reasoning-gym' cannot score the rows of rows\.jsonl"):
        notes_of(tree)
    with pytest.raises(RewardError, match="cannot score"):  # before a run, too
        prepare(load_config(tree))
    assert "6 training" in notes_of(tree, "reward.preset=gsm8k-hash")


def test_a_row_without_a_reference_does_not_refuse_the_others(tree: Any) -> None:
    rows_of(tree, answer="1")
    lines = Path("rows.jsonl").read_text().splitlines()
    bare = [json.dumps({"question": f"bare {i}?", "answer": None}) for i in range(6)]
    Path("rows.jsonl").write_text("\n".join([*bare, *lines]) + "\n")
    assert "12 training" in notes_of(tree, "reward.preset=gsm8k-hash")


def test_a_function_that_fails_is_refused_with_what_it_said_and_the_columns(tree: Any) -> None:
    Path("broken.py").write_text(
        "def score(prompts, completions, level, **columns):\n    return [0.0] * len(prompts)\n"
    )
    with pytest.raises(RewardError, match=r"'score' failed on a trial completion .*level.* are: reference"):
        notes_of(tree, 'reward.functions=[{"path": "broken.py:score"}]')


def test_a_function_is_tried_on_whole_groups_with_what_the_trainer_gives(tree: Any) -> None:
    Path("fine.py").write_text(
        "def score(prompts, completions, completion_ids, reference, trainer_state, log_metric, **columns):\n"
        "    assert len(prompts) % 4 == 0 and prompts[0] == prompts[3] and trainer_state.max_steps == 2\n"
        "    log_metric('a', 1.0)\n"
        "    return [float(c[-1]['content'] == r) for c, r in zip(completions, reference)]\n"
    )
    assert "reward: " in notes_of(tree, 'reward.functions=[{"path": "fine.py:score"}]')


# --- what this machine lacks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimisation.optimizer=adamw_8bit", "pip install 'grpo-kit"),
        ("run.report_to=[wandb, tensorboard]", "wandb, tensorboard is not installed.*pip install wandb tensorboard"),
        ("model.dtype=float16", r"Set model\.dtype: float32"),
        ("generation.engine=vllm", r"Set generation\.engine: hf"),
    ],
)
def test_what_the_machine_lacks_is_said_first(
    tree: Any, override: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kit.runner.prepare.find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for check_it in (notes_of, lambda tree, override: prepare(load_config(tree, [override]))):
        with pytest.raises(EnvironmentUnsupported, match=message):
            check_it(tree | {"data": {"source": "nowhere.jsonl"}}, override)


def test_several_gpus_asked_for_are_refused_unless_a_launcher_shares_them_out(
    tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    with pytest.raises(EnvironmentUnsupported, match="Set CUDA_VISIBLE_DEVICES=1,"):
        check_environment(load_config(tree))
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_environment(load_config(tree))
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    check_environment(load_config(tree))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # the training process is shown the first one
    check_environment(load_config(tree))


# --- the same steps as a run ------------------------------------------------------------------------------------------


def test_a_taken_run_id_is_refused(tree: Any, tmp_path: Path) -> None:
    (tmp_path / "runs" / "it").mkdir(parents=True)
    with pytest.raises(RunError, match="already a run 'it'"):
        notes_of(tree)


def test_four_bits_without_adapters_are_refused_for_the_embedded_model_too(tree: Any) -> None:
    with pytest.raises(ModelError, match="leaves nothing to train"):
        notes_of(tree, "model.name=embedded", "model.load_in_4bit=true", "model.lora=null")


def test_half_precision_for_all_weights_is_refused_for_the_embedded_model_too(tree: Any) -> None:
    with pytest.raises(ModelError, match="would lose most updates to rounding"):
        notes_of(tree, "model.name=embedded", "model.dtype=bfloat16", "model.lora=null")


# --- on-policy --------------------------------------------------------------------------------------------------------


def test_a_clip_that_cannot_act_is_noted(tree: Any) -> None:
    assert "Set optimisation.iterations: 2 for clipping to matter" in notes_of(tree)
    assert "on-policy" not in notes_of(tree, "optimisation.iterations=2")
    assert "on-policy" not in notes_of(tree, "objective.recipe=rloo")


def test_reinforce_over_several_iterations_is_refused(tree: Any) -> None:
    with pytest.raises(ObjectiveError, match=r"'reinforce' has no ratio.*Set optimisation\.iterations: 1"):
        notes_of(tree, "objective.recipe=rloo", "optimisation.iterations=2")


@pytest.mark.parametrize(
    ("clip", "reduction", "meant"),
    [
        ("gspo", "token_mean", "sequence_mean"),
        ("luspo", "sequence_mean", "sequence_sum"),
        ("gmpo", "fixed_length", "sequence_mean"),
    ],
)
def test_a_reduction_that_undoes_a_clip_is_noted(tree: Any, clip: str, reduction: str, meant: str) -> None:
    overrides = [f"objective.clip={clip}", f"objective.reduction={reduction}"]
    assert f"{clip} weighs completions as wholes and is meant for reduction {meant}" in notes_of(tree, *overrides)
    assert "as wholes" not in notes_of(tree, overrides[0], f"objective.reduction={meant}")


# --- what an objective needs of a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k3", "full"])
def test_a_kl_without_a_reference_is_refused(tree: Any, estimator: str) -> None:
    with pytest.raises(ObjectiveError, match=r"has no reference policy \(model.reference: none\)"):
        notes_of(tree, f"objective.regularizers=[{{name: kl, estimator: {estimator}}}]", "model.reference=none")


def test_the_norm_of_a_lora_update_needs_lora(tree: Any) -> None:
    override = "objective.regularizers=[reference_free_l2]"
    notes_of(tree, override)
    with pytest.raises(ObjectiveError, match=r"all weights train \(model.lora: null\)"):
        notes_of(tree, override, "model.lora=null")


def test_deepspeed_is_refused_with_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    from kit.runner.distributed import join

    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(EnvironmentUnsupported, match=r"--multi_gpu.*scale CONFIG --to verl"):
        join()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    assert join().size == 1


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("MULTI_CPU", {"FSDP_VERSION": "2"}, "without a word.*Leave --use_fsdp out"),
        ("MULTI_GPU", {}, "Add --fsdp_version 2"),
        ("MULTI_GPU", {"FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "efficient_loading false"),
        ("MULTI_GPU", {"FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}, None),
    ],
)
def test_fsdp_that_would_be_left_out_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, given: dict[str, str], said: str | None
) -> None:
    import accelerate
    import torch.distributed

    from kit.runner.distributed import join

    launched = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "ACCELERATE_USE_FSDP": "true"}
    for name, value in (launched | given).items():
        monkeypatch.setenv(name, value)
    state = SimpleNamespace(distributed_type=f"DistributedType.{kind}")
    monkeypatch.setattr(accelerate, "PartialState", lambda **_: state)
    for name, value in {"get_rank": 0, "get_world_size": 2, "new_group": None}.items():
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value, **__: value)
    if said is None:
        assert join().size == 2
        return
    with pytest.raises(EnvironmentUnsupported, match=said):
        join()


@pytest.mark.parametrize(
    ("change", "backend", "named"),
    [
        ("generation.replay_support=true", "transformers", r"generation\.replay_support"),
        ("model.load_in_4bit=true", "transformers", r"model\.load_in_4bit"),
        ("teacher.model=Qwen/Qwen3-4B", "transformers", r"teacher\.model"),
        ("model.backend=auto", "unsloth", r"model\.backend: unsloth"),
    ],
)
def test_what_no_run_tried_with_spread_weights_is_refused_before_it(
    monkeypatch: pytest.MonkeyPatch, tree: Any, change: str, backend: str, named: str
) -> None:
    from kit.runner.distributed import check_sharded_run

    config = load_config(tree, [change])
    check_sharded_run(config, backend)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_sharded_run(load_config(tree), "transformers")
    with pytest.raises(ConfigError, match=rf"{named}: not with accelerate launch --use_fsdp.*--multi_gpu"):
        check_sharded_run(config, backend)


@pytest.mark.parametrize(
    ("needs", "version", "vllm", "said"),
    [
        ({"values"}, 2, False, "values, read from weights that FSDP"),
        (set(), 1, False, "--fsdp_version 2"),
        (set(), 2, True, "generation.engine: hf"),
    ],
)
def test_what_was_not_proven_with_spread_weights_is_refused(
    needs: set[str], version: int, vllm: bool, said: str
) -> None:
    from kit.models.sharded import check_sharded

    kinds: list[str] = []
    plugin = SimpleNamespace(fsdp_version=version, set_state_dict_type=kinds.append)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    spread = functools.partial(SimpleNamespace, accelerator=accelerator, is_fsdp_enabled=True)
    with pytest.raises(KitError, match=said):
        check_sharded(spread(needs=needs, use_vllm=vllm))
    assert not kinds
    plugin.fsdp_version = 2
    second = spread(needs={"ref_logps"}, use_vllm=False, ref_model=object())
    with pytest.raises(KitError, match="a second model, which FSDP"):
        check_sharded(second)
    check_sharded(spread(needs={"ref_logps"}, use_vllm=False))
    assert kinds == ["FULL_STATE_DICT"]


def test_the_groups_of_a_spread_module_are_found_by_the_names_of_every_torch() -> None:
    from kit.models.sharded import groups_of

    for state, groups in (
        ({"_fsdp_param_groups": ["a", "b"], "_fsdp_param_group": "a"}, ["a", "b"]),
        ({"_fsdp_param_group": "a"}, ["a"]),
        ({"_fsdp_param_group": None}, []),
    ):
        assert groups_of(SimpleNamespace(_get_fsdp_state=lambda state=state: SimpleNamespace(**state))) == groups


@pytest.mark.parametrize(
    ("sharded", "said"), [(True, "launch --use_fsdp --fsdp_version 2"), (False, "without --use_fsdp")]
)
def test_a_checkpoint_of_another_kind_of_launch_is_refused_even_by_force(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sharded: bool, said: str
) -> None:
    from kit.errors import RunError
    from kit.runner import resume

    monkeypatch.setattr(resume, "differences", lambda *_: [])
    if sharded:
        (tmp_path / "pytorch_model_fsdp.bin").write_text("")
    run = SimpleNamespace(id="it")
    previous: Any = SimpleNamespace(checkpoint=tmp_path, run=run, config=None, data={}, env={})
    parts: Any = None
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(not sharded).lower())
    for force in (False, True):
        with pytest.raises(RunError, match=said):
            resume.check_resumable(previous, parts, force=force)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(sharded).lower())
    assert not resume.check_resumable(previous, parts, force=False).forced


@pytest.mark.parametrize(("error", "attended"), [(None, 1), (KeyboardInterrupt, 1), (RuntimeError, 0)])
def test_after_an_error_the_first_process_does_not_wait_for_the_others(
    tmp_path: Path, error: type[BaseException] | None, attended: int
) -> None:
    from contextlib import suppress

    from kit.runner.distributed import FirstProcess

    calls: list[Any] = []
    processes: Any = SimpleNamespace(all_gather_object=lambda value: calls.append(value) or [value])
    with suppress(KeyboardInterrupt, RuntimeError), FirstProcess(processes, None, tmp_path).last_work():
        if error is not None:
            raise error
    assert len(calls) == attended
