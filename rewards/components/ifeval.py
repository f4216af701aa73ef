"""Check the row's instructions: the 25 kinds of IFEval (2311.07911), each a function of a response and its arguments.

Names and arguments are those of the published data. Every function reads the response in linear time, and a blank
response follows none of them. What differs from the published checkers, always towards strictness, is said in the
docstrings; sentences are split by punctuation, since the tokenizer used there needs a download.

>>> follows("no commas here", "punctuation:no_comma", {})
True
>>> follows("One. Two. Three.", "length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"})
False
"""

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rewards.components.final_text import AnswerComponent, column
from rewards.components.json_values import parse_json
from rewards.components.languages import language_of
from rewards.errors import nearest
from rewards.protocol import Sample, Score

_RELATIONS: Mapping[str, Callable[[int, int], bool]] = MappingProxyType(
    {
        "at least": operator.ge,
        "at most": operator.le,
        "equal to": operator.eq,
        "exactly": operator.eq,
        "less than": operator.lt,
        "more than": operator.gt,
    }
)
# Possessive quantifiers and single character classes: nothing to backtrack over.
_WORD = re.compile(r"\w++")
_CASED_WORD = re.compile(r"[\w'’-]++")
_HIGHLIGHT = re.compile(r"\*\*[^\n*]++\*\*|\*[^\n*]++\*")
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]]*+(?=\s|$)|(?<![。！？])[。！？]++")
_SECTION_NUMBER = re.compile(r" ?+(\d++|[ivxlc]++\b)")
_FIRST_WORD = re.compile(r"[\"'“‘*_(]*+([^\s.,!?:;\"'”’*_)]++)")
_ABBREVIATIONS = frozenset(
    ["mr", "mrs", "ms", "dr", "prof", "st", "e.g", "i.e", "etc", "vs", "no", "jr", "sr", "inc", "u.s", "p.s"]
)
_ANSWERS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")


