"""After running out of memory, a step in smaller parts is the same step. Failures are planted at their real sources."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_qwen import TARGETS
from torch import Tensor

import rewards
from kit.config import EvaluationConfig, GenerationConfig, ModelConfig
from kit.errors import ModelError
from kit.evaluation.heldout import HeldOut
from kit.models.failures import BackoffEvent, BatchSizeBackoff, explained, is_out_of_memory
from kit.models.loading import find_model, load_model
from kit.trainer.policy_loss import MicroBatch
from kit.trainer.trainer import HookedGRPOTrainer

from .rollouts import KL, NewTrainer, adapter, assert_gradients_close, train

pytestmark = pytest.mark.survival

CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "34359738368 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.56 GiB"


@pytest.fixture(scope="module")
def new_trainer(new_trainer: NewTrainer) -> NewTrainer:
    """Return a factory of trainers without packing, so that the number of rows of a pass can be counted."""

    def make(*, extra: dict[str, Any] | None = None, **options: Any) -> Any:
        return new_trainer(extra={"packing": False, "skip_flat_groups": False, **(extra or {})}, **options)

    return make


class Shortage(torch.autograd.Function):
    """The identity, which raises an out-of-memory error in its backward pass if `due(rows)` is true."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, due: Callable[[int], bool]) -> Tensor:
        ctx.due, ctx.rows = due, len(values)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.due(ctx.rows):
            raise torch.OutOfMemoryError(CUDA_MESSAGE)
        return gradient, None


class Machine:
    """A simulated machine that is out of memory if a pass has more than `rows` rows at the first layer.

    `place` names the kind of pass. With `from_call`, it fails only from that pass on, so that earlier micro-batches succeed.
    """

    def __init__(self, place: str, rows: int, from_call: int = 0) -> None:
        self.place, self.rows, self.from_call = place, rows, from_call
        self.calls = self.failures = 0
        self.seen: list[int] = []

    def due(self, rows: int) -> bool:
        self.calls += 1
        short = rows > self.rows and self.calls > self.from_call
        self.failures += short
        return short

    @contextmanager
    def of(self, trainer: Any) -> Iterator[Machine]:
        layer = trainer.accelerator.unwrap_model(trainer.model).get_decoder().layers[0]
        handle = layer.register_forward_hook(self._after)
        try:
            yield self
        finally:
            handle.remove()

    def _after(self, layer: Any, inputs: Any, output: Tensor) -> Tensor:
        kind = "forward" if torch.is_grad_enabled() else "no_grad"
        if kind == "forward":
            self.seen.append(len(output))
        if self.place == "backward" and kind == "forward":
            return Shortage.apply(output, self.due)  # type: ignore[no-any-return, no-untyped-call]
        if self.place == kind and self.due(len(output)):
            raise RuntimeError(CPU_MESSAGE)
        return output


