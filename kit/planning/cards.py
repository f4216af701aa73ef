"""Graphics cards that runs are planned for, and how fast they are said to be."""

from __future__ import annotations

from dataclasses import dataclass

from kit.errors import ConfigError
from kit.registry import did_you_mean


@dataclass(frozen=True)
class Card:
    """A card. `usable` is what torch reports as its total memory, less than the number on the box."""

    name: str
    usable: float  # GiB
    teraflops: float  # dense, half precision with tensor cores, as the maker states
    bandwidth: float  # GB/s
    bf16: bool = True


CARDS = (
    Card("RTX 3060 12", 11.6, 51, 360),
    Card("T4 16", 14.6, 65, 320, bf16=False),
    Card("V100 16", 15.7, 125, 900, bf16=False),
    Card("L4 24", 22.0, 121, 300),
    Card("A10G 24", 22.1, 70, 600),
    Card("RTX 3090 24", 23.5, 71, 936),
    Card("RTX 4090 24", 23.5, 165, 1008),
    Card("RTX 5090 32", 31.3, 209, 1792),
    Card("A100 40", 39.4, 312, 1555),
    Card("L40S 48", 44.4, 362, 864),
    Card("A6000 48", 47.4, 155, 768),
    Card("A100 80", 79.1, 312, 2039),
    Card("H100 80", 79.1, 989, 3350),
    Card("H200 141", 139.8, 989, 4800),
)


def find_card(name: str) -> Card:
    """The card whose name contains every word of `name` ("t4", "a100 80"). Raises `ConfigError`."""
    words = name.lower().replace("-", " ").split()
    found = [card for card in CARDS if all(word in card.name.lower() for word in words)]
    if words and found:
        return found[0]
    names = [card.name for card in CARDS]
    raise ConfigError(f"There is no card '{name}' in the list.{did_you_mean(name, names)} It has: {', '.join(names)}.")
