"""Mixtures on the dims that their tokens had before these were flattened, and so what their routers compute of a token.

    reshape [b, s, h] -> [t, h]; f, f row by row   =>   f on [b, s, h]; reshape
    mw.experts(x [t, h], ids [t, k], ..)           =>   mw.experts(x [b, s, h], ids [b, s, k], ..); reshape

A dim of all tokens can be split by sample alone: ranks that split the sequence would all run the whole mixture. Only what a
mixture reads is touched, as far back as every row is computed by itself: elementwise operators, and those of ``ALONG``, along
dims behind the tokens'. Each is an identity on values; reshapes that meet their inverse are gone (``movement.merge_reshapes``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshwright.compiler.capture.movement import EXPAND, RESHAPE, is_elementwise
from meshwright.compiler.capture.rewrite import Edit, eliminate_dead_code, rewrite
from meshwright.ir.declared.experts import EXPERTS
from meshwright.ir.graph import FILL, Graph, Op, Ref, map_refs

ALONG: Mapping[str, int | None] = {
    "aten.softmax.int": 1, "aten.log_softmax.int": 1, "aten.topk.default": 2, "aten.sort.default": 1, "aten.sum.dim_IntList": 1,
    "aten.mean.dim": 1, "aten.amax.default": 1, "aten.max.dim": 1, "aten.gather.default": 1, "aten.scatter.src": 1,
    "aten.scatter.value": 1, "aten.cumsum.default": 1, "aten.unsqueeze.default": 1, "aten.slice.Tensor": 1,
    "aten.one_hot.default": None, "aten.linear.default": None,
}
"""{operator: the argument that says along which dims it runs, counted from the front; None: along the last, or a new last one}.
An argument that is not given stands for the last dim."""
Lead = tuple[int, ...]


def tokens_nd(graph: Graph) -> Graph:
    """Mixtures and their routers on the dims of their tokens."""
    leads = _leads(graph)
    if not leads:
        return graph
    apart: dict[str, str] = {}  # a value with a dim of tokens -> the same on their dims

    def step(op: Op, edit: Edit) -> Iterable[Op] | None:
        lead = leads.get(op.name)
        return None if lead is None else _Apart(op, lead, edit, apart).ops()

    return eliminate_dead_code(rewrite(graph, step))


def _leads(graph: Graph) -> dict[str, Lead]:
    """{operator: the dims that its tokens had} of the mixtures and of what they read."""
    found: dict[str, Lead] = {}
    for call in graph.ops:
        lead = _lead(graph, call) if call.target == EXPERTS else None
        left = [call] if lead is not None else []
        while left and lead is not None:
            op = left.pop()
            if found.setdefault(op.name, lead) != lead:
                return {}
            read = op.inputs[: 2 + (op.args[3] is not None)] if op.target == EXPERTS else op.inputs
            for name in read:
                maker = graph.ops[graph.producers[name]] if name in graph.producers else None
                if maker is not None and maker.name not in found and _by_row(maker, lead, graph):
                    left.append(maker)
    return found


def _lead(graph: Graph, call: Op) -> Lead | None:
    """The dims that the tokens of a call had before a reshape, followed back from what it reads through rows."""
    rows, left, seen = graph.values[call.inputs[0]].shape[:-1], list(call.inputs[:2]), set[str]()
    while left and len(rows) == 1:
        name = left.pop()
        maker = graph.ops[graph.producers[name]] if name in graph.producers and name not in seen else None
        seen.add(name)
        if maker is None:
            continue
        before = graph.values[maker.inputs[0]].shape if maker.inputs else ()
        if maker.target == RESHAPE and len(before) > 2 and math.prod(before[:-1]) == rows[0] and before[0] != rows[0]:
            return before[:-1]
        if _by_row(maker, rows, graph):
            left += maker.inputs
    return None


def _by_row(op: Op, lead: Lead, graph: Graph) -> bool:
    """Whether an operator computes, of a dim of tokens, every row by itself; or merges their dims to one."""
    rows, shapes = math.prod(lead), [graph.values[name].shape for name in op.outputs]
    if any(shape[:1] != (rows,) for shape in shapes):
        return False
    if op.target in (RESHAPE, EXPAND):
        before = graph.values[op.inputs[0]].shape
        return before[:1] == (rows,) or (op.target == RESHAPE and before[: len(lead)] == lead)
    if op.target == FILL:
        return True
    if op.target not in ALONG:
        return is_elementwise(op)
    first, at = graph.values[op.inputs[0]].shape, ALONG[op.target]
    dims = op.args[at] if at is not None and at < len(op.args) else ()
    named = any(key in ("dim", "dims") for key, _ in op.kwargs)
    given = dims if isinstance(dims, tuple) else (dims,)
    return first[:1] == (rows,) and len(first) > 1 and not named and all(type(dim) is int and dim > 0 for dim in given)


class _Apart:
    """One operator on the dims of its tokens, and the reshapes around it."""

    def __init__(self, op: Op, lead: Lead, edit: Edit, apart: dict[str, str]) -> None:
        self.op, self.lead, self.edit, self.apart = op, lead, edit, apart
        self.before: list[Op] = []

    def ops(self) -> list[Op] | None:
        """What stands for it; None where nothing of it changes."""
        op, edit = self.op, self.edit
        if op.target == EXPERTS and len(edit.shape(op.args[1])) != 2:
            return None
        outs = {name: edit.new(f"{name}_by_token", self._wide(edit.values[name].shape), edit.values[name].dtype)
                for name in op.outputs}
        args, kwargs = self._arguments()
        made = replace(op, name=edit.new(f"{op.name}_by_token", (), edit.values[op.outputs[0]].dtype) if len(outs) > 1
                       else next(iter(outs.values())), args=args, kwargs=kwargs, outputs=tuple(outs.values()))
        self.apart.update(outs)
        flat = [Op(name if len(outs) > 1 else op.name, RESHAPE, (Ref(wide), edit.values[name].shape), (), (name,), op.module,
                   op.source) for name, wide in outs.items()]
        return [*self.before, made, *flat]

    def _wide(self, shape: Lead) -> Lead:
        return (*self.lead, *shape[1:])

    def _arguments(self) -> tuple[Any, Any]:
        """The arguments on the dims of the tokens."""
        op, more = self.op, len(self.lead) - 1
        if op.target == RESHAPE:
            source = op.args[0]
            kept = self.edit.shape(source)[: len(self.lead)] == self.lead
            return (source if kept else self._read(source), self._wide(op.args[1])), ()
        if op.target == FILL:
            return (self._wide(op.args[0]), *op.args[1:]), op.kwargs
        if op.target == EXPERTS:
            experts, *given, operands = op.args
            return (experts, *(ref if ref is None else self._read(ref) for ref in given), operands), op.kwargs
        args = list(map_refs(op.args, self._read))
        at = ALONG.get(op.target, 1 if op.target == EXPAND else None)
        if op.target == EXPAND:
            args[1] = self._wide(args[1])
        elif at is not None and at < len(args):
            dims = args[at]
            args[at] = tuple(dim + more for dim in dims) if isinstance(dims, tuple) else dims + more
        return tuple(args), map_refs(op.kwargs, self._read)

    def _read(self, ref: Ref) -> Ref:
        """An operand on the dims of the tokens, if it has one of theirs."""
        shape, op = self.edit.shape(ref), self.op
        rows = math.prod(self.lead)
        if ref.name in self.apart:
            return Ref(self.apart[ref.name])
        whole = len(shape) == len(self.edit.values[op.outputs[0]].shape) or not is_elementwise(op)
        if shape[:1] != (rows,) or not whole or (op.target == "aten.linear.default" and ref != op.args[0]):
            return ref
        made = self.edit.op(op, RESHAPE, (ref, self._wide(shape)), self._wide(shape), self.edit.dtype(ref))
        self.before.append(made)
        return Ref(made.outputs[0])
