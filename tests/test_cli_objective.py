"""`grpo-kit objective`: list, show and check."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from command_line import run

from kit import objective
from kit.cli.objective import KINDS
from kit.objective.batch import TOKEN_FIELDS
from kit.objective.hook import ENTROPY_IN_LOSS
from kit.objective.recipes import recipe_names
from kit.objective.schedules import schedules

CHANGING = {
    "cosine": "schedule", "linear": "schedule",
    "adaptive_entropy": "controller", "adaptive_kl": "controller",
}  # fmt: skip
SIGN_CLIP = '''"""A newcomer's hook."""

import torch


def sign_clip(batch, power: float = 1.0, both_sides: bool = True):
    """The ratio to a power, pushed by the sign of the advantage alone.

    power > 0. Negative advantages count only with both_sides.
    """
    sign = torch.sign(batch.advantages)
    if not both_sides:
        sign = sign.clamp(min=0.0)
    return -sign * batch.ratio**power
'''
OTHERS = '''import torch

def pull(batch, limit: float = 0.1):
    """Towards the reference, where further than limit."""
    gap = (batch.logps - batch.ref_logps).abs()
    return torch.where(gap > limit, gap, torch.zeros_like(gap))

pull.needs = {"ref_logps"}
pull.kind = "regularizer"

def forgetful(batch):
    return -batch.advantages * (batch.logps - batch.ref_logps).exp()

def lottery(batch):
    return -batch.advantages * batch.ratio * torch.rand_like(batch.logps)

def spread(batch):
    return batch.rewards - batch.rewards.nanmean()

def columns(batch):
    return -batch.advantages * batch.ratio / batch.logps.shape[1] - batch.logps.mean()

def strange(batch):
    return batch.logps

strange.kind = "clipp"

def two_required(batch, power):
    return batch.logps * power

