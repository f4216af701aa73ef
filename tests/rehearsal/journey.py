"""A process that executes complete journeys on simulated GPUs: `journey.py FOLDER CASE ...`, cases of `CASES` of one backend.

A journey is the configuration of a preset or notebook with a tiny model of the same architecture and tokenizer class and few,
short completions: from `kit.train`'s main loop to the first checkpoint, resumed to the end, with held-out scores, and exported.
4-bit weights and vLLM are replaced below the classes of transformers, TRL and Unsloth. The result of each case, or its error, is
in FOLDER/CASE.json.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from rehearse import build_model, unsloths_kernels  # sets variables that Triton and Unsloth read on import

os.environ["CUDA_VISIBLE_DEVICES"] = "0"

import engine_stand_in
import torch
from pretended_gpu import PretendedGPU, pretended

SHORT = {
    "generation.num_generations": 4, "generation.max_completion_tokens": 6, "optimisation.steps": 2, "optimisation.batch_size": 8,
    "optimisation.micro_batch_size": 4, "evaluation.every": 1, "evaluation.prompts": 2, "evaluation.k": 2, "run.save_every": 1,
    "data.heldout": 2, "data.limit": 24, "run.threads": 1, "generation.vllm.timeout": 60,
}  # fmt: skip
"""What makes a run short and nothing else; every other key is the preset's or the notebook's."""


@dataclass(frozen=True)
class Case:
    """A journey: preset `base`, `changes` of the notebook or user, and the `architecture` of the tiny model."""

    base: str
    backend: str
    capability: tuple[int, int]
    changes: dict[str, Any] = field(default_factory=dict)
    architecture: str = "qwen2"
    export: str = "adapter"
    reward: str = "letters"
    full: bool = False  # the card is full once


STANDBY = {"generation.engine": "vllm", "generation.vllm.standby": True}
REPEATED = STANDBY | {
    "model.load_in_4bit": False,
    "generation.vllm.hand_over": "merged",
    "selection.dynamic_sampling": {"max_rounds": 2},
    "optimisation.learning_rate": 0.01,
}
"""Groups without spread are made again, so that the engine generates twice between two steps; the answers change in two steps."""
CASES = {
    "gsm8k-t4": Case("gsm8k", "transformers", (7, 5), {"model.dtype": "float16", "generation.engine": "hf"}, full=True),
    "gsm8k-l4-vllm": Case("gsm8k", "transformers", (8, 9), {"generation.engine": "vllm"}),
    "countdown-standby": Case("countdown", "transformers", (9, 0), REPEATED, reward="seldom", export="merged-16bit"),
    "calculator": Case("calculator", "transformers", (8, 9), {"model.dtype": "auto"}, "qwen3"),
    "qwen35": Case("qwen35-gsm8k", "transformers", (8, 9), {"generation.engine": "hf"}, "qwen3_5"),
    "02-unsloth-t4": Case("gsm8k", "unsloth", (7, 5), {"model.dtype": "float16", "generation.engine": "hf"}, "qwen3"),
    "calculator-unsloth": Case("calculator", "unsloth", (8, 9), STANDBY | {"model.dtype": "auto"}, "smollm3"),
}  # fmt: skip


def configuration(case: Case, name: str, folder: Path) -> Any:
    """The preset of the case, with the paths of model and data replaced and the keys of `SHORT`."""
    from kit.config import load_config

    model = folder / f"model-{name}"
    build_model(model, case.architecture, tools=case.base == "calculator")
    spread = folder / "spread.py"
    spread.write_text(
        "def letters(completions, **_):\n    return [sum(map(ord, str(c))) % 101 / 101 for c in completions]\n"
        "def seldom(completions, **_):\n    return [float(sum(map(ord, str(c))) % 101 < 25) for c in completions]\n"
    )
    changes: dict[str, Any] = {
        "model.name": str(model), "model.backend": case.backend, "run.id": name, "run.root": str(folder),
        "reward.functions": [{"path": f"{spread}:{case.reward}", "weight": 1.0}],  # random weights earn no other reward
    }  # fmt: skip
    if "gsm8k" in case.base:
        rows = [{"question": f"What is {n} plus {n + 1}?", "answer": f"#### {2 * n + 1}"} for n in range(26)]
        source = folder / "gsm8k.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes |= {"data.source": str(source), "data.subset": None, "data.split": "train"}
    overrides = [f"{key}={json.dumps(value)}" for key, value in (SHORT | case.changes | changes).items()]
    return load_config(case.base, overrides)


TRAINERS: list[Any] = []
"""Those that a journey has made."""


def with_shared_engine(load: Any) -> Any:
    """Wrap Unsloth's loading: the model gets the stand-in engine instead of one that Unsloth starts."""

    def loaded(revision: Any, config: Any, dtype: Any, backend: Any, with_: Any, source: str) -> Any:
        model = load(revision, config, dtype, backend, replace(with_, fast_inference={}), source)
        if with_.fast_inference:
            settings = {"dtype": str(dtype).removeprefix("torch."), "seed": 0, "max_model_len": with_.max_seq_length}
            model.vllm_engine = engine_stand_in.LLM(source, shared_weights=True, **settings)
            model.fast_generate = model.vllm_engine.generate
            model.fast_generate_batches = model.vllm_engine.generate
        return model

    return loaded


