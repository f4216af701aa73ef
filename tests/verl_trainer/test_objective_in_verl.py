"""`grpo-kit scale --to verl`: loss and advantages, called by verl, against the kit's and verl's own."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from kit.config import load_config
from kit.config.loading import leaves
from kit.objective import Objective
from kit.objective.batch import RewardBatch, TokenBatch
from kit.objective.recipes import recipe_names
from kit.objective.reduction import LossScale
from kit.objective.verl import AGGREGATIONS, NAME, advantage_estimator, carried_by_verl, policy_loss
from kit.planning.scaling import scale

pytestmark = pytest.mark.verl
ROWS, TOKENS, LONGEST = 8, 12, 16
CARRIED = [name for name in recipe_names() if name not in ("gdpo", "ppo", "sdpo", "opd", "grpo_sdpo")]


@pytest.fixture(scope="module")
def core() -> Any:
    """verl's module `core_algos`, whose registries of losses and advantages are restored afterwards."""
    from verl.trainer.ppo import core_algos

    losses, advantages = dict(core_algos.POLICY_LOSS_REGISTRY), dict(core_algos.ADV_ESTIMATOR_REGISTRY)
    yield core_algos
    for registry, before in (
        (core_algos.POLICY_LOSS_REGISTRY, losses),
        (core_algos.ADV_ESTIMATOR_REGISTRY, advantages),
    ):
        registry.clear()
        registry.update(before)


def registered(core: Any, objective: Objective) -> tuple[Any, dict[str, Any]]:
    """Register loss and advantages in verl; return the loss from verl's registry, and the keys of verl's configuration."""
    spec, keys, _ = carried_by_verl(objective)
    if spec["reduction"]["name"] == "fixed_length":
        spec["reduction"]["length"] = LONGEST
    adapted = Objective.from_spec(spec)
    core.register_policy_loss(NAME)(policy_loss(adapted))
    core.ADV_ESTIMATOR_REGISTRY.pop(NAME, None)
    core.register_adv_est(NAME)(advantage_estimator(adapted))
    return core.get_policy_loss_fn(keys["actor_rollout_ref.actor.policy_loss.loss_mode"]), keys


