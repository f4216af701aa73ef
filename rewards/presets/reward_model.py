"""Texts scored by a reward model: any sequence classifier, or a process reward model."""

from rewards.components.reward_model import AGGREGATES, ModelFiles, RewardModel, label_index
from rewards.errors import PresetError
from rewards.preset import Preset


def reward_model(
    *,
    model: str,
    label: str | None = None,
    wanted: bool = True,
    process: bool | None = None,
    separator: str = "\n\n",
    aggregate: str = "min",
    center: float = 0.0,
    temperature: float = 1.0,
    raw: bool = False,
    limit: float = 20.0,
    threshold: float | None = None,
    reads: str = "conversation",
    part: str = "answer",
    min_words: int = 1,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    download: bool = False,
    max_tokens: int | None = None,
    batch_tokens: int = 16_384,
) -> Preset:
    r"""Texts that a reward model prefers: any sequence classifier of transformers, or a process reward model.

    Formula: of a model with one output (Bradley-Terry), sigmoid((r - center) / temperature) of its logit r: the chance that
    it would prefer the text to one of reward `center`; with `raw`, r itself within ±`limit`. Of a model with several
    outputs, P(label), or 1 - P with `wanted=False`. With `process`, the min, mean, product or last of the steps' values.
    Range: [0, 1]; with `raw` [-limit, limit].
    Checker: reward, `ok` from `threshold` on: 0.5, with `raw` 0.
    Columns: none.
    Source: pairwise preferences 1706.03741 and 2203.02155; process rewards, joined by min or product, 2305.20050; heads and
    layouts of TRL's RewardTrainer and PRMTrainer.
    Hacks: what such a model likes too much, above all length, lists, confident tone and praise of the user, a policy finds
    within some hundred steps: keep a KL penalty, watch the length, add `length-target`, and read completions. Loops, echoes
    of the prompt, pleas to the grader and blank texts are refused unasked. Special tokens spelt out, which could end the
    answer and begin a turn of the user's that praises it: refused. Text behind the end of what the model reads: too long is
    0. Splitting a text into many trivial steps raises the mean, and not the min; one long step hides in neither.

    Args:
        model: folder or hub id of a model trained as ...ForSequenceClassification or ...ForTokenClassification.
        label: which of several outputs counts; not needed for a model with one, nor for a token classifier, where the last
            says that a step is right.
        wanted: whether `label` is to be rewarded; False for labels such as toxic.
        process: values for single steps; None where the model is a token classifier. A sequence classifier is then asked
            about the text up to the end of each step.
        separator: what steps are split at; the one that the model was trained with (`\n` is TRL's own).
        aggregate: min, mean, product or last of the steps.
        center: logit that is worth 0.5.
        temperature: logits by which the odds change e-fold; raise it for a model whose rewards differ by tens.
        raw: the logit itself.
        limit: what a raw logit is cut at.
        threshold: value from which a text counts as correct.
        reads: conversation (the prompt and the text, by the model's chat template, else as a pair of texts), or completion
            (the text alone, as classifiers of sentiment or toxicity want it).
        part: answer (what follows `</think>`, or stands in the answer tags), or whole.
        min_words: answers with fewer words score 0.
        device: auto (the process's GPU where there is one), cpu, cuda, cuda:1 or mps.
        dtype: auto (on a GPU bfloat16, or float16 where it has none; else float32), float32, bfloat16 or float16.
        revision: branch, tag or commit of a hub id.
        download: fetch the model from the hub while loading the preset.
        max_tokens: longest conversation that is judged; None takes the model's own limit.
        batch_tokens: tokens of a forward pass, padding included; halved where memory does not suffice.

    Raises:
        PresetError: the model's files are not here, it has another head or no such label, or a package is missing.

    >>> from rewards import PresetError, load
    >>> try:
    ...     load("reward-model", model="no/such-model")
    ... except PresetError as error:
    ...     print(str(error)[:58])
    Preset 'reward-model' needs the model 'no/such-model': not
    """
    for name, value, allowed in (
        ("aggregate", aggregate, tuple(AGGREGATES)),
        ("reads", reads, ("conversation", "completion")),
        ("part", part, ("answer", "whole")),
    ):
        if value not in allowed:
            raise PresetError(f"{name} is {value!r}. Use one of: {', '.join(allowed)}.")
    if temperature <= 0 or limit <= 0 or batch_tokens < 1 or not separator:
        raise PresetError("A reward model needs temperature > 0, limit > 0, batch_tokens >= 1 and a separator.")
    files = ModelFiles(model, device=device, dtype=dtype, revision=revision)
    config = files.config("reward-model", download)
    head = config["head"]
    if process is False and head == "token":
        raise PresetError(f"Model {model!r} is a token classifier, which has values for steps only. Leave process out.")
    index = label_index(config, label, model)
    if raw and index is not None:
        raise PresetError(f"raw is for models with one output; {model!r} has several, of which P(label) counts.")
    component = RewardModel(
        files=files,
        head=head,
        index=index,
        independent=config.get("problem_type") == "multi_label_classification",
        wanted=wanted,
        process=head == "token" or bool(process),
        separator=separator,
        aggregate=aggregate,
        center=center,
        temperature=temperature,
        raw=raw,
        limit=limit,
        threshold=(0.0 if raw else 0.5) if threshold is None else threshold,
        floor=-limit if raw else 0.0,
        low=-limit if raw else 0.0,
        high=limit if raw else 1.0,
        reads=reads,
        part=part,
        min_words=min_words,
        max_tokens=max_tokens,
        batch_tokens=batch_tokens,
    )
    return Preset([(component, 1.0)], checker="reward")
