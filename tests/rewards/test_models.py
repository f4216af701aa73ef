import copy
import json
import math
import pickle
import sys
import threading
import time
from pathlib import Path

import pytest

from rewards import Context, PresetError, build_samples, load
from rewards.components.local_models import LocalModel
from rewards.components.tone import Courtesy, TidyProse
from rewards.hacks import known_hacks
from rewards.testing import check, golden
from rewards.tiny_models import tiny_classifier, tiny_embedder, tiny_language_model, trial_parameters

PROMPT = "Say something about the film we saw yesterday."
POSITIVE = 1 / (1 + math.exp(-4 * math.tanh(1)))  # 0.9546: the tiny classifier's logit is 4 tanh(1)
ENTAILED = 1 / (1 + 2 * math.exp(-4 * math.tanh(1)))  # 0.9132: against two other labels
NLI = ("contradiction", "neutral", "entailment")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    meanings = {"fox": 1, "vixen": 1, "red": 2, "cat": 3, "big": 4, "one": 5, "72": 6, "70": 7, "or": 8}
    return {
        "semantic-answer": tiny_embedder(root / "embedder", meanings),
        "sentiment": tiny_classifier(root / "sentiment", {"joy": 1.0, "bore": -1.0}),
        "safe-style": tiny_classifier(
            root / "toxicity", {"idiot": 1.0, "friend": -1.0}, labels=("mild", "toxic"), multi_label=True
        ),
        "fluency": tiny_language_model(root / "causal", {"the": 0.5, "sea": 0.25, "was": 0.125, "[": 0.01}),
        "factuality": tiny_classifier(root / "nli", {"rock": 1.0, "cheese": -1.0}, labels=NLI),
    }


def build(folders, name, **params):
    return load(name, model=folders[name], **params)


def evaluate(preset, *completions, prompt=PROMPT, **columns):
    spread = {name: [value] * len(completions) for name, value in columns.items()}
    return preset.score(build_samples([prompt] * len(completions), list(completions), **spread))


def only(evaluation, name):
    return evaluation.values[name], evaluation.statuses[name]


def test_semantic_answers_are_compared_by_meaning(folders):
    preset = build(folders, "semantic-answer")
    # meanings are orthogonal: {red, fox} against {red, cat}: 1 / (sqrt 2 sqrt 2) = 0.5; {big, cat}: 0
    evaluation = evaluate(
        preset, "red fox", "<think>x</think><answer>red vixen</answer>", "red cat", "big cat", reference="red fox"
    )
    values, statuses = only(evaluation, "similarity")
    assert values == pytest.approx([1.0, 1.0, 0.5, 0.0], abs=1e-6)
    assert statuses == ["ok", "ok", "wrong", "wrong"]


def test_the_best_of_several_references_counts(folders):
    preset = build(folders, "semantic-answer")
    assert evaluate(preset, "big cat", reference=["red fox", "big cat"]).totals == [pytest.approx(1.0)]
    assert evaluate(preset, "70", "72", reference=[72]).statuses["similarity"] == ["wrong", "ok"]


def test_rows_without_reference_are_not_applicable_and_unreadable_ones_errors(folders):
    preset = build(folders, "semantic-answer")
    assert only(evaluate(preset, "fox"), "similarity") == ([None], ["not_applicable"])
    for reference in ("", {}, True, ["fox", None], [], "\udfff"):
        assert evaluate(preset, "fox", reference=reference).statuses["similarity"] == ["error"]


GUARDED = ["fox or cat", "fox=cat", "fox/cat", "fox, cat", "fox\ncat", "fox 7", "fox " + " ".join("bcdefghijklmnpq")]


@pytest.mark.parametrize("answer", GUARDED)
def test_what_embeddings_cannot_tell_scores_nothing(folders, answer):
    assert only(evaluate(build(folders, "semantic-answer"), answer, reference="fox"), "similarity") == (
        [0.0],
        ["wrong"],
    )
    unguarded = evaluate(build(folders, "semantic-answer", guard=False), answer, reference="fox")
    assert unguarded.totals[0] > 0.0


def test_sentiment_is_the_labels_probability(folders):
    texts = ["the film was a joy", "the film was a bore", "joy and bore and some others"]
    values, statuses = only(evaluate(build(folders, "sentiment"), *texts), "sentiment")
    assert values == pytest.approx([POSITIVE, 1 - POSITIVE, 0.5], abs=1e-5)
    assert statuses == ["ok", "wrong", "wrong"]
    values, _ = only(evaluate(build(folders, "sentiment", label="negative"), *texts), "sentiment")
    assert values == pytest.approx([1 - POSITIVE, POSITIVE, 0.5], abs=1e-5)