@contextmanager
def activated(*backend: Any, **settings: Any) -> Iterator[None]:
    """The main loop's activation; for Unsloth with fewer programs in Triton's interpreter. Trainers are recorded."""
    from kit.models import unsloth as unsloth_model
    from kit.models.backend import activate_backend

    with activate_backend(*backend, **settings), ExitStack() as stack:
        if "unsloth" in sys.modules:
            stack.enter_context(unsloths_kernels())
            from unsloth_zoo import vllm_utils

            stack.enter_context(mock.patch.object(unsloth_model, "load", with_shared_engine(unsloth_model.load)))
            # Unsloth creates its state of an engine's LoRA, and what its check reads, only with the real vLLM.
            beside = {"LORA_REQUEST_ID": None, "_check_lora_is_servable": mock.Mock()}
            stack.enter_context(mock.patch.multiple(vllm_utils, create=True, **beside))
        from kit.runner import build  # imports TRL, so Unsloth must be imported before

        make = build.make_trainer

        def remember(*args: Any, **keywords: Any) -> Any:
            TRAINERS.append(make(*args, **keywords))
            return TRAINERS[-1]

        with mock.patch.object(build, "make_trainer", remember):
            yield


@contextmanager
def one_out_of_memory() -> Iterator[None]:
    """Let the first completions of training run out of memory, as on a card that another process uses."""
    from transformers import GenerationMixin

    generate, left = GenerationMixin.generate, [1]

    def full(self: Any, *args: Any, **keywords: Any) -> Any:
        if self.training and left:
            left.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return generate(self, *args, **keywords)

    with mock.patch.object(GenerationMixin, "generate", full):
        yield


@contextmanager
def stopped_after_a_step() -> Iterator[None]:
    """Let a run save and stop after its first step and the evaluation of that step."""
    from kit.runner.evaluation import Evaluator

    step_end = Evaluator.on_step_end

    def stopping(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        step_end(self, args, state, control, **rest)
        self.stop.reason = "control/stop"
        control.should_save = control.should_training_stop = True

    with mock.patch.object(Evaluator, "on_step_end", stopping):
        yield


def travel(name: str, folder: Path) -> dict[str, Any]:
    """Train to the first checkpoint, resume to the end, export; return the results."""
    case = CASES[name]
    with ExitStack() as stack:
        gpu = stack.enter_context(pretended(PretendedGPU(case.capability)))
        stack.enter_context(mock.patch("kit.models.backend.is_of_the_kit", return_value=True))
        stack.enter_context(mock.patch("kit.train.activate_backend", activated))
        if case.full:
            stack.enter_context(one_out_of_memory())
        config = configuration(case, name, folder)
        import kit.train

        engine_stand_in.LLM.made.clear()
        TRAINERS.clear()
        with gpu.within("train"):
            with stopped_after_a_step():
                kit.train.run(config, quiet=True)
            run = kit.train.run(config, quiet=True, resume=True)
        exported = export(run, case.export)
        from safetensors.torch import load_file

        adapter = load_file(run.path / "adapter" / "adapter_model.safetensors")
        metrics = run.metrics()
        return {
            "state": run.status()["state"], "steps": [row["step"] for row in metrics if "loss" in row],
            "losses": [row["loss"] for row in metrics if "loss" in row],
            "moved": sum(float(weight.float().abs().sum()) for key, weight in adapter.items() if "lora_B" in key),
            "differences": [row["sampler/logp_difference"] for row in metrics if "sampler/logp_difference" in row],
            "evaluations": sorted(path.stem for path in (run.path / "eval").glob("*.json")),
            "checkpointing": [trainer.accelerator.unwrap_model(trainer.model).is_gradient_checkpointing for trainer in TRAINERS],
            "engine": json.loads((run.path / "env.json").read_text()).get("engine"),
            "engines": [engine.calls for engine in engine_stand_in.LLM.made], "export": exported,
            "mixed": [[*key, count] for key, count in gpu.mixed.most_common() if key[0] == "train" and "importlib" not in key[2]],
        }  # fmt: skip


def export(run: Any, name: str) -> dict[str, Any]:
    """Export in this process, as kit/export/job.py does."""
    from kit.export.job import export as make
    from kit.export.request import ExportRequest
    from kit.runner.console import Reporter

    return make(run, ExportRequest(format=name).for_run(run), Reporter(True))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    engine_stand_in.install(place / "packages")
    for name in sys.argv[2:]:
        try:
            outcome = travel(name, place)
        except BaseException as error:
            outcome = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        (place / f"{name}.json").write_text(json.dumps(outcome, default=str))
