"""How a command ends: its JSON, its errors as a line each, its exit code."""

from __future__ import annotations

import json
import math
import os
import select
import sys
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import typer
from typer.core import TyperGroup

from meshwright.errors import MeshwrightError

DIFFERENT, WRONG, NOTHING_FITS, BUG, STOPPED, CLOSED = 1, 2, 3, 4, 130, 141
"""Exit codes; the last is a shell's for what writes into a pipe that nobody reads on (``meshwright show plan.json | head``)."""
DEBUG: ContextVar[bool] = ContextVar("meshwright_debug", default=False)
"""Whether errors show their traceback."""
UsageError: Any = typer.BadParameter.__base__
"""What typer raises for words that it cannot read; its module is not the same in all versions of typer."""


class Commands(TyperGroup):
    """Commands whose wrong words are answered as wrong inputs are: in a line, or in JSON where that was asked for."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
        standalone_mode: bool = True, windows_expand_args: bool = True, **options: Any,
    ) -> Any:
        """Run the command that the words name; ends the process, as any command line does."""
        words = list(sys.argv[1:] if args is None else args)
        if not words or not standalone_mode:
            return super().main(words, prog_name, complete_var, standalone_mode, windows_expand_args, **options)
        try:
            code = super().main(words, prog_name, complete_var, False, windows_expand_args, **options)
            sys.stdout.flush()
            sys.exit(code)
        except OSError as error:  # the answer could not be written: nobody reads on, or a full disk
            closed = isinstance(error, BrokenPipeError)
            if not closed:
                typer.echo(f"meshwright: stdout: {error.strerror}; make room, or write elsewhere", err=True)
            _let_go()
            sys.exit(CLOSED if closed else WRONG)
        except UsageError as error:
            where = error.ctx.command_path if error.ctx is not None else "meshwright"
            said = f"{' '.join(error.format_message().split()).rstrip('.')}; see {where} --help"
            if "--json" in words:
                print_json({"error": "UsageError", "message": said})
            typer.echo(f"meshwright: {said}", err=True)
            sys.exit(WRONG)
        except typer.Abort:
            sys.exit(STOPPED)


@contextmanager
def errors(as_json: bool) -> Iterator[None]:
    """An error becomes a line and an exit code, with --debug behind its traceback."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread():
            _let_go()
            raise typer.Exit(CLOSED) from None
        if DEBUG.get():
            traceback.print_exc()
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


def _unread() -> bool:
    """Whether stdout is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _let_go() -> None:
    """What is still to be written goes nowhere, or Python would say again, as it ends, that it could not be."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def in_width(line: str) -> str:
    """A line of an answer within 120 columns, continued under its text."""
    return textwrap.fill(line, 120, subsequent_indent="    ", break_on_hyphens=False)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON value on stdout; null for a number that is none or without end, which JSON has not."""
    typer.echo(json.dumps(_finite(value), indent=2, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