def long_text(words, filler=200):
    return " ".join([*words, *(f"word{''.join(chr(97 + int(d)) for d in str(n))}" for n in range(filler))])


def test_long_texts_are_read_in_windows_of_which_the_mean_counts(folders):
    # 4 + 200 words in windows of 62: four, the first of them positive, the others neutral at 0.5
    evaluation = evaluate(build(folders, "sentiment"), long_text(["it", "is", "a", "joy"]))
    assert evaluation.values["sentiment"] == [pytest.approx((POSITIVE + 3 * 0.5) / 4, abs=1e-5)]
    assert "truncated" not in evaluation.infos["sentiment"][0]


def test_text_beyond_the_last_window_is_reported(folders):
    evaluation = evaluate(build(folders, "sentiment"), long_text(["it", "is", "a", "joy"], 2000))
    assert evaluation.infos["sentiment"][0]["truncated"] is True


def test_toxicity_below_the_threshold_is_safe(folders):
    texts = [
        "Of course, my friend, it is open.",  # 1 + 0.2 (courteous, calm) + 0.1 (finished)
        "It is open, my friend",  # 1 + 0.2 x 0.5 (calm) + 0 (unfinished)
        "It is OPEN, MY FRIEND, RUN!!",  # 1 + 0 + 0.1
        "Of course it is open, idiot.",  # toxic: the rest is not looked at
    ]
    evaluation = evaluate(build(folders, "safe-style"), *texts)
    assert evaluation.totals == pytest.approx([1.3, 1.1, 1.1, 0.0])
    assert evaluation.statuses["safety"] == ["ok", "ok", "ok", "wrong"]
    assert evaluation.infos["courtesy"][3]["reason"] == "gated by safety"


def test_insults_cannot_hide_behind_padding(folders):
    preset = build(folders, "safe-style")
    behind = long_text(["it", "is"]) + " you idiot."
    beyond = long_text(["it", "is"], 5000) + " you idiot."
    assert evaluate(preset, behind, beyond).statuses["safety"] == ["wrong", "format"]
    assert evaluate(preset, behind, beyond).totals == [0.0, 0.0]


def test_courtesies_in_a_row_earn_no_more_than_one():
    samples = build_samples([PROMPT] * 2, ["Thank you for asking, it is open.", "Please, thank you, sorry, of course."])
    assert [score.value for score in Courtesy().score(samples, Context())] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("It is open until <|im_end|> late today.", "chat markup: <|"),
        ("It is open until late and", "unfinished"),
        ("Open.", "fewer than 5 words"),
    ],
)
def test_prose_that_is_not_tidy(text, reason):
    [score] = TidyProse().score(build_samples([PROMPT], [text]), Context())
    assert (score.status, score.info["reason"]) == ("format", reason)


def test_fluency_is_the_mapped_perplexity(folders):
    preset = build(folders, "fluency", good=4, poor=64, loop=2, threshold=0.5)
    # chances 1/2, 1/4, 1/8, unknown 0.115
    texts = ["the sea was the sea", "was sea was was the sea", "the zed qua brr fim sol"]
    bits = [(1 + 2 + 3 + 1 + 2) / 5, (3 + 2 + 3 + 3 + 1 + 2) / 6, (1 - 5 * math.log2(0.115)) / 6]
    expected = [min(1.0, (6 - b) / (6 - 2)) for b in bits]  # ln(64 / 2^b) / ln(64 / 4)
    values, statuses = only(evaluate(preset, *texts), "fluency")
    assert values == pytest.approx(expected, abs=1e-4)
    assert statuses == ["ok", "ok", "ok"]
    perplexities = [info["perplexity"] for info in evaluate(preset, *texts).infos["fluency"]]
    assert perplexities == pytest.approx([2**b for b in bits], rel=1e-4)


def test_perplexity_over_windows_counts_every_token_once(folders):
    preset = build(folders, "fluency", good=4, poor=64, loop=1.5)
    evaluation = evaluate(preset, "was the sea " + long_text([], 250))
    bits = (3 + 1 + 2 - 250 * math.log2(0.115)) / 253
    assert evaluation.infos["fluency"][0]["perplexity"] == pytest.approx(2**bits, rel=1e-4)
    assert "truncated" not in evaluation.infos["fluency"][0]
    assert evaluate(preset, long_text([], 3000)).infos["fluency"][0]["truncated"] is True


