"""Functions with a backward of their own: what of them may be split follows from the rules of what they are made of.

Take one dim of one operand and split it. The rules of the operators inside say what becomes of it, in the forward and then in
the backward: a value is split along a dim, a pending sum (``+``), or does not depend on it (None). The dim is a factor of the
whole function, with all dims that had to be split with it, if

    every result is split or a pending sum,
    the gradient of every operand that was split is split alike,
    the gradient of every other operand is a pending sum (it is read differently on each rank), or there is none.

What meets an operator that needs it whole, or one without a rule, stays whole. On a rank, both graphs are localized operator by
operator, as any others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from meshwright.compiler.rules.book import Declaration, declare, default_rules
from meshwright.compiler.rules.call import Call, Rewritten
from meshwright.ir.declared.draws import Seeded
from meshwright.ir.declared.operator import Saves, Work
from meshwright.ir.gradients.custom import CUSTOM, CustomFunction
from meshwright.ir.graph import Graph, Op, Value
from meshwright.ir.rule import Factor, Local, OpRule, place
from meshwright.ir.sharding import Sharding

State = int | str | None
"""Of a value under the split of one factor: the dim that is split, "+", or None."""


class _WholeError(Exception):
    """Something inside needs the factor whole."""


class _DemandError(Exception):
    """An operand must be split too."""

    def __init__(self, name: str, dim: int) -> None:
        super().__init__()
        self.name, self.dim = name, dim


@dataclass(frozen=True)
class _Split:
    """One factor: the states of every value, and the factor of every operator, in each direction."""

    operands: Mapping[str, int]
    ahead: Mapping[str, State]
    behind: Mapping[str, State]
    ops_ahead: Mapping[str, Factor]
    ops_behind: Mapping[str, Factor]


def _custom(call: Call) -> OpRule:
    """The function's rule; see the file's head."""
    function: CustomFunction = call["0"]
    splits = _splits(function)

    def dims(shape: tuple[int, ...], states: list[State]) -> list[Factor | None]:
        return [next((f"f{k}" for k, state in enumerate(states) if state == dim), None) for dim in range(len(shape))]

    operands = [
        dims(function.forward.values[name].shape, [split.operands.get(name) for split in splits])
        for name in function.forward.inputs
    ]
    results = [
        dims(function.forward.values[ref.name].shape, [split.ahead[ref.name] for split in splits]) for ref in function.results
    ]

    known = {_named(function): splits}

    def localize(op: Op, local: Local) -> Rewritten:
        mine: CustomFunction = op.args[0]  # equal to the function, perhaps under other names
        if (names := _named(mine)) not in known:
            known[names] = _splits(mine)
        by_axis = {axis: known[names][int(factor[1:])] for axis, factor in local.assignment.items() if factor.startswith("f")}
        return CUSTOM, (_localized(mine, by_axis, local), *op.args[1:]), op.kwargs

    return call.rule(operands, results, localize=localize)


def _named(function: CustomFunction) -> tuple[tuple[str, ...], ...]:
    """The names of values and operators: of functions that compute the same, only these differ."""
    return tuple(names for one in (function.forward, function.backward)
                 for names in (tuple(one.values), tuple(op.name for op in one.ops)))


def _splits(function: CustomFunction) -> list[_Split]:
    """Every factor that may be split, each once."""
    found: list[_Split] = []
    for name in function.forward.inputs:
        for dim, size in enumerate(function.forward.values[name].shape):
            if size > 1 and not any(split.operands.get(name) == dim for split in found):
                split = _split(function, {name: dim})
                taken = {(n, d) for other in found for n, d in other.operands.items()}
                if split is not None and taken.isdisjoint(split.operands.items()):
                    found.append(split)
    return found


def _split(function: CustomFunction, operands: dict[str, int]) -> _Split | None:
    """The factor of these operands' dims; None if it cannot be split."""
    while True:
        try:
            ahead, ops_ahead = _follow(function.forward, operands)
            break
        except _DemandError as demand:
            if operands.get(demand.name, demand.dim) != demand.dim:
                return None
            operands = {**operands, demand.name: demand.dim}
        except _WholeError:
            return None
    results = [ref.name for ref in function.results]
    if any(ahead[name] is None for name in results):
        return None
    start = {ref.name: ahead[ref.name] for ref in function.saved}
    incoming = [name for name, flag in zip(results, function.differentiable, strict=True) if flag]
    for name, result in zip(function.backward.inputs[len(function.saved) :], incoming, strict=True):
        state = ahead[result]
        start[name] = state if isinstance(state, int) else None
    try:
        behind, ops_behind = _follow(function.backward, start)
    except (_DemandError, _WholeError):
        return None
    for name, ref in zip(function.forward.inputs, function.gradients, strict=True):
        if ref is not None and behind[ref.name] != operands.get(name, "+"):
            return None
    return _Split(operands, ahead, behind, ops_ahead, ops_behind)