def stepped(
    trainer: Any, machine: Machine | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Train; return the gradient before the first optimiser step, the final weights, and the log of each step."""
    gradients: dict[str, Tensor] = {}
    clip = trainer._clip_grad_norm

    def watched(model: Any) -> Any:
        if not gradients:
            named = dict(trainer.model.named_parameters())
            gradients.update({name: w.grad.clone() for name, w in named.items() if w.requires_grad})
            if trainer.critic is not None:
                gradients.update({f"head.{n}": w.grad.clone() for n, w in trainer.critic.head.named_parameters()})
        return clip(model)

    trainer._clip_grad_norm = watched
    if machine is None:
        train(trainer)
    else:
        with machine.of(trainer):
            train(trainer)
    logs = {f"{line['step']}/{name}": value for line in trainer.state.log_history for name, value in line.items()}
    return gradients, adapter(trainer), {name: value for name, value in logs.items() if "time" not in name}


def assert_logs_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    left_out = ("runtime", "per_second", "seconds/", "flos", "memory")
    names = [name for name in expected if not any(part in name for part in left_out)]
    assert {"1/loss", "1/entropy", "1/ratio/p50", "1/grad_norm"} <= set(names)
    for name in names:
        assert actual[name] == pytest.approx(expected[name], rel=2e-4, abs=2e-6, nan_ok=True), name


# Objectives that look across completions or depend on how the window is divided, and the plain recipes.
ACROSS = {
    "dapo": "dapo",
    "bnpo": "bnpo",
    "ppo": {
        "recipe": "ppo",
        "regularizers": [{"name": "kl", "coef": "adaptive_kl(target=0.001, horizon=40, start=0.1)"}],
    },
    "high_entropy_only": {
        "recipe": "grpo",
        "weights": ["high_entropy_only"],
        "regularizers": [{"name": "entropy_bonus", "coef": 0.01}],
    },
    "full_kl": {"recipe": "bnpo", "regularizers": [{"name": "kl", "estimator": "full", "coef": 0.1}]},
}


@pytest.mark.parametrize(("name", "place"), [("bnpo", "forward"), *((name, "backward") for name in ACROSS)])
def test_the_step_in_parts_is_the_undisturbed_one(new_trainer: NewTrainer, name: str, place: str) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 2, "num_iterations": 2}
    want = stepped(new_trainer(objective=ACROSS[name], **settings))
    events: list[BackoffEvent] = []
    trainer = new_trainer(objective=ACROSS[name], extra={"memory": BatchSizeBackoff(events.append)}, **settings)
    machine = Machine(place, rows=2, from_call=1)  # the second micro-batch of the first step
    got = stepped(trainer, machine)
    assert machine.failures == 1
    assert [(each.work, each.rows) for each in events] == [("training", 2)]
    assert_gradients_close(got[0], want[0], rtol=2e-5)
    for weight, value in want[1].items():
        assert torch.allclose(got[1][weight], value, rtol=0, atol=5e-5), weight
    assert_logs_equal(got[2], want[2])


def test_a_token_budget_and_halving_go_together(new_trainer: NewTrainer) -> None:
    """From the third pass on, a part of the token budget is still too large, so the number of rows is halved."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 2, "per_device_train_batch_size": 8}
    objective = ACROSS["high_entropy_only"]
    want = stepped(new_trainer(objective=objective, unchecked=True, num_iterations=2, **settings))
    memory = BatchSizeBackoff()
    saving = {"memory": memory, "token_budget": 100, "skip_flat_groups": True}
    trainer = new_trainer(objective=objective, unchecked=True, num_iterations=2, extra=saving, **settings)
    machine = Machine("backward", rows=2, from_call=2)
    got = stepped(trainer, machine)
    assert machine.failures >= 1
    assert memory.state_dict()["training"] <= 2
    assert max(machine.seen[:2]) > 2
    assert_gradients_close(got[0], want[0], rtol=2e-5)
    for weight, value in want[1].items():
        assert torch.allclose(got[1][weight], value, rtol=0, atol=5e-5), weight


def test_a_finished_step_breaks_the_row_and_one_completion_is_the_least() -> None:
    memory = BatchSizeBackoff()
    for _ in range(2):
        memory.halve("training", 64, MemoryError())
    memory.finished()
    memory.halve("training", 64, MemoryError())
    assert (memory.rows("training", 64), memory.rows("training", 5), memory.rows("scoring", 5)) == (8, 5, 5)
    memory.finished()
    memory.load_state_dict({"training": 1, "nothing": 3})
    assert memory.state_dict() == {"training": 1}
    with pytest.raises(ModelError, match="in training, with 1 completion at once"):
        memory.halve("training", 64, MemoryError())
    odd = BatchSizeBackoff()
    odd.halve("evaluation", 5, MemoryError())
    assert odd.rows("evaluation", 5) == 3


def test_generation_and_scoring_are_halved_on_out_of_memory(new_trainer: NewTrainer) -> None:
    greedy = {"top_k": 1, "gradient_accumulation_steps": 2, "max_steps": 2, "num_iterations": 2}
    objective = {"recipe": "reinforce_pp", "regularizers": [KL]}
    want = stepped(new_trainer(objective=objective, unchecked=True, **greedy))

    events: list[BackoffEvent] = []
    trainer = new_trainer(
        objective=objective, unchecked=True, extra={"memory": BatchSizeBackoff(events.append)}, **greedy
    )
    got = stepped(trainer, Machine("no_grad", rows=4))
    assert [(each.work, each.rows) for each in events] == [("generation", 4)]
    assert_logs_equal(got[2], want[2])

    events.clear()
    trainer = new_trainer(
        objective=objective, unchecked=True, extra={"memory": BatchSizeBackoff(events.append)}, **greedy
    )
    trainer.memory.load_state_dict({"generation": 2})
    got = stepped(trainer, Machine("no_grad", rows=2))
    assert [(each.work, each.rows) for each in events] == [("scoring", 2)]
    assert_logs_equal(got[2], want[2])

    with pytest.raises(ModelError, match="3 times in a row, the last time in generation, with 2 completions"):
        stepped(
            new_trainer(objective="dapo", extra={"memory": BatchSizeBackoff()}, **greedy), Machine("no_grad", rows=0)
        )


def test_dropout_is_the_same_in_both_passes_over_a_part(new_trainer: NewTrainer) -> None:
    lora = LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False, lora_dropout=0.5)
    memory = BatchSizeBackoff()
    memory.load_state_dict({"training": 2})
    trainer = new_trainer(
        objective=ACROSS["high_entropy_only"], unchecked=True, extra={"memory": memory, "peft_config": lora}
    )
    score, passes = trainer.scorer.score, []

    def watched(model: Any, rows: Any, *options: Any) -> Any:
        result = score(model, rows, *options)
        passes.append((torch.is_grad_enabled(), result.logps.detach()))
        return result

    trainer.scorer.score = watched
    train(trainer)
    assert [graph for graph, _ in passes] == [False, False, True, True]
    assert all(torch.equal(passes[index][1], passes[index + 2][1]) for index in (0, 1))
    assert not torch.equal(
        *(score(trainer.model.train(), MicroBatch(trainer._buffered_inputs[0]).rows).logps for _ in "12")
    )