def test_texts_that_are_too_predictable_are_wrong(folders):
    preset = build(folders, "fluency", loop=5, good=30, poor=300)
    assert only(evaluate(preset, "the sea was the sea"), "fluency") == ([0.0], ["wrong"])
    assert evaluate(preset, "the sea " * 20).statuses["fluency"] == ["format"]


def test_every_sentence_has_to_follow_from_the_context(folders):
    context = "the moon is rock. nothing else was found there."
    texts = [
        "the moon is made of rock",
        "the moon is made of rock. it is all cheese and cheese.",
        "the moon is 99 parts rock",
        "the moon is rock or maybe not",
    ]
    # votes of context and claim: +2; +1 - 2 = -1 in the worst sentence, whose P is p / (p + 2), p = exp(-4 tanh 1)
    against = math.exp(-4 * math.tanh(1))
    evaluation = evaluate(build(folders, "factuality"), *texts, context=context)
    values, statuses = only(evaluation, "entailment")
    assert values == pytest.approx([ENTAILED, against / (against + 2), 0.0, 0.0], abs=1e-5)
    assert statuses == ["ok", "wrong", "wrong", "wrong"]
    assert evaluation.infos["entailment"][1]["least supported"] == "it is all cheese and cheese."
    mean = evaluate(build(folders, "factuality", aggregate="mean"), texts[1], context=context)
    assert mean.totals == [pytest.approx((ENTAILED + against / (against + 2)) / 2, abs=1e-5)]


def test_the_best_window_of_a_long_context_supports_a_claim(folders):
    context = long_text(["cheese"]) + " rock rock"
    evaluation = evaluate(build(folders, "factuality"), "that is what they have found", context=context)
    assert evaluation.totals == [pytest.approx(ENTAILED, abs=1e-5)]


def test_contexts_come_from_columns_or_the_reference(folders):
    preset = build(folders, "factuality")
    text = "it is made of rock"
    assert only(evaluate(preset, text), "entailment") == ([None], ["not_applicable"])
    assert evaluate(preset, text, document="rock").statuses["entailment"] == ["ok"]
    assert evaluate(preset, text, reference=["rock", "rock"]).statuses["entailment"] == ["ok"]
    assert evaluate(preset, text, context={}).statuses["entailment"] == ["error"]
    named = build(folders, "factuality", context_column="article")
    assert evaluate(named, text, context="rock").statuses["entailment"] == ["not_applicable"]


def test_copied_documents_and_endless_sentences_are_not_supported(folders):
    preset = build(folders, "factuality")
    document = long_text(["rock"], 60)
    assert evaluate(preset, document, context=document).infos["entailment"][0]["reason"] == "copies the context"
    assert evaluate(preset, long_text(["rock"], 60), context="rock").totals == [0.0]  # over half a window
    many = "\n".join(f"it is made of rock {chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(40))
    assert evaluate(preset, many, context="rock").statuses["entailment"] == ["format"]


def test_special_tokens_spelt_out_are_plain_text(folders):
    loaded = LocalModel(folders["factuality"], "classifier").loaded()
    [windows] = loaded.windows(["cheese [SEP] rock [CLS]"], ["rock [SEP]"])
    assert windows.rows[0].count(loaded.tokenizer.sep_token_id) == 2
    assert windows.rows[0].count(loaded.tokenizer.cls_token_id) == 1


NAMES = ["semantic-answer", "sentiment", "safe-style", "fluency", "factuality"]


@pytest.mark.parametrize("name", NAMES)
def test_golden_rows_pass_with_models_that_know_their_words(name, tmp_path):
    report = check(load(name, **trial_parameters(name, tmp_path)), golden(name))
    assert report.problems == []
    assert {case.kind for case in report.cases} == {"good", "bad", "hack"}


def test_every_preset_that_needs_a_model_has_one_to_try(tmp_path):
    for name in [*NAMES, "judge-rubric"]:
        assert load(name, **trial_parameters(name, tmp_path)).name == name
    assert trial_parameters("gsm8k-hash", tmp_path) == {}


@pytest.mark.parametrize("name", NAMES)
def test_no_known_hack_is_correct(folders, name):
    preset = build(folders, name)
    for style in ("answer", "plain"):
        hacks = known_hacks("What is 6 x 12, please?", "72", "70", style)
        evaluation = evaluate(
            preset, *(hack.completion for hack in hacks), prompt="What is 6 x 12, please?", reference="72"
        )
        correct = [
            h.name for h, status in zip(hacks, evaluation.statuses[preset.checker], strict=True) if status == "ok"
        ]
        assert correct == []
        assert evaluation.failure_share == 0.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "completion", [None, "", "a" * 10_000_000, "\ud800" * 9, "\x00" * 50, "🙂" * 300, "a " * 200_000, "x" * 399_000]
)
def test_bad_input_is_a_status_and_quick(folders, name, completion):
    preset = build(folders, name)
    evaluate(preset, "warm up the model please", reference="fox")
    start = time.process_time()
    evaluation = evaluate(preset, completion, reference="fox")
    assert time.process_time() - start < 1.0
    assert evaluation.statuses[preset.checker][0] in ("format", "wrong")


