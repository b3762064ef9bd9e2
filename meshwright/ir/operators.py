"""From the name of an operator to the operator: the only place where a text becomes something that can be called.

Graphs name operators ("aten.linear.default"), and a graph may come from a file that anybody wrote. ``torch.ops`` is no table
of operators: it has attributes that load libraries and import modules. So a name is looked up as what it claims to be, a
namespace, an operator and an overload of it, and what is found must be an ``OpOverload`` that computes tensors and reads no
file. Which namespaces a graph from a file may use is decided by who reads it
(``planner.rules_of``, ``compiler.structure.same``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

from meshwright.ir.graph import GraphError

TARGET = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*|mw\.[a-z]\w*", re.ASCII)
"""The form of a target: namespace, operator and overload, or an operator of meshwright's own."""

IN_EVALUATION: Mapping[str, Any] = MappingProxyType({"train": False, "training": False, "dropout_p": 0.0})
"""{argument name: its value in ``eval()``}, whatever the operator."""
STATISTICS = "running_mean"
"""The argument of a norm that is None if it keeps none."""


def evaluated(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call as it is in ``eval()``; ``names``: of the operator's arguments, in order. A norm that keeps no statistics takes
    those of the batch in either mode.

    >>> evaluated(("input", "p", "train"), ("x", 0.5, True), {})
    (('x', 0.5, False), {})
    >>> evaluated(("input", "running_mean", "training"), ("x", None, True), {})
    (('x', None, True), {})
    """
    if {**dict(zip(names, args, strict=False)), **kwargs}.get(STATISTICS, names) is None:
        return args, dict(kwargs)
    given = [IN_EVALUATION.get(name, arg) for name, arg in zip(names, args, strict=False)]
    return (*given, *args[len(given):]), {name: IN_EVALUATION.get(name, arg) for name, arg in kwargs.items()}


def argument_names(operator: torch._ops.OpOverload) -> tuple[str, ...]:
    """Of its schema, in order."""
    return tuple(argument.name for argument in operator._schema.arguments)


def namespace(target: str) -> str:
    """The library that an operator belongs to.

    >>> namespace("aten.linear.default")
    'aten'
    """
    return target.partition(".")[0]


def overload(target: str) -> torch._ops.OpOverload:
    """The operator of torch, or of a library that registered it, with this name. Raises GraphError if there is none.

    >>> overload("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    found = find(target)
    if found is None:
        raise GraphError(f"torch has no operator {target!r}; import the library that registers it")
    reason = _unfit(found)
    if reason:
        raise GraphError(f"operator {target} cannot be part of a graph: it {reason}")
    return found


@lru_cache(maxsize=4096)
def _found(target: str) -> torch._ops.OpOverload:
    if not TARGET.fullmatch(target) or target.count(".") != 2:
        raise LookupError(target)
    library, name, which = target.split(".")
    operators = getattr(torch.ops, library, None)
    packet = getattr(operators, name, None) if isinstance(operators, torch._ops._OpNamespace) else None
    if not isinstance(packet, torch._ops.OpOverloadPacket) or which not in packet.overloads():
        raise LookupError(target)
    found = getattr(packet, which)
    if not isinstance(found, torch._ops.OpOverload) or str(found) != target:
        raise LookupError(target)
    return found


def find(target: str) -> torch._ops.OpOverload | None:
    """The operator of this name, if there is one. What is missing is looked for again: its library may be imported later."""
    try:
        return _found(target)
    except LookupError:
        return None


@lru_cache(maxsize=4096)
def _unfit(operator: torch._ops.OpOverload) -> str:
    """Why an operator has no place in a graph; "" if it has."""
    schema = operator._schema
    if not any(str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns):
        return "returns no tensor"
    if any(argument.name == "filename" for argument in schema.arguments):
        return "reads files"
    return ""