def test_a_failed_attempt_keeps_no_tensors(new_trainer: NewTrainer) -> None:
    alive: list[weakref.ref[Tensor]] = []
    trainer = new_trainer(objective="dapo", unchecked=True, extra={"memory": BatchSizeBackoff()})
    score, freed = trainer.scorer.score, []

    def watched(model: Any, rows: Any, *options: Any) -> Any:
        freed.append([reference() is None for reference in alive])
        result = score(model, rows, *options)
        alive.append(weakref.ref(result.logps))
        return result

    trainer.scorer.score = watched
    gc.disable()  # so that the test does not depend on a garbage collection
    try:
        stepped(trainer, Machine("backward", rows=2))
    finally:
        gc.enable()
    assert freed[1] == [True]


def test_other_errors_and_updates_are_not_retried(new_trainer: NewTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")

    trainer = new_trainer(objective="dapo", extra={"memory": BatchSizeBackoff()})
    monkeypatch.setattr(trainer.objective, "loss", broken)
    with pytest.raises(RuntimeError, match="size of tensor a"):
        train(trainer)
    assert trainer.memory.in_a_row == 0

    def short(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(CUDA_MESSAGE)

    trainer = new_trainer(objective="dapo", extra={"memory": BatchSizeBackoff()})
    trainer.create_optimizer()
    monkeypatch.setattr(trainer.optimizer, "step", short)  # an optimiser step cannot be repeated
    with pytest.raises(ModelError, match=r"out of memory.*adamw_8bit"), explained():
        train(trainer)
    assert trainer.memory.in_a_row == 0


# --- a complete run ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Machine]:
    """Return `make(place, rows)`: trainers built afterwards train on a simulated `Machine`."""

    def make(place: str, rows: int) -> Machine:
        machine, begin = Machine(place, rows), HookedGRPOTrainer.train

        def started(trainer: Any, *args: Any, **named: Any) -> Any:
            with machine.of(trainer):
                return begin(trainer, *args, **named)

        monkeypatch.setattr(HookedGRPOTrainer, "train", started)
        return machine

    return make


def test_a_run_halves_its_micro_batch_and_records_it(
    attempt: Any, small_machine: Callable[[str, int], Machine]
) -> None:
    rows = (
        "optimisation.packing=false",
        "optimisation.skip_flat_groups=false",
    )  # one completion per row, as the simulated machine counts
    want = attempt("run.id=whole", *rows).folder.metrics()
    machine = small_machine("backward", 4)
    divided = attempt("run.id=parts", "run.save_every=1", "run.keep_checkpoints=5", *rows)
    assert (divided.code, machine.failures) == (0, 1)
    assert divided.folder.status()["state"] == "finished"
    events = [event for event in divided.folder.events() if event["kind"] == "out_of_memory"]
    assert [(e["step"], e["work"], e["rows"], e["micro_batch_size"]) for e in events] == [(0, "training", 4, 4)]
    assert "CUDA out of memory" in events[0]["reason"]
    assert "continuing with 4 completions at once (the same step in smaller parts)" in divided.shown
    got = divided.folder.metrics()
    for line, expected in zip(got, want, strict=True):
        for name in ("loss", "reward", "grad_norm", "entropy", "completions/mean_length"):
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    progress = [json.loads((path / "progress.json").read_text()) for path in divided.folder.checkpoints]
    assert [each["parts"]["memory"] for each in progress] == [{"training": 4}] * 2


def test_an_evaluation_goes_on_with_smaller_batches(tree: Any, model_folder: Any) -> None:
    config = ModelConfig(name=str(model_folder), dtype="float32")
    loaded = load_model(find_model(config, chat=True), config)
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1 ="}], "reference": str(n + 1)} for n in range(6)]
    settings = EvaluationConfig(k=1, batch_size=6), GenerationConfig(max_completion_tokens=4, top_k=1)
    preset, events = rewards.load("length-target"), []

    def score(memory: BatchSizeBackoff | None, rows_at_once: int | None) -> Any:
        def short(layer: Any, inputs: Any, output: Tensor) -> None:
            if rows_at_once is not None and len(output) > rows_at_once:
                raise RuntimeError(CPU_MESSAGE)

        handle = loaded.model.get_decoder().layers[0].register_forward_hook(short)
        try:
            return HeldOut(rows, preset, loaded.tokenizer, *settings, memory=memory).score(loaded.model)
        finally:
            handle.remove()

    want = score(None, None)
    got = score(BatchSizeBackoff(events.append), 3)
    assert [(each.work, each.rows) for each in events] == [("evaluation", 3)]
    assert got["samples"] == want["samples"]
    with pytest.raises(RuntimeError, match="can't allocate"):
        score(None, 3)
    with pytest.raises(ModelError, match=r"in evaluation, with 2 completions at once.*Lower evaluation.batch_size"):
        score(BatchSizeBackoff(), 0)


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError(CUDA_MESSAGE), True),
        (RuntimeError(CPU_MESSAGE), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("the judge said: out of memory"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, short: bool) -> None:
    assert is_out_of_memory(error) == short
