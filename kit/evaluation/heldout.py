"""Held-out score of a model: greedy accuracy, pass@1 and pass@k, with 95 % intervals and samples."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kit.config import EvaluationConfig, GenerationConfig
from kit.data.images import IMAGES, digest
from kit.evaluation.statistics import bootstrap_mean, pass_at_k, wilson
from kit.generation.multi_turn import Conversation, MultiTurnSampler, environment_rewards, own_tokens, readable
from kit.generation.prompts import (
    ImagePrompt,
    LazyPrompt,
    has_pictures,
    is_plain,
    model_inputs,
    note_opened_thinking,
    question,
    render,
)

if TYPE_CHECKING:
    import torch

    from kit.generation.tools import ToolSetup
    from kit.models.failures import BatchSizeBackoff
    from rewards import Context, Evaluation, Preset, Sample

log = logging.getLogger("kit")
SHOWN = 8
GENERATION = ("max_completion_tokens", "top_p", "top_k", "min_p")
"""The run's generation settings that `_generation_config` uses."""
Progress = Callable[[int, int], None]  # (completions done, completions in all)
Completion = tuple[list[int], bool]  # (token ids, whether it was cut at the limit)
Prompt = str | list[int] | LazyPrompt | ImagePrompt


class HeldOut:
    """A fixed set of held-out problems, scored the same way at every evaluation.

    The checker component of `checker`, or of `preset` if `checker` is None, decides correctness. The reward is always that of
    `preset`, on which the policy trains.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        preset: Preset,
        tokenizer: Any,
        config: EvaluationConfig,
        generation: GenerationConfig,
        checker: Preset | None = None,
        memory: BatchSizeBackoff | None = None,
        interaction: ToolSetup | None = None,
        processor: Any = None,
    ) -> None:
        self.processor = processor  # for prompts with pictures
        self.rows = list(rows)[: config.prompts]
        self.preset, self.tokenizer, self.config, self.generation = preset, tokenizer, config, generation
        self.checker = checker if checker is not None else preset
        self.memory = memory  # retries with smaller batches if memory runs out; None: fail
        self.sampler: MultiTurnSampler | None = None
        if interaction:
            self.sampler = MultiTurnSampler(interaction, tokenizer, generation.max_completion_tokens)
        self.prompt_ids: dict[str, list[int]] = {}  # token ids of each rendered prompt
        self.half: torch.dtype | None = None  # autocast dtype of training, for float32 weights
        self.further: dict[str, Any] = {}  # additional keywords of generate()
        self.prompts = [self._prompt(row) for row in self.rows]
        self.plain = is_plain([row["prompt"] for row in self.rows])
        for scorer in {id(preset): preset for preset in (self.preset, self.checker)}.values():
            note_opened_thinking(scorer, tokenizer, [row["prompt"] for row in self.rows[:1]])

    def _prompt(self, row: dict[str, Any]) -> Prompt:
        """Return the rendered prompt, or a wrapper of the row if it has pictures or may call tools."""
        if self.sampler is not None:
            return LazyPrompt(row)
        if has_pictures(row):
            return ImagePrompt(row)
        return render(self.tokenizer, row["prompt"])

    @property
    def checker_name(self) -> str | None:
        """The checker as `preset/component`, or None."""
        return None if self.checker.checker is None else f"{self.checker.name}/{self.checker.checker}"

    def score(self, model: Any, progress: Progress | None = None, *, step: int = 0) -> dict[str, Any]:
        """Return the scores of `model` after `step` optimiser steps, as plain numbers. Restores model mode and RNG.

        `per_problem` has one column per quantity with an entry per problem, in order, so that two evaluations can be compared
        problem by problem: `id` (a hash of prompt and reference), `greedy_correct`, `sampled_correct` (how many of the k),
        `greedy_reward`, `greedy_tokens`, `sampled_tokens_mean`.
        """
        started, k = time.perf_counter(), self.config.k
        total = len(self.prompts) * (1 + k)
        with evaluating(model, self.config.seed):
            greedy = self._complete(model, self.prompts, False, progress, 0, total)
            repeated = [prompt for prompt in self.prompts for _ in range(k)]
            sampled = self._complete(model, repeated, True, progress, len(self.prompts), total)
        lengths = [own_tokens(completion) for completion in sampled]
        right, correct = self._accuracy(greedy, sampled) if self.checker_name is not None else ({}, {})
        verdict = self._verdict(self._as_samples(self.rows, greedy), greedy, scoring_context())
        failure = {"reward_failure": first_failure(verdict)} if verdict.failure_share else {}
        if failure:
            log.warning("%.0f%% of held-out rewards failed. %s.", 100 * verdict.failure_share, *failure.values())
        shown = zip(self.rows[:SHOWN], greedy, verdict.totals, strict=False)
        return {
            "problems": len(self.rows),
            "step": step,
            "seed": self.config.seed,
            "checker": self.checker_name,
            "k": k,
            "temperature": self.config.temperature,
            "generation": self.generation.model_dump(include=set(GENERATION)),
            **right,
            "greedy_reward": bootstrap_mean([total for total in verdict.totals if total is not None])._asdict(),
            "reward_failure_share": verdict.failure_share,
            **failure,
            "completion_tokens_mean": sum(lengths) / max(1, len(lengths)),
            "truncated_share": sum(cut for _, cut in sampled) / max(1, len(sampled)),
            "seconds": time.perf_counter() - started,
            "per_problem": {
                "id": [problem_id(row) for row in self.rows],
                **correct,
                "greedy_reward": verdict.totals,
                "greedy_tokens": [own_tokens(completion) for completion in greedy],
                "sampled_tokens_mean": [sum(lengths[at : at + k]) / k for at in range(0, len(lengths), k)],
            },
            "samples": [
                {
                    "prompt": question(row["prompt"]),
                    "reference": row.get("reference"),
                    "completion": readable(done.messages) if isinstance(done, Conversation) else self._text(done[0]),
                    "reward": total,
                }
                for row, done, total in shown
            ],
        }

    def _accuracy(self, greedy: list[Completion], sampled: list[Completion]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the checker's scores (share right, unbiased pass@1 and pass@k) and their columns of `per_problem`."""
        k = self.config.k
        context, repeated = scoring_context(), [row for row in self.rows for _ in range(k)]
        right = self.checker.is_correct(self._as_samples(self.rows, greedy), context)
        drawn = self.checker.is_correct(self._as_samples(repeated, sampled), context)
        counts = [sum(drawn[start : start + k]) for start in range(0, len(drawn), k)]
        estimates = {
            "greedy_accuracy": wilson(sum(right), len(right)),
            "pass@1": bootstrap_mean([pass_at_k(k, count, 1) for count in counts], shares=True),
            f"pass@{k}": bootstrap_mean([pass_at_k(k, count, k) for count in counts], shares=True),
        }
        columns = {"greedy_correct": right, "sampled_correct": counts}
        return {name: estimate._asdict() for name, estimate in estimates.items()}, columns

    def _complete(
        self, model: Any, prompts: list[Prompt], sample: bool, progress: Progress | None, done: int, total: int
    ) -> list[Completion]:
        """Return one completion per prompt, in the order of `prompts`."""
        size, ends = self.config.batch_size, end_tokens(model, self.tokenizer)
        results: list[Completion] = [([], True)] * len(prompts)
        # Batch prompts of similar length to save padding. The order depends on the prompts only.
        order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            completions = self._ended(model, [prompts[index] for index in chosen], sample, ends)
            for index, completion in zip(chosen, completions, strict=True):
                results[index] = completion
            if progress is not None:
                progress(done + min(start + size, len(order)), total)
        return results

    def _ended(self, model: Any, prompts: list[Prompt], sample: bool, ends: list[int]) -> Sequence[Completion]:
        """Return one completion per prompt, up to its end token; a conversation if the model may call tools."""

        def generate(batch: Sequence[Prompt]) -> list[Completion]:
            rows = self._rows(model, list(batch), sample, ends)
            stops = [next((place for place, token in enumerate(row) if token in ends), None) for row in rows]
            return [(row if end is None else row[: end + 1], end is None) for row, end in zip(rows, stops, strict=True)]

        if self.sampler is None:
            return generate(prompts)
        rows = [prompt.row for prompt in prompts if isinstance(prompt, LazyPrompt)]
        return self.sampler.converse(rows, lambda batch: [ids for ids, _ in generate(batch)], ends, model)

    def _rows(self, model: Any, prompts: list[Prompt], sample: bool, ends: list[int]) -> list[list[int]]:
        """Generate for all prompts at once, or in smaller batches after running out of memory."""

        def parts(size: int) -> list[list[int]]:
            chunks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
            return [row for chunk in chunks for row in self._generate(model, chunk, sample, ends)]

        if self.memory is None:
            return parts(len(prompts))
        rows = self.memory.attempt("evaluation", len(prompts), parts)
        self.memory.finished()
        return rows

    def _generate(self, model: Any, prompts: list[Prompt], sample: bool, ends: list[int]) -> list[list[int]]:
        import torch

        from kit.generation.decoding import as_in_training, fast_decoding
        from kit.models.family import adapter_of, placeholders
        from kit.models.unsloth import free_cache

        with_images = [prompt for prompt in prompts if isinstance(prompt, ImagePrompt)]
        if 0 < len(with_images) < len(prompts):  # processors need pictures for every prompt or none
            text_only: list[Prompt] = [prompt for prompt in prompts if not isinstance(prompt, ImagePrompt)]
            parts: dict[bool, list[Prompt]] = {True: [*with_images], False: text_only}
            rows = {images: iter(self._generate(model, part, sample, ends)) for images, part in parts.items()}
            return [next(rows[isinstance(prompt, ImagePrompt)]) for prompt in prompts]
        if with_images:
            batch = model_inputs(self.processor, [prompt.row for prompt in with_images], adapter_of(model).accepts)
        elif all(isinstance(prompt, str) for prompt in prompts):
            batch = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=self.plain)
        else:
            ids = [
                self.tokenizer(prompt, add_special_tokens=self.plain)["input_ids"]
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]
            batch = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding=True)
        for prompt, ids, live in zip(prompts, batch["input_ids"], batch["attention_mask"], strict=True):
            if isinstance(prompt, str):
                self.prompt_ids[prompt] = ids[live.bool()].tolist()
        batch = batch.to(model.device)
        settings = self._generation_config(sample, ends)
        settings.suppress_tokens = list(placeholders(model.config)) or None
        with torch.inference_mode(), as_in_training(model, self.half), fast_decoding(model):
            try:
                output = model.generate(
                    **(batch if with_images else {name: batch[name] for name in ("input_ids", "attention_mask")}),
                    generation_config=settings,
                    **self.further,
                )
            finally:
                free_cache(model)
        return output[:, batch["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]

    def _generation_config(self, sample: bool, ends: list[int]) -> Any:
        from transformers import GenerationConfig as HFGenerationConfig

        # Loading dropped the model's own settings (`keep_only_tokens`), so None disables a setting.
        sampling: dict[str, Any] = {"do_sample": False}
        if sample:
            sampling = {
                "do_sample": True,
                "temperature": self.config.temperature,
                "top_p": self.generation.top_p,
                "top_k": self.generation.top_k,
                "min_p": self.generation.min_p,
            }
        return HFGenerationConfig(
            max_new_tokens=self.generation.max_completion_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=ends,
            disable_compile=True,
            **sampling,
        )

    def _as_samples(self, rows: Sequence[dict[str, Any]], completions: Sequence[Completion]) -> list[Sample]:
        from rewards import build_samples

        columns: dict[str, Any] = (
            {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", IMAGES)} if rows else {}
        )
        columns["finish_reason"] = [
            done.reason if isinstance(done, Conversation) else "length" if done[1] else "stop" for done in completions
        ]
        prompt_ids: list[Any] = []  # None for pictures, and before anything was generated
        for row, done in zip(rows, completions, strict=True):
            prompt = done.prompt_ids if isinstance(done, Conversation) else self._prompt(row)
            prompt_ids.append(self.prompt_ids.get(prompt) if isinstance(prompt, str) else prompt)
        if all(isinstance(ids, list) for ids in prompt_ids):
            columns["prompt_ids"] = prompt_ids
        if self.sampler is not None and self.sampler.interaction.environments is not None:
            columns["environments"] = [getattr(done, "environment", None) for done in completions]
        return build_samples(
            [row["prompt"] for row in rows],
            [self._completion(row["prompt"], completion) for row, completion in zip(rows, completions, strict=True)],
            [ids for ids, _ in completions],
            **columns,
        )

    def _verdict(self, samples: list[Sample], completions: Sequence[Completion], context: Context) -> Evaluation:
        """Score by the preset and add the rewards of environments to the totals, as in training."""
        verdict = self.preset.score(samples, context)
        extra = environment_rewards(completions)
        if all(value is None for value in extra):
            return verdict
        totals = [
            total if more is None else more + (total or 0.0) for total, more in zip(verdict.totals, extra, strict=True)
        ]
        return dataclasses.replace(verdict, totals=totals)

    def _completion(self, prompt: Any, completion: Completion) -> Any:
        """Return a completion in the form of its prompt, as rewards get it in training: messages or text."""
        if isinstance(completion, Conversation):
            return completion.messages
        text = self._text(completion[0])
        return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def problem_id(row: dict[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a problem: a hash of prompt, reference and pictures."""
    parts = [row["prompt"], row.get("reference")]
    parts += [digest(row[IMAGES])] if has_pictures(row) else []
    content = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def scoring_context(seed: int = 0, total_steps: int = 0) -> Context:
    """Return the context that trainers pass to reward functions before the first step; it logs nothing."""
    from rewards import Context

    state = SimpleNamespace(global_step=0, max_steps=total_steps, epoch=0.0, log_history=[])
    silent = {"trainer_state": state, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    return Context(seed=seed, step=0, total_steps=total_steps, extras=silent)


def first_failure(verdict: Evaluation) -> str:
    """Return the reason of the first failed score as text, without a full stop."""
    for name, statuses in verdict.statuses.items():
        for index, status in enumerate(statuses):
            if status in ("error", "timeout", "infra"):
                reason = verdict.infos[name][index].get("reason", "no reason given")
                return f"'{name}' on completion {index + 1} of the batch: {status}: {reason}".rstrip(".")
    return "No single failure is on record"


@contextmanager
def evaluating(model: Any, seed: int) -> Iterator[None]:
    """Switch to eval mode with the KV cache and a separate random state; restore everything afterwards."""
    import torch

    from kit.models.unsloth import for_inference, for_training

    was_training, checkpointing = model.training, getattr(model, "is_gradient_checkpointing", False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.eval()
        is_unsloth = for_inference(model)
        if checkpointing and not is_unsloth:
            model.gradient_checkpointing_disable()
        try:
            yield
        finally:
            if is_unsloth and was_training:
                for_training(model)
            elif checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train(was_training)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the sorted token ids that end a completion: the tokenizer's and those that the model declares."""
    from kit.models.family import end_ids

    return sorted(end_ids(model.generation_config, tokenizer, None))
