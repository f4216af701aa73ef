"""Models: which backend loads them, how, in what precision, and what a family of them needs."""

from kit.models.libraries import silence_import_noise

silence_import_noise()  # before any module here brings transformers or peft
