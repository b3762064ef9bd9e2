"""What several commands take, and what the words of their options mean."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.errors import InputError

MODEL = 'A transformers config (folder or config.json; no weights needed), "module:callable" or "file.py:callable".'
Batch = Annotated[int, typer.Option(min=1, help="Global batch in samples (a config only).")]
Sequence = Annotated[int, typer.Option(min=2, help="Sequence length in tokens (a config only).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]
_LONG = 20
"""Digits that no number of an option has: what is longer is no number."""


def whole_numbers(text: str, option: str) -> list[int]:
    """ "8,16,64" as numbers of 1 or more."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise InputError(f'{option} {text!r}: give whole numbers, as in "8,16,64"')
    return found


def pin_of(text: str | None) -> Any:
    """A pin as it is written on the command line: a value ("4", "1f1b"), a list ("1,2,4", "none,1f1b") or a bound ("<=4"). What
    it may be, ``ir.pins`` says.

    >>> pin_of("4"), pin_of("1,2,4"), pin_of("<=4"), pin_of("none,1f1b"), pin_of(None)
    (4, [1, 2, 4], '<=4', ['none', '1f1b'], None)
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    values = [int(word) if word.isascii() and word.isdigit() and len(word) < _LONG else word for word in words]
    return values[0] if len(values) == 1 else values


def seconds_of(text: str, option: str) -> list[float]:
    """ "1,1.5,2" as numbers."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise InputError(f'{option} {text!r}: give seconds, or one number a stage, as in "1,1,1,2"') from None


def finite(number: float, option: str) -> float:
    """The number. Raises InputError where it is none, or without end."""
    if not math.isfinite(number):
        raise InputError(f"{option} {number!r}: give a number that is finite")
    return number


def one_or_all(numbers: list[float]) -> float | list[float]:
    """The number, if there is only one."""
    return numbers[0] if len(numbers) == 1 else numbers


def writable(file: Path | None) -> None:
    """Raise InputError for a file that cannot be written: before what takes long, not after it."""
    if file is not None and not os.access(file.parent, os.W_OK):
        raise InputError(f"{file} cannot be written: there is no folder {file.parent} that may be written to; make it first")
    if file is not None and file.is_dir():
        raise InputError(f"{file} cannot be written: it is a folder; name a file")


def cluster_of(text: str) -> Any:
    """A cluster by its name or its file of TOML."""
    from meshwright.cost.cluster import Cluster  # --help answers without torch

    return Cluster.from_toml(text) if text.endswith(".toml") else Cluster.parse(text)


def optimizer_of(text: str) -> str | float:
    """The name of an optimizer, or bytes of state as a number."""
    try:
        return float(text)
    except ValueError:
        return text


def tensor_pins(words: list[str]) -> dict[str, str]:
    """{pattern: sharding} of words such as "*.down_proj.weight=[_, _@tp]". Raises PinError."""
    pairs = [word.partition("=") for word in words]
    for name, equals, sharding in pairs:
        if not (name and equals and sharding):
            from meshwright.ir.pins import PinError

            given = name + equals + sharding
            raise PinError(f"--tensor {given!r} is not PATTERN=SHARDING, as in '*.down_proj.weight=[_, _@tp]'")
    return {name.strip(): sharding.strip() for name, _, sharding in pairs}
