"""From a segment's graph to code: a ``torch.fx.GraphModule`` on local tensors.

    (*arguments) -> outputs of the segment, as a tuple; the arguments are the graph's inputs and parameters, in any order

``mw.x`` becomes the function of ``runtime.ops``, with mesh-axis names in ``axis=`` and ``axes=`` replaced by this rank's
``Group``s; any other name the operator that ``ir.operators`` finds; one that draws (``draw=``) is wrapped by ``runtime.draws``.
Three things depend on the run, not on the plan, and are settled here:

* the device: factories (arange, zeros) make their tensor on this rank's device;
* the mode: in ``eval`` dropout and batch statistics are off (``ir.operators.evaluated``, by the names of arguments);
* the precision: a parameter's gradient is all-reduced (``mw.vary``) in fp32 whatever the compute dtype.

FX drops every value after its last use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import fx

from meshwright.ir.declared.experts import EXPERTS
from meshwright.ir.declared.operator import Operators
from meshwright.ir.gradients.custom import CUSTOM
from meshwright.ir.graph import Graph, GraphError, Op, Ref, map_refs
from meshwright.ir.operators import argument_names, evaluated, overload
from meshwright.ir.program import DRAW
from meshwright.runtime.custom import custom_function
from meshwright.runtime.draws import drawing
from meshwright.runtime.experts.mixture import experts
from meshwright.runtime.groups import Groups
from meshwright.runtime.ops import OPS

OWN = frozenset((*OPS, CUSTOM, EXPERTS))
"""Operators that are meshwright's own."""


def generate(
    graph: Graph, arguments: Sequence[str], groups: Groups, training: bool, operators: Operators
) -> Callable[..., tuple[Any, ...]]:
    """The segment as a function of ``arguments``. Raises GraphError for an operator that torch does not have.

    What one of ``operators`` reads that may ask how it lies in memory is contiguous: between the ``aten.contiguous`` that the
    graph has (``compiler.capture.exported.dense``) and its reader a value may be gathered, or cut into micro-batches.
    """
    code = fx.Graph()
    params = {param.value for param in graph.params}
    nodes = {name: code.placeholder(f"_{n}_{_identifier(name)}") for n, name in enumerate(arguments)}
    for op in graph.ops:
        function, args, kwargs = _call(op, groups, training, params)
        dense = op.target not in OWN and operators[op.target].dense

        def value(ref: Ref, dense: bool = dense) -> fx.Node:
            node = nodes[ref.name]
            return code.call_function(torch.Tensor.contiguous, (node,)) if dense else node

        try:
            args, kwargs = map_refs((args, kwargs), value)
        except KeyError as error:
            raise GraphError(f"{op} reads %{error.args[0]}, which the segment does not define") from None
        node = code.call_function(function, args, kwargs)
        if not _returns_many(op):
            nodes[op.outputs[0]] = node
        else:
            for index, name in enumerate(op.outputs):
                nodes[name] = code.call_function(_item, (node, index))
    code.output(tuple(nodes[name] for name in graph.outputs))
    code.eliminate_dead_code()
    forward: Callable[..., tuple[Any, ...]] = fx.GraphModule(torch.nn.Module(), code).forward
    return forward


def _returns_many(op: Op) -> bool:
    """Whether the function returns a tuple or list of results, perhaps of one."""
    if len(op.outputs) != 1 or op.target == CUSTOM:
        return True
    if op.target == EXPERTS:
        return False
    if op.target in OPS:
        return str(signature(OPS[op.target]).return_annotation).startswith("tuple")
    returns = overload(op.target)._schema.returns
    return len(returns) > 1 or isinstance(returns[0].type, torch.ListType)


def _call(op: Op, groups: Groups, training: bool, params: set[str]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(function, args, kwargs) with Refs still in place."""
    args, kwargs = op.args, dict(op.kwargs)
    if op.target == CUSTOM:
        return _named(functools.partial(custom_function, args[0]), "custom_function"), args[1:], kwargs
    if op.target == EXPERTS:
        axes = kwargs.pop("axis", ())
        group = groups.group(axes) if axes else None
        return _named(functools.partial(experts, args[0], axis=group, **kwargs), "experts"), args[1:], {}
    if op.target in OPS:
        fixed = {name: groups.group(kwargs.pop(name)) for name in ("axis", "axes") if kwargs.get(name) is not None}
        names = tuple(signature(OPS[op.target]).parameters)
        if not training:
            args, kwargs = evaluated(names, args, kwargs)
        if "reduce_dtype" in names and op.inputs[0] in params:
            kwargs["reduce_dtype"] = torch.float32
        return _bound(OPS[op.target], fixed), args, kwargs
    function = overload(op.target)
    names = argument_names(function)
    kwargs.pop("pin_memory", None)
    if "device" in names and (not op.inputs or kwargs.get("device") is not None):
        kwargs["device"] = groups.device
    if not training:
        args, kwargs = evaluated(names, args, kwargs)
    return drawing(function, groups.device) if DRAW in kwargs else function, args, kwargs


def _bound(function: Callable[..., Any], fixed: Mapping[str, Any]) -> Callable[..., Any]:
    """With the groups bound: FX cannot print them as literals."""
    if not fixed:
        return function
    bound: Any = functools.partial(function, **fixed)
    bound.__name__, bound.__module__ = function.__name__, function.__module__
    return bound  # type: ignore[no-any-return]


def _named(bound: functools.partial[Any], name: str) -> Any:
    """With a name, which FX asks for."""
    bound.__name__, bound.__module__ = name, __name__  # type: ignore[attr-defined]
    return bound


def _item(values: tuple[Any, ...], index: int) -> Any:
    return values[index]


def _identifier(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
