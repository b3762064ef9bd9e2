"""Operators that torch makes of others, of which no rule is known: the others in their place.

torch.export leaves such an operator whole: ``hstack`` is a ``cat``, ``linalg_norm`` a ``linalg_vector_norm``, ``inner`` a
product. One process runs the others in any case, so the numbers are the same; and they have rules, where the whole would be
run by every rank and could not be cut into micro-batches. What draws, writes, checks or decides by contents inside stays whole.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright.compiler.capture.exported.strided import STRIDED
from meshwright.compiler.capture.rewrite import Edit, rewrite
from meshwright.compiler.rules import default_rules
from meshwright.ir.graph import Graph, Op, Ref, arguments
from meshwright.ir.operators import overload


def open_composites(graph: Graph) -> Graph:
    """The graph with what operators without a rule are made of; the same one if nothing was opened."""
    known = default_rules().known
    return rewrite(graph, lambda op, edit: None if known(op.target) or not op.target.startswith("aten.") else _opened(op, edit))


def _opened(op: Op, edit: Edit) -> Iterable[Op] | None:
    """The operators that one is made of; None if it stays."""
    body = _traced(op, edit)
    if body is None or not all(_plain(node) for node in body.graph.nodes):
        return None
    env: dict[fx.Node, Any] = {}
    found: list[Op] = []
    names = iter(dict.fromkeys(op.inputs))
    for node in body.graph.nodes:
        if node.op == "placeholder":
            env[node] = Ref(next(names))
        elif node.target is operator.getitem:
            env[node] = env[node.args[0]][node.args[1]]
        elif node.op == "call_function":
            val = node.meta["val"]
            made = [val] if isinstance(val, Tensor) else list(val)
            base = node.target.overloadpacket.__name__
            outputs = tuple(edit.new(base, one.shape, one.dtype) for one in made)
            env[node] = Ref(outputs[0]) if isinstance(val, Tensor) else tuple(map(Ref, outputs))
            args, kwargs = _with_refs(node.args, env), tuple((key, _with_refs(one, env)) for key, one in node.kwargs.items())
            found.append(Op(outputs[0], str(node.target), args, kwargs, outputs, op.module, op.source))
        else:
            results = _with_refs(node.args[0], env)
    results = results if isinstance(results, tuple) else (results,)
    for name, result in zip(op.outputs, results, strict=True):
        edit.replace(name, result.name)
    return found


def _traced(op: Op, edit: Edit) -> fx.GraphModule | None:
    """What an operator does on tensors of these shapes, of which none is looked into."""
    function, order = overload(op.target), list(dict.fromkeys(op.inputs))
    values = [edit.values[name] for name in order]
    tensors = [torch.empty(one.shape, dtype=one.dtype, device="meta", requires_grad=one.differentiable) for one in values]

    def body(*given: Tensor) -> Any:
        by_name = dict(zip(order, given, strict=True))
        args, kwargs = arguments(op, lambda ref: by_name[ref.name])
        return function.decompose(*args, **kwargs)

    try:
        if body(*tensors) is NotImplemented:
            return None
        return make_fx(body)(*tensors)
    except Exception:  # it asks for what a tensor without contents cannot say: the operator stays, and is run whole
        return None


def _plain(node: fx.Node) -> bool:
    """Whether a node is an operator of tensors that computes and nothing else."""
    if node.op in ("placeholder", "output") or node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable or str(node.target) in STRIDED:
        return False
    val = node.meta.get("val")
    tensors = val if isinstance(val, tuple | list) else [val]
    return torch.Tag.nondeterministic_seeded not in node.target.tags and all(isinstance(one, Tensor) for one in tensors)


def _with_refs(tree: Any, env: dict[fx.Node, Any]) -> Any:
    if isinstance(tree, fx.Node):
        return env[tree]
    return tuple(_with_refs(item, env) for item in tree) if isinstance(tree, tuple | list) else tree
