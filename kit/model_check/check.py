"""`grpo-kit model check` tests whether an architecture trains here, with a tiny random copy of it or with real weights.

The trials run in this process: the scorer against plain logits, left padding against none, one GRPO step of each kind.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kit.errors import KitError, ModelError
from kit.models.failures import first_line, release
from kit.models.family import FamilyAdapter

log = logging.getLogger("kit")
TESTED, UNTESTED, FAILING = "tested", "untested", "failing"
TOLERANCE = 1e-3
"""Nats per token in float32. A wrong mask or position gives an error of at least 0.1."""
STAND_IN = 512
"""Vocabulary of the replacement tokenizer and of its tiny model."""
VALUES = ("context", "positions", "multimodal", "fills", "refused", "ends")


@dataclass
class Findings:
    """The findings about a model."""

    source: str
    model_type: str
    architecture: str
    weights: str
    """`random, 0.12M` or `its own, 1543.71M`."""
    family: dict[str, Any]
    tokenizer: str
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    """(subject, `tested`, `untested` or `failing`, reason)."""

    @property
    def trains(self) -> bool:
        """Whether everything that training needs has passed."""
        return not any(
            status == FAILING for what, status, _ in self.findings if what in ("scores", "padding", "train", "LoRA")
        )

    @property
    def fails_on_pictures(self) -> bool:
        """Whether a step on pictures failed. Training on text may still work."""
        return any((what, status) == ("vision", FAILING) for what, status, _ in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        findings = [{"what": what, "status": status, "why": why} for what, status, why in self.findings]
        return asdict(self) | {"findings": findings, "trains": self.trains}


def check_model(source: str, *, weights: bool = False, trust_remote_code: bool = False) -> Findings:
    """Tests the model of a folder, a hub id, a GGUF file or a `model_type`. Raises `ModelError` if there is none.

    Without `weights`, a folder with only config.json is sufficient; the kit then builds a tokenizer.
    """
    from kit.models.embedded import source_of
    from kit.models.family import adapter_of

    folder = source_of(source)
    config = find_config(folder, trust_remote_code)
    tokenizer, processor, named = find_tokenizer(folder, config, trust_remote_code)
    make, kind = _maker(folder, config, tokenizer, processor, named, weights, trust_remote_code)
    model = make()
    family = adapter_of(model, processor or tokenizer)
    count = f"{kind}, {sum(weight.numel() for weight in model.parameters()) / 1e6:.2f}M"
    values = {name: getattr(family, name) for name in VALUES}
    values = {name: list(value) if isinstance(value, (tuple, frozenset)) else value for name, value in values.items()}
    values["template"] = asdict(family.template) if family.template is not None else None
    report = Findings(source, family.model_type, family.architecture, count, values, named)
    trials = _Trials(report, make, family, tokenizer, processor, [model])
    del model  # the list has the only reference and releases it, because real weights may fit only once
    trials.run()
    return report


def find_config(source: str, trust_remote_code: bool = False) -> Any:
    """The configuration of a folder, a hub id, or an architecture by its `model_type`. Raises `ModelError`."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from kit.models.loading import _load

    folder = Path(source).expanduser()
    if not folder.is_dir() and source in CONFIG_MAPPING_NAMES:
        return AutoConfig.for_model(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
        raise ModelError(f"{source}: the folder has no config.json. It contains: {names}.")
    try:
        return _load(source, "its configuration", AutoConfig.from_pretrained, {"trust_remote_code": trust_remote_code})
    except ModelError as error:
        if folder.is_dir() or "trust_remote_code" in str(error):
            raise
        raise ModelError(
            f"{error} Offline, use a folder with a config.json, or the model_type of an architecture, e.g. "
            "`grpo-kit model check qwen3`."
        ) from error


def find_tokenizer(source: str, config: Any, trust_remote_code: bool) -> tuple[Any, Any | None, str]:
    """The tokenizer, the processor or None, and a description. Without a tokenizer, that of the embedded model."""
    from kit.models.embedded import source_of
    from kit.models.family import is_multimodal
    from kit.models.loading import TOKENIZER_FILES, load_processor, load_tokenizer

    folder = Path(source).expanduser()
    has_files = any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES) if folder.is_dir() else "/" in source
    if has_files:
        keywords: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        tokenizer = load_tokenizer(source, chat=False, **keywords)
        processor = load_processor(source, tokenizer, **keywords) if is_multimodal(config) else None
        return tokenizer, processor, "its own" + (", with its processor" if processor is not None else "")
    tokenizer = load_tokenizer(source_of("embedded"), chat=False)
    return tokenizer, None, "the kit's, because the folder has none"


