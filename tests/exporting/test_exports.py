"""Exports loaded with the libraries that users load them with, and planted defects that verification must detect."""

from __future__ import annotations

import json
import re
import shutil
import struct
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exporting_runs import make_run
from peft.tuners.lora import Linear
from safetensors.torch import load_file, save_file

from kit.errors import ConfigError, ModelError, RunError
from kit.export import job
from kit.export.request import LIMITS, ExportRequest, exports
from kit.export.source import choose_dtype, merge, share_kept
from kit.export.verify import Measured, Written, measure, verify
from kit.runner.console import Reporter
from kit.runner.trained import Source, open_source
from kit.runs.store import RunDir

WEIGHTS = "model.safetensors"


def export(run: RunDir, to: str, **options: Any) -> dict[str, Any]:
    return job.export(run, ExportRequest(to, **options).for_run(run), Reporter(quiet=True))


@pytest.fixture(scope="module")
def merged(made: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged export, of which tests spoil copies."""
    place = tmp_path_factory.mktemp("merged") / "good"
    result = export(made, "merged_16bit", out=place, dtype="float16")
    assert result["verification"]["faults"] == []
    return place


@pytest.fixture(scope="module")
def adapter(made: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("adapter") / "good"
    assert export(made, "adapter", out=place)["verification"]["verified"]
    return place


@pytest.fixture(scope="module")
def source(made: RunDir) -> Source:
    return open_source(made, None)[0]


@pytest.fixture(scope="module")
def measured(made: RunDir, source: Source) -> Measured:
    return job._measure(source, ExportRequest("adapter", prompts=8).for_run(made), Reporter(quiet=True))


def test_a_merged_model_answers_as_base_and_adapter_do(made: RunDir, merged: Path, measured: Measured) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    ids = torch.tensor([measured.prompts[0]])
    with torch.inference_mode():
        answer = model.generate(input_ids=ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
    assert answer == measured.answers.greedy[0]
    assert model.generation_config.repetition_penalty in (None, 1.0), "the base's penalty is a default of the export"
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(made.adapter).chat_template
    assert load_file(merged / WEIGHTS)["model.embed_tokens.weight"].dtype == torch.float16


def test_what_came_of_it_is_filed_in_the_run(run: RunDir) -> None:
    result = export(run, "adapter", prompts=3)
    assert Path(result["path"]) == run.path / "export" / "adapter"
    assert exports(run)["adapter"] == json.loads(json.dumps(result))
    sizes = {each["name"]: each["bytes"] for each in result["files"]}
    assert sizes["adapter_model.safetensors"] == (run.adapter / "adapter_model.safetensors").stat().st_size
    assert {"README.md", "adapter_config.json", "tokenizer.json", "chat_template.jinja"} <= sizes.keys()
    assert all(len(each["sha256"]) == 64 for each in result["files"])
    assert result["verification"]["comparison"]["prompts"] == 3
    event = run.events()[-1]
    assert event["kind"] == "export"
    assert (event["format"], event["step"], event["verified"]) == ("adapter", 2, True)
    with pytest.raises(RunError, match="--force"):
        export(run, "adapter")


def test_a_run_that_trained_all_weights_is_cast_and_has_no_adapter(model_folder: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "full", model_folder, lora=False)
    result = export(run, "merged-16bit", prompts=4)
    assert (result["stored"], result["verification"]["faults"]) == ("float32", [])
    with pytest.raises(ConfigError, match="no adapter"):
        export(run, "adapter")


def forget_in_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora import Linear

    real = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda layer, name: torch.zeros_like(real(layer, name)))


def test_only_an_export_of_its_own_is_replaced(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("mine", "other.not-verified"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "work.txt").write_text("work")
        with pytest.raises(RunError, match="is no export"):
            export(run, "adapter", out=tmp_path / folder.partition(".")[0], force=True)
        assert (tmp_path / folder / "work.txt").read_text() == "work"
    assert export(run, "adapter", prompts=2)["path"] == export(run, "adapter", prompts=2, force=True)["path"]
    forget_in_merging(monkeypatch)
    first = export(run, "merged-16bit", prompts=2, dtype="float16")["path"]
    assert export(run, "merged-16bit", prompts=2, dtype="float16")["path"] == first


def test_an_export_that_is_not_what_was_trained_takes_no_place(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_in_merging(monkeypatch)
    result = export(run, "merged-16bit", prompts=4, dtype="float16")
    assert result["path"].endswith("merged-16bit.not-verified")
    assert not (run.path / "export" / "merged-16bit").exists()
    assert any("of the effect of training" in fault for fault in result["verification"]["faults"])


def test_a_run_under_way_gives_its_last_whole_checkpoint(run: RunDir) -> None:
    shutil.copytree(run.adapter, run.path / "checkpoint-1")
    (run.path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    run.write_status("running", step=2)
    result = export(run, "adapter", prompts=2)
    assert result["step"] == 1
    assert "last complete checkpoint, step 1" in result["notes"][0]


def test_a_checkpoint_that_is_removed_meanwhile_is_still_exported(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    real = job._measure

    def measuring(source: Source, *rest: Any) -> Measured:
        shutil.rmtree(run.adapter)
        return real(source, *rest)

    monkeypatch.setattr(job, "_measure", measuring)
    assert export(run, "adapter", prompts=2)["verification"]["verified"]


def rewrite(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path, Source], None]:
    def spoil(folder: Path, source: Source) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return spoil


def forget_one_layer(folder: Path, source: Source) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(folder / WEIGHTS)
    tensors[name] = load_file(Path(source.base) / WEIGHTS)[name].half()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def forget_the_adapter(folder: Path, source: Source) -> None:
    tensors = load_file(Path(source.base) / WEIGHTS)
    save_file({name: value.half() for name, value in tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def cut_short(folder: Path, source: Source) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def damage_the_header(folder: Path, source: Source) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**40) + data[8:])


def other_end(folder: Path, source: Source) -> None:
    change_json(folder / "generation_config.json", eos_token_id=source.tokenizer.convert_tokens_to_ids(">"))


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def other_template(folder: Path, source: Source) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_start|>", "<|endoftext|>"))


def other_tokenizer(folder: Path, source: Source) -> None:
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    words = tree["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    path.write_text(json.dumps(tree))


def untie(folder: Path, source: Source) -> None:
    rewrite(lambda tensors: tensors.update({"lm_head.weight": torch.randn_like(tensors["model.embed_tokens.weight"])}))(
        folder, source
    )
    change_json(folder / "config.json", tie_word_embeddings=False)


DEFECTS: dict[str, tuple[Callable[[Path, Source], None], str]] = {
    "one layer's update forgotten": (forget_one_layer, "log-probabilities differ"),
    "base without adapter": (forget_the_adapter, "of the effect of training"),
    "cut short": (cut_short, "cannot be loaded"),
    "damaged header": (damage_the_header, "cannot be loaded"),
    "no weights": (lambda folder, source: (folder / WEIGHTS).unlink(), "cannot be loaded"),
    "not a number": (
        rewrite(lambda tensors: tensors["model.norm.weight"].__setitem__(0, float("nan"))),
        "not finite",
    ),
    "a tensor too few": (rewrite(lambda tensors: tensors.__delitem__("model.norm.weight") or None), "is missing"),
    "a tensor too many": (rewrite(lambda tensors: tensors.update(ghost=torch.ones(2))), "'ghost' is not part of"),
    "wrong end": (other_end, "completions end at the tokens"),
    "chat template swapped": (other_template, "the chat template differs"),
    "tokenizer swapped": (other_tokenizer, "splits .* differently|other token ids"),
    "embeddings untied": (untie, "log-probabilities differ"),
    "config of another shape": (
        lambda folder, source: change_json(folder / "config.json", num_hidden_layers=2),
        "cannot be loaded|is missing",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, merged: Path, source: Source, measured: Measured, tmp_path: Path) -> None:
    spoil, words = DEFECTS[name]
    folder = tmp_path / "spoilt"
    shutil.copytree(merged, folder)
    spoil(folder, source)
    faults = verify(source, measured, folder, "merged-16bit", Written("float16")).faults
    assert any(re.search(words, fault) for fault in faults), faults


def zero_update(folder: Path, source: Source) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name: torch.zeros_like(value) for name, value in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (zero_update, "is not the trained file"),
        (lambda folder, source: change_json(folder / "adapter_config.json", lora_alpha=16), "log-probabilities differ"),
        (
            lambda folder, source: change_json(folder / "adapter_config.json", use_rslora=True),
            "log-probabilities differ",
        ),
        (other_template, "the chat template"),
    ],
    ids=["no update", "scaling", "rslora", "template"],
)
def test_a_planted_defect_of_an_adapter_is_found(
    spoil: Callable[[Path, Source], None], words: str, adapter: Path, source: Source, measured: Measured, tmp_path: Path
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(adapter, folder)
    spoil(folder, source)
    faults = verify(source, measured, folder, "adapter", Written("float32")).faults
    assert any(words in fault for fault in faults), faults


def test_no_room_to_measure_says_what_to_do(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("kit.export.verify.generate", full)
    with pytest.raises(ModelError, match="--no-verify"):
        measure(source, [{"prompt": "1 + 1"}], 4)


def test_an_adapter_that_is_not_verified_needs_neither_gpu_nor_weights(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the GPU or the base was asked for")

    monkeypatch.setattr(job, "held_gpu", refuse)
    monkeypatch.setattr(Source, "load_base", refuse)
    job.export_run(ExportRequest("adapter", verify=False).for_run(run), quiet=True)
    assert exports(run)["adapter"]["verification"] is None
    monkeypatch.setattr(job, "held_gpu", lambda what: nullcontext())
    job.export_run(ExportRequest("merged-16bit", verify=False).for_run(run), quiet=True)
    settings = json.loads((run.path / "export/merged-16bit/generation_config.json").read_text())
    assert settings["eos_token_id"] == job._ends(open_source(run, None)[0])[0]


@pytest.mark.parametrize(("room", "dtype"), [(1e12, "float32"), (1e5, "float16")])
def test_a_merged_model_that_does_not_fit_the_gpu_is_verified_on_the_cpu(
    room: float, dtype: str, merged: Path, source: Source, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kit.export import verify as module

    real, devices, dtypes = module._open, [], []

    def opened(*arguments: Any) -> Any:
        devices.append(arguments[-1])
        if len(devices) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        model, *rest = real(*arguments)
        dtypes.append(str(model.dtype))
        return model, *rest

    monkeypatch.setattr("kit.export.source.free_memory", lambda device: room)
    measured = replace(measured, computed="float16")

    monkeypatch.setattr(module, "_open", opened)
    backend = replace(source.files.backend, device="cuda")
    on_a_gpu = replace(source, files=replace(source.files, backend=backend), notes=[])
    verdict = module.verify(on_a_gpu, measured, merged, "merged-16bit", Written("float16"))
    assert (verdict.faults, devices, dtypes) == ([], ["cuda", "cpu"], [f"torch.{dtype}"])
    assert any("verified on the CPU" in note for note in on_a_gpu.notes)


def test_a_16_bit_source_that_does_not_fit_the_gpu_is_measured_on_the_cpu(
    run: RunDir, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 8B that was trained in 4 bits on a card of 12 GB."""
    devices: list[str] = []

    def placed(device: str, *, quantized: bool) -> None:
        devices.append(device)
        if device == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("kit.models.loading.place_of", placed)
    backend = replace(source.files.backend, device="cuda")
    on_a_gpu = replace(source, files=replace(source.files, backend=backend), notes=[])
    request = ExportRequest("merged-16bit", prompts=2).for_run(run)
    assert job._measure(on_a_gpu, request, Reporter(quiet=True)).computed == "float32"
    assert devices == ["cuda", "cpu"]
    assert on_a_gpu.files.backend.device == "cpu"
    assert "verified on the CPU" in on_a_gpu.notes[0]
    # An adapter is loaded as the source was measured: float16 needs a GPU.
    measured = job._measure(on_a_gpu, {**request, "format": "adapter"}, Reporter(quiet=True))
    with monkeypatch.context() as patch:
        patch.setattr(source.config.model, "dtype", "float16")
        assert verify(on_a_gpu, measured, source.weights, "adapter", Written("float32")).comparison
    monkeypatch.setattr(source.config.model, "load_in_4bit", True)
    with pytest.raises(ModelError, match="CUDA out of memory"):  # 4-bit weights fitted in training
        job._measure(
            replace(on_a_gpu, files=replace(source.files, backend=backend)),
            {**request, "format": "adapter"},
            Reporter(quiet=True),
        )


def test_an_export_keeps_to_the_main_memory_that_is_free(
    run: RunDir, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kit.export.source.free_memory", lambda device: 3.0 * source.files.parameters)
    request = ExportRequest("merged-16bit", prompts=2).for_run(run)
    assert job._measure(source, request, Reporter(quiet=True)).computed == "bfloat16"
    monkeypatch.setattr("kit.models.memory.free_memory", lambda device: 1.0 * source.files.parameters)
    with pytest.raises(ModelError, match="main memory"):
        job.export(run, request, Reporter(quiet=True))


def test_a_merge_holds_the_update_of_one_layer_at_a_time(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """All updates in float32 need four times the memory of a 4-bit model, and Colab has 12 GB of RAM."""
    real, made, most = Linear.get_delta_weight, weakref.WeakSet[torch.Tensor](), []

    def counted(*arguments: Any) -> torch.Tensor:
        update = real(*arguments)
        made.add(update)
        most.append(len(made))
        return update

    monkeypatch.setattr(Linear, "get_delta_weight", counted)
    merge(source, "auto")
    layers = 7 * source.files.config.num_hidden_layers
    assert len(most) == 2 * layers, "once to choose the precision, once to merge"
    assert max(most) <= 2


def test_the_cap_of_attention_scores_applies_to_the_export(model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

    tokenizer, base = AutoTokenizer.from_pretrained(model_folder), tmp_path / "base"
    config = Gemma2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        vocab_size=len(tokenizer), attn_logit_softcapping=0.1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    for weight in model.model.layers[0].self_attn.parameters():
        weight.data *= 20
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    result = export(make_run(tmp_path / "runs", "capped", base), "merged-16bit", dtype="float32", prompts=2)
    assert result["verification"]["comparison"]["logp_difference_max"] < 1e-4


def test_a_run_of_another_machines_dtype_is_exported(model_folder: Path, tmp_path: Path) -> None:
    dtype = {"model": {"name": str(model_folder), "dtype": "float16", "lora": {"rank": 4, "alpha": 8}}}
    run = make_run(tmp_path / "runs", "elsewhere", model_folder, more=dtype)
    result = export(run, "merged-16bit", prompts=2)
    assert result["verification"]["verified"]
    assert any("float16, so it uses model.dtype: auto" in note for note in result["notes"])


def test_an_adapter_on_the_parameters_of_experts_is_merged(model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer, base = AutoTokenizer.from_pretrained(model_folder), tmp_path / "base"
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, vocab_size=len(tokenizer),
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(base)
    tokenizer.save_pretrained(base)
    source = open_source(make_run(tmp_path / "runs", "experts", base), None)[0]
    policy = source.load().eval()
    assert "gate_up_proj" in policy.peft_config["default"].target_parameters
    model, _, share = merge(source, "float32")
    ids = torch.arange(8)[None]
    assert torch.allclose(model(ids).logits, policy(ids).logits, atol=1e-5)
    assert share == pytest.approx(1, abs=1e-3)


def test_a_lost_update_is_a_fault_where_the_answers_cannot_tell(
    merged: Path, source: Source, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kit.export import verify as module

    lost = Written("float16", update_kept=0.1)
    assert module.verify(source, measured, merged, "merged-16bit", lost).verified
    monkeypatch.setattr(module, "LEAST_EFFECT", float("inf"))
    verdict = module.verify(source, measured, merged, "merged-16bit", lost)
    assert any("--dtype float32 or --to adapter" in fault for fault in verdict.faults)


def test_bfloat16_is_left_where_it_would_round_the_update_away() -> None:
    base = torch.full((4, 4), 1.0)
    # The step of bfloat16 at 1 is 2^-7: an update of 2^-9 rounds back to 1, one of 2^-7 is kept. float16's is 2^-10.
    small, large = torch.full((4, 4), 2.0**-9), torch.full((4, 4), 2.0**-7)
    assert share_kept(base, small, torch.bfloat16) == 0.0
    assert share_kept(base, small, torch.float16) == 1.0
    assert share_kept(base, large, torch.bfloat16) == 1.0
    cases = (("llama", 1.0, small, "float16"), ("llama", 1.0, large, "bfloat16"), ("llama", 1e5, small, "bfloat16"))
    for family, factor, change, dtype in (*cases, ("gemma3_text", 1.0, small, "bfloat16")):
        model = torch.nn.Linear(4, 4, bias=False)
        vars(model)["config"] = SimpleNamespace(model_type=family)
        model.weight.data = factor * base.to(torch.bfloat16)
        assert choose_dtype(model, [(model.weight.data, change)]) == dtype


def test_a_base_that_is_quantised_is_not_merged_into(run: RunDir, model_folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "quantised"
    shutil.copytree(model_folder, base)
    change_json(base / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    config = run.config.read_text().replace(str(model_folder), str(base))
    run.write_text("config.yaml", config)
    request = {"format": "merged-16bit", "base": None}
    with pytest.raises(ModelError, match="--base"):
        job._check(open_source(run, None)[0], "merged-16bit", request)
    source = open_source(run, None, str(model_folder))[0]
    job._check(source, "merged-16bit", request | {"base": source.base})


def small_effect_of_4_bit_training(run: RunDir) -> None:
    """Change the run into one on 4-bit weights whose adapter has a small effect, as after few steps."""
    run.write_text("config.yaml", run.config.read_text().replace("load_in_4bit: false", "load_in_4bit: true"))
    tensors = {
        name: value * (0.3 if "lora_B" in name else 1.0)
        for name, value in load_file(run.adapter / "adapter_model.safetensors").items()
    }
    save_file(tensors, run.adapter / "adapter_model.safetensors", {"format": "pt"})


def test_a_merged_export_of_4_bit_training_is_compared_on_the_16_bit_base(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_effect_of_4_bit_training(run)
    good = export(run, "merged-16bit", dtype="float32")["verification"]
    assert good["faults"] == []
    assert good["limits"]["mean"] == LIMITS["float32"].mean
    assert good["comparison"]["effect_kept"] == pytest.approx(1.0, abs=0.02)
    forget_in_merging(monkeypatch)
    bad = export(run, "merged-16bit", dtype="float32", force=True)["verification"]
    assert any("of the effect of training" in fault for fault in bad["faults"])


def test_the_effect_of_training_is_not_judged_below_the_rounding_of_the_format(
    run: RunDir, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for kind in ("q4_k_m", "nf4"):
        monkeypatch.setitem(LIMITS, kind, replace(LIMITS[kind], mean=0.008))

    small_effect_of_4_bit_training(run)
    export(run, "merged-16bit", dtype="float32", out=tmp_path / "good")
    source = open_source(run, None)[0]
    measured = job._measure(source, ExportRequest("gguf").for_run(run), Reporter(quiet=True))
    tensors = load_file(tmp_path / "good" / WEIGHTS)
    for name, value in tensors.items():
        if "_proj" in name:
            tensors[name] = dequantize_4bit(*quantize_4bit(value, quant_type="nf4"))
    save_file(tensors, tmp_path / "good" / WEIGHTS, {"format": "pt"})

    def faults(update_kept: float) -> list[str]:
        written = Written("q4_k_m", update_kept=update_kept)
        verdict = verify(source, measured, tmp_path / "good", "merged-16bit", written)
        assert verdict.limits["mean"] < verdict.comparison["training_effect"] < 3 * verdict.limits["mean"]
        return verdict.faults

    assert not any("effect" in fault for fault in faults(1.0))
    assert any("0% of the update" in fault for fault in faults(0.0))


def test_the_card_says_what_it_is_and_leaks_no_path(merged: Path, made: RunDir) -> None:
    text = (merged / "README.md").read_text()
    front = text.split("---")[1]
    assert "library_name: transformers" in front
    assert "license" not in front
    assert "base_model" not in front  # a local folder is not named
    assert "| pass@1 | 0.250 [0.150, 0.350] | 0.500 [0.400, 0.600] |" in text
    assert str(made.path.parent) not in text
    assert "/tmp" not in text


@pytest.mark.parametrize("verifies", [True, False])
def test_a_card_says_that_a_file_was_not_verified(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verifies: bool
) -> None:
    monkeypatch.setattr(job, "_write_merged", lambda *_: Written("q8_0", tmp_path / "it.gguf"))
    monkeypatch.setattr("kit.export.gguf.missing_ends", lambda *_: None)
    job.write(
        source, "gguf", tmp_path, ExportRequest("gguf", verify=verifies).for_run(source.run), Reporter(quiet=True)
    )
    assert ("Rounded to q8_0. Not verified." in (tmp_path / "README.md").read_text()) != verifies


def test_the_revision_of_the_base_is_in_the_card_and_in_the_adapter(run: RunDir, tmp_path: Path) -> None:
    from kit.export.card import model_card

    source = open_source(run, None)[0]
    source.config.model.revision = "abc123"
    text = model_card(source, "adapter", "someone/base", None, None, [])
    assert 'AutoModelForCausalLM.from_pretrained("someone/base", revision="abc123")' in text
    assert "| revision of the base | abc123 |" in text
    (tmp_path / "written").mkdir()
    job._write_adapter(source, tmp_path / "written")
    assert json.loads((tmp_path / "written" / "adapter_config.json").read_text())["revision"] == "abc123"
    source.base = "someone/other"  # --base: that revision is of another repository
    assert "revision=" not in model_card(source, "adapter", "someone/other", None, None, [])
