"""Two processes of a launcher form one run: the steps of one process, one directory, one end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_qwen import tiny_run

from kit.config import load_config
from kit.errors import ConfigError
from kit.runner.distributed import check_division
from kit.runs.store import RunDir

pytestmark = pytest.mark.survival

ROOT = Path(__file__).parents[1]

# Reward file. It replaces generation by completions that depend only on step and position, and can plant a SIGTERM.
MISHAPS = """
import os
import random
import signal

from kit.trainer.trainer import HookedGRPOTrainer

RANK = int(os.environ.get("RANK", "0"))


def placed(self, prompt_ids, images, fields, *rest, **keywords):
    step, made = self.state.global_step + 1, []
    for row in range(len(prompt_ids)):
        draw = random.Random(f"{step}/{self.accelerator.process_index * len(prompt_ids) + row}")
        made.append([draw.randrange(20, 60) for _ in range(draw.randint(2, 9))] + [self.eos_token_ids[0]])
    if os.environ.get("MISHAP") == f"stop {step} {RANK}":
        os.kill(os.getpid(), signal.SIGTERM)
    return made, None


HookedGRPOTrainer._generate_single_turn = placed


def score(completion_ids, **_):
    return [sum(place * token for place, token in enumerate(ids, 1)) % 101 / 101 for ids in completion_ids]
"""

# Runs are forks of one process, because imports take most of the time.
SCRIPT = """
import os
import sys
import traceback

import torch

torch.set_num_threads(1)
import kit.train
import trl.trainer.grpo_trainer
from kit.runs.worker import serve

YAML, PORT = sys.argv[1], int(sys.argv[2])


def start(overrides, processes, mishap="", port=0, **ways):
    pids = []
    for rank in range(processes):
        pid = os.fork()
        if not pid:
            os.environ["MISHAP"] = mishap
            if processes > 1:
                local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
                os.environ |= {name: str(value) for name, value in local.items()}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT + port)}
            changes = [word for override in overrides for word in ("-o", override)]
            read = lambda source, given: kit.train.read_request(source, given) | ways
            code = 1
            try:
                code = serve(kit.train.main, [YAML, *changes], read=read)
            except Exception:
                traceback.print_exc()
            except SystemExit as end:
                code = end.code
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


print("codes", start(["run.id=one"], 1))
print("codes", start(["run.id=two"], 2, port=2, resume=True))
print("codes", start(["run.id=odd", "optimisation.batch_size=24", "optimisation.micro_batch_size=8"], 2, port=3))
"""


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> dict[str, Any]:
    """A run `two` of two processes, stopped at step 2 by a SIGTERM to the second and resumed, and a run `one` of one process."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "mishaps.py").write_text(MISHAPS)
    tree = tiny_run(
        model_folder,
        folder / "runs",
        data={"heldout": 4},
        reward={"preset": None, "functions": [{"path": f"{folder}/mishaps.py:score"}]},
        objective={"regularizers": [{"name": "kl", "coef": 0.1}]},
        generation={"num_generations": 8, "max_completion_tokens": 12},
        optimisation={"steps": 3, "batch_size": 16, "micro_batch_size": 4},
        evaluation={"before": True, "every": 1, "prompts": 2, "k": 1},
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
    launcher += ["--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    launcher += [f"--main_process_port={free_port()}", "-m", "kit.train", "run.yaml", "-o", "run.id=two"]
    keywords: dict[str, Any] = {"cwd": folder, "capture_output": True, "text": True, "timeout": 240, "check": False}
    first = subprocess.run(launcher, env=environment | {"MISHAP": "stop 2 1"}, **keywords)
    two = RunDir(folder / "runs" / "two")
    assert two.path.is_dir(), first.stderr[-4000:]
    results: dict[str, Any] = {
        "launcher": first,
        "stopped": two.status(),
        "checkpoints": [checkpoint.name for checkpoint in two.checkpoints],
    }
    (folder / "script.py").write_text(SCRIPT)
    script = [sys.executable, "script.py", "run.yaml", str(free_port())]
    second = subprocess.run(script, env=environment, **keywords)
    assert second.returncode == 0, second.stderr[-4000:]
    codes = [json.loads(line) for line in re.findall(r"^codes (.*)$", second.stdout, re.M)]
    results |= {"codes": codes, "shown": second.stderr}
    return results | {name: RunDir(folder / "runs" / name) for name in ("one", "two", "odd")}


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_step(launched: dict[str, Any]) -> None:
    status = launched["stopped"]
    assert (status["state"], status["step"], status["exit"]) == ("stopped", 2, 130), launched["launcher"].stderr[-4000:]
    assert status["reason"] == "SIGTERM"
    assert launched["checkpoints"][-1] == "checkpoint-2"
    assert launched["launcher"].stdout.count("grpo-kit: run 'two'") == 1


@pytest.mark.slow
def test_two_processes_make_the_steps_of_one(launched: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import load_file

    assert launched["codes"][0] == [0]
    assert launched["codes"][1] == [0, 0], launched["shown"][-4000:]
    alone, two = launched["one"], launched["two"]
    assert two.status()["state"] == "finished"
    want, got = alone.metrics(), two.metrics()
    assert [line["step"] for line in got] == [1, 2, 3]
    compared = ["loss", "reward", "reward_std", "grad_norm", "advantage/std", "objective/kl", "entropy"]
    for line, expected_line in zip(got, want, strict=True):
        for metric in (*compared, "completions/mean_length", "num_tokens"):
            assert line[metric] == pytest.approx(expected_line[metric], rel=2e-4, abs=1e-6), (line["step"], metric)
    weights, expected = (load_file(run.adapter / "adapter_model.safetensors") for run in (two, alone))
    start = max(float(value.abs().max()) for key, value in expected.items() if "lora_B" in key)
    assert start > 1e-4  # lora_B starts at zero, so it was trained
    assert all(torch.allclose(weights[key], value, rtol=0, atol=2e-5) for key, value in expected.items())


@pytest.mark.slow
def test_the_directory_is_that_of_one_process(launched: dict[str, Any]) -> None:
    import pyarrow.parquet as pq

    alone, two = launched["one"], launched["two"]
    for path in sorted(alone.completions.glob("*.parquet")):
        want, got = pq.read_table(path).to_pylist(), pq.read_table(two.completions / path.name).to_pylist()
        assert len(got) == len(want) // 2 == 8  # only the first process writes its rows
        texts = [(row["prompt"], row["completion"], row["reference"]) for row in want]
        assert all((row["prompt"], row["completion"], row["reference"]) in texts for row in got)
    assert {path.name for path in two.eval.iterdir()} == {path.name for path in alone.eval.iterdir()}
    arguments = json.loads(two.env.read_text())["trainer_arguments"]
    assert (arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]) == (4, 2)


@pytest.mark.parametrize(
    ("batch", "micro", "processes", "advice"),
    [
        (8, None, 3, "Use a multiple of 12."),
        (8, 4, 3, "Use a multiple of 12."),
        (8, 8, 2, "Use a multiple of 16"),
        (8, None, 2, None),
        (24, 4, 3, None),
    ],
)
def test_a_batch_is_shared_evenly_or_refused(batch: int, micro: int | None, processes: int, advice: str | None) -> None:
    optimisation = {"batch_size": batch, "micro_batch_size": micro}
    config = load_config({"optimisation": optimisation, "generation": {"num_generations": 4}})
    if advice is None:
        check_division(config, processes)
        return
    with pytest.raises(ConfigError, match=re.escape(advice)):
        check_division(config, processes)