def _maker(
    source: str, config: Any, tokenizer: Any, processor: Any, named: str, weights: bool, trust_remote_code: bool
) -> tuple[Callable[..., Any], str]:
    """A function that creates a new model (`four_bit=True`: quantised), and a description of its weights."""
    from kit.model_check.tiny import parts_of, tiny_config, tiny_model

    if weights:
        from kit.config import ModelConfig
        from kit.models.loading import find_model, load_model

        section = ModelConfig(name=source, trust_remote_code=trust_remote_code, backend="transformers")
        files = find_model(section, chat=False)

        def load(*, four_bit: bool = False) -> Any:
            return load_model(files, section.model_copy(update={"load_in_4bit": four_bit})).model

        return load, "its own"
    own = not named.startswith("a stand-in")
    small = copy.deepcopy(config)
    ids = [value for part in parts_of(small) for name, value in vars(part).items() if name.endswith("token_id")]
    vocab = max([len(tokenizer), *(1 + value for value in ids if type(value) is int)]) if own else STAND_IN
    small = tiny_config(config, vocab, pictures=processor is None)
    for part in (small, small.get_text_config()):
        part.eos_token_id, part.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    try:
        tiny_model(small)
    except Exception as error:  # architectures may raise any error if a size does not fit
        raise ModelError(
            f"{source}: a tiny copy of this architecture ({config.model_type}) cannot be built: {type(error).__name__}: "
            f"{first_line(error)} Test it at full size: grpo-kit model check {source} --weights."
        ) from error

    def make(*, four_bit: bool = False) -> Any:
        return quantised(tiny_model(small)) if four_bit else tiny_model(small)

    return make, "random"


def quantised(model: Any) -> Any:
    """A tiny model in 4 bits. It is saved and loaded, because only loading quantises."""
    from kit.models.backend import quantization_config
    from kit.models.family import auto_class
    from kit.models.loading import set_up_four_bits

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = auto_class(model.config).from_pretrained(
            folder, quantization_config=quantization_config(torch.float32), dtype=torch.float32
        )
    set_up_four_bits(loaded, torch.float32)
    return loaded


