"""How surprised is a language model by the text?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewards.components.local_models import Loaded
from rewards.components.readable import readable
from rewards.components.text_model import Measured, TextModelComponent
from rewards.errors import PresetError
from rewards.protocol import Sample, Score

__all__ = ["Fluency"]


@dataclass(frozen=True, kw_only=True)
class Fluency(TextModelComponent[str]):
    """ln(poor / ppl) / ln(poor / good), clipped to [0, 1]: 1 up to perplexity `good`, 0 from `poor` on.

    ppl = exp(mean negative log-likelihood in nats a token), the first token after the model's begin-of-text token when
    it has one. Perplexity below `loop` is what recited or repeated text has: `wrong` at the floor. `ok` from
    `threshold` on. Longer texts are read in windows that share a quarter; beyond `max_windows` the text is left out,
    which `truncated` in the info says.
    """

    name: str = "fluency"
    good: float = 30.0
    poor: float = 300.0
    loop: float = 3.0
    min_words: int = 5
    batch_size: int = 4  # logits are (batch, tokens, vocabulary) floats: 50k words x 512 tokens are 100 MB a text

    def __post_init__(self) -> None:
        if not 1.0 <= self.loop < self.good < self.poor < math.inf:
            raise PresetError(
                f"fluency needs 1 <= loop < good < poor, got loop {self.loop}, good {self.good}, poor {self.poor}."
            )

    def question(self, sample: Sample) -> str | Score:
        found = readable(sample.whole, min_words=self.min_words, prompt=sample.prompt)
        return Score(None, "format", {"reason": found.reason}) if found.text is None else found.text

    def measure(self, loaded: Loaded, questions: Sequence[str]) -> list[Measured]:
        begin_token = loaded.tokenizer.bos_token_id
        prefix = [begin_token] if begin_token is not None else []
        length = loaded.max_tokens - len(prefix)
        shared = length // 4
        tokens = loaded.plain_tokens(questions, self.max_windows)
        rows, news, owners, cut = [], [], [], []
        for index, (ids, more) in enumerate(tokens):
            starts = range(0, max(1, len(ids) - shared), length - shared)
            cut.append(more or len(starts) > self.max_windows)
            for window, start in enumerate(starts[: self.max_windows]):
                rows.append([*prefix, *ids[start : start + length]])
                news.append(shared if window else 0)
                owners.append(index)
        losses = loaded.run(rows, None, self.batch_size, _token_losses)
        totals, counts = [0.0] * len(questions), [0] * len(questions)
        for owner, new, loss in zip(owners, news, losses, strict=True):
            # losses[t] is that of token t + 1 of the row; without a prefix the first token has none.
            fresh = loss[new if prefix else max(0, new - 1) :]
            totals[owner] += math.fsum(fresh)
            counts[owner] += len(fresh)
        return [
            Measured(math.exp(min(700.0, total / max(1, count))), {"truncated": True} if more else {})
            for total, count, more in zip(totals, counts, cut, strict=True)
        ]

    def verdict(self, sample: Sample, measured: Measured) -> Score:
        perplexity = measured.value
        info = {**measured.info, "perplexity": perplexity}
        if perplexity < self.loop:
            return Score(None, "wrong", {**info, "reason": "too predictable: recited or repeated"})
        value = math.log(self.poor / perplexity) / math.log(self.poor / self.good)
        value = min(1.0, max(0.0, value))
        return Score(value, "ok" if value >= self.threshold else "wrong", info)


def _token_losses(outputs: Any, inputs: dict[str, Any]) -> list[list[float]]:
    """Negative log-likelihoods in nats of every real token but the first, per row."""
    from torch.nn.functional import cross_entropy

    logits = outputs.logits[:, :-1].float()  # (B, T - 1, V)
    targets = inputs["input_ids"][:, 1:]  # (B, T - 1)
    losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none").double()  # (B, T - 1)
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    return [row[: length - 1] for row, length in zip(losses.tolist(), lengths, strict=True)]