def tensors(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    lengths = torch.tensor([12, 3, 7, 1, 9, 12, 5, 8])
    mask = torch.arange(TOKENS) < lengths[:, None]
    old = torch.randn(ROWS, TOKENS) - 2
    return {
        "old_log_prob": old,
        "log_prob": old + 0.4 * torch.randn(ROWS, TOKENS),
        "advantages": torch.randn(ROWS, 1).expand(ROWS, TOKENS) * mask,
        "response_mask": mask,
    }


def config(**info: Any) -> Any:
    return SimpleNamespace(global_batch_info=info)


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> tuple[float, Tensor]:
    leaf = at.clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad


@pytest.mark.parametrize("recipe", CARRIED)
def test_the_loss_in_verl_is_ours_with_its_gradient(recipe: str, core: Any) -> None:
    objective = Objective.from_spec(recipe)
    function, _ = registered(core, objective)
    batch = tensors()
    others = {name: batch[name] for name in ("old_log_prob", "advantages", "response_mask")}
    settings = config(dp_size=1, batch_num_tokens=int(batch["response_mask"].sum()), global_batch_size=ROWS)
    actual = gradient(lambda x: function(log_prob=x, config=settings, **others)[0], batch["log_prob"])
    scale = LossScale(1.0, batch["response_mask"].sum(), LONGEST)

    def ours(logps: Tensor) -> Tensor:
        return objective.loss(
            TokenBatch(logps, batch["old_log_prob"], batch["advantages"], batch["response_mask"]), scale
        ).loss

    expected = gradient(ours, batch["log_prob"])
    assert actual[0] == expected[0]
    assert torch.equal(actual[1], expected[1])
    assert actual[1].abs().sum() > 0
    metrics = function(**batch, config=settings)[1]
    assert all(name.startswith("actor/") and np.isfinite(value) for name, value in metrics.items())
    tokens = batch["response_mask"].sum()
    per_token = objective.loss(
        TokenBatch(batch["log_prob"], batch["old_log_prob"], batch["advantages"], batch["response_mask"]),
        LossScale(1.0, tokens, LONGEST),
    ).metrics["objective/clip"]
    assert metrics["actor/objective/clip"] == per_token.value.item()


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("processes", [1, 2])
def test_verls_own_loss_and_ours_are_one(mode: str, processes: int, core: Any) -> None:
    """verl's vanilla loss has a dual clip. With `dual_clip`, each reduction equals it for any division of a mini-batch."""
    from verl.workers.config import ActorConfig

    objective = Objective.from_spec(
        {"recipe": "grpo", "clip": {"name": "dual_clip", "c": 3.0, "eps_high": 0.3}, "reduction": mode}
    )
    function, keys = registered(core, objective)
    batch = tensors(1)
    tokens = int(batch["response_mask"].sum())

    def total(loss: Any, parts: int) -> Callable[[Tensor], Tensor]:
        def summed(logps: Tensor) -> Tensor:
            actor = ActorConfig(
                strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_high=0.3,
                loss_scale_factor=LONGEST if mode == "fixed_length" else None,
            )  # fmt: skip
            actor.global_batch_info.update(
                dp_size=processes, batch_num_tokens=tokens, global_batch_size=ROWS,
                loss_scale_factor=actor.loss_scale_factor,
            )  # fmt: skip
            pieces = []
            for rows in torch.arange(ROWS).chunk(parts):
                part = {name: (logps if name == "log_prob" else value)[rows] for name, value in batch.items()}
                average = keys["actor_rollout_ref.actor.loss_agg_mode"]
                pieces.append(loss(**part, config=actor, loss_agg_mode=average)[0])
            return torch.stack(pieces).sum()

        return summed

    expected = gradient(total(core.get_policy_loss_fn("vanilla"), 1), batch["log_prob"])
    for parts in (1, 2, 4):
        if mode == "token_mean" and parts > 1:
            continue  # TRL's bnpo averages per micro-batch; verl has no such mode
        actual = gradient(total(function, parts), batch["log_prob"])
        assert actual[0] == pytest.approx(expected[0], rel=1e-5)
        torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("hook", "verls"), [("group_zscore", "grpo_vectorized"), ("leave_one_out", "rloo"), ("opo", "opo")]
)
def test_advantages_through_verls_trainer_are_ours_and_verls(hook: str, verls: str, core: Any) -> None:
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    objective = Objective.from_spec({"recipe": "grpo", "advantage": hook})
    registered(core, objective)
    mask = tensors()["response_mask"]
    rewards = torch.zeros(ROWS, TOKENS)
    ends = mask.sum(-1) - 1
    rewards[torch.arange(ROWS), ends] = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.2, 0.9, 0.0])
    prompts = np.array(["b", "a", "b", "a", "b", "a", "b", "a"], dtype=object)

    def computed(name: str) -> Tensor:
        data = DataProto.from_dict(
            {"token_level_rewards": rewards.clone(), "response_mask": mask.float()}, {"uid": prompts}
        )
        return compute_advantage(data, name, config=OmegaConf.create({})).batch["advantages"]

    group = torch.tensor([0, 1] * 4)
    batch = RewardBatch(rewards.sum(-1), group, lengths=mask.sum(-1).float(), mask=mask, token_rewards=rewards)
    expected = objective.compute_advantages(batch)[:, None] * mask
    assert torch.equal(computed(NAME), expected)
    assert expected.abs().sum() > 0
    torch.testing.assert_close(computed(verls), expected, rtol=1e-3, atol=1e-3)  # std + 1e-6 in verl, + 1e-4 here


