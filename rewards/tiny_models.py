"""Models of a few kB with weights set by hand, to try a model-backed preset or a pipeline without a download.

Not for training against: they know only the words they are given. Real transformers folders all the same, loaded like
any other, and simple enough that their verdicts can be computed on paper.

>>> import tempfile
>>> from rewards import build_samples, load
>>> folder = tiny_classifier(tempfile.mkdtemp(), {"joy": 1.0, "bore": -1.0})
>>> samples = build_samples(["Review?"] * 2, ["the film is a joy to me", "the film is a bore to me"])
>>> [round(total, 4) for total in load("sentiment", model=folder).score(samples).totals]
[0.9546, 0.0454]
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["tiny_classifier", "tiny_embedder", "tiny_language_model", "trial_parameters"]

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def tiny_embedder(folder: str | Path, meanings: Mapping[str, int], *, size: int = 16, max_tokens: int = 64) -> str:
    """An encoder in which words of one meaning share a direction and different meanings are orthogonal.

    The cosine of two texts is that of their meaning counts; unknown words count for nothing. Meanings are 1 to
    `size` - 1, `size` is a power of two. Returns `folder`.
    """
    import torch
    from transformers import BertConfig, BertModel

    table = {word: _walsh(meaning, size) for word, meaning in meanings.items()}
    config = BertConfig(num_hidden_layers=0, **_bert(len(_SPECIAL) + len(table), size, max_tokens))
    with torch.no_grad():
        model = BertModel(config)
        _set_embeddings(model.embeddings, table)
    return _save(model, list(table), folder, max_tokens)


def tiny_classifier(
    folder: str | Path,
    words: Mapping[str, float],
    *,
    labels: Sequence[str] = ("NEGATIVE", "POSITIVE"),
    multi_label: bool = False,
    max_tokens: int = 64,
) -> str:
    """A text classifier in which words vote: those above 0 for the last label, those below for the first.

    The majority decides and its size does not matter: the last label's logit is 4 tanh(1) = 3.0464 above all others
    for a majority in favour (P = 0.9546 of two), as much below for one against, and equal without one. With
    `multi_label` that logit is for the last label alone, through a sigmoid. Returns `folder`.
    """
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    size = 4
    table = {word: [vote * sign for sign in _walsh(1, size)] for word, vote in words.items()}
    config = BertConfig(
        num_hidden_layers=1,
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
        problem_type="multi_label_classification" if multi_label else "single_label_classification",
        **_bert(len(_SPECIAL) + len(table), size, max_tokens),
    )
    with torch.no_grad():
        model = BertForSequenceClassification(config)
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "LayerNorm.weight" in name else 0.0)
        _set_embeddings(model.bert.embeddings, table)
        layer = model.bert.encoder.layer[0].attention
        # Queries and keys of zero attend to all tokens alike: the sum of the votes arrives at [CLS].
        for dense in (layer.self.value, layer.output.dense, model.bert.pooler.dense):
            dense.weight.copy_(torch.eye(size))
        model.classifier.weight[-1] = torch.tensor(_walsh(1, size))
    return _save(model, list(table), folder, max_tokens)


def tiny_language_model(folder: str | Path, chances: Mapping[str, float], *, max_tokens: int = 64) -> str:
    """A causal model that draws every word with its own chance, whatever came before; returns `folder`.

    `chances` sum to at most 1; the rest is the chance of an unknown word. The perplexity of a text is the geometric
    mean of 1 / chance.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    size = 4
    table = list(chances)
    count = len(_SPECIAL) + len(table)
    unknown = max(1.0 - math.fsum(chances.values()), 1e-9)
    logs = [-1e4, math.log(unknown), -1e4, -1e4, *(math.log(chances[word]) for word in table)]
    config = GPT2Config(
        vocab_size=count, n_embd=size, n_layer=0, n_head=1, n_positions=max_tokens, tie_word_embeddings=False,
        bos_token_id=_SPECIAL.index("[CLS]"), eos_token_id=_SPECIAL.index("[SEP]"),
    )  # fmt: skip
    with torch.no_grad():
        model = GPT2LMHeadModel(config)
        model.transformer.wte.weight.copy_(torch.tensor([_walsh(1, size)] * count))
        model.transformer.wpe.weight.zero_()
        # Every hidden state is the same +-1 vector h, so that row w of the head gives log P(w) h.h / size.
        model.lm_head.weight.copy_(torch.tensor([[log * h / size for h in _walsh(1, size)] for log in logs]))
    return _save(model, table, folder, max_tokens, bos="[CLS]")


def trial_parameters(name: str, folder: str | Path) -> dict[str, Any]:
    """Parameters with which preset `name` loads anywhere: tiny models that know the words of its golden rows.

    Presets that load without parameters get none. The judge's address is one where nobody answers.
    """
    folder = Path(folder) / name
    if name == "judge-rubric":
        return {"base_url": "http://127.0.0.1:9/v1", "model": "judge", "retries": 0}
    if name == "semantic-answer":
        meanings = {"red": 1, "fox": 2, "blue": 3, "whale": 4, "72": 5, "70": 6}
        return {"model": tiny_embedder(folder, meanings)}
    if name == "sentiment":
        return {"model": tiny_classifier(folder, {"joy": 1.0, "bore": -1.0})}
    if name == "safe-style":
        votes = {"idiot": 1.0, "friend": -1.0}
        return {"model": tiny_classifier(folder, votes, labels=("mild", "toxic"), multi_label=True)}
    if name == "factuality":
        labels = ("contradiction", "neutral", "entailment")
        return {"model": tiny_classifier(folder, {"rock": 1.0, "cheese": -1.0}, labels=labels)}
    if name == "fluency":
        known = ("the", "sea", "was", "calm", "and", "beach", "empty", ".")
        return {"model": tiny_language_model(folder, dict.fromkeys(known, 0.124)), "good": 12.0, "poor": 60.0}
    return {}


def _bert(vocabulary: int, size: int, max_tokens: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary, "hidden_size": size, "num_attention_heads": 1, "intermediate_size": size,
        "max_position_embeddings": max_tokens, "hidden_act": "relu",
    }  # fmt: skip


def _walsh(index: int, size: int) -> list[float]:
    """Row `index` of the Walsh matrix: entries +-1, mean 0 for index > 0, orthogonal to all other rows."""
    if not 0 < index < size or size & (size - 1):
        raise ValueError(f"meanings are 1 to size - 1 and size is a power of two, got {index} of {size}")
    return [float((-1) ** (index & column).bit_count()) for column in range(size)]


def _set_embeddings(embeddings: Any, table: Mapping[str, list[float]]) -> None:
    """Word vectors as given, everything else zero; vectors of +-1 pass the layer norm unchanged, zeros stay zeros."""
    import torch

    for parameter in embeddings.parameters():
        parameter.zero_()
    embeddings.LayerNorm.weight.fill_(1.0)
    for index, vector in enumerate(table.values(), start=len(_SPECIAL)):
        embeddings.word_embeddings.weight[index] = torch.tensor(vector)


def _save(model: Any, words: Sequence[str], folder: str | Path, max_tokens: int, bos: str | None = None) -> str:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [*_SPECIAL, *words]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokens.index("[CLS]")), ("[SEP]", tokens.index("[SEP]"))],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_tokens, pad_token="[PAD]", unk_token="[UNK]",
        cls_token="[CLS]", sep_token="[SEP]", bos_token=bos,
    ).save_pretrained(folder)  # fmt: skip
    model.save_pretrained(folder)
    return str(folder)