class _Trials:
    """The trials of a model. Each uses a new model, after the previous one is freed. An exception becomes a finding."""

    def __init__(
        self,
        report: Findings,
        make: Callable[..., Any],
        family: FamilyAdapter,
        tokenizer: Any,
        processor: Any | None,
        made: list[Any],
    ) -> None:
        self.report, self.make, self.family = report, make, family
        self.tokenizer, self.processor = tokenizer, processor
        self.scored: dict[str, Any] | None = None  # the scoring layout of the first step on text
        self.made = made
        """The model for the first trial."""

    def run(self) -> None:
        """Runs all trials."""
        self._attempt("scores", lambda: self._scores(self.made.pop()))
        self.made.clear()
        if self.report.weights.startswith("its own"):
            why = "not tested with real weights; adapters are tested below"
            self.report.findings.append(("train", UNTESTED, why))
        else:
            self._attempt("train", lambda: self._step(lora=False))
        self._attempt("LoRA", self._step)
        if importlib.util.find_spec("bitsandbytes") is None:
            why = "bitsandbytes is not installed (uv sync --inexact --extra bnb)"
            self.report.findings.append(("4-bit", UNTESTED, why))
        else:
            self._attempt("4-bit", lambda: self._step(quantised=True))
        self._attempt("vision", self._vision)
        words = {"packed": "rows without padding, a shared prompt once", "plain": "padded rows"}
        packing = (UNTESTED, "no step on text was made")
        if self.scored is not None and self.scored["packing"] is not None:
            reason = f" ({self.scored['reason']})" if self.scored["reason"] else ""
            packing = (TESTED, words[self.scored["packing"]] + reason)
        self.report.findings.append(("packing", *packing))

    def _attempt(self, what: str, trial: Callable[[], tuple[str, str]]) -> None:
        if any(what == name for name, *_ in self.report.findings):
            return
        try:
            finding = trial()
        except Exception as error:  # any error of training is a finding
            name = "" if isinstance(error, KitError) else f"{type(error).__name__}: "
            finding = FAILING, name + first_line(error)
        self.report.findings.append((what, *finding))

    def _scores(self, model: Any) -> tuple[str, str]:
        """Compares the fused head with plain logits, and left-padded with unpadded rows."""
        vocab = min(len(self.tokenizer), model.get_input_embeddings().weight.shape[0])
        scores = score_three_ways(model, self.family, vocab)
        limit = TOLERANCE if next(model.parameters()).dtype == torch.float32 else 0.15
        padded = f"left-padded and unpadded rows differ by {scores.padded:.1e} nats a token"
        if not scores.padded <= limit:
            self.report.findings.append(("padding", FAILING, f"{padded}: the architecture does not handle padding"))
        else:
            self.report.findings.append(("padding", TESTED, padded))
        head = f"the scorer and plain logits differ by {scores.head:.1e} nats a token"
        return (TESTED if scores.head <= limit else FAILING), head

    def _step(
        self, *, lora: bool = True, rows: list[dict[str, Any]] | None = None, quantised: bool = False
    ) -> tuple[str, str]:
        """The result of a GRPO step. It fails if no weight changed."""
        from kit.config import ModelConfig
        from kit.models.loading import adapter

        settings = ModelConfig.model_validate({"name": "x", "lora": {"rank": 4} if lora else None})
        release()
        model = self.make(four_bit=True) if quantised else self.make()
        processing = self.processor if rows is not None else self.tokenizer
        step = grpo_step(model, processing, adapter(settings, self.family), rows)
        self.scored = self.scored or (step.scored if rows is None else None)
        what = f" on {', '.join(step.adapted)}" if step.adapted else ""
        text = f"one GRPO step: gradient norm {step.grad_norm:.3g}, {step.trained} weights{what}"
        moved = math.isfinite(step.grad_norm) and step.grad_norm > 0 and step.moved > 0
        return (TESTED, text) if moved else (FAILING, f"{text}; nothing moved")

    def _vision(self) -> tuple[str, str]:
        if not self.family.multimodal:
            return UNTESTED, "the model reads text only"
        if self.processor is None:
            return UNTESTED, "the model has no processor for pictures"
        from PIL import Image

        questions = ("What colour?", "Is it dark, or is it light?", "Describe it.", "Why?")
        rows = [
            {
                "prompt": [{"role": "user", "content": text}],
                "images": [Image.new("RGB", (32 + 32 * (n % 2), 32), (60 * n, 9, 99))],
            }
            for n, text in enumerate(questions)
        ]
        return self._step(rows=rows)


# --- the trials -------------------------------------------------------------------------------------------------------


PROMPTS = (
    "Add 2 and 3.",
    "What is left when five apples out of nine are eaten?",
    "Say yes.",
    "How many legs have two cats?",
)
PADDING = 5
"""Padding tokens of the shorter row in `score_three_ways`."""


@dataclass(frozen=True)
class Scores:
    """Mean differences in nats per token from the model's logits on single rows without padding."""

    padded: float
    """Plain logits of a left-padded batch."""
    head: float
    """The scorer on single rows. A transform of logits that the fused head ignores shows here."""
    scorer: float
    """The scorer on the left-padded batch, as in training."""


def score_three_ways(model: Any, family: FamilyAdapter, vocab: int, tokens: int = 24) -> Scores:
    """Scores two rows of random ids, one shorter by `PADDING`, alone and in a batch. Installs TRL's head in the model."""
    fuse(model)
    generator, device = torch.Generator().manual_seed(1), model.device
    rows = [torch.randint(0, vocab, (1, size), generator=generator).to(device) for size in (tokens, tokens + PADDING)]
    batch = torch.cat([torch.nn.functional.pad(rows[0], (PADDING, 0)), rows[1]])
    mask = torch.ones_like(batch)
    mask[0, :PADDING] = 0
    completed = family.completed(model)
    with torch.no_grad():
        alone = [plain_logps(completed, row, torch.ones_like(row)) for row in rows]
        padded = plain_logps(completed, batch, mask)
        fused = [fused_logps(completed, row, torch.ones_like(row)) for row in rows]
        scored = fused_logps(completed, batch, mask)
    back = [padded[:1, PADDING:], padded[1:]], [scored[:1, PADDING:], scored[1:]]
    return Scores(_apart(back[0], alone), _apart(fused, alone), _apart(back[1], alone))


