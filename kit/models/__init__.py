"""Loading of models: backend, precision, adapters, memory, and the properties of a model family."""

from kit.models.libraries import silence_import_noise

silence_import_noise()  # before a module here imports transformers or peft
