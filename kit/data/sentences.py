"""Generated rows `kit:sentence-to-json`: a sentence about a person, and its name, age and city as JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from kit.config import DataConfig
from kit.data.rows import Record, Source

SENTENCES = "kit:sentence-to-json"
TRAIN_ROWS = 2000
"""Rows to train on where `data.limit` is null."""
HELDOUT_SHARE = 4
"""One name and one city in so many is seen in held-out rows only."""
COLUMNS = ["prompt", "reference", "schema"]
PROMPT = "Write this as JSON with the keys name, age and city: {sentence}"
SCHEMA = json.dumps({
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
})  # fmt: skip
NAMES = """Ada Alan Amir Anna Arjun Astrid Bella Bruno Carla Cem Chloe Clara Daniel Dilara Diego Elif Elena Emil Erik Eva Farah
Felix Fiona Greta Hana Hugo Ida Imran Ines Ivan Jana Jonas Julia Kaito Karim Lars Laura Lena Leo Lina Luca Maja Marco Maria Mei
Mila Nadia Nina Noah Nora Olga Omar Oscar Paula Pedro Petra Rosa Samir Sara Sven Tara Theo Tom Vera Wei Yara Yusuf Zoe"""
CITIES = """Accra Athens Basel Berlin Bilbao Bogota Boston Bremen Cairo Chicago Dakar Delhi Denver Dublin Dubai Florence Geneva
Ghent Hamburg Hanoi Helsinki Istanbul Jakarta Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid Manila Miami Milan Munich Nairobi
Naples Nice Osaka Oslo Ottawa Paris Perth Porto Prague Quito Riga Rome Seattle Seoul Seville Sofia Split Sydney Tallinn Tokyo
Toronto Tunis Turin Utrecht Valencia Vienna Vilnius Warsaw York Zagreb Zurich"""
FORMS = (
    "{name}, who is {age}, lives in {city}.",
    "{name} is {age} years old and comes from {city}.",
    "{name} ({age}) works in {city}.",
    "In {city} lives {name}, aged {age}.",
    "I met {name} in {city}; {name} is {age}.",
    "The {age}-year-old {name} is visiting {city}.",
    "{name} from {city} turned {age} last week.",
    "At the age of {age}, {name} moved to {city}.",
)
HELDOUT_FORMS = (
    "Our neighbour {name} grew up in {city} and is now {age}.",
    "{city} is home to {name}, a {age}-year-old baker.",
)
"""Sentences of held-out rows alone, half of them."""


def read_sentences(config: DataConfig) -> Source:
    """Rows to train on, then `config.heldout` rows with names, cities and, in every second, a form seen nowhere else.

    `config.limit` rows in all, or 2000 and the held-out ones. The same seed gives the same rows.
    """
    chance = random.Random(f"sentences {config.seed}")
    names, cities = NAMES.split(), CITIES.split()
    chance.shuffle(names)
    chance.shuffle(cities)
    apart_names, apart_cities = len(names) // HELDOUT_SHARE, len(cities) // HELDOUT_SHARE
    total = config.limit or TRAIN_ROWS + config.heldout
    heldout = min(config.heldout, total // 2)
    train = _rows(chance, names[apart_names:], cities[apart_cities:], [FORMS], total - heldout)
    heldout_rows = _rows(chance, names[:apart_names], cities[:apart_cities], [FORMS, HELDOUT_FORMS], heldout)
    records = [Record(number, row) for number, row in enumerate([*train, *heldout_rows], start=1)]
    notes = [
        f"Held-out rows have names and cities that training never shows; two of their {len(FORMS) + 2} forms are new."
    ]
    return Source(records, COLUMNS, len(records), notes=notes * bool(heldout), heldout=heldout)


def _rows(
    chance: random.Random, names: Sequence[str], cities: Sequence[str], forms: Sequence[Sequence[str]], count: int
) -> list[dict[str, str]]:
    """`count` different rows, whose sentences take their form from each of `forms` in turn."""
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        person = {"name": chance.choice(names), "age": chance.randint(18, 90), "city": chance.choice(cities)}
        sentence = chance.choice(forms[len(rows) % len(forms)]).format(**person)
        rows[sentence] = {"prompt": PROMPT.format(sentence=sentence), "reference": json.dumps(person), "schema": SCHEMA}
    return list(rows.values())
