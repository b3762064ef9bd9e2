"""A field of a plan file with its path: what is not as it must be is a PlanError that names it.

``unpacked`` reads what ``serialize`` packs: uses of values, names of torch (from a list, nothing is looked up) and devices.
"""

from __future__ import annotations

import cmath
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from meshwright.errors import PlanError
from meshwright.ir.graph import Ref
from meshwright.ir.sharding import DTYPES

VERSION, FOLDED = 1, 2
"""Of the format of plans: with every name written out, as processes hand it on; and of files (``reading.unfold``)."""
_DEEPEST = 200
"""Nesting of a file; real ones stay far below."""
LARGEST = 1 << 62
_LITERALS: Mapping[str, Any] = {
    str(value).removeprefix("torch."): value
    for value in (
        *DTYPES.values(), torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.strided, torch.contiguous_format,
        torch.preserve_format, torch.channels_last, torch.channels_last_3d,
    )
}
"""What torch's names may stand for in a file."""
_DEVICES = ("cpu", "cuda", "meta", "xpu", "mps", "hpu")


@dataclass(slots=True)  # not frozen, and its path made when it is asked for: there is one for every value of a file
class Field:
    """A value of a file, and where it is: ``key`` in the field ``within``, or at the path ``key``."""

    value: Any
    key: str | int
    within: Field | None = None

    @property
    def path(self) -> str:
        """Where it is in the file, as errors say it."""
        before = "" if self.within is None else self.within.path
        if isinstance(self.key, int):
            return f"{before}[{self.key}]"
        return f"{before}.{self.key}" if before else self.key

    def wrong(self, expected: str) -> PlanError:
        """The error that says what was expected here."""
        text = repr(self.value)
        found = text if len(text) < 80 else f"a {type(self.value).__name__}"
        return PlanError(f"the plan is damaged: {self.path or 'the file'}: expected {expected}, found {found}")

    def at(self, key: str | int) -> Field:
        """A part of it."""
        return Field(self.value[key], key, self)

    def mapping(self) -> dict[str, Field]:
        """The fields of an object."""
        if type(self.value) is not dict or not all(type(key) is str for key in self.value):
            raise self.wrong("an object")
        return {key: Field(value, key, self) for key, value in self.value.items()}

    def record(self, names: str, optional: str = "") -> dict[str, Field]:
        """The fields of an object that has these and no others."""
        found = self.mapping()
        wanted = names.split()
        missing = [name for name in wanted if name not in found]
        unknown = [name for name in found if name not in (*wanted, *optional.split())]
        if missing or unknown:
            raise PlanError(f"the plan is damaged: {self.path or 'the file'}: expected the fields {', '.join(wanted)}; "
                            f"missing {missing}, unknown {unknown}")
        return found

    def items(self) -> list[Field]:
        """The items of a list."""
        if type(self.value) is not list:
            raise self.wrong("a list")
        return [Field(value, i, self) for i, value in enumerate(self.value)]

    def row(self, count: int) -> list[Field]:
        """Those of a list of so many."""
        found = self.items()
        if len(found) != count:
            raise self.wrong(f"a list of {count}")
        return found

    def text(self) -> str:
        """A text, perhaps empty."""
        if type(self.value) is not str:
            raise self.wrong("text")
        return str(self.value)

    def name(self) -> str:
        """Text that is not empty."""
        if not self.text():
            raise self.wrong("a name")
        return str(self.value)

    def one_of(self, known: Collection[str], what: str) -> str:
        """One of these texts; ``what`` says which in an error."""
        if type(self.value) is not str or self.value not in known:
            raise self.wrong(what)
        return str(self.value)

    def flag(self) -> bool:
        """True or false."""
        if type(self.value) is not bool:
            raise self.wrong("true or false")
        return bool(self.value)

    def count(self, least: int = 0, most: int = LARGEST) -> int:
        """A whole number within bounds."""
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.wrong(f"a whole number from {least} on" + (f" to {most}" if most < LARGEST else ""))
        return int(self.value)

    def number(self, finite: bool = False) -> float:
        """Any number; if ``finite``, no less than 0 and finite."""
        ordinary = type(self.value) is float or (type(self.value) is int and abs(self.value) < LARGEST)
        if not ordinary or (finite and not 0 <= self.value < float("inf")):
            raise self.wrong("a number that is not negative" if finite else "a number")
        return self.value  # type: ignore[no-any-return]

    def names(self, known: Collection[str] | None = None, what: str = "a name") -> tuple[str, ...]:
        """A list of names, each once."""
        found = [item.name() if known is None else item.one_of(known, what) for item in self.items()]
        if len(set(found)) != len(found):
            raise self.wrong("names that differ")
        return tuple(found)


def load_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also where it nests without end or names a field twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError(f"a field is given twice among {sorted(found)[:5]}")
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def check_form(data: Any) -> None:
    """Raise PlanError for what nests without end, and for text that cannot be printed: names and notes are printed as they are,
    and nothing in a file controls a terminal."""
    level, depth = [data], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise PlanError(f"the plan is damaged: it nests deeper than {_DEEPEST} levels")
        inside = [item for part in level if type(part) in (dict, list) for item in part]
        inside += [item for part in level if type(part) is dict for item in part.values()]
        for text in inside:
            if type(text) is str and not text.isprintable():
                raise PlanError(f"the plan is damaged: {text!r:.80} has a character that cannot be printed; "
                                "rename it in the model, and plan again")
        level = [item for item in inside if type(item) in (dict, list)]


def unpacked(field: Field, graphs: Mapping[str, Callable[[Field], Any]] = MappingProxyType({})) -> Any:
    """What ``serialize`` packed: uses of values, dtypes and devices by name, tuples and mappings.

    ``graphs``: {kind: reads it} of values that hold graphs, where there may be some.
    """
    value = field.value
    if isinstance(value, list):
        return tuple(unpacked(item, graphs) for item in field.items())
    if isinstance(value, dict):
        if value.keys() == {"%"}:
            return Ref(field.at("%").name())
        if value.keys() == {"torch"}:
            return _LITERALS[field.at("torch").one_of(_LITERALS, "a dtype, layout or memory format of torch")]
        if value.keys() == {"device"}:
            return _device(field.at("device"))
        if value.keys() == {"complex"}:
            number = complex(*(part.number() for part in field.at("complex").row(2)))
            if not cmath.isfinite(number):
                raise field.wrong("a complex number that is finite")
            return number
        if value.keys() == {"map"}:
            pairs = [pair.row(2) for pair in field.at("map").items()]
            found = {key.text(): unpacked(item, graphs) for key, item in pairs}
            if len(found) != len(pairs):
                raise field.wrong("keys that differ")
            return found
        for kind, read in graphs.items():
            if value.keys() == {kind}:
                return read(field.at(kind))
        raise field.wrong("a value, a name of torch, a device, a complex number or a mapping")
    if type(value) is int and abs(value) >= 1 << 64:
        raise field.wrong("a number of 64 bits")
    return value


def _device(field: Field) -> torch.device:
    kind, colon, index = field.text().partition(":")
    if kind not in _DEVICES or (colon and not (index.isdecimal() and index.isascii() and len(index) < 4)):
        raise field.wrong(f"a device ({', '.join(_DEVICES)})")
    return torch.device(field.value)
