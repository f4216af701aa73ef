"""Drafts from past completions: fewer calls of the model for the same completions.

A completion of a prompt is much like those that were made of it in earlier epochs. From them the next tokens are guessed, all
guesses of a row go through the model in one call, and each is kept as long as it is what the policy samples.

What is sampled does not depend on the guesses. Every place of every completion has one uniform number u, drawn beforehand, and
its token is the one at which the cumulated probabilities of the policy (of what temperature, top-p, top-k and min-p have left)
reach u. A guess is accepted where it is that token; the first other token takes the place of its guess, and the guesses behind
it are forgotten. So a guess x is accepted with probability p(x), and where it is not, the token is distributed as p without x:
speculative sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318) of a proposal that puts all its mass on x, for which
min(1, p / p_draft) is p(x) and the residual is p without x, renormalised. Completions are those that the same numbers u give
without drafts, up to the rounding of logits; those of a group stay independent of each other; and a past completion may serve
any number of times.

Why not min(1, p_now / p_old) with the probability that the past completion had (as SPEC-RL, 2509.23232)? That rule needs a
draft that is a draw from p_old given the policy of now. But the policy of now was trained on that very draft, so that given its
weights the draft is no such draw, and the result is not exactly the policy's. And one draft for several completions of a group
would make these alike, which the group's mean and deviation are taken of. Its acceptance would be higher, its residual would need
the whole of p_old at each place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ORDERS = (6, 3, 1)
"""Tokens of context by which the next one is looked up, the longest that is known first."""
LONGEST = 16
"""Guesses in one call, at most: a row's number doubles when all were accepted, and halves when the first one was not."""
FIRST = 4
HOLES = 32
"""Columns of rejected guesses in the cache of keys and values before it is packed."""
PROMPTS, TOKENS = 4096, 2_000_000
"""Prompts whose completions are kept, those that were seen last; and tokens of these, about 6 bytes each in a checkpoint."""
INDEPENDENT = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"} | {
    "SuppressTokensLogitsProcessor"
}
"""Processors of logits that look at the logits of one place alone, so that several places can be sampled at once."""
Prompt = tuple[int, ...]
CALLS, PLAIN_CALLS = "generation/model_calls", "generation/model_calls_without_drafts"
"""Metrics of a rollout: calls of the model, and those that the longest completions would have taken one token a call."""


