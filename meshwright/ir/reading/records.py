"""Frozen records of numbers and words as plain values, and back.

They are read by the types of their fields; what does not have them is a PlanError that names the field. Which record it is, is
given: nothing that a file names is looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from meshwright.errors import PlanError
from meshwright.ir.reading.fields import Field

T = TypeVar("T")


def record_of(kind: type[T], field: Field) -> T:
    """The record that ``record_to`` wrote, from JSON; numbers are finite and not negative. Raises PlanError."""
    hints = get_type_hints(kind)
    known = [one for one in fields(kind) if one.compare]  # type: ignore[arg-type]
    part = field.record(" ".join(one.name for one in known))
    try:
        return kind(**{one.name: _as(hints[one.name], part[one.name]) for one in known})
    except ValueError as error:
        raise PlanError(f"the plan is damaged: {field.path}: {error}") from error


def record_to(one: Any) -> Any:
    """A record as plain values, which ``record_of`` reads: fields that are compared."""
    if is_dataclass(one):
        return {field.name: record_to(getattr(one, field.name)) for field in fields(one) if field.compare}
    if isinstance(one, Mapping):
        return {key: record_to(item) for key, item in one.items()}
    return [record_to(item) for item in one] if isinstance(one, tuple) else one


def _as(hint: Any, field: Field) -> Any:
    origin, inside = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return record_of(hint, field)
    if origin is tuple and inside[-1] is Ellipsis:
        return tuple(_as(inside[0], item) for item in field.items())
    if origin is tuple:
        return tuple(_as(one, item) for one, item in zip(inside, field.row(len(inside)), strict=True))
    if origin is Mapping:
        return {key: _as(inside[1], item) for key, item in field.mapping().items()}
    if hint is str:
        return field.text()
    if hint is bool:
        return field.flag()
    return field.count() if hint is int else float(field.number(finite=True))
