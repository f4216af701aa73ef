"""Models, scorer and trainer: everything that touches torch."""

from kit.training.library_noise import without_no_news

without_no_news()  # before any module here brings transformers or peft
