"""How a command ends: its JSON, its errors as a line each, its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import typer

from meshwright.errors import MeshwrightError

DIFFERENT, WRONG, NOTHING_FITS, BUG = 1, 2, 3, 4
DEBUG: ContextVar[bool] = ContextVar("meshwright_debug", default=False)
"""Whether errors keep their traceback."""


@contextmanager
def errors(as_json: bool) -> Iterator[None]:
    """An error becomes a line and an exit code; with --debug it keeps its traceback."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if DEBUG.get():
            raise
        known = isinstance(error, MeshwrightError | OSError)
        words = " ".join(str(error).split())
        if isinstance(error, OSError) and not isinstance(error, MeshwrightError):
            words += "; check the path, and that it may be read or written"
        if not known:
            words = (f"an error inside meshwright or the model: {type(error).__name__}: {words}; meshwright --debug COMMAND "
                     "shows where, please report it with that")
        if as_json:
            print_json({"error": type(error).__name__, "message": words})
        typer.echo(f"meshwright: {words}", err=True)
        fits = type(error).__name__ != "OutOfMemoryError"
        raise typer.Exit(BUG if not known else WRONG if fits else NOTHING_FITS) from None


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON value on stdout."""
    typer.echo(json.dumps(value, indent=2, default=str))