def _follow(graph: Graph, start: Mapping[str, State]) -> tuple[dict[str, State], dict[str, Factor]]:
    """The states of all values, and the factor that is split in every operator ("+k": its k-th linear group)."""
    states: dict[str, State] = {name: start.get(name) for name in (*graph.inputs, *graph.constants)}
    factors: dict[str, Factor] = {}
    for op in graph.ops:
        rule = default_rules().rule_for(op, graph)
        factor = _factor(op, rule, states, graph, start)
        if factor is None:
            states.update(dict.fromkeys(op.outputs))
            continue
        factors[op.name] = factor
        for name, dims in zip(op.outputs, rule.results, strict=True):
            states[name] = dims.index(factor) if factor in dims else "+"
            if states[name] == "+" and not graph.values[name].dtype.is_floating_point:
                raise _WholeError
    return states, factors


def _factor(op: Op, rule: OpRule, states: Mapping[str, State], graph: Graph, start: Mapping[str, State]) -> Factor | None:
    pending = frozenset(i for i, name in enumerate(op.inputs) if states[name] == "+")
    split = {
        dims[state] for dims, name in zip(rule.operands, op.inputs, strict=True) if isinstance(state := states[name], int)
    }
    if not split:
        if pending and pending not in rule.linear:
            raise _WholeError
        return f"+{rule.linear.index(pending)}" if pending else None
    factor = next(iter(split))
    if pending or len(split) > 1 or factor is None or factor in rule.whole | rule.even | rule.internal.keys():
        raise _WholeError
    for dims, name in zip(rule.operands, op.inputs, strict=True):
        if factor not in dims or states[name] is not None:
            continue
        if name in graph.inputs and name not in start:
            raise _DemandError(name, dims.index(factor))
        raise _WholeError
    if any(graph.values[name].shape[dims.index(factor)] != rule.sizes[factor]
           for name, dims in zip((*op.inputs, *op.outputs), (*rule.operands, *rule.results), strict=True) if factor in dims):
        raise _WholeError
    return factor


# --------------------------------------------------------------------------------------------------------------- one rank
def _localized(function: CustomFunction, splits: Mapping[str, _Split], local: Local) -> CustomFunction:
    """The function on a rank's pieces. ``splits``: what each axis splits."""
    ahead = {axis: (split.ahead, split.ops_ahead) for axis, split in splits.items()}
    behind = {axis: (split.behind, split.ops_behind) for axis, split in splits.items()}
    return replace(function, forward=_local_graph(function.forward, ahead, local),
                   backward=_local_graph(function.backward, behind, local))


def _local_graph(
    graph: Graph, splits: Mapping[str, tuple[Mapping[str, State], Mapping[str, Factor]]], local: Local
) -> Graph:
    def shape(value: Value) -> tuple[int, ...]:
        dims = [tuple(axis for axis in local.mesh.axes if axis in splits and splits[axis][0].get(value.name) == dim)
                for dim in range(len(value.shape))]
        return Sharding(tuple(dims)).local_shape(value.shape, local.mesh, local.coordinates)

    ops = []
    for op in graph.ops:
        rule = default_rules().rule_for(op, graph)
        localize = rule.localize.localize if isinstance(rule.localize, Seeded) else rule.localize  # the function draws as one
        if localize is not None:
            assignment = {axis: factors[op.name] for axis, (_, factors) in splits.items() if op.name in factors}
            inside = Local(
                local.mesh, local.coordinates, assignment, place(rule, assignment, local.mesh, [True] * len(op.inputs)),
                tuple(graph.values[name].shape for name in op.inputs), tuple(graph.values[name].shape for name in op.outputs),
            )
            target, args, kwargs = localize(op, inside)
            op = replace(op, target=target, args=args, kwargs=kwargs)
        ops.append(op)
    values = MappingProxyType({name: replace(value, shape=shape(value)) for name, value in graph.values.items()})
    return replace(graph, ops=tuple(ops), values=values)


def _kept(args: tuple[Any, ...]) -> Saves:
    """A function says itself what it saves."""
    operands, results, _ = args[0].kept
    return Saves(tuple((at, ()) for at in operands), results, _beside)


def _beside(work: Work) -> float:
    """What is neither operand nor result, as large a part of the whole as the first result."""
    function: CustomFunction = work.args[0]
    part = math.prod(work.results[0]) / max(1, function.forward.values[function.results[0].name].numel)
    return math.ceil(part * sum(value.bytes_ for value in function.kept[2]))


RULES: Mapping[str, Declaration] = {CUSTOM: declare(_custom, saves_of=_kept)}