class Guesser:
    """The next tokens of a completion, looked up in other completions of the same prompt."""

    def __init__(self, completions: Iterable[Sequence[int]] = ()) -> None:
        self.next: dict[Prompt, Counter[int]] = {}
        for ids in completions:
            self.learn(ids)

    def learn(self, ids: Sequence[int]) -> None:
        """Counts what follows each context of a whole completion."""
        padded = [-1] * max(ORDERS) + list(ids)  # the beginning is a context, too
        for place in range(max(ORDERS), len(padded)):
            for order in ORDERS:
                self.next.setdefault(tuple(padded[place - order : place]), Counter())[padded[place]] += 1

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens after `ids`: the most frequent one at each place, as long as there is any."""
        context = [-1] * max(ORDERS) + list(ids[-max(ORDERS) :])
        found: list[int] = []
        while len(found) < count:
            seen = next((self.next[key] for order in ORDERS if (key := tuple(context[-order:])) in self.next), None)
            if seen is None:
                break
            found.append(max(seen, key=lambda token: (seen[token], -token)))
            context.append(found[-1])
        return found


class Drafts:
    """The completions of each prompt's last group, and what they were good for. Saved with checkpoints."""

    def __init__(self) -> None:
        self.past: OrderedDict[Prompt, list[list[int]]] = OrderedDict()
        self.calls = self.plain_calls = 0
        """Calls of the model since `counts`, and as many as would have been made without drafts."""

    def remember(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> None:
        """Keeps the completions of a rollout, in place of earlier ones of the same prompts."""
        groups: dict[Prompt, list[list[int]]] = {}
        for prompt, ids in zip(prompts, completions, strict=True):
            groups.setdefault(tuple(prompt), []).append(list(ids))
        for prompt_ids, made in groups.items():
            self.past[prompt_ids] = made
            self.past.move_to_end(prompt_ids)
        held = sum(len(ids) for made in self.past.values() for ids in made)
        while len(self.past) > PROMPTS or held > TOKENS:
            held -= sum(map(len, self.past.popitem(last=False)[1]))

    def counts(self) -> dict[str, int]:
        """Metrics: calls, and calls without drafts, since this was asked for."""
        found = {CALLS: self.calls, PLAIN_CALLS: self.plain_calls}
        self.calls = self.plain_calls = 0
        return found

    def state_dict(self) -> dict[str, Any]:
        """As text, which is small in JSON: prompts and their completions, in the order in which they were seen."""
        return {"past": [[_text(prompt), [_text(ids) for ids in made]] for prompt, made in self.past.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        self.past = OrderedDict((tuple(_ids(prompt)), [_ids(text) for text in made]) for prompt, made in state["past"])

    def decode(
        self, model: Any, logits: Tensor, out: Tensor, mask: Tensor, processors: Any, ends: Tensor, inputs: Any
    ) -> Tensor:
        """The loop over tokens. logits: (B, V) after the prompts; out: (B, P + T), prompts in its first P columns.

        mask: (B, P) of the prompts, which the cache in `inputs` holds. Returns `out` up to the longest completion.
        """
        (batch, width), longest, cache = mask.shape, out.shape[1], inputs["past_key_values"]
        prompts = [tuple(row[seen.bool()].tolist()) for row, seen in zip(out[:, :width], mask, strict=True)]
        guessers = {prompt: Guesser(self.past.get(prompt, ())) for prompt in dict.fromkeys(prompts)}
        luck = torch.rand(batch, longest - width, dtype=torch.float64, device=out.device)
        made: list[list[int]] = [[] for _ in range(batch)]
        rows, sizes, drafts = list(range(batch)), [FIRST] * batch, [list[int]() for _ in range(batch)]
        start = mask.sum(dim=1)  # the position of the first token of each completion
        scores, fed = logits[:, None], False
        ending = set(ends.tolist())
        while True:
            # (live rows, 1 + guesses): what the policy samples after the last token and after each guess
            counts = torch.tensor([len(made[row]) for row in rows], device=out.device)
            places = (counts[:, None] + torch.arange(scores.shape[1], device=out.device)).clamp(max=longest - width - 1)
            flat = scores.reshape(-1, scores.shape[-1]).to(copy=True, dtype=torch.float32)
            flat = processors(out[rows, :1].repeat_interleave(scores.shape[1], dim=0), flat)
            sampled = token_at(flat, luck[rows].gather(1, places).reshape(-1)).view(len(rows), -1).tolist()
            kept, live = [], []
            for row, found, draft in zip(rows, sampled, drafts, strict=True):
                good = next((n for n, guess in enumerate(draft) if guess != found[n]), len(draft))
                if good == len(draft):
                    sizes[row] = min(LONGEST, 2 * sizes[row])
                elif good == 0:
                    sizes[row] = max(1, sizes[row] // 2)
                new = found[: good + 1]
                new = new[: next((n + 1 for n, token in enumerate(new) if token in ending), len(new))]
                made[row] += new
                kept.append(good + 1)
                live.append(new[-1] not in ending and len(made[row]) < longest - width)
            if fed:
                columns = torch.arange(scores.shape[1], device=out.device)
                mask[:, -scores.shape[1] :] *= columns < torch.tensor(kept, device=out.device)[:, None]
            if not any(live):
                break
            if not all(live):
                stay = torch.tensor(live, device=out.device)
                cache.batch_select_indices(stay.nonzero()[:, 0])
                rows, mask, start = [row for row, on in zip(rows, live, strict=True) if on], mask[stay], start[stay]
            mask = packed(cache, mask)
            drafts = [
                guessers[prompts[row]].guess(made[row], min(sizes[row], longest - width - len(made[row]) - 1))
                for row in rows
            ]
            asked = [[made[row][-1], *draft] for row, draft in zip(rows, drafts, strict=True)]
            deep = max(map(len, asked))
            tokens = torch.tensor([ids + ids[-1:] * (deep - len(ids)) for ids in asked], device=out.device)
            own = torch.tensor([[1] * len(ids) + [0] * (deep - len(ids)) for ids in asked], device=out.device)
            mask = torch.cat([mask, own.to(mask.dtype)], dim=1)
            done = torch.tensor([len(made[row]) - 1 for row in rows], device=out.device)
            # A column of padding has its row's last place: behind that a learned position embedding may have ended.
            places = torch.tensor([[min(n, len(ids) - 1) for n in range(deep)] for ids in asked], device=out.device)
            positions = (start + done)[:, None] + places
            scores = model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, **(inputs | {"logits_to_keep": deep})
            ).logits
            self.calls, fed = self.calls + 1, True
        lengths = list(map(len, made))
        self.calls += 1
        self.plain_calls += max(lengths)
        for row, ids in enumerate(made):
            out[row, width : width + len(ids)] = torch.tensor(ids, device=out.device)
        return out[:, : width + max(lengths)]


def _text(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def _ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def token_at(scores: Tensor, luck: Tensor) -> Tensor:
    """(N, V) logits, (N,) uniform numbers -> (N,) tokens: where the cumulated softmax of each row reaches beyond its number."""
    reached = torch.softmax(scores, dim=-1).double().cumsum(dim=-1)
    place = luck[:, None].to(reached.device) * reached[:, -1:]
    # Never a token of probability 0: that reaches no further than the one before it.
    return torch.searchsorted(reached, place, right=True)[:, 0].clamp(max=scores.shape[1] - 1)


def packed(cache: Any, mask: Tensor) -> Tensor:
    """Removes columns that hold nothing from the cache, row by row, once they are many; returns the mask of what is left.

    A row keeps its live columns in their order, at the right. Keys carry their positions, so that they may be moved.
    """
    width = int(mask.sum(dim=1).max())
    if mask.shape[1] - width < HOLES:
        return mask
    order = mask.sort(dim=1, stable=True).indices[:, -width:]
    for layer in cache.layers:
        for name in ("keys", "values"):
            held = getattr(layer, name)
            index = order[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3])
            setattr(layer, name, held.gather(2, index))
    return mask.gather(1, order)
