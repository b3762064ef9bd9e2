"""From a segment's graph to code: a ``torch.fx.GraphModule`` on local tensors.

    (*arguments) -> outputs of the segment, as a tuple; the arguments are the graph's inputs and parameters, in any order

``mw.x`` becomes the function of ``runtime.ops``, with mesh-axis names in ``axis=`` and ``axes=`` replaced by this rank's
``Group``s; any other name the operator that ``ir.operators`` finds; one that draws (``draw=``) is wrapped by ``runtime.draws``.
Three things depend on the run, not on the plan, and are settled here:

* the device: factories (arange, zeros) make their tensor on this rank's device;
* the mode: in ``eval`` dropout and batch statistics are off (``_EVAL``: the arguments that every such operator has);
* the precision: a parameter's gradient is all-reduced (``mw.vary``) in fp32 whatever the compute dtype.

FX drops every value after its last use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from meshwright.ir.declared.experts import EXPERTS
from meshwright.ir.gradients.custom import CUSTOM
from meshwright.ir.graph import Graph, GraphError, Op, map_refs
from meshwright.ir.operators import overload
from meshwright.ir.program import DRAW
from meshwright.runtime.custom import custom_function
from meshwright.runtime.draws import drawing
from meshwright.runtime.experts.mixture import experts
from meshwright.runtime.groups import Groups
from meshwright.runtime.ops import OPS

_EVAL: Mapping[str, Any] = {"train": False, "training": False, "dropout_p": 0.0}
"""{argument name: its value in eval mode}."""


def generate(
    graph: Graph, arguments: Sequence[str], groups: Groups, training: bool
) -> Callable[..., tuple[Any, ...]]:
    """The segment as a function of ``arguments``. Raises GraphError for an operator that torch does not have."""
    code = fx.Graph()
    params = {param.value for param in graph.params}
    nodes = {name: code.placeholder(f"_{n}_{_identifier(name)}") for n, name in enumerate(arguments)}
    for op in graph.ops:
        function, args, kwargs = _call(op, groups, training, params)
        try:
            args, kwargs = map_refs((args, kwargs), lambda ref: nodes[ref.name])
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
        return op.target == "mw.gather_linear"
    returns = overload(op.target)._schema.returns
    return len(returns) > 1 or isinstance(returns[0].type, torch.ListType)


def _call(op: Op, groups: Groups, training: bool, params: set[str]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(function, args, kwargs) with Refs still in place."""
    args, kwargs = op.args, dict(op.kwargs)
    if op.target == CUSTOM:
        return _named(functools.partial(custom_function, args[0]), "custom_function"), args[1:], {}
    if op.target == EXPERTS:
        axes = kwargs.pop("axis", ())
        group = groups.group(axes) if axes else None
        return _named(functools.partial(experts, args[0], axis=group, **kwargs), "experts"), args[1:], {}
    if op.target in OPS:
        fixed = {name: groups.group(kwargs.pop(name)) for name in ("axis", "axes") if kwargs.get(name) is not None}
        if not training and op.target == "mw.dropout":
            args = (args[0], 0.0, *args[2:])
        if not training and op.target in ("mw.sdpa", "mw.attend", "mw.ring", "mw.dealt"):
            args = (*args[:4], 0.0, *args[5:])
        if not training and op.target == "mw.batch_norm":
            args = (*args[:5], False, *args[6:])
        if op.target == "mw.vary" and op.inputs[0] in params:
            kwargs["reduce_dtype"] = torch.float32
        return _bound(OPS[op.target], fixed), args, kwargs
    function = overload(op.target)
    schema = {argument.name: index for index, argument in enumerate(function._schema.arguments)}
    kwargs.pop("pin_memory", None)
    if "device" in schema and (not op.inputs or kwargs.get("device") is not None):
        kwargs["device"] = groups.device
    for name, value in {} if training else _EVAL.items():
        if name in schema and schema[name] < len(args):
            args = (*args[: schema[name]], value, *args[schema[name] + 1 :])
        elif name in kwargs:
            kwargs[name] = value
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