@pytest.mark.parametrize("weight", [
    {"mode": "token_truncate", "max": 1.2}, {"mode": "token_mask", "min": 0.8, "max": 1.2}, {"mode": "token_mask", "max": 1.1},
    {"mode": "sequence_mask", "max": 1.5}, {"mode": "sequence_truncate", "max": 1.1},
])  # fmt: skip
def test_the_samplers_correction_is_verls_with_the_same_weights(weight: dict[str, Any], core: Any) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    objective = Objective.from_spec({"recipe": "dapo", "weights": [{"name": "sampler_correction", **weight}]})
    function, keys = registered(core, objective)
    inputs = tensors(2)
    sampler = inputs["old_log_prob"] + 0.3 * torch.randn(ROWS, TOKENS)
    settings = {name.rpartition(".")[2]: value for name, value in keys.items() if "rollout_correction" in name}
    weights, _ = compute_rollout_correction_weights(
        inputs["old_log_prob"] - sampler, inputs["response_mask"].float(), **settings
    )
    actual = function(**inputs, config=config(), rollout_is_weights=weights)[0]
    batch = TokenBatch(
        inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], inputs["response_mask"], sampler_logps=sampler
    )
    expected = objective.loss(batch, LossScale(1.0, inputs["response_mask"].sum())).loss
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    plain = function(**inputs, config=config())[0]
    assert plain.item() != pytest.approx(expected.item(), rel=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_the_kl_to_a_reference_is_verls_with_the_same_coefficient(estimator: str, core: Any) -> None:
    term = {"name": "kl", "coef": 0.1, "estimator": estimator}
    objective = Objective.from_spec({"recipe": "grpo", "regularizers": [term]})
    function, keys = registered(core, objective)
    inputs = tensors(3)
    reference = inputs["old_log_prob"] + 0.2 * torch.randn(ROWS, TOKENS)
    actor = {
        name.rpartition(".")[2]: value for name, value in keys.items() if name.startswith("actor_rollout_ref.actor.")
    }
    divergence = core.kl_penalty(inputs["log_prob"], reference, actor["kl_loss_type"])
    kl = core.agg_loss(divergence, inputs["response_mask"].float(), actor["loss_agg_mode"])
    actual = function(**inputs, config=config())[0] + actor["kl_loss_coef"] * kl
    batch = TokenBatch(
        inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], inputs["response_mask"], ref_logps=reference
    )
    assert actual.item() == pytest.approx(objective.loss(batch).loss.item(), rel=1e-5)
    assert actor["use_kl_loss"] is True


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files for verl of a run similar to the preset gsm8k."""
    folder = tmp_path_factory.mktemp("scaled")
    rows = "".join(f'{{"question": "What is {n} + 1?", "answer": "#### {n + 1}"}}\n' for n in range(40))
    (folder / "rows.jsonl").write_text(rows)
    run = {
        "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct", "lora": {"targets": ["q_proj", "v_proj"]}},
        "data": {"source": str(folder / "rows.jsonl"), "heldout": 8, "system_prompt": "Think."},
        "reward": {"preset": "gsm8k-hash"},
        "objective": {"recipe": "dr_grpo", "regularizers": [{"name": "kl", "coef": 0.01}, {"name": "entropy_bonus"}]},
        "generation": {"num_generations": 4},
        "optimisation": {
            "batch_size": 32,
            "micro_batch_size": 4,
            "optimizer": "adamw_8bit",
            "gradient_checkpointing": True,
        },
    }
    scale(load_config(run), folder / "out", gpus=2).write(folder / "out", force=False)
    return folder / "out"


def test_verl_composes_the_configuration_and_knows_every_key(scaled: Path) -> None:
    from hydra import compose, initialize_config_dir
    from verl.utils.config import omega_conf_to_dataclass

    with initialize_config_dir(str(scaled), version_base=None):
        composed = compose("verl", return_hydra_config=False)
    plain = Path(sys.modules["verl"].__file__ or "").parent / "trainer/config"
    with initialize_config_dir(str(plain), version_base=None):
        default = compose("ppo_trainer")
    written = yaml.safe_load((scaled / "verl.yaml").read_text())
    for key, value in leaves({name: part for name, part in written.items() if name not in (NAME, "hydra", "defaults")}):
        place: Any = default
        if ".env_vars" in key or "apply_chat_template_kwargs" in key:
            continue
        for part in key.split("."):
            assert part in place.keys(), f"verl has no {key}"  # noqa: SIM118 (`in` is False for a missing value)
            place = place._get_node(part)
        node: Any = composed
        for part in key.split("."):
            node = node[part]
        assert node == value, key
    actor = omega_conf_to_dataclass(composed.actor_rollout_ref.actor)
    assert (actor.policy_loss.loss_mode, actor.entropy_coeff, actor.loss_scale_factor) == (NAME, 0.01, 256)
    assert omega_conf_to_dataclass(composed.actor_rollout_ref.rollout).n == 4
    assert omega_conf_to_dataclass(composed.algorithm).adv_estimator == NAME


def test_every_process_of_verl_has_the_objective_and_the_reward(scaled: Path) -> None:
    """Start a process with the environment variables that the YAML file sets for Ray, and call verl's functions there."""
    variables = yaml.safe_load((scaled / "verl.yaml").read_text())["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]
    code = f"""
import torch, numpy, datasets
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.reward import get_custom_reward_fn
from omegaconf import OmegaConf
loss = core_algos.get_policy_loss_fn("{NAME}")
row = datasets.load_dataset("parquet", data_files="{scaled}/train.parquet")["train"][0]
one = torch.ones(2, 4)
print(loss(-one, -one, one * torch.tensor([[1.0], [-3.0]]), one.bool())[0].item())
print(core_algos.get_adv_estimator_fn("{NAME}")(one, one, numpy.array(["a", "b"]))[0].sum().item())
score = get_custom_reward_fn(OmegaConf.load("{scaled}/verl.yaml"))
print([message["role"] for message in row["prompt"]])
for text in (row["reward_model"]["ground_truth"], "#### 999"):
    print(score(row["data_source"], text, row["reward_model"]["ground_truth"], row["extra_info"])["accuracy"])
"""
    cache = {"HF_DATASETS_CACHE": str(scaled / "cache")}
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables, **cache},
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = out.stdout.splitlines()
    # Dr. GRPO: (sum over 2 x 4 tokens of -A) / (2 rows x 256 tokens).
    assert [float(line) for line in (lines[0], lines[1])] == [pytest.approx(8 / 512), 0.0], out.stderr[-2000:]
    assert lines[2:] == ["['system', 'user']", "1.0", "0.0"], out.stderr[-2000:]


