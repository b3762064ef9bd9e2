"""Seconds of whole modules that were measured, brought to the operators inside.

A device's table may give the seconds, forward and backward, of one call of a module at some points (samples on a rank, tensor
ranks, tokens of a sample; ``cost.catalogue.MeasuredModule``). An operator inside is then priced as

    its own formula  x  R(samples, tensor ranks),    R = measured / sum of the formula over the module's operators

where the sum at a point counts every operator on its share of the samples, split over the tensor ranks as it is done fastest.
So a module whose operators are all split that way takes what was measured, a share that is split less well more. R is that
of the nearest degree of tensor parallelism, between its samples by their logarithms, beyond the ends as there. Of the lengths
that were measured the one nearest to the model's counts, token by token.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.compiler.structure.activations import local_shapes
from meshwright.compiler.structure.dims import Dim, DimClasses, batch_inputs, batch_size, handed_on, sequence_dims
from meshwright.cost import compute
from meshwright.cost.catalogue import Device
from meshwright.cost.tables import MeasuredModule
from meshwright.ir.declared.operator import Work
from meshwright.ir.graph import Graph, Op
from meshwright.ir.mesh import ANY, SAMPLED, TENSOR, Mesh, role_of
from meshwright.ir.rule import OpRule, Rules, place
from meshwright.ir.sharding import DTYPE_NAMES

_POINT = "dp", "tp"
"""Axes of the mesh that a point stands for: of its samples, and of its tensor ranks."""
Ratios = tuple[tuple[float, float, float, float], ...]
"""(samples, tensor ranks, measured over formula forward, the same backward), ascending."""


@dataclass(frozen=True)
class _Inside:
    """An operator of a measured module: the table's number, and which of its factors are the batch."""

    table: int
    batch: frozenset[str]


class ModuleTimes:
    """What the modules of one graph take of those that the device's tables name."""

    def __init__(self, graph: Graph, rules: Rules, device: Device) -> None:
        self.graph, self.rules, self.device = graph, rules, device
        self._batch = batch_size(graph)
        classes = DimClasses(graph, rules)
        batch = classes.of(batch_inputs(graph).items())
        lengths = sequence_dims(graph, handed_on(graph), classes, batch)
        self._tokens = max((graph.values[name].shape[dim] for name, dim in lengths.items()), default=1)
        self._fused = dict(zip((op.name for op in graph.ops), compute.fusion(graph, rules.operators), strict=True))
        tables = self._tables()
        inside: list[dict[str, list[Op]]] = [{} for _ in tables]
        self._of: dict[str, _Inside] = {}
        for op in graph.ops:
            found = _named(op.module, tables)
            if found is not None:
                number, path = found
                inside[number].setdefault(path, []).append(op)
                self._of[op.name] = _Inside(number, _batch_factors(op, rules[op.name], classes, batch))
        self._ratios = [self._measured(table, list(calls.values())) for table, calls in zip(tables, inside, strict=True)]
        self._known: dict[tuple[int, float, int], tuple[float, float]] = {}

    @classmethod
    def of(cls, graph: Graph, rules: Rules, device: Device) -> ModuleTimes | None:
        """Of a graph on a device; None where its table has no modules."""
        return cls(graph, rules, device) if device.modules else None

    @property
    def least(self) -> float:
        """The least ratio of measured to formula, at most 1."""
        return min([1.0, *(min(point[2:]) for points in self._ratios for point in points)])

    def apart(self, ops: Sequence[Op]) -> object:
        """Equal for parts of the graph whose operators are measured in the same tables."""
        return tuple(self._table(op) for op in ops)

    def ratio(self, op: str, assignment: Mapping[str, str], mesh: Mesh, microbatches: int) -> tuple[float, float]:
        """Measured over formula, forward and backward, of an operator under an assignment; 1 where nothing was measured."""
        inside = self._of.get(op)
        if inside is None or not self._ratios[inside.table]:
            return 1.0, 1.0
        sampled = tensor = 1
        for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
            role, factor = role_of(axis), assignment.get(axis)
            splits = role == ANY and factor is not None
            sampled *= size if role in SAMPLED or (splits and factor in inside.batch) else 1
            tensor *= size if role == TENSOR or (splits and factor not in inside.batch) else 1
        key = inside.table, self._batch / (sampled * microbatches), tensor
        if key not in self._known:
            self._known[key] = _between(self._ratios[key[0]], *key[1:])
        return self._known[key]

    def _table(self, op: Op) -> int:
        found = self._of.get(op.name)
        return -1 if found is None else found.table

    def _tables(self) -> tuple[MeasuredModule, ...]:
        """The tables of modules that compute in their dtype, those of the same modules as one."""
        found: dict[tuple[str, str], MeasuredModule] = {}
        for table in self.device.modules:
            products = [op for op in self.graph.ops if self.rules.operators[op.target].kind == "matmul"
                        and _named(op.module, [table]) is not None]
            if all(DTYPE_NAMES.get(self.graph.values[op.inputs[0]].dtype) == table.dtype for op in products):
                known = found.get(key := (table.module, table.dtype))
                found[key] = table if known is None else replace(
                    known, points=known.points + table.points, forward=known.forward + table.forward,
                    backward=known.backward + table.backward,
                )
        return tuple(found.values())

    def _measured(self, table: MeasuredModule, calls: Sequence[Sequence[Op]]) -> Ratios:
        """The ratios of a table to the mean of the calls that it names."""
        if not calls:
            return ()
        nearest = min({tokens for _, _, tokens in table.points}, key=lambda n: (abs(math.log(n / self._tokens)), n))
        found = []
        for (samples, tensor, tokens), *seconds in zip(table.points, table.forward, table.backward, strict=True):
            if tokens != nearest:
                continue
            pieces = max(1, min(self._batch, round(self._batch / samples)))
            formula = np.sum([self._formula(op, pieces, tensor) for ops in calls for op in ops], axis=0) / len(calls)
            scale = self._batch / pieces / samples * self._tokens / tokens
            ahead, back = (
                measured * scale / plain if plain > 0 else 1.0 for measured, plain in zip(seconds, formula, strict=True)
            )
            found.append((float(samples), float(tensor), ahead, back))
        return tuple(sorted(found))

    def _formula(self, op: Op, pieces: int, tensor: int) -> tuple[float, float]:
        """Seconds (forward, backward) of an operator on a part of the samples, split over tensor ranks as it is fastest."""
        rule, mesh = self.rules[op.name], Mesh(_POINT, (pieces, tensor))
        own = self._of[op.name].batch
        samples = [{_POINT[0]: one} for one in sorted(own.intersection(rule.splittable)) if _runs(rule, {_POINT[0]: one}, mesh)]
        base = samples[0] if samples and pieces > 1 else {}
        others = [{**base, _POINT[1]: one} for one in rule.splittable if one not in own] if tensor > 1 else []
        legal = [base, *(one for one in others if _runs(rule, one, mesh))]
        return min((self._seconds(op, rule, one, mesh) for one in legal), key=sum)

    def _seconds(self, op: Op, rule: OpRule, assignment: Mapping[str, str], mesh: Mesh) -> tuple[float, float]:
        values = self.graph.values
        placed = place(rule, assignment, mesh, [values[name].differentiable for name in op.inputs])
        shapes = (
            local_shapes(placed, [values[name].shape for name in names], mesh, results)
            for names, results in ((op.inputs, False), (op.outputs, True))
        )
        operator, fused = self.rules.operators[op.target], self._fused[op.name]
        return compute.seconds(operator, Work.of(op, self.graph, *shapes), self.device, fused)


