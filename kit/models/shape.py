"""The sizes of a decoder from its configuration, without its weights. Memory and time are estimated with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kit.errors import ModelError


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. Counts are numbers of elements, not bytes."""

    parameters: int
    linear: int
    """Weights of linear layers except the head. 4-bit quantisation and `all-linear` apply to them."""
    largest: int
    """Size of the largest weight."""
    layers: int
    hidden: int
    intermediate: int
    """Width of the feed-forward part; for a mixture of experts, of all active experts of a token."""
    query: int
    """heads × head size."""
    key: int
    """key-value heads × head size."""
    heads: int
    vocab: int
    qk_norm: bool
    modules: tuple[tuple[str, int, int], ...]
    """Linear layers except the head: (last part of the name, inputs, outputs)."""
    norms: int = 2
    """Number of norms per layer over the hidden size."""

    def adapted(self, targets: str | list[str]) -> list[tuple[int, int]]:
        """(inputs, outputs) of the linear layers with an adapter."""
        return [(a, b) for name, a, b in self.modules if targets == "all-linear" or name in targets]

    def lora_parameters(self, rank: int, targets: str | list[str]) -> int:
        """Weights of the adapters: A is (r, in) and B is (out, r)."""
        return sum(rank * (a + b) for a, b in self.adapted(targets))


def shape_of(model_config: Any) -> ModelShape | None:
    """Reads the sizes from the architecture on the meta device. None for remote code."""
    from kit.models.family import is_remote, meta_model

    if is_remote(model_config):
        return None
    try:
        model = meta_model(model_config)
    except ModelError:
        return None
    text = model_config.get_text_config()
    head = model.get_output_embeddings()
    modules, sizes = [], [weight.numel() for weight in model.parameters()]
    for name, module in model.named_modules():
        if module is not head and type(module).__name__ in ("Linear", "Conv1D"):
            rows, columns = module.weight.shape
            inputs, outputs = (columns, rows) if type(module).__name__ == "Linear" else (rows, columns)
            modules.append((name.rpartition(".")[2], inputs, outputs))
    layers = _field(text, "num_hidden_layers", "n_layer", default=1)
    heads = _field(text, "num_attention_heads", "n_head", default=1)
    hidden = _field(text, "hidden_size", "n_embd", default=1)
    head_size = _field(text, "head_dim", default=hidden // heads)
    keys = _field(text, "num_key_value_heads", default=heads)
    if experts := _field(text, "num_experts_per_tok", default=0):
        wide = experts * _field(text, "moe_intermediate_size", "intermediate_size", default=4 * hidden)
    else:
        wide = _field(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    return ModelShape(
        parameters=sum(sizes),
        linear=sum(a * b for _, a, b in modules),
        largest=max(sizes),
        layers=layers,
        hidden=hidden,
        intermediate=wide,
        query=heads * head_size,
        key=keys * head_size,
        heads=heads,
        vocab=_field(text, "vocab_size", default=1),
        qk_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        modules=tuple(modules),
        norms=max(
            2, sum(weight.shape == (hidden,) and "norm" in name for name, weight in model.named_parameters()) // layers
        ),
    )


def is_in_4_bits(model_config: Any) -> bool:
    """Whether the weights are published in 4 bits of bitsandbytes."""
    return bool((getattr(model_config, "quantization_config", None) or {}).get("load_in_4bit"))


def _field(config: Any, *names: str, default: int) -> int:
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # it varies between layers, e.g. Gemma 4's head size: use the largest
            value = max(getattr(layer, name) for layer in config.per_layer_config)
        if isinstance(value, int):
            return value
    return default
