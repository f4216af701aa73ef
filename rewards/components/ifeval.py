"""Check the row's instructions: the 25 kinds of IFEval (2311.07911), each a function of a response and its arguments.

Names and arguments are those of the published data. Each function returns whether the response follows the instruction, in
linear time; a blank response follows none. Differences from the published checkers, all of them stricter, are in the
docstrings. Sentences are split at punctuation, because the published tokenizer needs a download.

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
# Possessive quantifiers and single character classes, which cannot backtrack.
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
    """Return whether the response follows one instruction.

    Raises:
        KeyError: unknown instruction. TypeError, ValueError: unknown or unusable arguments.
    """
    text = response.strip()
    return CONSTRAINTS[instruction](text, **arguments) if _has_content(text) else False


def _compare(count: int, relation: str, bound: Any) -> bool:
    if relation not in _RELATIONS:
        raise ValueError(f"relation {relation!r} is not one of {', '.join(_RELATIONS)}")
    return _RELATIONS[relation](count, int(bound))


def _has_content(text: str) -> bool:
    return any(character.isalnum() for character in text)


def _phrases(value: Sequence[str] | str) -> list[str]:
    phrases = [value] if isinstance(value, str) else [str(phrase) for phrase in value]
    if not phrases or not all(phrase.strip() for phrase in phrases):
        raise ValueError("phrases must not be blank")
    return [phrase.strip().casefold() for phrase in phrases]


def keywords(text: str, keywords: Sequence[str]) -> bool:
    """Whether every keyword occurs, in any case, also within words."""
    folded = text.casefold()
    return all(keyword in folded for keyword in _phrases(keywords))


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """Compare the number of occurrences of the keyword, in any case, also within words, with `frequency`."""
    return _compare(text.casefold().count(_phrases(keyword)[0]), relation, frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """Whether none of the words occurs as a separate word."""
    folded = text.casefold()
    return not any(_has_word(folded, word) for word in _phrases(forbidden_words))


def _has_word(text: str, word: str) -> bool:
    start = text.find(word)
    while start >= 0:
        neighbours = text[start - 1 : start] + text[start + len(word) : start + len(word) + 1]
        if not any(character.isalnum() or character == "_" for character in neighbours):
            return True
        start = text.find(word, start + len(word))
    return False


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Compare the number of occurrences of the letter, in any case, with `let_frequency`."""
    if len(letter.strip()) != 1:
        raise ValueError(f"letter is {letter!r}, not a single letter")
    return _compare(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """Count sentences, which end with punctuation before white space or at the end; common abbreviations do not end one."""
    return _compare(sum(1 for _ in _sentences(text)), relation, num_sentences)


def _sentences(text: str) -> Iterator[str]:
    begin = 0
    for mark in _SENTENCE_END.finditer(text):
        last = text[max(begin, mark.start() - 8) : mark.start()].rpartition(" ")[2].lower()
        if mark[0] == "." and (last in _ABBREVIATIONS or (len(last) == 1 and last.isalpha() and last != "i")):
            continue
        if _has_content(text[begin : mark.end()]):
            yield text[begin : mark.end()]
        begin = mark.end()
    if _has_content(text[begin:]):
        yield text[begin:]


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Whether `***` divides the text into so many paragraphs; only the first and the last part may be blank, and do not count."""
    parts = text.split("***")
    if len(parts) > 1 and not parts[0].strip():
        parts = parts[1:]
    if len(parts) > 1 and not parts[-1].strip():
        parts = parts[:-1]
    return all(part.strip() for part in parts) and len(parts) == int(num_paragraphs)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Whether blank lines divide the text into exactly so many paragraphs, and the n-th (from 1) begins with the word."""
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != int(num_paragraphs) or not 1 <= int(nth_paragraph) <= len(paragraphs):
        return False
    word = _FIRST_WORD.match(paragraphs[int(nth_paragraph) - 1].strip())
    return word is not None and word[1].casefold() == _phrases(first_word)[0]


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """Whether there are at least so many `[placeholders]` that are not blank, each within a line."""
    return sum(1 for inside in _between(text, "[", "]") if inside.strip("[] ")) >= int(num_placeholders)


def _between(text: str, opening: str, closing: str) -> Iterator[str]:
    """Yield the text between each pair of marks within a line."""
    for line in text.split("\n"):
        begin = line.find(opening)
        while begin >= 0:
            end = line.find(closing, begin + len(opening))
            if end < 0:
                break
            yield line[begin + len(opening) : end]
            begin = line.find(opening, end + len(closing))


def postscript(text: str, postscript_marker: str) -> bool:
    """Whether words follow the marker (`P.S.`, `P.P.S`), in any case and with or without spaces inside."""
    marker = _phrases(postscript_marker)[0].replace(" ", "")
    folded = text.casefold()
    for spelling in (marker, marker.replace(".", ". ").strip()):
        start = folded.rfind(spelling)
        if start >= 0 and _has_content(folded[start + len(spelling) :]):
            return True
    return False


def number_bullets(text: str, num_bullets: int) -> bool:
    """Whether exactly so many lines begin with `*` or `-` followed by letters or digits; rules (`---`) do not count."""
    lines = (line.strip() for line in text.split("\n"))
    bullets = (line[1:] for line in lines if line.startswith(("-", "*")) and not line.startswith("**"))
    return sum(map(_has_content, bullets)) == int(num_bullets)


def constrained_response(text: str) -> bool:
    """Whether exactly one of `My answer is yes.`, `… no.`, `… maybe.` occurs; the published checker accepts all three at once."""
    return sum(answer in text.casefold() for answer in _ANSWERS) == 1


def highlighted_sections(text: str, num_highlights: int) -> bool:
    """Whether there are at least so many `*highlights*` or `**highlights**` that are not blank."""
    return sum(1 for match in _HIGHLIGHT.finditer(text) if match[0].strip("* ")) >= int(num_highlights)


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """Whether at least so many sections `Section 1`, `Section 2`, ... have different numbers and are not blank."""
    name = _phrases(section_spliter)[0]
    folded = text.casefold()
    heads: list[tuple[int, int, str]] = []
    start = folded.find(name)
    while start >= 0:
        number = _SECTION_NUMBER.match(folded, start + len(name))
        if number is not None:
            heads.append((start, number.end(), number[1]))
        start = folded.find(name, start + len(name))
    if not heads:
        return False
    ends = [*(begin for begin, _, _ in heads[1:]), len(folded)]
    filled = {number for (_, end, number), stop in zip(heads, ends, strict=True) if _has_content(folded[end:stop])}
    return len(filled) >= int(num_sections)


def json_format(text: str) -> bool:
    """Whether the complete response is JSON, alone or in one fenced block."""
    if text.startswith("```"):
        first, _, rest = text.partition("\n")
        if first.strip("` ").casefold() not in ("", "json") or not rest.endswith("```"):
            return False
        text = rest.removesuffix("```")
    return parse_json(text.strip()).reason is None


def title(text: str) -> bool:
    """Whether there is a title `<<title>>` that is not blank."""
    return any(_has_content(inside) for inside in _between(text, "<<", ">>"))


def two_responses(text: str) -> bool:
    """Whether the text is two different responses divided by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    inner = [part for index, part in enumerate(parts) if part or 0 < index < len(parts) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """Whether an answer follows the repeated prompt, in any case; the published checker accepts the prompt alone."""
    prompt = " ".join(_phrases(prompt_to_repeat)[0].split())
    folded = " ".join(text.casefold().split())
    return folded.startswith(prompt) and _has_content(folded[len(prompt) :])


def end_checker(text: str, end_phrase: str) -> bool:
    """Whether the response ends with the phrase, in any case; quotation marks after it are ignored."""
    return text.strip("\"' \n").casefold().endswith(_phrases(end_phrase)[0].strip("\"' "))


def quotation(text: str) -> bool:
    """Whether double quotation marks enclose the response, with letters or digits between them."""
    return len(text) > 2 and text[0] in '"“' and text[-1] in '"”' and _has_content(text[1:-1])


def capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Compare the number of words in capitals, one-letter words included, with `capital_frequency`."""
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
    """1 if the response follows all instructions of the row, else 0.

    Blank responses are `format`; unknown instructions and unusable arguments are `error`.
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
    """Return pairs of instruction and arguments; arguments of None, with which Arrow fills rows, are dropped.

    Raises:
        ValueError: `ids` and `kwargs` are not lists of equal length, there are none, or an instruction is unknown.
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
            raise ValueError(f"arguments of {name} are not an object: {arguments!r}")
        pairs.append((str(name), {str(key): value for key, value in arguments.items() if value is not None}))
    return pairs


def _from_json(value: Any) -> Any:
    """Return the value of JSON text; a list with the name for other text; other values unchanged."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.lstrip()[:1] in ("[", "{") else [value]
