"""What planning reads off a graph and its rules, whatever the mesh: each is found once and serves every candidate."""

from __future__ import annotations

import math
from functools import cached_property

from meshwright.compiler.structure.activations import Saved, Shape, body_shapes, saved_values
from meshwright.compiler.structure.dims import Dim, DimClasses, batch_inputs, handed_on, sequence_classes, sequence_dims
from meshwright.compiler.structure.meeting import meeting
from meshwright.compiler.structure.microbatch import check_groups, made_alone, split_alike, split_time
from meshwright.compiler.structure.positions import Position, positions_of, several_readers
from meshwright.compiler.structure.stacked import StackedExperts
from meshwright.cost.cluster import Device
from meshwright.cost.compute import Fused, fusion, started
from meshwright.cost.memory.replay import passing
from meshwright.cost.memory.saved import not_repeated, saved_for_backward, storages
from meshwright.cost.memory.working import kept_later
from meshwright.ir.declared.operator import Work
from meshwright.ir.graph import Graph, Op
from meshwright.ir.plan import Schedule
from meshwright.ir.rule import Rules

SLIGHT = 8
"""Chosen: a weight so many times smaller than another of its position is split over tensor ranks only where that pays."""


class Structure:
    """Of one graph under its rules; nothing in it is changed by who reads it. ``choices``: of its operators, as far as they
    were found: what each axis may split, and the choices by what it divides (``placement.choices``)."""

    def __init__(self, graph: Graph, rules: Rules, classes: DimClasses | None = None) -> None:
        self.graph, self.rules = graph, rules
        self.classes = DimClasses(graph, rules) if classes is None else classes
        self.choices: dict[object, tuple[list[list[str | None]], dict[object, list[dict[str, str]]]]] = {}
        self._kinds: dict[str, dict[str, frozenset[str]]] = {}
        self._contracted: dict[str, frozenset[str]] = {}
        self._twins: dict[str, int] = {}
        self._numbers: dict[object, int] = {}
        self._schedules: dict[int, Schedule] = {}
        self._whole: set[tuple[int, int]] = set()
        self._shapes: dict[int, dict[str, Shape]] = {}

    def schedule(self, microbatches: int, ranks: int = 1) -> Schedule:
        """What so many micro-batches split. ``ranks``: that share the batch. Raises PlanError where an operator cannot run in
        them (``split_time``, ``check_groups``)."""
        if microbatches not in self._schedules:
            split = self.graph, self.rules, microbatches, self.batch_inputs
            like = next((one for count, one in self._schedules.items() if min(count, microbatches) > 1), None)
            found = None if like is None else split_alike(*split, like)
            self._schedules[microbatches] = split_time(*split) if found is None else found
        found = self._schedules[microbatches]
        if microbatches > 1 and ranks > 1 and (microbatches, ranks) not in self._whole:
            check_groups(self.graph, self.rules, found, ranks)
            self._whole.add((microbatches, ranks))
        return found

    def shapes(self, microbatches: int) -> dict[str, Shape]:
        """The shape of every value within one of so many micro-batches."""
        if microbatches not in self._shapes:
            self._shapes[microbatches] = body_shapes(self.graph, self.rules, self.schedule(microbatches))
        return self._shapes[microbatches]

    def kinds(self, op: Op) -> dict[str, frozenset[str]]:
        """Which factors of an operator are samples ("batch"), "sequence", "width" and "experts"."""
        if op.name not in self._kinds:
            classes = {"batch": self.batch, "sequence": self.sequence, "width": self.width, "experts": self.stacked.dims}
            rule, found = self.rules[op.name], list[tuple[str, Dim]]()
            pairs = [*zip(op.inputs, rule.operands, strict=True), *zip(op.outputs, rule.results, strict=True)]
            for name, dims in pairs:
                found += [(factor, self.classes.find((name, dim))) for dim, factor in enumerate(dims) if factor is not None]
            self._kinds[op.name] = {
                kind: frozenset(factor for factor, root in found if root in known) for kind, known in classes.items()
            }
        return self._kinds[op.name]

    def contracted(self, op: Op) -> frozenset[str]:
        """Factors of the weights, trained or frozen, that an operator contracts or looks rows up in."""
        if op.name not in self._contracted:
            rule, weights = self.rules[op.name], self.weights
            results = {factor for dims in rule.results for factor in dims}
            self._contracted[op.name] = frozenset(
                factor for name, dims in zip(op.inputs, rule.operands, strict=True)
                if self._viewed(name) in weights and any(factor is not None and factor not in results for factor in dims)
                for factor in dims if factor is not None
            )
        return self._contracted[op.name]

    def twin(self, op: Op) -> int:
        """A number that operators share which have the same choices at the same costs, on every mesh on which what they read
        and make is cut alike: calls under one rule (``RuleBook.rule_for``), whose factors and values play the same parts."""
        if op.name not in self._twins:
            rule, known = self.rules[op.name], self.rules.operators[op.target]
            kept_later = bool(rule.algorithms or rule.grouped or known.kind == "loss" or known.cost.again is not None)
            key = (
                id(rule), op.target, tuple(self.kinds(op).values()), self.contracted(op), self.meeting.get(op.name),
                self.stacked.products.get(op.name), op.name in self.slight, op.name in self.graph.parameter_free,
                self.kept[op.name], self.kept_if_split.get(op.name), self.kept_later.get(op.name, 0.0) if kept_later else 0.0,
                tuple(map(self._part_of, op.inputs)), tuple(map(self._part_of, op.outputs)),
            )
            self._twins[op.name] = self._numbers.setdefault(key, len(self._numbers))
        return self._twins[op.name]

    def _part_of(self, name: str) -> tuple[object, ...]:
        """What a value is to the operators that read or make it."""
        value = self.graph.values[name]
        return (value.shape, value.dtype, value.differentiable, self._sequences.get(name),
                *(name in part for part in (self._trained, self.tied, self.of_parameters, self.saved.values)))

    @cached_property
    def _sequences(self) -> dict[str, int]:
        return sequence_dims(self.graph, self.handed_on, self.classes, self.batch)

    @cached_property
    def _trained(self) -> frozenset[str]:
        return frozenset(param.value for param in self.graph.params if param.trainable)

    @cached_property
    def weights(self) -> frozenset[str]:
        """Parameters, trained or frozen."""
        return frozenset(param.value for param in self.graph.params if not param.buffer)

    @cached_property
    def meeting(self) -> dict[str, str]:
        """Of operators by which pending sums reach each other the choice that passes them on."""
        return meeting(self.graph, self.rules, self.contracted)

    @cached_property
    def slight(self) -> frozenset[str]:
        """Operators whose weights are small beside the largest that an operator of their position contracts: routers, adapters,
        latent projections, keys and values of few heads. Tensor ranks split them only where that pays."""
        found: set[str] = set()
        for position in self.positions:
            sizes = {op.name: self._weighed(op) for op in position.ops(self.graph)}
            found.update(name for name, size in sizes.items() if 0 < SLIGHT * size <= max(sizes.values()))
        return frozenset(found)

    def _weighed(self, op: Op) -> int:
        """Elements of the weights that an operator contracts."""
        if not self.contracted(op):
            return 0
        return sum(math.prod(self.graph.values[name].shape) for name in op.inputs if self._viewed(name) in self.weights)

    def _viewed(self, name: str) -> str:
        """The value that a value is a view of: a weight that is turned before it is contracted is still that weight."""
        graph, operators = self.graph, self.rules.operators
        while name in graph.producers:
            op = graph.ops[graph.producers[name]]
            if operators[op.target].kind != "view" or not op.inputs:
                break
            name = op.inputs[0]
        return name

    @cached_property
    def batch_inputs(self) -> dict[str, int]:
        """{input with samples: its batch dim}."""
        return batch_inputs(self.graph)

    @cached_property
    def batch(self) -> frozenset[Dim]:
        """The classes of dims that are samples."""
        return self.classes.of(self.batch_inputs.items())

    @cached_property
    def made_alone(self) -> frozenset[str]:
        """Values that are made once a step and stay for others to read."""
        return made_alone(self.graph, self.rules.operators)

    @cached_property
    def handed_on(self) -> frozenset[str]:
        """Values that layers hand to the next."""
        return frozenset(handed_on(self.graph))

    @cached_property
    def sequence(self) -> frozenset[Dim]:
        """The classes of dims that are a sequence."""
        return sequence_classes(self.graph, self.handed_on, self.classes, self.batch)

    @cached_property
    def width(self) -> frozenset[Dim]:
        """The last dim of what blocks hand on."""
        shapes = {name: self.graph.values[name].shape for name in self.handed_on}
        return frozenset(self.classes.of((name, len(shape) - 1) for name, shape in shapes.items() if len(shape) >= 3))

    @cached_property
    def _positions(self) -> tuple[list[Position], frozenset[str]]:
        return positions_of(self.graph)

    @property
    def positions(self) -> list[Position]:
        """The blocks and the runs of the root's operators between them."""
        return self._positions[0]

    @property
    def leaving_alone(self) -> frozenset[str]:
        """Values made of inputs and buffers alone that leave their position."""
        return self._positions[1]

    @cached_property
    def several_in_one(self) -> dict[str, int]:
        """{parameter that holds several weights, one after the other: the dim along which these lie}."""
        return {op.inputs[at]: dim for op in self.graph.ops for at, (dim, parts) in self.rules[op.name].fused.items()
                if parts > 1 and at < len(op.inputs)}

    @cached_property
    def fused(self) -> tuple[Fused | None, ...]:
        """Per operator what its kernel reads and writes (``cost.compute.fusion``)."""
        return fusion(self.graph, self.rules.operators)

    def started(self, device: Device, schedule: Schedule) -> list[tuple[float, float]]:
        """Of every position the seconds (forward, backward) that the host takes at least to start the kernels of what each
        micro-batch runs, whatever is split. What a sum or a copy hands back needs none where no operand was stretched, which
        one sample may not be."""
        operators, found = self.rules.operators, list[tuple[float, float]]()
        for position in self.positions:
            ops = zip(position.ops(self.graph), self.fused[position.start : position.stop], strict=True)
            repeated = [(operators[op.target], op, kernel) for op, kernel in ops if not schedule.once(op.name)]
            each = [(one.kind, *started(one, Work.of(op, self.graph), device, kernel)) for one, op, kernel in repeated]
            found.append((sum(ahead for _, ahead, _ in each), sum(back for kind, _, back in each if kind != "linear")))
        return found

    @cached_property
    def saved(self) -> Saved:
        """Values that are kept for the backward."""
        return saved_values(self.graph, self.rules.operators)

    @cached_property
    def kept(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of every operator the operands and the results that autograd keeps."""
        return {op.name: saved_for_backward(op, self.graph, self.rules.operators) for op in self.graph.ops}

    @cached_property
    def not_repeated(self) -> list[tuple[int, frozenset[int]]]:
        """Of every position the last operator that keeps anything, and those to which recomputation does not come."""
        return [not_repeated([self.kept[op.name] for op in position.ops(self.graph)]) for position in self.positions]

    @cached_property
    def passed(self) -> dict[str, frozenset[int]]:
        """Of every operator the operands whose gradient is that of its result, or a view of it."""
        values, known = self.graph.values, self.rules.operators
        return {
            op.name: frozenset(at for at in passing(op, Work.of(op, self.graph), self.graph, known)
                               if values[op.inputs[at]].dtype == values[op.outputs[0]].dtype)
            for op in self.graph.ops if any(values[name].differentiable for name in op.inputs)
        }

    @cached_property
    def kept_later(self) -> dict[str, float]:
        """Of every operator the bytes that those after it in its block keep (``cost.memory.working``)."""
        return kept_later(self.graph, self.rules.operators)

    @cached_property
    def kept_if_split(self) -> dict[str, frozenset[int]]:
        """Of operators that an algorithm may split the operands that nobody keeps, and that count for them if what runs then
        does: each once, for the first of its position, and none that is counted where later positions share it."""
        base, known, found = storages(self.graph, self.rules.operators), self.saved.values, dict[str, frozenset[int]]()
        for position in self.positions:
            seen = {base[name] for name in (*position.shared_in, *position.shared_out)} | known | self.stored
            for op in position.ops(self.graph):
                if self.rules[op.name].algorithms:
                    found[op.name] = frozenset(
                        at for at, name in enumerate(op.inputs)
                        if base[name] not in seen and name not in self.graph.parameter_free_values
                    )
                    seen |= {base[name] for name in op.inputs}
        return found

    @cached_property
    def stored(self) -> frozenset[str]:
        """Parameters and buffers."""
        return frozenset(param.value for param in self.graph.params)

    @cached_property
    def tied(self) -> frozenset[str]:
        """Trainable parameters with several readers."""
        return several_readers(self.graph)

    @cached_property
    def trains_root(self) -> bool:
        """Whether some trainable parameter is read by the root, or by several blocks."""
        ops = [(position.block, position.ops(self.graph)) for position in self.positions]
        read = [(block, {name for op in found for name in op.inputs}) for block, found in ops]
        readers = ({block for block, names in read if param.value in names} for param in self.graph.params if param.trainable)
        return any(len(blocks) > 1 or -1 in blocks for blocks in readers)

    @cached_property
    def stacked(self) -> StackedExperts:
        """Experts that are matrices of one product."""
        return StackedExperts.of(self.graph, self.classes)

    @cached_property
    def of_parameters(self) -> frozenset[str]:
        """Values made of trainable parameters and of nothing that has a sample: turned weights, scales plus one, position
        biases. Their gradients may be summed where the parameters' are."""
        graph, found = self.graph, {param.value for param in self.graph.params if param.trainable}
        params = frozenset(found)
        for op in graph.ops:
            flows = [name for name in op.inputs if graph.values[name].differentiable]
            if flows and found.issuperset(flows) and not self._sampled(op):
                found.update(name for name in op.outputs if graph.values[name].differentiable)
        return frozenset(found) - params

    def _sampled(self, op: Op) -> bool:
        return any(
            self.classes.find((name, dim)) in self.batch
            for name in (*op.inputs, *op.outputs) for dim in range(len(self.graph.values[name].shape))
        )
