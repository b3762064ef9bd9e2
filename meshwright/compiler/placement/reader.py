"""What a placement says of every position, read off the solution of the folded graph (``placement``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.compiler.placement.blockmodel import ROOT, Model
from meshwright.compiler.placement.costs import (
    BACKWARD,
    FORWARD,
    HOST,
    RESOURCES,
    SAVED,
    SECONDS,
    TRANSIENT,
    Vector,
)
from meshwright.compiler.placement.problem import AHEAD, UNIT, Problem
from meshwright.compiler.placement.rows import (
    DATA,
    NONE,
    TENSOR,
    DataMove,
    Mixture,
    PlacedPosition,
    Placement,
    PrologueSeconds,
    Solved,
    Use,
)
from meshwright.compiler.solver.chain import BlockModel, Chain, Solution
from meshwright.compiler.structure.activations import local_shapes, operand_shapes
from meshwright.compiler.structure.dims import batch_size
from meshwright.compiler.structure.folding import Folded
from meshwright.compiler.structure.positions import operands, results
from meshwright.cost.memory.working import (
    BackwardStep,
    Halves,
    backward_peak,
    beside_output,
    halves,
    handed_back,
    held_outputs,
)
from meshwright.ir.declared.again import made_again
from meshwright.ir.declared.experts import EXPERTS
from meshwright.ir.declared.operator import Work
from meshwright.ir.graph import Op
from meshwright.ir.mesh import SAMPLED, role_of
from meshwright.ir.program import JOINED
from meshwright.ir.reshard import reshard
from meshwright.ir.rule import Placed, Rules
from meshwright.ir.sharding import Sharding

LIGHT = 1e-3
"""Seconds that all saved bytes of a placement may weigh, as a part of its time: of equals the one that saves less."""


class _BackwardPeak(NamedTuple):
    """Bytes of gradients at the worst moment of a position's backward (``working.backward_peak``).

    without: no gradients of weights
    with_weights: with them in the compute dtype, where each stays, or is added to a sum; the same where pieces are copied
    weights: those of all weights
    halves: where the backward is split
    """

    without: float
    with_weights: tuple[float, ...]
    weights: float
    halves: Halves = Halves()


@dataclass
class SolutionReader:
    """Reads a solution of the folded graph back for the whole one.

    recompute: kinds of it
    once, passed: as ``Placements`` has them
    """

    folded: Folded
    rules: Rules
    recompute: Sequence[str]
    once: Mapping[str, bool]
    passed: Mapping[str, frozenset[str]]
    problem: Problem
    chain: Chain
    solution: Solution
    count: int

    def placement(self, tensor: int, samples: int) -> Placement:
        folded, numbers = self.folded, dict[tuple[int, tuple[int, ...]], int]()
        rows: list[PlacedPosition] = []
        sequence: list[int] = []
        charged: set[str] = set()
        for n, at in enumerate(folded.serves):
            key = (self.chain.sequence[at], self.solution.choices[n])
            if key not in numbers:
                numbers[key] = len(rows)
                rows.append(self._row(at, self.solution.choices[n], charged))
            sequence.append(numbers[key])
        once = [row.activations[NONE] for row in rows]
        times = [self.chain.time(one) + self.chain.time(one @ AHEAD) * row.ahead for one, row in zip(once, rows, strict=True)]
        seconds = float(sum(times[r] for r in sequence))
        slack = max(0.0, 1.0 - self.solution.gap - LIGHT * 2)
        again = made_again(folded.graph, self.rules.operators)
        return Placement(
            tensor, samples, tuple(rows), tuple(sequence), self._crossing(frozenset()), self._crossing(again),
            self._again(again), *self._outputs(), self._alone(samples), seconds, seconds * slack, self.chain.time_rows,
            Solved(folded, self.problem, self.solution.choices),
        )

    # one position

    def _row(self, at: int, chosen: Sequence[int], charged: set[str]) -> PlacedPosition:
        model, position = self.problem.model(at), self.problem.positions[at]
        roots = {var for name, var in model.shared if name == ROOT}
        edges = tuple(e for e in model.edges if e.j not in roots)
        plain = BlockModel(tuple(model.sizes), tuple(model.unary), edges).cost(chosen)
        # what is handed back is held by the step, not by what is in flight
        for bytes_, kept in self._handed_back(at, self.problem.serves(at), chosen):
            plain[SAVED] -= bytes_ * (handed_back(self.count) - kept)
        beside, waiting, above = self._gradients(at, chosen)
        alive = self._backward_peak(at, chosen)
        entering = sum(float(e.cost(chosen[e.i], chosen[e.j])[SAVED]) for e in model.edges if e.i in model.entry)
        block, least = position.block >= 0, plain[TRANSIENT]
        plain[TRANSIENT] = max(least, alive.with_weights[0] if block else alive.without) - beside
        with_weights = tuple(max(least, of) - beside - plain[TRANSIENT] for of in alive.with_weights)
        activations, within, once = {}, dict[str, Vector](), self._once(at, chosen)
        ways = self.problem.open(at) if block else self.problem.block_variants[:1]
        costs = self.problem.costs(at, ways, chosen) if len(ways) > 1 else []
        for number, name in enumerate(self.recompute):
            more = costs[number] - costs[0] if 0 < number < len(costs) else np.zeros(RESOURCES)
            kind, first = name if 0 < number < len(costs) else NONE, self.problem.serves(at)
            apart = sum((row @ self.problem.recomputed(first, i, kind) for i, row in once.items()), np.zeros(RESOURCES))
            if kind != NONE and (there := float(plain[TRANSIENT] + more[TRANSIENT])) > 0.0:
                more = more - UNIT[TRANSIENT] * min(there, self.problem.released_again(first, kind, chosen))
            activations[name] = self._per_microbatch(plain + more - apart)
            within[name] = self._per_microbatch(apart)
        return PlacedPosition(
            activations, self._weight(at, chosen), self._uses(at, chosen, charged), block, self.problem.ahead(at, chosen),
            self._mixtures(at, chosen, block), self._data_moves(at, chosen, block), beside, waiting, alive.weights * block,
            with_weights, float(least) - beside, alive.halves._replace(above=above), entering, self._prologue(at, once, within),
        )

    def _once(self, at: int, chosen: Sequence[int]) -> dict[int, Vector]:
        """{operator that runs once a step: its seconds among the resources of its row}."""
        model, found = self.problem.model(at), dict[int, Vector]()
        for i, op in enumerate(self.problem.positions[self.problem.serves(at)].ops(self.folded.graph)):
            if op.name in self.once:
                found[i] = np.zeros(RESOURCES)
                found[i][[FORWARD, HOST]] = model.unary[i][chosen[i]][[FORWARD, HOST]]
        return found

    def _prologue(self, at: int, once: Mapping[int, Vector], within: Mapping[str, Vector]) -> PrologueSeconds:
        ops = self.problem.positions[self.problem.serves(at)].ops(self.folded.graph)
        of_samples = {i for i in once if self.once[ops[i].name]}
        whole = sum(float(row[FORWARD]) for i, row in once.items() if i not in of_samples)
        each = sum(float(once[i][FORWARD]) for i in of_samples) / self.count
        return PrologueSeconds(whole, each, sum(float(row[HOST]) for row in once.values()), within if once else {})

    def _mixtures(self, at: int, chosen: Sequence[int], block: bool) -> tuple[Mixture, ...]:
        graph, model, tables = self.folded.graph, self.problem.model(at), self.problem.tables
        first, found = self.problem.serves(at), list[Mixture]()
        for i, op in enumerate(self.problem.positions[first].ops(graph)):
            if op.target != EXPERTS:
                continue
            rule, made = self.rules[op.name], [tables.shapes[name] for name in op.outputs]
            placed, assignment = model.placed[i][chosen[i]], model.op_choices[i][chosen[i]]
            shapes = operand_shapes(op, graph, rule, tables.schedule), made
            found.append(Mixture(op, placed, assignment, self._recomputed(at, block, i), shapes, self._space(op, placed)))
        return tuple(found)

    def _recomputed(self, at: int, block: bool, var: int, reader: int = -1) -> dict[str, Vector]:
        """For every recomputation what it makes of the resources of an operator, or of a way to a reader."""
        variants, first = len(self.problem.open(at)) if block else 1, self.problem.serves(at)
        return {
            name: self.problem.recomputed(first, var, name if block and 0 < number < variants else NONE, reader)
            for number, name in enumerate(self.recompute)
        }

    def _data_moves(self, at: int, chosen: Sequence[int], block: bool) -> tuple[DataMove, ...]:
        """What data ranks exchange of the values of a position, where experts may be split over some of them."""
        graph, model = self.folded.graph, self.problem.model(at)
        if not any(op.target == EXPERTS for op in graph.ops):
            return ()
        ops = self.problem.positions[self.problem.serves(at)].ops(graph)
        made, found = results(ops), list[DataMove]()
        for name, readers in operands(ops).items():
            if name in self.problem.builder.params or (name not in made and name not in model.states):
                continue
            maker, result = made.get(name, (-1, 0))
            var, states = model.states.get(name, (-1, []))
            have = states[chosen[var]] if maker < 0 else model.placed[maker][chosen[maker]].results[result]
            ways = [(i, model.placed[i][chosen[i]].operands[k]) for i, k in readers]
            if name in model.copies:  # all readers share the first way
                var, options = model.copies[name]
                shared = options[chosen[var]]
                found += self._data_move(at, block, name, (maker, have), (-1, shared))
                have = shared
            for reader, want in ways:
                found += self._data_move(at, block, name, (maker, have), (reader, want))
        return tuple(found)

    def _data_move(
        self, at: int, block: bool, name: str, source: tuple[int, Sharding], target: tuple[int, Sharding]
    ) -> list[DataMove]:
        """The way from one sharding to another if data ranks have a part in it; with who makes and who reads it."""
        (maker, have), (reader, want), tables = source, target, self.problem.tables
        if have == want or all(step.axis != DATA for step in reshard(have, want)):
            return []
        value = self.folded.graph.values[name]
        return [DataMove(
            have, want, tables.whole(name), tables.times(name) / self.count, value.differentiable,
            name in tables.saved.by_linears, self._recomputed(at, block, maker, reader),
        )]

    def _per_microbatch(self, vector: Vector) -> Vector:
        """Seconds of a step -> of a micro-batch; bytes are of one already."""
        result = vector.copy()
        result[:SECONDS] /= self.count
        return result

    def _weight(self, at: int, chosen: Sequence[int]) -> float:
        """Seconds of a micro-batch's backward that only weights wait for."""
        graph, problem = self.folded.graph, self.problem
        position, model = problem.positions[at], problem.model(at)
        weights = {param.value for param in graph.params if param.trainable}
        total = 0.0
        for i, op in enumerate(position.ops(graph)):
            operator = self.rules.operators[op.target]
            if operator.kind == "view" and op.inputs and op.inputs[0] in weights:
                weights.update(op.outputs)
            if operator.kind != "matmul" or not weights.intersection(op.inputs):
                continue
            both = Work.of(op, graph, *self._local(op, model.placed[i][chosen[i]]))
            assignment = model.op_choices[i][chosen[i]]
            total += problem.tables.costs.waited_for(op, operator, assignment, both, weights)
        return total

    def _backward_peak(self, at: int, chosen: Sequence[int]) -> _BackwardPeak:
        """Of a position's backward. None of a mixture: experts may be shared out later."""
        graph, model, tables = self.folded.graph, self.problem.model(at), self.problem.tables
        ops, operators = self.problem.positions[self.problem.serves(at)].ops(graph), self.rules.operators
        if EXPERTS in {op.target for op in ops}:
            return _BackwardPeak(0.0, (0.0, 0.0, 0.0, 0.0), 0.0)
        released, steps = [float(model.unary[i][chosen[i]][SAVED]) for i in range(len(ops))], list[BackwardStep]()
        readers = {var: min(e.j for e in model.edges if e.i == var) for var, _ in model.copies.values()}
        for e in model.edges:
            if (last := readers.get(e.j, e.j)) < len(ops):
                released[last] += float(e.cost(chosen[e.i], chosen[e.j])[SAVED])
        weights, inside = {param.value for param in graph.params}, {name for op in ops for name in op.inputs}
        trained, (reading, moving) = {param.value for param in graph.params if param.trainable}, self._reading(at)
        for i in reversed(range(len(ops))):
            op, placed = ops[i], model.placed[i][chosen[i]]
            lost, passed = operators[op.target].kind == "loss", self.passed[op.name]
            space = max(float(model.unary[i][chosen[i]][TRANSIENT]), 0.0 if lost else self._space(op, placed))
            operands = [(name, tables.bytes(name, state)) for name, state in zip(op.inputs, placed.operands, strict=True)
                        if graph.values[name].differentiable and name not in weights]
            results = {name: tables.bytes(name, state) for name, state in zip(op.outputs, placed.results, strict=True)
                       if graph.values[name].differentiable}
            parts = {name: tables.mesh.size(state.split_axes) for name, state in zip(op.inputs, placed.operands, strict=True)
                     if name in trained}
            made = {name: graph.values[name].numel / ranks * tables.costs.itemsize for name, ranks in parts.items()}
            copied = max((bytes_ for name, bytes_ in made.items() if parts[name] > 1), default=0.0)
            steps.append(BackwardStep(results, operands, passed, sum(made.values()), space, released[i], lost, copied,
                                      tuple(made), i in reading))
        leaving = {name: bytes_ for step in steps for name, bytes_ in step.results.items() if name not in inside}
        without = backward_peak([step._replace(weights=0.0) for step in steps], leaving, stay=True, copies=False)
        found = [backward_peak(steps, leaving, stay, copies) for copies in (False, True) for stay in (True, False)]
        return _BackwardPeak(without, tuple(found), sum(step.weights for step in steps), halves(steps, leaving, moving))

    def _space(self, op: Op, placed: Placed) -> float:
        """Bytes beside all else while the backward of a call runs."""
        space = self.rules.operators[op.target].cost.space
        return 0.0 if space is None else space(Work.of(op, self.folded.graph, *self._local(op, placed)))[1]

    def _gradients(self, at: int, chosen: Sequence[int]) -> tuple[float, float, float]:
        """Bytes of gradients: of the weights that make an output, and of those from which weights' gradients are made, less
        what a loss and all behind the last weight had kept (``torch.distributed.pipelining`` lets go of it when I is done);
        and these."""
        graph, model, tables = self.folded.graph, self.problem.model(at), self.problem.tables
        weights = {param.value for param in graph.params if param.trainable}
        ops, kinds = self.problem.positions[self.problem.serves(at)].ops(graph), self.rules.operators
        beside, waiting, kept, lost = 0.0, 0.0, 0.0, any(kinds[op.target].kind == "loss" for op in ops)
        reading, _ = self._reading(at)
        if lost:
            above = range(max(reading, default=-1) + 1, len(ops))
            returned = {model.makers[name] for name in graph.outputs if name in model.makers}
            kept += sum(float(model.unary[i][chosen[i]][SAVED]) for i in above if i not in returned)
            kept += sum(float(e.cost(chosen[e.i], chosen[e.j])[SAVED]) for e in model.edges if e.j in above)
        for i, op in enumerate(ops):
            placed = model.placed[i][chosen[i]]
            if i in reading:
                waiting += sum(tables.bytes(name, state) for name, state in zip(op.outputs, placed.results, strict=True)
                               if graph.values[name].differentiable)
            for name, state in zip(op.outputs, placed.results, strict=True):
                if name in graph.outputs:
                    beside += beside_output(op, placed, state, weights, graph, tables.mesh, tables.costs.itemsize)
        return beside, waiting - kept, kept

    def _reading(self, at: int) -> tuple[list[int], set[str]]:
        """Operators of a position on the way from what enters it that read weights, or what is made of them, beside that: the
        gradients that reach these wait (``cost.memory.replay.Script.waiting``); and values with gradients on that way."""
        graph, position = self.folded.graph, self.problem.positions[self.problem.serves(at)]
        values, found = graph.values, list[int]()
        moving = {name for name in (*position.entry, *position.shared_in) if values[name].differentiable}
        for i, op in enumerate(position.ops(graph)):
            if not moving.isdisjoint(op.inputs) and (made := [name for name in op.outputs if values[name].differentiable]):
                moving.update(made)
                if any(values[name].differentiable and name not in moving for name in op.inputs):
                    found.append(i)
        return found, moving

    def _local(self, op: Op, placed: Placed) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        tables = self.problem.tables
        read = operand_shapes(op, self.folded.graph, self.rules[op.name], tables.schedule)
        made = [tables.shapes[name] for name in op.outputs]
        return local_shapes(placed, read, tables.mesh, False), local_shapes(placed, made, tables.mesh, True)

    def _uses(self, at: int, chosen: Sequence[int], charged: set[str]) -> tuple[Use, ...]:
        """The parameters of a position; tied ones at every position that reads them."""
        graph, model, tables = self.folded.graph, self.problem.model(at), self.problem.tables
        found = [(name, needs[chosen[var]]) for var, name, needs in model.parameter_uses]
        known = {name for name, _ in found}
        for name, (var, options) in model.states.items():
            if name in self.problem.tied and name not in known:
                split = (*options[chosen[var]].split_axes, TENSOR)
                rest = frozenset(axis for axis in tables.mesh.axes if axis not in split)
                found.append((name, Sharding(options[chosen[var]].dims, frozenset(), rest)))
        group = float(sum({n: graph.values[n].numel for n, _ in found if tables.trainable[n]}.values()))
        small = {name: graph.values[name].numel for name, need in found if tables.trainable[name] and TENSOR in need.varying}
        late = float(sum(numel for numel in small.values() if numel <= JOINED))
        uses = []
        for name, need in found:
            uses.append(Use(graph.values[name], need, tables.trainable[name], group, name not in charged, late))
            if name in self.problem.tied:
                charged.add(name)
        return tuple(uses)

    # what crosses

    def _crossing(self, without: frozenset[str]) -> tuple[float, ...]:
        """Local bytes of what a cut behind each position hands on, but for some values: what the next one is handed, and what
        later ones share."""
        folded = self.folded
        live: dict[str, tuple[int, float]] = {}  # value -> (last position that reads it, bytes)
        last = {name: n for n, position in enumerate(folded.positions) for name in position.shared_in}
        crossing = []
        for n, at in enumerate(folded.serves):
            model, chosen = self.problem.model(at), self.solution.choices[n]
            serving = self.problem.positions[self.problem.serves(at)]
            total = sum(self._bytes(model, name, chosen) for name in serving.exit if name not in without)
            own = folded.positions[n].shared_out
            for name, theirs in zip(serving.shared_out, own, strict=True):
                if theirs not in without:
                    live[theirs] = (last.get(theirs, n), self._bytes(model, name, chosen))
            total += sum(bytes_ for until, bytes_ in live.values() if until > n)
            crossing.append(float(total))
        return tuple(crossing)

    def _again(self, values: frozenset[str]) -> tuple[tuple[int, int, float, float], ...]:
        """``Placement.again`` of these values."""
        graph, found = self.folded.graph, list[tuple[int, int, float, float]]()
        last = {name: n for n, position in enumerate(self.folded.positions) for name in position.shared_in}
        for n, at in enumerate(self.folded.serves):
            own, model = self.folded.positions[n], self.problem.model(at)
            serving = self.problem.positions[self.problem.serves(at)]
            handed = [(name, n + 1) for name in serving.exit if name in values]
            handed += [(name, last.get(theirs, n)) for name, theirs in zip(serving.shared_out, own.shared_out, strict=True)
                       if theirs in values]
            wanted, row = {name for name, _ in handed}, np.zeros(RESOURCES)
            for i, op in reversed(list(enumerate(serving.ops(graph) if handed else ()))):
                if not wanted.isdisjoint(op.outputs) and op.name not in graph.parameter_free:
                    wanted.update(op.inputs)
                    row += self._per_microbatch(model.unary[i][self.solution.choices[n][i]])
            if handed:
                found.append((n, max(until for _, until in handed), float(row[FORWARD]), float(row[BACKWARD])))
        return tuple(found)

    def _outputs(self) -> tuple[float, float]:
        """``Placement.outputs`` and ``outputs_kept``."""
        numbers, graph = enumerate(self.folded.serves), self.folded.graph
        made = {at: {name for op in position.ops(graph) for name in op.outputs}
                for at, position in enumerate(self.problem.positions)}
        last = {at for at, names in made.items() if names & {name for name in graph.outputs if graph.values[name].shape}}
        pairs = [(at, self.solution.choices[n]) for n, at in numbers if at in last]
        found = [one for at, chosen in pairs for one in self._handed_back(at, at, chosen)]
        return sum(bytes_ for bytes_, _ in found), sum(bytes_ * kept for bytes_, kept in found)

    def _alone(self, samples: int) -> tuple[float, float]:
        """``Placement.alone``: as it is made, what ranks with samples of their own make of these by micro-batches."""
        graph, mesh = self.folded.graph, self.problem.mesh
        stays = self.problem.structure.made_alone
        sampled = {axis for axis in mesh.axes if mesh.size(axis) > 1 and role_of(axis) in SAMPLED}
        part, whole, each = samples / batch_size(graph), 0.0, 0.0
        staying = [{name: place for name, place in results(position.ops(graph)).items() if name in stays}
                   for position in self.problem.positions]
        for n, at in enumerate(self.folded.serves):
            for name, (i, k) in staying[at].items():
                axes = set(self.problem.model(at).placed[i][self.solution.choices[n][i]].results[k].split_axes)
                bytes_ = graph.values[name].bytes_ / mesh.size(tuple(axes - sampled))
                if sampled and sampled <= axes:
                    each += bytes_ * part
                else:
                    whole += bytes_
        return whole, each

    def _handed_back(self, at: int, position: int, chosen: Sequence[int]) -> list[tuple[float, int]]:
        """(bytes of a micro-batch, how many times those are held anyway) of what the model hands back, of a position whose
        model is that of ``at``."""
        graph, placed, tables = self.folded.graph, self.problem.model(at).placed, self.problem.tables
        wanted = {name for name in graph.outputs if graph.values[name].shape}
        return [
            (tables.bytes(name, state), handed_back(1) - held_outputs(1, name in tables.saved.values, state))
            for i, op in enumerate(self.problem.positions[position].ops(graph))
            for name, state in zip(op.outputs, placed[i][chosen[i]].results, strict=True) if name in wanted
        ]

    def _bytes(self, model: Model, name: str, chosen: Sequence[int]) -> float:
        var, options = model.states[name]
        return self.problem.tables.bytes(name, options[chosen[var]])