number = 3
'''


@pytest.fixture(autouse=True)
def _in_a_folder_with_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(SIGN_CLIP)
    Path("others.py").write_text(OTHERS)
    Path("broken.py").write_text("def sign_clip(batch:\n    return 1\n")


def results(output: str) -> dict[str, str]:
    """Return the result of each check from the tables that `objective check` prints."""
    names = "|".join(("passed", "failed", "note"))
    return {row[1].strip(): row[2] for row in re.finditer(rf"^ (\S.*?)  +({names})  ", output, re.MULTILINE)}


# --- list ------------------------------------------------------------------------------------------------------------


def test_the_list_names_every_recipe_and_hook_with_defaults_needs_and_source() -> None:
    lines = run("objective", "list").splitlines()
    for name in recipe_names():
        assert any(line.split()[:1] == [name] for line in lines)
    for kind in KINDS:
        for name in getattr(objective, f"{kind}s"):
            assert any(line.split()[:2] == [name, kind] for line in lines)
    (kl,) = [line for line in lines if line.split()[:2] == ["kl", "regularizer"]]
    for word in ("estimator=k3", "coef=0.04", "ref_logps", "arXiv 2402.03300"):
        assert word in kl
    for name, kind in CHANGING.items():
        assert any(line.split()[:2] == [name, kind] for line in lines), name
    assert set(CHANGING) == set(schedules)
    (adaptive,) = [line for line in lines if line.split()[:1] == ["adaptive_kl"]]
    assert "target, horizon=10000, start=0.1" in adaptive
    assert "Multiplies the coefficient after every step" in adaptive


def test_a_kind_can_be_listed_alone() -> None:
    output = run("objective", "list", "--kind", "weight")
    assert "drop_truncated" in output
    assert "ppo_clip" not in output
    assert "dr_grpo" not in output
    assert "Did you mean 'clip'" in run("objective", "list", "--kind", "clips", code=2)
    for kind in ("schedule", "controller"):
        output = run("objective", "list", "--kind", kind)
        assert {name for name in CHANGING if f" {name} " in output} == {n for n, k in CHANGING.items() if k == kind}
        assert "ppo_clip" not in output


# --- show ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedules)
def test_a_schedule_is_shown(name: str) -> None:
    output = run("objective", "show", name)
    assert output.startswith(f"{CHANGING[name]} {name}(")
    assert all(field.name in output for field in dataclasses.fields(schedules[name]) if field.init)
    assert ("any regularizer's coef," if CHANGING[name] == "controller" else "any float hyper-parameter") in output


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_shown_as_yaml_that_can_be_run(name: str) -> None:
    text = run("objective", "show", name).partition("\nloss = ")[0]
    spec = yaml.safe_load(text)["objective"]
    assert objective.Objective.from_spec(spec).to_spec() == objective.Objective.from_spec(name).to_spec()


def test_a_recipe_says_what_it_computes_and_costs() -> None:
    assert "  nothing\n" in run("objective", "show", "dapo")
    ppo = run("objective", "show", "ppo")
    assert "  values: a linear head on the policy's hidden states" in ppo
    changed = run("objective", "show", "grpo", "-o", "regularizers=[{name: kl, estimator: full}, entropy_bonus]")
    assert "  full_kl: one scoring pass of the reference policy" in changed
    assert f"  entropy: {ENTROPY_IN_LOSS}" in changed
    assert "0.04 · full(policy || reference)" in changed
    assert run("objective", "show", "kl").startswith("regularizer kl: coef · estimator(policy || reference)\n")


def test_a_hook_of_a_recipes_name_is_shown_by_its_kind() -> None:
    assert "grpo-kit objective show gspo --kind clip" in run("objective", "show", "gspo")
    assert run("objective", "show", "gspo", "--kind", "clip").startswith("clip gspo: -min(s·A")
    assert "No reduction is called 'gspo'" in run("objective", "show", "gspo", "--kind", "reduction", code=2)


def test_a_hook_is_shown_with_docstring_types_defaults_needs_and_costs() -> None:
    output = run("objective", "show", "sampler_correction", "-o", "mode=geometric", "-o", "max=1.01")
    assert "Ratio of the old policy" in output
    assert re.search(r"max +float or null +3 +1\.01", output)
    assert re.search(r"mode +token_truncate or .* +sequence_mask +geometric", output)
    assert f"sampler_logps: {TOKEN_FIELDS['sampler_logps'].cost}" in output
    assert "source: TIS and MIS" in output


def test_what_is_shown_of_a_hook_of_ones_own() -> None:
    output = run("objective", "show", "my.py:sign_clip", "-o", "power=2")
    assert output.startswith("clip my.py:sign_clip\n")
    assert "Negative advantages count only with both_sides." in output
    assert re.search(r"power +float +1 +2\s", output)
    assert re.search(r"both_sides +bool +true +true\s", output)
    assert "It needs no additional fields." in output
    pull = run("objective", "show", "others.py:pull")
    assert pull.startswith("regularizer others.py:pull")
    assert f"ref_logps: {TOKEN_FIELDS['ref_logps'].cost}" in pull


# --- check -----------------------------------------------------------------------------------------------------------


def test_a_newcomers_hook_is_checked_and_then_used() -> None:
    output = run("objective", "check", "my.py:sign_clip", "-o", "power=2")
    assert "clip my.py:sign_clip(power=2, both_sides=true)" in output
    findings = results(output)
    assert set(findings.values()) == {"passed"}
    assert {"runs", "gradient", "extreme ratios"} <= set(findings)
    assert output.rstrip().endswith("No check failed.")
    used = run("validate", "quickstart", "-o", "objective.clip=my.py:sign_clip", "-o", "objective.clip.power=2")
    assert "quickstart can be run." in used


@pytest.mark.parametrize(
    ("function", "check", "words"),
    [
        ("forgetful", "runs", "forgetful.needs = {"),
        ("lottery", "same again", "neither repeated nor resumed"),
        ("columns", "padding", "Count with the mask"),
    ],
)
def test_a_defect_is_found_and_ends_with_code_2(function: str, check: str, words: str) -> None:
    output = run("objective", "check", f"others.py:{function}", code=2)
    assert results(output)[check] == "failed"
    assert words in " ".join(output.split())
    closing = output.partition("error: ")[2]
    assert re.match(rf"clip 'others.py:{function}' failed \d of \d checks: .*{check}", closing)


def test_an_advantage_taken_for_a_clip_gets_the_hint_of_its_kind() -> None:
    assert "--kind regularizer" in run("objective", "check", "others.py:spread", code=2)
    assert "No check failed." in run("objective", "check", "others.py:spread", "--kind", "advantage")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["my.py:sign_clip", "-o", "power=two"], "power must be a number or a schedule, got 'two'"),
        (["my.py:sign_clip", "-o", "powr=2"], "no hyper-parameter 'powr'. Did you mean 'power'"),
        (["my.py:sign_clip", "-o", "power"], "is not an override"),
        (["broken.py:sign_clip"], "fails to load: SyntaxError"),
        (["others.py:two_required"], "has the parameters without default (batch, power)"),
        (["others.py:strange"], "'clipp' is no kind of hook. Did you mean 'clip'"),
        (["dapoo"], "Did you mean 'dapo'"),
        (
            ["reinforce_pp", "-o", "gamma=.9"],
            "has no key 'gamma'. Known: recipe, advantage, clip, weights, regularizers, reduction.",
        ),
        (["linear", "-o", "end=1"], "'linear' is a schedule, not a hook: it is the value of a hyper-parameter."),
        (["adaptive_ki"], "Did you mean 'adaptive_kl'"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(arguments: list[str], words: str) -> None:
    output = run("objective", "check", *arguments, code=2)
    assert output.startswith("error: ")
    assert words in " ".join(output.split())