def test_a_file_without_the_objective_is_refused(scaled: Path, tmp_path: Path) -> None:
    from kit.errors import ConfigError
    from kit.objective.verl import register

    tree = copy.deepcopy(yaml.safe_load((scaled / "verl.yaml").read_text()))
    del tree[NAME]
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match="scale CONFIG --to verl"):
        register(tmp_path / "verl.yaml")


# A reward loop worker of verl decodes a batch, calls the reward file, and collects the scores.
REWARD_LOOP = r"""
import json, sys
import numpy as np, torch
from hydra import compose, initialize_config_module
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

model, rewards = sys.argv[1:]
rows = [("so \\boxed{72}", "72"), ("\\boxed{70}", "72"), ("\\boxed{2 + 70}", "72"), ("\\boxed{144/2}", "72.0")] * 4
tokenizer = AutoTokenizer.from_pretrained(model)
ids = [tokenizer(text)["input_ids"] for text, _ in rows]
responses = torch.full((len(rows), max(map(len, ids))), tokenizer.pad_token_id)
mask = torch.zeros(len(rows), 4 + responses.shape[1], dtype=torch.long)
for at, tokens in enumerate(ids):
    responses[at, : len(tokens)] = torch.tensor(tokens)
    mask[at, : 4 + len(tokens)] = 1
columns = {
    "data_source": ["mine"] * len(rows),
    "reward_model": [{"style": "rule", "ground_truth": truth} for _, truth in rows],
    "extra_info": [{"question": "What is $2 + 70$?", "index": at} for at in range(len(rows))],
}
data = DataProto.from_dict(
    tensors={"prompts": torch.ones(len(rows), 4, dtype=torch.long), "responses": responses, "attention_mask": mask},
    non_tensors={name: np.array(column, dtype=object) for name, column in columns.items()},
)
scores = {}
for manager in ("naive", "dapo"):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[
            f"actor_rollout_ref.model.path={model}", f"reward.reward_manager.name={manager}",
            f"reward.custom_reward_function.path={rewards}", "reward.custom_reward_function.name=compute_score",
        ])
    worker = RewardLoopWorker(config)
    scores[manager] = worker.loop.run_until_complete(worker.compute_score_batch(data))
print(json.dumps(scores, default=float))
"""


def test_verls_reward_loop_scores_with_a_file_of_the_rewards(tmp_path: Path) -> None:
    """Run verl's reward loop workers and reward managers with verl's configuration."""
    (tmp_path / "mine.py").write_text('from rewards import load\n\ncompute_score = load("math-verify").verl()\n')
    model = Path(__file__).parents[2] / "kit/models/shipped/embedded"
    command = [sys.executable, "-W", "ignore", "-c", REWARD_LOOP, model, tmp_path / "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    for manager in ("naive", "dapo"):
        scores = [answer["reward_score"] for answer in answers[manager]]
        assert scores == [1.0, 0.0, 0.0, 1.0] * 4, manager  # right, wrong, the formula copied from the question, right
        assert [answer["reward_extra_info"]["accuracy"] for answer in answers[manager]] == scores
