"""Models: which backend loads them, how, in what precision, and what a family of them needs."""

from kit.models.libraries import without_no_news

without_no_news()  # before any module here brings transformers or peft