def fuse(model: Any) -> None:
    """Installs TRL's fused head with the kit's kernel in `model`, once."""
    from trl.trainer.utils import add_fused_lm_head

    from kit.scoring.head import install_torch_logprob_kernel

    install_torch_logprob_kernel()
    if not getattr(model, "_kit_fused", False):
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        model._kit_fused = True


def plain_logps(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities (B, L-1), in nats, of the tokens after the first, from the model's logits."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    logps: Tensor = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return logps


def fused_logps(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities (B, L-1), in nats, by the scorer; 0 on padding."""
    labels = ids.masked_fill(mask == 0, -100)
    scored: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
    return scored.float()


def _apart(values: list[Tensor], expected: list[Tensor]) -> float:
    differences = torch.cat([(a - b).abs().flatten() for a, b in zip(values, expected, strict=True)])
    return float(differences.mean())


@dataclass(frozen=True)
class Step:
    """The result of a GRPO step."""

    loss: float
    grad_norm: float
    moved: float
    """Largest change of a trained weight."""
    trained: int
    """Weights that train."""
    adapted: tuple[str, ...]
    """Kinds of linear layers with an adapter."""
    completion_ids: tuple[tuple[int, ...], ...]
    scored: dict[str, Any]
    """The trainer's `packing_report`."""


def grpo_step(model: Any, processing_class: Any, peft_config: Any, rows: list[dict[str, Any]] | None = None) -> Step:
    """Makes a step of `HookedGRPOTrainer` on 8 completions with all first-step checks. Raises the errors of training."""
    from datasets import Dataset, Features, Image, List, Value
    from trl import GRPOConfig

    from kit.config import load_config
    from kit.models.backend import TRANSFORMERS, Backend
    from kit.models.loading import LoadedModel
    from kit.objective import Objective
    from kit.runner.build import make_trainer

    chat = bool(getattr(processing_class, "chat_template", None))
    if rows is None:
        rows = [{"prompt": [{"role": "user", "content": text}] if chat else text} for text in PROMPTS]
    data = Dataset.from_list(rows)
    if "images" in rows[0]:
        message = {"role": Value("string"), "content": Value("string")}
        data = Dataset.from_list(rows, features=Features({"prompt": List(message), "images": List(Image())}))
    sampled: list[tuple[int, ...]] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        sampled.extend(tuple(ids) for ids in completion_ids)
        return [float(sum(ids) % 7) + index % 4 for index, ids in enumerate(completion_ids)]

    with _quietly(), tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, max_steps=1, per_device_train_batch_size=8, num_generations=4, max_completion_length=8,
            learning_rate=1e-3, report_to="none", save_strategy="no", use_cpu=model.device.type == "cpu", bf16=False,
            disable_tqdm=True, logging_steps=1, seed=0, gradient_checkpointing=False, remove_unused_columns=False,
        )  # fmt: skip
        backend = Backend(TRANSFORMERS, model.device.type, "")
        loaded = LoadedModel(model, processing_class, peft_config, backend, processing_class)
        trainer = make_trainer(load_config({}), loaded, reward, args, data, Objective.from_spec("dapo"), log.warning)
        weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        before = [weight.detach().clone() for weight in weights]
        trainer.train()
        metrics = trainer.state.log_history[0]
    moved = max(float((new.detach() - old).abs().max()) for new, old in zip(weights, before, strict=True))
    names = (name for name, _ in trainer.model.named_parameters() if ".lora_A" in name)
    adapted = sorted({name.partition(".lora_A")[0].rpartition(".")[2] for name in names})
    count, scored = sum(weight.numel() for weight in weights), dict(trainer.packing_report)
    return Step(metrics["loss"], metrics["grad_norm"], moved, count, tuple(adapted), tuple(sampled), scored)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppresses the output of libraries."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
