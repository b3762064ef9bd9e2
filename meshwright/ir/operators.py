"""From the name of an operator to the operator: the only place where a text becomes something that can be called.

Graphs name operators ("aten.linear.default"), and a graph may come from a file that anybody wrote. ``torch.ops`` is no table
of operators: it has attributes that load libraries and import modules. So a name is looked up as what it claims to be, a
namespace, an operator and an overload of it, and what is found must be an ``OpOverload`` that computes tensors and reads no
file. Which namespaces a graph from a file may use is decided by who reads it
(``planner.rules_of``, ``compiler.structure.same``).
"""

from __future__ import annotations

import re
from functools import lru_cache

import torch

from meshwright.ir.graph import GraphError

TARGET = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*|mw\.[a-z]\w*", re.ASCII)
"""The form of a target: namespace, operator and overload, or an operator of meshwright's own."""


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