def follows(response: str, instruction: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the response follows one instruction.

    Raises:
        KeyError: unknown instruction. TypeError, ValueError: arguments that it does not take or cannot use.
    """
    text = response.strip()
    return CONSTRAINTS[instruction](text, **arguments) if _says_something(text) else False


def _compare(count: int, relation: str, bound: Any) -> bool:
    if relation not in _RELATIONS:
        raise ValueError(f"relation {relation!r} is none of {', '.join(_RELATIONS)}")
    return _RELATIONS[relation](count, int(bound))


def _says_something(text: str) -> bool:
    return any(character.isalnum() for character in text)


def _phrases(value: Sequence[str] | str) -> list[str]:
    phrases = [value] if isinstance(value, str) else [str(phrase) for phrase in value]
    if not phrases or not all(phrase.strip() for phrase in phrases):
        raise ValueError("phrases must not be blank")
    return [phrase.strip().casefold() for phrase in phrases]


def keywords(text: str, keywords: Sequence[str]) -> bool:
    """Every keyword occurs, in any case, also within words."""
    folded = text.casefold()
    return all(keyword in folded for keyword in _phrases(keywords))


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword occurs so often, in any case, also within words."""
    return _compare(text.casefold().count(_phrases(keyword)[0]), relation, frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs as a word of its own."""
    folded = text.casefold()
    return not any(_has_word(folded, word) for word in _phrases(forbidden_words))


def _has_word(text: str, word: str) -> bool:
    at = text.find(word)
    while at >= 0:
        around = text[at - 1 : at] + text[at + len(word) : at + len(word) + 1]
        if not any(character.isalnum() or character == "_" for character in around):
            return True
        at = text.find(word, at + len(word))
    return False


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The letter occurs so often, in any case."""
    if len(letter.strip()) != 1:
        raise ValueError(f"letter is {letter!r}")
    return _compare(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """Sentences end with punctuation before white space; a last one may lack it. Common abbreviations do not end one."""
    return _compare(sum(1 for _ in _sentences(text)), relation, num_sentences)


def _sentences(text: str) -> Iterator[str]:
    begin = 0
    for mark in _SENTENCE_END.finditer(text):
        last = text[max(begin, mark.start() - 8) : mark.start()].rpartition(" ")[2].lower()
        if mark[0] == "." and (last in _ABBREVIATIONS or (len(last) == 1 and last.isalpha() and last != "i")):
            continue
        if _says_something(text[begin : mark.end()]):
            yield text[begin : mark.end()]
        begin = mark.end()
    if _says_something(text[begin:]):
        yield text[begin:]


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs divided by `***`; blank ones are allowed at the very beginning and end only."""
    parts = text.split("***")
    if len(parts) > 1 and not parts[0].strip():
        parts = parts[1:]
    if len(parts) > 1 and not parts[-1].strip():
        parts = parts[:-1]
    return all(part.strip() for part in parts) and len(parts) == int(num_paragraphs)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly so many paragraphs divided by blank lines, of which the n-th (from 1) begins with the word."""
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != int(num_paragraphs) or not 1 <= int(nth_paragraph) <= len(paragraphs):
        return False
    word = _FIRST_WORD.match(paragraphs[int(nth_paragraph) - 1].strip())
    return word is not None and word[1].casefold() == _phrases(first_word)[0]


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """At least so many `[placeholders]` that are not blank, each within a line."""
    return sum(1 for inside in _between(text, "[", "]") if inside.strip("[] ")) >= int(num_placeholders)


def _between(text: str, opening: str, closing: str) -> Iterator[str]:
    """What stands between the marks, line by line, one pair after the other."""
    for line in text.split("\n"):
        begin = line.find(opening)
        while begin >= 0:
            end = line.find(closing, begin + len(opening))
            if end < 0:
                break
            yield line[begin + len(opening) : end]
            begin = line.find(opening, end + len(closing))


def postscript(text: str, postscript_marker: str) -> bool:
    """The marker (`P.S.`, `P.P.S`), in any case and with or without spaces inside, with words behind it."""
    marker = _phrases(postscript_marker)[0].replace(" ", "")
    folded = text.casefold()
    for written in (marker, marker.replace(".", ". ").strip()):
        at = folded.rfind(written)
        if at >= 0 and _says_something(folded[at + len(written) :]):
            return True
    return False


def number_bullets(text: str, num_bullets: int) -> bool:
    """Exactly so many lines that begin with `*` or `-` and say something behind it; rules (`---`) do not count."""
    lines = (line.strip() for line in text.split("\n"))
    bullets = (line[1:] for line in lines if line.startswith(("-", "*")) and not line.startswith("**"))
    return sum(map(_says_something, bullets)) == int(num_bullets)


def constrained_response(text: str) -> bool:
    """Exactly one of `My answer is yes.`, `… no.`, `… maybe.`; the published checker lets all three pass at once."""
    return sum(answer in text.casefold() for answer in _ANSWERS) == 1


def highlighted_sections(text: str, num_highlights: int) -> bool:
    """At least so many `*highlights*` or `**highlights**` that are not blank."""
    return sum(1 for match in _HIGHLIGHT.finditer(text) if match[0].strip("* ")) >= int(num_highlights)


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections `Section 1`, `Section 2`, ..., numbered differently and none of them blank."""
    name = _phrases(section_spliter)[0]
    folded = text.casefold()
    heads: list[tuple[int, int, str]] = []
    at = folded.find(name)
    while at >= 0:
        number = _SECTION_NUMBER.match(folded, at + len(name))
        if number is not None:
            heads.append((at, number.end(), number[1]))
        at = folded.find(name, at + len(name))
    if not heads:
        return False
    ends = [*(begin for begin, _, _ in heads[1:]), len(folded)]
    filled = {number for (_, end, number), stop in zip(heads, ends, strict=True) if _says_something(folded[end:stop])}
    return len(filled) >= int(num_sections)


def json_format(text: str) -> bool:
    """The whole response is JSON, alone or in one fenced block."""
    if text.startswith("```"):
        first, _, rest = text.partition("\n")
        if first.strip("` ").casefold() not in ("", "json") or not rest.endswith("```"):
            return False
        text = rest.removesuffix("```")
    return parse_json(text.strip()).reason is None


def title(text: str) -> bool:
    """A title in double angular brackets, `<<title>>`, that is not blank."""
    return any(_says_something(inside) for inside in _between(text, "<<", ">>"))


def two_responses(text: str) -> bool:
    """Two different responses divided by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    inner = [part for index, part in enumerate(parts) if part or 0 < index < len(parts) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """The prompt word for word, in any case, and then an answer: an echo alone does not do, unlike as published."""
    prompt = " ".join(_phrases(prompt_to_repeat)[0].split())
    folded = " ".join(text.casefold().split())
    return folded.startswith(prompt) and _says_something(folded[len(prompt) :])


def end_checker(text: str, end_phrase: str) -> bool:
    """The response ends with the phrase, in any case; quotation marks behind it are ignored."""
    return text.strip("\"' \n").casefold().endswith(_phrases(end_phrase)[0].strip("\"' "))


def quotation(text: str) -> bool:
    """Wrapped in double quotation marks, with something between them."""
    return len(text) > 2 and text[0] in '"“' and text[-1] in '"”' and _says_something(text[1:-1])


def capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Words in all capitals, one-letter ones included."""
    return _compare(sum(word[0].isupper() for word in _CASED_WORD.finditer(text)), capital_relation, capital_frequency)


CONSTRAINTS: Mapping[str, Callable[..., bool]] = MappingProxyType(
    {
        "change_case:capital_word_frequency": capital_words,
        "change_case:english_capital": lambda text: text.isupper() and language_of(text.lower()) == "en",
        "change_case:english_lowercase": lambda text: text.islower() and language_of(text) == "en",
        "combination:repeat_prompt": repeat_prompt,
        "combination:two_responses": two_responses,
        "detectable_content:number_placeholders": number_placeholders,
        "detectable_content:postscript": postscript,
        "detectable_format:constrained_response": constrained_response,
        "detectable_format:json_format": json_format,
        "detectable_format:multiple_sections": multiple_sections,
        "detectable_format:number_bullet_lists": number_bullets,
        "detectable_format:number_highlighted_sections": highlighted_sections,
        "detectable_format:title": title,
        "keywords:existence": keywords,
        "keywords:forbidden_words": forbidden_words,
        "keywords:frequency": keyword_frequency,
        "keywords:letter_frequency": letter_frequency,
        "language:response_language": lambda text, language: language_of(text) == language.lower(),
        "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
        "length_constraints:number_paragraphs": number_paragraphs,
        "length_constraints:number_sentences": number_sentences,
        "length_constraints:number_words": lambda text, num_words, relation: _compare(
            len(_WORD.findall(text)), relation, num_words
        ),
        "punctuation:no_comma": lambda text: "," not in text,
        "startend:end_checker": end_checker,
        "startend:quotation": quotation,
    }
)


MAX_INSTRUCTIONS = 32


@dataclass(frozen=True, kw_only=True)
class InstructionFollowing(AnswerComponent):
    """1 when the response follows all of the row's instructions, else 0.

    Blank responses follow nothing (`format`); unknown instructions and unusable arguments are `error`.
    """

    answer_in: str = "text"

    def expected(self, sample: Sample) -> list[tuple[str, dict[str, Any]]]:
        return instructions_of(column(sample, "instruction_id_list"), column(sample, "kwargs"))

    def judge(self, answer: str, expected: list[tuple[str, dict[str, Any]]], sample: Sample) -> Score:
        try:
            broken = [name for name, arguments in expected if not follows(answer, name, arguments)]
        except (TypeError, ValueError, KeyError) as failure:
            raise ValueError(f"kwargs cannot be used: {failure}") from failure
        return Score(None, "wrong", {"reason": f"not {', '.join(broken)}"[:300]}) if broken else Score(self.high)


def instructions_of(ids: Any, kwargs: Any) -> list[tuple[str, dict[str, Any]]]:
    """Pairs of instruction and arguments; None among the arguments is Arrow's filling and is dropped.

    Raises:
        ValueError: not lists of the same length, none at all, or unknown instructions.
    """
    ids, kwargs = _from_json(ids), _from_json(kwargs)
    if isinstance(kwargs, Mapping) or kwargs is None:
        kwargs = [kwargs or {}] * (1 if isinstance(kwargs, Mapping) or not isinstance(ids, list) else len(ids))
    if not isinstance(ids, list | tuple) or not ids or len(ids) > MAX_INSTRUCTIONS:
        raise ValueError("no instructions: give a list of 1 to 32 names in column `instruction_id_list`")
    if not isinstance(kwargs, list | tuple) or len(kwargs) != len(ids):
        raise ValueError(f"column `kwargs` must hold one object for each of the {len(ids)} instructions")
    pairs = []
    for name, arguments in zip(ids, kwargs, strict=True):
        arguments = _from_json(arguments) or {}
        if name not in CONSTRAINTS:
            raise ValueError(f"unknown instruction {name!r}. {nearest(str(name), CONSTRAINTS)}")
        if not isinstance(arguments, Mapping):
            raise ValueError(f"arguments of {name} are no object: {arguments!r}")
        pairs.append((str(name), {str(key): value for key, value in arguments.items() if value is not None}))
    return pairs


def _from_json(value: Any) -> Any:
    """The value of JSON text; a list of one for a single name; anything else unchanged."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.lstrip()[:1] in ("[", "{") else [value]
