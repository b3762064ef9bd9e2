"""How the inside of an expert splits: which dims of its weights are the inner width, and what its body is on one piece of it.

The first product of a row makes the inner width ``f``, the last one sums it up again (``h -> f -> h``). Split f and every rank
answers a term of a sum. Whether a body allows it follows from what it is made of, by a walk with one state for every value:

    None        whole, the same on every rank
    parts       an int: its last dim is split; the dim holds so many parts, and the piece is a piece of every part
    "+"         a term of a sum

A product of whole rows makes the split, in as many parts as what reads it takes apart (gate and up in one weight: 2); one of
split rows makes a sum. Slices with a step (gate and up interleaved) take the parts of one split dim. What is added to a sum (a
bias of the last product) is added in equal shares. Anything else follows its rule; what that forbids leaves the width whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.compiler.rules.book import builtin_rules
from meshwright.ir.declared.experts import GROUPED, IDS, Experts
from meshwright.ir.graph import Graph, Op, Ref, Value

State = int | str | None
FREE = "free"
"""A row of a stacked bias: it is split, or not, as what it meets."""
INDEX, ADD = "aten.index.Tensor", "aten.add.Tensor"
SPLIT, SLICE = "aten.split.Tensor", "aten.slice.Tensor"


class _WholeError(Exception):
    """The width cannot be split."""


class _PartsError(Exception):
    """A product is read in so many parts."""

    def __init__(self, name: str, parts: int) -> None:
        super().__init__()
        self.name, self.parts = name, parts


@dataclass(frozen=True)
class Inner:
    """``operands``: {operand: (dim of the width, parts)}; ``units``: the width; ``states``: of every value;
    ``shares``: (op, position in its inputs) of what is added to a sum."""

    operands: Mapping[str, tuple[int, int]]
    units: int
    states: Mapping[str, State]
    shares: frozenset[tuple[str, int]]


def inner(experts: Experts) -> Inner | None:
    """How the inner width of these experts splits, in the names of their graph; None if it cannot."""
    return _inner(experts, tuple(experts.graph.values), tuple(op.name for op in experts.graph.ops))


@lru_cache(maxsize=1024)
def _inner(experts: Experts, *names: tuple[str, ...]) -> Inner | None:
    """``names``: those of values and operators; experts that compute the same are equal under any."""
    parts: dict[str, int] = {}
    while True:
        walk = _InnerWalk(experts, parts)
        try:
            return walk.run()
        except _WholeError:
            return None
        except _PartsError as error:
            if error.name in parts:
                return None
            parts[error.name] = error.parts


class _InnerWalk:
    """One walk, with so many parts in every product that makes the split."""

    def __init__(self, experts: Experts, parts: Mapping[str, int]) -> None:
        self.experts, self.graph, self.parts = experts, experts.graph, parts
        self.states: dict[str, State] = dict.fromkeys(self.graph.inputs)
        self.operands: dict[str, tuple[int, int]] = {}
        self.maker: dict[str, str] = {}  # split value -> the product that split it
        self.biases: dict[str, str] = {}  # row of a bias -> the bias
        self.shares: set[tuple[str, int]] = set()
        self.units = 0

    def run(self) -> Inner:
        for op in self.graph.ops:
            self._op(op)
        if self.states[self.experts.output] != "+" or not self.units:
            raise _WholeError
        if any(self.graph.values[name].shape[dim] % (parts * self.units) for name, (dim, parts) in self.operands.items()):
            raise _WholeError
        states = {name: None if state == FREE else state for name, state in self.states.items()}
        return Inner(self.operands, self.units, states, frozenset(self.shares))

    def _op(self, op: Op) -> None:
        first = self.states[op.inputs[0]] if op.inputs else None
        if op.target == GROUPED:
            self._product(op, first)
        elif op.target == INDEX and op.inputs[-1] == self.graph.inputs[IDS]:
            narrow = len(self.graph.values[op.outputs[0]].shape) == 2
            self.states[op.outputs[0]] = FREE if narrow else None
            self.biases[op.outputs[0]] = op.inputs[0]
        elif isinstance(first, int) and op.target in (SPLIT, SLICE) and op.args[2 if op.target == SPLIT else 1] == 1:
            self._taken_apart(op, first)
        else:
            self._any(op)

    def _product(self, op: Op, rows: State) -> None:
        weight, transposed = op.args[1].name, op.args[3]
        k, n = (1, 2) if transposed else (2, 1)
        if rows is None:
            parts = self.parts.get(op.name, 1)
            self._demand(weight, n, parts)
            self.states[op.outputs[0]], self.maker[op.outputs[0]] = parts, op.name
        elif rows == 1:
            self._demand(weight, k, 1)
            self.units = self.units or self.graph.values[weight].shape[k]
            self.states[op.outputs[0]] = "+"
        else:
            raise _WholeError

    def _demand(self, operand: str, dim: int, parts: int) -> None:
        if self.operands.setdefault(operand, (dim, parts)) != (dim, parts) or operand not in self.experts.operands:
            raise _WholeError

    def _taken_apart(self, op: Op, parts: int) -> None:
        """A split or a slice of a split dim."""
        width = self.graph.values[op.inputs[0]].shape[1]
        if op.target == SPLIT:
            wanted, rest = divmod(width, op.args[1])
            strided = False
        else:
            _, _, start, end, step = op.args
            strided = step > 1 and start < step and end == width and width % step == 0
            wanted, rest = (1, 0) if strided else divmod(width, max(end - start, 1))
            rest = rest or (not strided and (step != 1 or start % max(end - start, 1)))
        if rest:
            raise _WholeError
        if wanted != parts:
            raise _PartsError(self.maker[op.inputs[0]], wanted) if parts == 1 else _WholeError
        for name in op.outputs:
            self.states[name], self.maker[name] = 1, self.maker[op.inputs[0]]

    def _any(self, op: Op) -> None:
        states = [self.states[name] for name in op.inputs]
        known = [state for state in states if state not in (None, FREE)]
        if not known:
            self.states.update(dict.fromkeys(op.outputs))
            return
        rule = builtin_rules().rule_for(op, self.graph)
        pending = frozenset(i for i, state in enumerate(states) if state == "+")
        if pending:
            self._sum(op, states, pending, rule.linear)
            return
        if len(set(known)) > 1 or rule.localize is not None:
            raise _WholeError
        split = {dims[-1] for dims, state in zip(rule.operands, states, strict=True) if isinstance(state, int)}
        factor = next(iter(split))
        if len(split) > 1 or factor is None or factor in rule.whole | rule.even | rule.internal.keys():
            raise _WholeError
        for dims, name, state in zip(rule.operands, op.inputs, states, strict=True):
            if isinstance(state, int):
                maker = self.maker[name]
                continue
            if factor in dims and state == FREE:
                self._demand(self.biases[name], 1, int(known[0]))  # type: ignore[arg-type]
                self.states[name] = known[0]
            elif factor in dims:
                raise _WholeError
        for name, dims in zip(op.outputs, rule.results, strict=True):
            if dims[-1] != factor:
                raise _WholeError
            self.states[name], self.maker[name] = known[0], maker

    def _sum(self, op: Op, states: list[State], pending: frozenset[int], linear: tuple[frozenset[int], ...]) -> None:
        if any(isinstance(state, int) for state in states):
            raise _WholeError
        if pending not in linear:
            if op.target != ADD or op.kwargs or len(states) != 2 or len(pending) != 1:
                raise _WholeError
            self.shares.add((op.name, 1 - next(iter(pending))))
        self.states[op.outputs[0]] = "+"


def piece_of(experts: Experts, ranks: int) -> Experts:
    """The experts as one of ``ranks`` ranks computes them, on its piece of the inner width."""
    found = inner(experts)
    if found is None or ranks == 1:
        return experts
    graph, ops = experts.graph, list[Op]()
    cut = {name: 1 for name, state in found.states.items() if isinstance(state, int)}
    cut.update((name, dim) for name, (dim, _) in found.operands.items())
    values = {name: _cut(value, cut[name], ranks) if name in cut else value for name, value in graph.values.items()}
    for op in graph.ops:
        split = op.inputs and isinstance(found.states[op.inputs[0]], int)
        if split and op.target == SPLIT and op.args[2] == 1:
            op = replace(op, args=(op.args[0], op.args[1] // ranks, *op.args[2:]))
        elif split and op.target == SLICE and op.args[1] == 1:
            x, dim, start, end, step = op.args
            op = replace(op, args=(x, dim, start if step > 1 else start // ranks, end // ranks, step))
        for name, position in found.shares:
            if name == op.name:
                share = _share(op.inputs[position], ranks, values)
                ops.append(share)
                args = list(op.args)
                args[position] = Ref(share.outputs[0])
                op = replace(op, args=tuple(args))
        ops.append(op)
    return replace(experts, graph=_with(graph, ops, values))


def _cut(value: Value, dim: int, ranks: int) -> Value:
    """One of ``ranks`` equal pieces of a dim."""
    return replace(value, shape=(*value.shape[:dim], value.shape[dim] // ranks, *value.shape[dim + 1 :]))


def _share(name: str, ranks: int, values: dict[str, Value]) -> Op:
    """An equal share of what is added once."""
    made = f"{name}_share"
    values[made] = replace(values[name], name=made)
    return Op(made, "aten.mul.Tensor", (Ref(name), 1.0 / ranks), (), (made,))


def _with(graph: Graph, ops: list[Op], values: Mapping[str, Value]) -> Graph:
    return replace(graph, ops=tuple(ops), values=values)