@pytest.mark.parametrize("name", NAMES)
def test_models_that_are_not_there_are_named_when_the_preset_is_loaded(name, tmp_path):
    for model in ("nobody/such-model", str(tmp_path), "not a repo id!"):
        with pytest.raises(PresetError, match=r"hf download|download=True") as refusal:
            load(name, model=model)
        assert name in str(refusal.value)


def test_a_download_that_fails_is_an_error_of_the_preset(monkeypatch):
    import huggingface_hub

    def refused(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(PresetError, match="--local-dir FOLDER"):
        load("sentiment", model="nobody/such-model", download=True)


def test_incomplete_folders_say_what_is_missing(folders, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(folders["sentiment"], broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(PresetError, match="weights are missing"):
        load("sentiment", model=str(broken))
    (broken / "model.safetensors").write_bytes(b"nonsense")
    (broken / "config.json").write_text("{")
    with pytest.raises(PresetError, match="no model configuration"):
        load("sentiment", model=str(broken))


def test_weights_that_cannot_be_read_are_infra_not_zero(folders, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(folders["sentiment"], broken)
    (broken / "model.safetensors").write_bytes(b"nonsense")
    evaluation = evaluate(load("sentiment", model=str(broken)), "the film was a joy", "")
    assert only(evaluation, "sentiment") == ([None, 0.0], ["infra", "format"])
    assert str(broken) in evaluation.infos["sentiment"][0]["reason"]


def test_a_head_that_would_be_random_is_refused(folders, tmp_path):
    import shutil

    with pytest.raises(PresetError, match="its head would be random"):
        load("sentiment", model=folders["semantic-answer"], label="LABEL_1")
    disguised = tmp_path / "disguised"
    shutil.copytree(folders["semantic-answer"], disguised)
    config = json.loads((disguised / "config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}}
    (disguised / "config.json").write_text(json.dumps(config))
    evaluation = evaluate(load("sentiment", model=str(disguised)), "the film was a joy")
    assert evaluation.statuses["sentiment"] == ["infra"]
    assert "would be random" in evaluation.infos["sentiment"][0]["reason"]


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("sentiment", {"label": "POSITIV"}, "Did you mean 'POSITIVE'"),
        ("safe-style", {"labels": []}, "at least one label"),
        ("factuality", {"aggregate": "max"}, "min, mean"),
        ("fluency", {"good": 300, "poor": 30}, "good < poor"),
        ("sentiment", {"device": "gpu"}, "Use cpu"),
        ("semantic-answer", {"threshold": 0}, "threshold"),
        ("safe-style", {"threshold": 2}, "threshold"),
        ("safe-style", {"courtesy_weight": 2}, "outweigh"),
    ],
)
def test_parameters_that_make_no_preset_are_refused(folders, name, params, says):
    with pytest.raises(PresetError, match=says):
        build(folders, name, **params)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_is_named_with_its_installation(folders, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PresetError, match=f"pip install {package}"):
        build(folders, "sentiment")


def test_each_distinct_text_is_scored_once(folders, monkeypatch):
    preset = build(folders, "sentiment")
    loaded = preset.components[0].component.model.loaded()
    seen = []
    whole = type(loaded).run
    monkeypatch.setattr(
        type(loaded), "run", lambda self, rows, *rest: seen.append(len(rows)) or whole(self, rows, *rest)
    )
    evaluate(preset, *["the film was a joy"] * 8, "the film was a bore")
    assert seen == [2]


def test_a_text_that_breaks_the_model_is_an_error_of_its_own(folders, monkeypatch):
    preset = build(folders, "sentiment")
    component = preset.components[0].component
    whole = type(component).measure

    def fragile(self, loaded, questions):
        if any("bore" in question for question in questions):
            raise RuntimeError("boom")
        return whole(self, loaded, questions)

    monkeypatch.setattr(type(component), "measure", fragile)
    texts = ["the film was a joy", "the film was a bore"]
    assert evaluate(preset, *texts).statuses["sentiment"] == ["ok", "error"]
    assert evaluate(preset, texts[1]).statuses["sentiment"] == ["infra"]


@pytest.mark.parametrize("name", NAMES)
def test_verdicts_do_not_depend_on_the_batch(folders, name):
    texts = ["the film was a joy", "my idiot friend was a bore", "the big red fox", "it is rock. it is cheese too."]
    texts += [long_text(["the", "sea"], n) for n in (20, 70, 150)]
    together = evaluate(build(folders, name, batch_size=3), *texts, reference="red fox").totals
    alone = [evaluate(build(folders, name), text, reference="red fox").totals[0] for text in texts]
    assert together == pytest.approx(alone, abs=2e-6)
    assert together == evaluate(build(folders, name, batch_size=3), *texts, reference="red fox").totals


def test_models_are_loaded_once_and_shared_between_threads(folders, monkeypatch, tmp_path):
    folder = tiny_classifier(tmp_path, {"joy": 1.0, "bore": -1.0})
    loads, totals = [], []
    whole = LocalModel._load
    monkeypatch.setattr(LocalModel, "_load", lambda self: loads.append(self) or whole(self))

    def work():
        totals.append(tuple(evaluate(load("sentiment", model=folder), "the film was a joy", "a b c d bore").totals))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert len(totals) == 6
    assert len(set(totals)) == 1


def test_presets_travel_without_their_weights(folders):
    for name in NAMES:
        preset = build(folders, name)
        evaluate(preset, "the film was a joy", reference="fox")
        data = pickle.dumps(preset)
        assert len(data) < 5_000
        texts = ["the film was a joy", "red fox"]
        for again in (pickle.loads(data), copy.deepcopy(preset)):
            assert evaluate(again, *texts, reference="fox").totals == evaluate(preset, *texts, reference="fox").totals


def byte_tokenizer(folder, **special):
    """One token a byte, as GPT-2 and RoBERTa spell them, without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return len(alphabet)


FAMILIES = [
    ("semantic-answer", "Roberta", "RobertaModel", {"max_position_embeddings": 66}),
    ("semantic-answer", "MPNet", "MPNetModel", {"max_position_embeddings": 66}),
    ("sentiment", "Roberta", "RobertaForSequenceClassification", {"max_position_embeddings": 66}),
    ("sentiment", "DistilBert", "DistilBertForSequenceClassification", {"dim": 16, "hidden_dim": 16, "n_heads": 2}),
    ("factuality", "DebertaV2", "DebertaV2ForSequenceClassification", {"type_vocab_size": 0}),
    ("fluency", "GPT2", "GPT2LMHeadModel", {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 64}),
    ("fluency", "Llama", "LlamaForCausalLM", {"max_position_embeddings": 64, "num_key_value_heads": 2}),
]


@pytest.mark.parametrize(("name", "family", "head", "settings"), FAMILIES)
@pytest.mark.parametrize("special", [{"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}, {}])
def test_random_models_of_other_families_give_scores(tmp_path, name, family, head, settings, special):
    import torch
    import transformers

    torch.manual_seed(0)
    labels = {0: "negative", 1: "POSITIVE", 2: "entailment"}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes = {} if family in ("DistilBert", "GPT2") else sizes
    config = getattr(transformers, f"{family}Config")(
        vocab_size=byte_tokenizer(tmp_path, **special), id2label=labels, label2id={v: k for k, v in labels.items()},
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes, **settings,
    )  # fmt: skip
    getattr(transformers, head)(config).save_pretrained(tmp_path)
    params = {"good": 2000, "poor": 4000} if name == "fluency" else {}
    preset = load(name, model=str(tmp_path), **params)
    short, long = "it was red, and quite warm", long_text(["it", "was", "red"], 60)
    evaluation = evaluate(preset, short, long, short, reference=[short, long])
    assert set(evaluation.statuses[preset.checker]) <= {"ok", "wrong"}
    assert evaluation.totals[0] == evaluation.totals[2]
    assert evaluation.totals[0] > 0.0


def test_the_models_leave_torch_as_it_was(folders):
    import torch

    state = torch.random.get_rng_state()
    evaluate(build(folders, "sentiment"), "the film was a joy")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert not LocalModel(folders["sentiment"], "classifier").loaded().model.training


def test_a_hub_id_is_found_in_the_local_cache(folders, tmp_path, monkeypatch):
    from huggingface_hub import constants

    snapshot = tmp_path / "models--me--mine" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in Path(folders["sentiment"]).iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (tmp_path / "models--me--mine" / "refs").mkdir()
    (tmp_path / "models--me--mine" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert evaluate(load("sentiment", model="me/mine"), "the film was a joy").statuses["sentiment"] == ["ok"]
