"""Preset for texts that a reward model scores, which may be any sequence classifier."""

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
    r"""Texts that a reward model prefers; any sequence classifier of transformers.

    Formula: for a model with one output (Bradley-Terry), sigmoid((r - center) / temperature) of its logit r: the probability
    that the text is preferred to a text of reward `center`; with `raw`, r itself within ±`limit`. For a model with several
    outputs, P(label), or 1 - P with `desired=False`.
    Range: [0, 1]; with `raw` [-limit, limit].
    Checker: reward, `ok` if the value is at least `threshold`: 0.5 by default, 0 with `raw`.
    Columns: none.
    Source: pairwise preferences 1706.03741 and 2203.02155; head and layout of TRL's RewardTrainer.
    Attacks: biases of reward models, above all length, lists, confident tone and praise of the user, which policies learn
    within a few hundred steps: keep a KL penalty, watch the length, add `length-target`, and read completions. Loops, echoes
    of the prompt, instructions to the grader and blank texts: rejected before the model reads them. Special tokens in the
    text, which could end the answer and begin a user's turn with praise: rejected. Text after the model's length limit: such
    a completion scores 0.

    Args:
        model: folder or hub id of a model trained as ...ForSequenceClassification.
        label: name of the output that is the score; not needed for a model with one output.
        desired: whether to reward `label`; False for labels such as toxic.
        center: logit with the value 0.5.
        temperature: difference of logits that changes the odds by a factor of e; raise it if the rewards differ by tens.
        raw: use the logit itself.
        limit: limit of the absolute value of a raw logit.
        threshold: smallest value of a correct text.
        reads: conversation (the prompt and the text, in the model's chat template or as a pair of texts), or completion
            (the text alone, as for classifiers of sentiment or toxicity).
        min_words: answers with fewer words score 0.
        device: auto (the process's GPU, or the CPU without a GPU), cpu, cuda, cuda:1 or mps.
        dtype: auto (float32 on the CPU; bfloat16 on a GPU, or float16 if it has no bfloat16), float32, bfloat16 or float16.
        revision: branch, tag or commit of a hub id.
        max_tokens: longest conversation to score; None uses the model's limit.
        batch_tokens: tokens of a forward pass, including padding; halved if the memory does not suffice.

    Raises:
        PresetError: the model's files are missing, it has another head or no such label, or a package is missing.

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
        raise PresetError(f"raw is for models with one output; {model!r} has several. Remove raw.")
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
