"""Held-out score of a model: greedy accuracy, pass@1 and pass@k, with 95 % intervals and samples.

`python -m kit.evaluation.heldout REQUEST` evaluates a run's adapter anew, in a process of its own.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kit.config import EvaluationConfig, GenerationConfig, RunConfig, load_config
from kit.errors import RunError
from kit.evaluation.statistics import bootstrap_mean, pass_at_k, wilson

if TYPE_CHECKING:
    from kit.data import DataSplit
    from kit.runs.store import RunDir
    from rewards import Context, Evaluation, Preset, Sample

log = logging.getLogger("kit")
SHOWN = 8
Progress = Callable[[int, int], None]  # (completions done, completions in all)
Completion = tuple[list[int], bool]  # (token ids, whether it was cut at the limit)


class HeldOut:
    """A fixed set of held-out problems, scored the same way each time it is asked."""

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        preset: Preset,
        tokenizer: Any,
        config: EvaluationConfig,
        generation: GenerationConfig,
    ) -> None:
        self.rows = list(rows)[: config.prompts]
        self.preset, self.tokenizer, self.config, self.generation = preset, tokenizer, config, generation
        self.prompts = [render(tokenizer, row["prompt"]) for row in self.rows]
        self.plain = is_plain([row["prompt"] for row in self.rows])

    def score(self, model: Any, progress: Progress | None = None) -> dict[str, Any]:
        """Greedy accuracy, pass@1 and pass@k of `model`, as plain numbers. Leaves model mode and RNG as they were."""
        started, k = time.perf_counter(), self.config.k
        total = len(self.prompts) * (1 + k)
        with evaluating(model, self.config.seed):
            greedy = self._complete(model, self.prompts, False, progress, 0, total)
            repeated = [prompt for prompt in self.prompts for _ in range(k)]
            sampled = self._complete(model, repeated, True, progress, len(self.prompts), total)
        lengths = [len(ids) for ids, _ in sampled]
        result = self._accuracy(greedy, sampled) if self.preset.checker is not None else {}
        return {
            "problems": len(self.rows),
            "k": k,
            "temperature": self.config.temperature,
            **result,
            **self._reward(greedy),
            "completion_tokens_mean": sum(lengths) / max(1, len(lengths)),
            "truncated_share": sum(cut for _, cut in sampled) / max(1, len(sampled)),
            "seconds": time.perf_counter() - started,
            "samples": self._samples(greedy),
        }

    def _accuracy(self, greedy: list[Completion], sampled: list[Completion]) -> dict[str, Any]:
        """Scores by the preset's checker: the share right, and the unbiased pass@1 and pass@k."""
        k = self.config.k
        context, repeated = scoring_context(), [row for row in self.rows for _ in range(k)]
        right = self.preset.is_correct(self._as_samples(self.rows, greedy), context)
        drawn = self.preset.is_correct(self._as_samples(repeated, sampled), context)
        counts = [sum(drawn[start : start + k]) for start in range(0, len(drawn), k)]
        return {
            "greedy_accuracy": wilson(sum(right), len(right))._asdict(),
            "pass@1": bootstrap_mean([pass_at_k(k, count, 1) for count in counts], shares=True)._asdict(),
            f"pass@{k}": bootstrap_mean([pass_at_k(k, count, k) for count in counts], shares=True)._asdict(),
        }

    def _reward(self, completions: list[Completion]) -> dict[str, Any]:
        """Mean reward of the greedy completions, and how much of it could not be scored."""
        verdict = self.preset.score(self._as_samples(self.rows, completions), scoring_context())
        failure = {"reward_failure": first_failure(verdict)} if verdict.failure_share else {}
        if failure:
            log.warning("%.0f%% of held-out rewards failed. %s.", 100 * verdict.failure_share, *failure.values())
        return {
            "greedy_reward": bootstrap_mean([total for total in verdict.totals if total is not None])._asdict(),
            "reward_failure_share": verdict.failure_share,
            **failure,
        }

    def _complete(
        self, model: Any, prompts: list[str], sample: bool, progress: Progress | None, done: int, total: int
    ) -> list[Completion]:
        """Token ids of one completion a prompt, and whether it was cut, in the order of `prompts`."""
        import torch

        tokenizer, size = self.tokenizer, self.config.batch_size
        ends = end_tokens(model, tokenizer)
        results: list[Completion] = [([], True)] * len(prompts)
        # Prompts of like length together: less padding. The order is a function of the prompts alone.
        order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            batch = tokenizer(
                [prompts[index] for index in chosen],
                return_tensors="pt",
                padding=True,
                add_special_tokens=self.plain,
            ).to(model.device)
            with torch.inference_mode():
                output = model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    generation_config=self._generation_config(sample, ends),
                )
            for index, row in zip(chosen, output[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
                end = next((place for place, token in enumerate(row) if token in ends), None)
                results[index] = (row if end is None else row[: end + 1], end is None)
            if progress is not None:
                progress(done + min(start + size, len(order)), total)
        return results

    def _generation_config(self, sample: bool, ends: list[int]) -> Any:
        from transformers import GenerationConfig as HFGenerationConfig

        # The model's own settings were dropped when it was loaded (`keep_only_tokens`), so that None means none.
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
            repetition_penalty=self.generation.repetition_penalty,
            disable_compile=True,
            **sampling,
        )

    def _as_samples(self, rows: Sequence[dict[str, Any]], completions: Sequence[Completion]) -> list[Sample]:
        from rewards import build_samples

        columns: dict[str, Any] = (
            {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"} if rows else {}
        )
        columns["finish_reason"] = ["length" if cut else "stop" for _, cut in completions]
        return build_samples(
            [row["prompt"] for row in rows],
            [self._completion(row["prompt"], ids) for row, (ids, _) in zip(rows, completions, strict=True)],
            [ids for ids, _ in completions],
            **columns,
        )

    def _completion(self, prompt: Any, ids: list[int]) -> Any:
        """What a reward is given in training, too: messages after messages, text after text."""
        text = self._text(ids)
        return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _samples(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """The first problems with their greedy completion and its reward, for people to read."""
        shown = list(zip(self.rows, completions, strict=True))[:SHOWN]
        samples = self._as_samples([row for row, _ in shown], [done for _, done in shown])
        totals = self.preset.score(samples, scoring_context()).totals
        return [
            {
                "prompt": question(row["prompt"]),
                "reference": row.get("reference"),
                "completion": self._text(ids),
                "reward": total,
            }
            for (row, (ids, _)), total in zip(shown, totals, strict=True)
        ]


def scoring_context(seed: int = 0, total_steps: int = 0) -> Context:
    """What trainers hand to reward functions beside columns, as before the first step: nothing is logged here."""
    from rewards import Context

    state = SimpleNamespace(global_step=0, max_steps=total_steps, epoch=0.0, log_history=[])
    silent = {"trainer_state": state, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    return Context(seed=seed, step=0, total_steps=total_steps, extras=silent)


def first_failure(verdict: Evaluation) -> str:
    """The reason of the first score that failed, in words, without a full stop."""
    for name, statuses in verdict.statuses.items():
        for index, status in enumerate(statuses):
            if status in ("error", "timeout", "infra"):
                reason = verdict.infos[name][index].get("reason", "no reason given")
                return f"'{name}' on completion {index + 1} of the batch: {status}: {reason}".rstrip(".")
    return "No single failure is on record"


@contextmanager
def evaluating(model: Any, seed: int) -> Iterator[None]:
    """Eval mode, cache on, and RNGs of their own; all is as before afterwards, so that training does not notice."""
    import torch

    was_training, checkpointing = model.training, getattr(model, "is_gradient_checkpointing", False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.eval()
        if checkpointing:
            model.gradient_checkpointing_disable()
        try:
            yield
        finally:
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train(was_training)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token id that ends a completion: the tokenizer's and those that the model declares."""
    declared = model.generation_config.eos_token_id
    declared = [declared] if isinstance(declared, int) else list(declared or [])
    return list(dict.fromkeys([tokenizer.eos_token_id, *declared]))


def render(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> str:
    """The text that the model is given."""
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))


def is_plain(prompts: Sequence[Any]) -> bool:
    """Whether prompts are texts to which the tokenizer adds its special tokens; a chat template brings its own."""
    return bool(prompts) and isinstance(prompts[0], str)


def count_tokens(tokenizer: Any, prompts: Sequence[Any]) -> list[int]:
    """Tokens of each prompt, as the model is given it."""
    texts = [render(tokenizer, prompt) for prompt in prompts]
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=is_plain(prompts))["input_ids"]]


def question(prompt: str | list[dict[str, Any]]) -> str:
    """What was asked, for people: the last message's text, or the text itself."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def evaluate_run(request: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Scores a finished run's adapter with the run's own data, reward and settings, `overrides` aside."""
    from kit.runs.store import RunDir
    from kit.training.quiet import LogBook

    run, logs = RunDir(Path(request["run_dir"])), LogBook()
    with logs.collecting(), logs.written_to(run.log):
        return _evaluate_run(run, request)


def _evaluate_run(run: RunDir, request: dict[str, Any]) -> dict[str, Any]:
    from peft import PeftModel

    from kit.data import load_data
    from kit.training.backend import use_threads
    from kit.training.models import find_model, load_model
    from kit.training.preparation import build_reward, fit_prompts

    changes = [f"evaluation.{key}={json.dumps(value)}" for key, value in request["overrides"].items()]
    config: RunConfig = load_config(run.config, changes)
    if not (run.adapter / "config.json").is_file() and not (run.adapter / "adapter_config.json").is_file():
        raise RunError(f"Run '{run.id}' has no trained weights in {run.adapter}; they are written at its end.")
    use_threads(config.run.threads)
    if config.model.lora is None:
        config.model.name = str(run.adapter)
    loaded = load_model(find_model(config.model, chat=config.data.chat), config.model)
    model = loaded.model if config.model.lora is None else PeftModel.from_pretrained(loaded.model, str(run.adapter))
    heldout = fit_prompts(config, unchanged(run, load_data(config.data)), loaded.tokenizer).heldout.to_list()
    result = HeldOut(heldout, build_reward(config), loaded.tokenizer, config.evaluation, config.generation).score(model)
    run.write_json(f"eval/{request.get('name', 'again')}.json", result)
    print(json.dumps(result))
    return result


def unchanged(run: RunDir, data: DataSplit) -> DataSplit:
    """The data, if it is what the run was trained on. Raises `RunError`: other rows would be held out now."""
    trained = json.loads(run.data.read_text(encoding="utf-8"))
    if data.info["sha256"] != trained["sha256"]:
        raise RunError(
            f"The data in {trained['source']} has changed since run '{run.id}' (its content hash differs), so problems that it "
            "was trained on could be held out now. Bring the old file back, or train again."
        )
    return data


if __name__ == "__main__":
    from kit.runs.child import serve

    sys.exit(serve(evaluate_run))
