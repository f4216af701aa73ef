"""Gradio, started without work that this page has no use for: half of the time until the page is up."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def import_gradio() -> Any:
    """The module `gradio`. Raises `ImportError` where it is not installed.

    Gradio parses the source of each of its components, twice, to write a stub (.pyi) for editors beside it in
    site-packages: a third of its import. It passes over a class whose source file is not known, so none is known meanwhile.
    """
    known = inspect.getfile

    def unless_a_component(thing: Any) -> str:
        if isinstance(thing, type) and hasattr(thing, "EVENTS"):
            raise OSError("no stub is written")
        return known(thing)

    inspect.getfile = unless_a_component  # type: ignore[assignment]
    try:
        import gradio
    finally:
        inspect.getfile = known
    return gradio


@contextmanager
def without_applications() -> Iterator[None]:
    """While a page is put together: the end of each screen makes a web application of all routes, which the next throws
    away. The one that is mounted is made afterwards; whoever mounts it sets `Blocks.app` to it.
    """
    from gradio.routes import App

    known = App.__dict__["create_app"]
    App.create_app = staticmethod(lambda *given, **named: None)
    try:
        yield
    finally:
        App.create_app = known