def unused_tables(graph: Graph, rules: Rules, device: Device) -> Iterator[str]:
    """In words, what was measured on a device and no price of the graph is made of: of another dtype, or of other modules."""
    made: dict[str, set[str]] = {}
    named = dict[str, set[str]]()
    for op in graph.ops:
        kind, value = rules.operators[op.target].kind, graph.values[op.inputs[0]] if op.inputs else None
        if value is not None and kind in ("matmul", "attention"):
            name = device.products if kind == "matmul" and device.products else DTYPE_NAMES.get(value.dtype, "another dtype")
            made.setdefault(kind, set()).add(name)
        for table in device.modules:
            if _named(op.module, [table]) is not None:
                own = named.setdefault(table.module, set())
                own.update({DTYPE_NAMES.get(value.dtype, "")} if value is not None and kind == "matmul" else ())
    for what, kind, tables in (("products", "matmul", device.measured), ("attention", "attention", device.attentions)):
        yield from _in_another(what, {table.dtype for table in tables}, made.get(kind, set()))
    for module in dict.fromkeys(table.module for table in device.modules):
        dtypes = {table.dtype for table in device.modules if table.module == module}
        if module in named:
            yield from _in_another(f"calls of {module}", dtypes, named[module])
        else:
            yield f"what was measured of {module} on {device.name} is of no module of this model"


def _in_another(what: str, measured: Collection[str], made: Collection[str]) -> Iterator[str]:
    """In words, that something was measured in other dtypes than it is computed in."""
    if measured and made and not set(measured).intersection(made):
        here, there = (", ".join(sorted(names)) for names in (made, measured))
        yield (f"{what}: measured in {there} and computed in {here}, so that formulas price it; measure it in {here}, or plan "
               f"with the precision of {there}")


def _named(module: str, tables: Sequence[MeasuredModule]) -> tuple[int, str] | None:
    """The table that names a module or, of several, the innermost of what is around it, and of several of that the one with the
    fewest "*"; and that module's path."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        path = ".".join(parts[:length])
        found = [(table.module.count("*"), number) for number, table in enumerate(tables)
                 if path.count(".") == table.module.count(".") and fnmatch.fnmatchcase(path, table.module)]
        if found:
            return min(found)[1], path
    return None


def _batch_factors(op: Op, rule: OpRule, classes: DimClasses, batch: Iterable[Dim]) -> frozenset[str]:
    pairs = [*zip(op.inputs, rule.operands, strict=True), *zip(op.outputs, rule.results, strict=True)]
    return frozenset(
        factor for name, dims in pairs for dim, factor in enumerate(dims)
        if factor is not None and classes.find((name, dim)) in batch
    )


def _runs(rule: OpRule, assignment: Mapping[str, str], mesh: Mesh) -> bool:
    return rule.legal(assignment, mesh, even=False)


def _between(points: Ratios, samples: float, tensor: int) -> tuple[float, float]:
    """The ratios at so many samples and tensor ranks."""
    degree = min({point[1] for point in points}, key=lambda n: (abs(math.log(n / tensor)), n))
    near = [point for point in points if point[1] == degree]
    sizes = [math.log(point[0]) for point in near]
    ahead, back = (
        math.exp(float(np.interp(math.log(samples), sizes, [math.log(point[at]) for point in near]))) for at in (2, 3)
    )
    return ahead, back
