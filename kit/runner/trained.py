"""The trained policy of a run: finds and loads its weights and its base model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kit.config import RunConfig, load_config
from kit.errors import KitError, ModelError, RunError
from kit.evaluation.results import checkpoint_now, weights_of
from kit.models.start import find_start, put_on

if TYPE_CHECKING:
    from kit.evaluation.heldout import HeldOut
    from kit.generation.tools import ToolSetup
    from kit.models.failures import BatchSizeBackoff
    from kit.models.loading import ModelFiles
    from kit.runs.store import RunDir
    from rewards import Preset

    AnyHeldOut = TypeVar("AnyHeldOut", bound=HeldOut)


@dataclass
class Source:
    """A run's policy at one step: its weights on disk and the base model. `load` loads it."""

    run: RunDir
    config: RunConfig
    files: ModelFiles
    step: int
    weights: Path
    base: str
    """The folder or hub id of the 16-bit weights into which the adapter is merged."""
    run_name: str = ""
    """The model's name in the run's configuration."""
    ends: list[int] | None = None
    """All tokens that end a completion; None: not determined yet."""
    notes: list[str] = field(default_factory=list)
    """Notes for the result of an export, in order."""
    start: Path | None = None
    """Folder of the adapter with which training started."""

    @property
    def lora(self) -> bool:
        """Whether an adapter was trained, and not all weights."""
        return self.config.model.lora is not None

    @property
    def unrounded(self) -> bool:
        """Whether the adapter is merged into the weights that training loaded, before they were quantised."""
        return self.base == self.files.source and getattr(self.files.config, "quantization_config", None) is None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the run, with its chat template."""
        return self.files.tokenizer

    def load(self, **changes: Any) -> Any:
        """Loads base and adapter in the precision of the training, on the run's device. Raises `ModelError`."""
        base = self.load_base(**changes)
        return put_on(base, self.weights, self.start) if self.lora else base

    def load_base(self, **changes: Any) -> Any:
        """Loads the base as for training, with changed keys of `model`; if all weights were trained, the trained ones."""
        from kit.models.loading import load_model

        return load_model(self.files, self.config.model.model_copy(update=changes)).model

    def load_start(self) -> Any:
        """Loads the initial model of a run that trains all weights. Raises `ModelError`."""
        from kit.models.embedded import source_of
        from kit.models.loading import load_model

        revision = self.config.model.revision
        files = replace(self.files, source=source_of(self.run_name, revision), revision=revision)
        return load_model(files, self.config.model).model.eval()

    @cached_property
    def interaction(self) -> ToolSetup:
        """The tools and environments of the run. Raises `KitError` if the tokenizer has no template for them."""
        from kit.generation.tools import check_turns, load_tools

        interaction = load_tools(self.config.generation)
        check_turns(interaction, self.tokenizer, chat=self.config.data.chat, source=self.config.model.name)
        return interaction

    def heldout_rows(self) -> list[dict[str, Any]]:
        """The held-out rows in the order of the run's evaluations, from the run's copy.

        Raises `RunError` if the run has no copy. The data source may have changed and could hold out trained rows.
        """
        import pyarrow.parquet as pq
        from datasets import Dataset

        if not self.run.heldout.is_file():
            raise RunError(f"Run '{self.run.id}' has no {self.run.heldout.name}, its copy of the held-out rows.")
        rows: list[dict[str, Any]] = Dataset(pq.read_table(self.run.heldout)).to_list()
        return rows

    def heldout(
        self,
        kind: type[AnyHeldOut],
        rows: Sequence[dict[str, Any]],
        preset: Preset,
        checker: Preset | None = None,
        memory: BatchSizeBackoff | None = None,
    ) -> AnyHeldOut:
        """A `HeldOut` of `rows`, with the prompts, generation and scores of the run's evaluations."""
        from kit.models.loading import autocast_dtype

        config, processor = self.config, self.files.processor
        settings = (config.evaluation, config.generation, checker, memory, self.interaction, processor)
        heldout = kind(rows, preset, self.tokenizer, *settings)
        heldout.half = autocast_dtype(config.model, self.files.backend)
        return heldout

    def note(self, text: str) -> None:
        """Adds a note to the result, once."""
        if text not in self.notes:
            self.notes.append(text)


def open_source(
    run: RunDir, which: str | int | None, base: str | None = None, *, overrides: Sequence[str] = ()
) -> tuple[Source, str | None]:
    """Finds the run's policy and loads the libraries, but not the weights. Returns it with a note or None.

    Raises `KitError`. which: `best`, `last`, a step, or None for the run's result. overrides: `section.key=value` strings.
    """
    from kit.models.backend import precision, this_machine, use_threads
    from kit.models.embedded import source_of
    from kit.models.family import is_multimodal
    from kit.models.libraries import load_libraries
    from kit.models.loading import find_model, load_processor

    now = checkpoint_now(run, which)
    step, weights = weights_of(run, now)
    note = None
    if now != which:
        state = run.status()["state"]
        note = f"Run '{run.id}' is {state}: these are the weights of its last complete checkpoint, step {step}."
    config = load_config(run.config, overrides)
    load_libraries(config.model, training=False)
    use_threads(config.run.threads, config.model.name)
    named, dtype = config.model.name, config.model.dtype
    try:
        precision(dtype, this_machine().capability)
    except KitError:  # of the GPU on which the run was trained
        config.model.dtype = "auto"
        note = f"{note or ''} This machine does not compute in {dtype}, so it uses model.dtype: auto.".strip()
    # Unsloth's models are transformers' models, and its adapters PEFT's.
    config.model.backend = "transformers"
    start = find_start(config.model)
    if config.model.lora is None:
        config.model = config.model.model_copy(update={"name": str(weights)})
    files = find_model(config.model, chat=config.data.chat, template=config.data.chat_template_kwargs)
    if config.model.lora is None and is_multimodal(files.config):
        original = source_of(named, config.model.revision)
        keywords = {"revision": config.model.revision, "trust_remote_code": config.model.trust_remote_code}
        try:  # weights of a run on texts are saved without a processor
            files = replace(files, processor=load_processor(original, files.tokenizer, **keywords))
        except ModelError:
            missing = (
                f"The processor of {named} cannot be read. An export lacks it then, and vLLM does not load the export."
            )
            note = f"{note or ''} {missing}".strip()
    return Source(run, config, files, step, weights, base or files.source, named, start=start), note
