"""Texts scored by a reward model: any sequence classifier."""

from rewards.components.reward_model import ModelFiles, RewardModel, label_index
from rewards.errors import PresetError
from rewards.preset import Preset


def reward_model(
    *,
    model: str,
    label: str | None = None,
    desired: bool = True,
    center: float = 0.0,
    temperature: float = 1.0,
    raw: bool = False,
    limit: float = 20.0,
    threshold: float | None = None,
    reads: str = "conversation",
    min_words: int = 1,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    max_tokens: int | None = None,
    batch_tokens: int = 16_384,
) -> Preset:
    r"""Texts that a reward model prefers: any sequence classifier of transformers.

    Formula: of a model with one output (Bradley-Terry), sigmoid((r - center) / temperature) of its logit r: the chance that
    it would prefer the text to one of reward `center`; with `raw`, r itself within ±`limit`. Of a model with several
    outputs, P(label), or 1 - P with `desired=False`.
    Range: [0, 1]; with `raw` [-limit, limit].
    Checker: reward, `ok` from `threshold` on: 0.5, with `raw` 0.
    Columns: none.
    Source: pairwise preferences 1706.03741 and 2203.02155; head and layout of TRL's RewardTrainer.
    Hacks: what such a model likes too much, above all length, lists, confident tone and praise of the user, a policy finds
    within some hundred steps: keep a KL penalty, watch the length, add `length-target`, and read completions. Loops, echoes
    of the prompt, pleas to the grader and blank texts are refused unasked. Special tokens spelt out, which could end the
    answer and begin a turn of the user's that praises it: refused. Text behind the end of what the model reads: too long is
    0.

    Args:
        model: folder or hub id of a model trained as ...ForSequenceClassification.
        label: which of several outputs counts; not needed for a model with one.
        desired: whether to reward `label`; False for labels such as toxic.
        center: logit that is worth 0.5.
        temperature: logits by which the odds change e-fold; raise it for a model whose rewards differ by tens.
        raw: the logit itself.
        limit: what a raw logit is cut at.
        threshold: value from which a text counts as correct.
        reads: conversation (the prompt and the text, by the model's chat template, else as a pair of texts), or completion
            (the text alone, as classifiers of sentiment or toxicity want it).
        min_words: answers with fewer words score 0.
        device: auto (the process's GPU where there is one), cpu, cuda, cuda:1 or mps.
        dtype: auto (on a GPU bfloat16, or float16 where it has none; else float32), float32, bfloat16 or float16.
        revision: branch, tag or commit of a hub id.
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
    if reads not in ("conversation", "completion"):
        raise PresetError(f"reads is {reads!r}. Use one of: conversation, completion.")
    if temperature <= 0 or limit <= 0 or batch_tokens < 1:
        raise PresetError("A reward model needs temperature > 0, limit > 0 and batch_tokens >= 1.")
    files = ModelFiles(model, device=device, dtype=dtype, revision=revision)
    config = files.config("reward-model")
    index = label_index(config, label, model)
    if raw and index is not None:
        raise PresetError(f"raw is for models with one output; {model!r} has several, of which P(label) counts.")
    component = RewardModel(
        files=files,
        index=index,
        independent=config.get("problem_type") == "multi_label_classification",
        desired=desired,
        center=center,
        temperature=temperature,
        raw=raw,
        limit=limit,
        threshold=(0.0 if raw else 0.5) if threshold is None else threshold,
        floor=-limit if raw else 0.0,
        low=-limit if raw else 0.0,
        high=limit if raw else 1.0,
        reads=reads,
        min_words=min_words,
        max_tokens=max_tokens,
        batch_tokens=batch_tokens,
    )
    return Preset([(component, 1.0)], checker="reward")
