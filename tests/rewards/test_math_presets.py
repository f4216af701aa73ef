import pytest

from rewards import PresetError, build_samples, load

RIGHT = "<reasoning>\n6 x 12\n</reasoning>\n<answer>\n72\n</answer>\n"


def evaluate(name, *completions, reference="72", lengths=None, prompts=None, params=None, **columns):
    size = len(completions)
    ids = [[1] * n for n in lengths] if lengths else None
    columns = {key: [value] * size for key, value in columns.items()}
    samples = build_samples(
        prompts or ["6 x 12?"] * size, list(completions), ids, reference=[reference] * size, **columns
    )
    return load(name, **(params or {})).score(samples)


def test_xml_gives_the_five_rewards_of_the_notebooks():
    evaluation = evaluate("gsm8k-xml", RIGHT)
    assert evaluation.totals == [4.0]  # 2 + 4 x 0.5
    assert load("gsm8k-xml").weights == {
        "correctness": 2.0, "integer": 0.5, "strict_format": 0.5, "soft_format": 0.5, "tags": 0.5,
    }  # fmt: skip


def test_xml_formats_differ_in_lines_only():
    one_line = "<reasoning>6 x 12</reasoning><answer>72</answer>"
    evaluation = evaluate("gsm8k-xml", RIGHT, one_line, RIGHT + "junk", "72")
    assert evaluation.values["strict_format"] == [1.0, 0.0, 0.0, 0.0]
    assert evaluation.values["soft_format"] == [1.0, 1.0, 0.0, 0.0]
    assert evaluation.values["correctness"] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "value"), [("72", 1), ("-72", 1), ("1,072", 1), ("72.0", 0), ("7²", 0), ("x", 0), ("72!", 0)]
)
def test_xml_integers_have_signs_and_separators(answer, value):
    assert evaluate("gsm8k-xml", RIGHT.replace("\n72\n", f"\n{answer}\n")).values["integer"] == [value]


def test_verify_pays_for_a_box_only_when_asked_for():
    texts = (r"\boxed{72}", r"\boxed{70}", "72", r"\boxed{")
    assert evaluate("math-verify", *texts, params={"format_weight": 0.1}).totals == [1.1, 0.1, 0.0, 0.0]
    assert evaluate("math-verify", *texts).totals == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(PresetError, match="outweigh"):
        load("math-verify", format_weight=1.1)


def test_r1_zero_adds_accuracy_layout_and_language():
    good = "<think>six times twelve</think><answer>72</answer>"
    evaluation = evaluate(
        "r1-zero", good, good.replace("six", "六"), good.replace("72", "70"), good + "!", "seventy-two"
    )  # language of the second: 11 Latin letters in `times twelve`, 1 other
    assert evaluation.totals == pytest.approx([1.3, 1.2 + 0.1 * 11 / 12, 0.3, 0.1, 0.1])
    assert evaluation.statuses["accuracy"] == ["ok", "ok", "wrong", "format", "format"]


def test_every_checker_says_whether_a_completion_is_correct():
    right = build_samples(["?"], [r"\boxed{72}"], [[1] * 5000], reference=["72"])
    for name in ("math-verify", "math-dapo"):
        assert load(name).is_correct(right) == [True], name
