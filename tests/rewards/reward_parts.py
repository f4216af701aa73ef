"""Helpers of the reward tests: an answer in its layout, and a component with fixed scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewards import Context, Sample, Score

THINK = "<think>work</think>"


def answered(answer: str) -> str:
    return f"{THINK}<answer>{answer}</answer>"


@dataclass
class Fixed:
    """A component that returns prepared scores, or calls `act`."""

    name: str = "fixed"
    scores: list[Any] = field(default_factory=list)
    floor: float = 0.0
    low: float = 0.0
    high: float = 1.0
    version: str = "1"
    act: Callable[[Sequence[Sample], Context], list[Score]] | None = None
    batches: list[list[int]] = field(default_factory=list)

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        self.batches.append([sample.index for sample in samples])
        if self.act is not None:
            return self.act(samples, ctx)
        return [self.scores[sample.index] for sample in samples]


TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def tiny_reward_model(
    folder: Any, family: str = "Llama", *, labels: Sequence[str] = ("good",),
    chat: bool = True, pad: bool = True, seed: int = 0, **settings: Any,
) -> str:  # fmt: skip
    """Write a small random reward model with byte tokens; return its folder."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = {"pad_token": "<pad>"} if pad else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=special[3:], **names
    )
    fast.chat_template = TEMPLATE if chat else None
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"max_position_embeddings": 512, "pad_token_id": 0 if pad else None, "bos_token_id": 1, "eos_token_id": 2}
    sizes |= {"num_key_value_heads": 2} if family in ("Llama", "Qwen2") else {}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(alphabet), id2label=dict(enumerate(labels)), label2id={v: k for k, v in enumerate(labels)},
        **sizes | settings,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)  # so that texts differ by more than rounding
    model.save_pretrained(folder)
    return str(folder)


def trial_parameters(name: str, folder: Any) -> dict[str, Any]:
    """Parameters with which preset `name` loads without a server or a download; empty if it needs none.

    No server answers at the address of the judges.
    """
    if name.startswith("judge-"):
        return {"base_url": "http://127.0.0.1:9/v1", "model": "judge", "retries": 0}
    return {"model": tiny_reward_model(folder)} if name == "reward-model" else {}
