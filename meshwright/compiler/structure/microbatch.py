"""Micro-batches as an axis in time.

The graph is captured at the global batch. Splitting its batch over the time axis and summing what becomes pending over it
is gradient accumulation, so the rules decide whether it is right:

* operators that read no parameter run once per step, before the first micro-batch, on the whole batch (the *prologue*:
  masks, position tables, shifted labels, the count of valid labels);
* the others split the factor that their split operands carry, or pass a pending sum through linearly;
* what needs all micro-batches (a product of means over the batch, a logarithm of a sum) and what is made of it runs once per
  step, behind them, on their sums or on what they made, joined (the *epilogue*), if none of it reads a parameter of more than
  one element (``read_apart``);
* the loss must come out as a pending sum over time, then the sum over the micro-batches is the loss of the whole batch, or of
  the epilogue, whose gradients the micro-batches go back from (``ir.gradients.ahead``).

What would need a sum over all micro-batches in the middle (batch statistics) cannot be accumulated; ``split_time`` says which
operator that is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from meshwright.compiler.structure.dims import batch_size
from meshwright.cost.memory.saved import storages
from meshwright.ir.declared.operator import Operators
from meshwright.ir.gradients.ahead import run_ahead
from meshwright.ir.graph import FILL, Graph, Op, Ref, Value, map_refs
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import TIME, PlanError, Schedule
from meshwright.ir.rule import OpRule, place

_INSTEAD = (
    "use microbatches=1, or leave out of the loss what is a product of means over all samples (a mixture's load balancing, "
    "which output_router_logits=False turns off in transformers), or plan for a smaller batch and call the model several times "
    "before optimizer.step(), where such a term is that of each call"
)
"""What to do where micro-batches cannot be accumulated."""


class _WholeBatchError(Exception):
    """An operator needs all micro-batches at once."""


def split_counts(graph: Graph) -> Graph:
    """Give every cross entropy's count of valid labels an operator of its own.

    ``mw.cross_entropy`` returns (sum, count); the count depends on the labels alone, so it belongs to the prologue.
    """
    ops: list[Op] = []
    values = dict(graph.values)
    renamed: dict[str, str] = {}
    for op in graph.ops:
        op = replace(op, args=map_refs(op.args, lambda ref: Ref(renamed.get(ref.name, ref.name))))
        if op.target == "mw.cross_entropy":
            count = op.outputs[1]
            name = f"{count}_all"
            values[name] = Value(name, (), values[count].dtype)
            ops.append(Op(name, "mw.valid_count", (op.args[1], op.args[2]), (), (name,), op.module, op.source))
            renamed[count] = name
        ops.append(op)
    if not renamed:
        return graph
    shift, starts = 0, {}
    for position, op in enumerate(ops):
        if op.target == "mw.valid_count":
            shift += 1
        else:
            starts[position - shift] = position
    blocks = tuple(replace(b, start=starts[b.start], stop=starts[b.stop - 1] + 1) for b in graph.blocks)
    tree = map_refs(graph.output_tree, lambda ref: Ref(renamed.get(ref.name, ref.name)))
    return replace(graph, ops=tuple(ops), values=values, output_tree=tree, blocks=blocks)


def read_apart(graph: Graph, operators: Operators) -> Graph:
    """The graph with a copy of every parameter of one element for each operator that reads it beside something else, element by
    element: micro-batches can make it where the reader needs them all (the temperature and the bias of a loss over pairs)."""
    numbers = {param.value for param in graph.params if not param.buffer and math.prod(graph.values[param.value].shape) == 1}
    ops: list[Op] = []
    values, places = dict(graph.values), [0]
    for op in graph.ops:
        beside = numbers.intersection(op.inputs) if len(set(op.inputs)) > 1 and operators[op.target].elementwise else ()
        copies = {name: f"{op.name}_reads_{name}" for name in op.inputs if name in beside}
        for name, copy in copies.items():
            values[copy] = replace(values[name], name=copy)
            ops.append(Op(copy, "aten.clone.default", (Ref(name),), (), (copy,), op.module, op.source))

        def renamed(ref: Ref, copies: Mapping[str, str] = copies) -> Ref:
            return Ref(copies.get(ref.name, ref.name))

        ops.append(replace(op, args=map_refs(op.args, renamed), kwargs=map_refs(op.kwargs, renamed)))
        places.append(len(ops))
    if len(ops) == len(graph.ops):
        return graph
    blocks = tuple(replace(b, start=places[b.start], stop=places[b.stop]) for b in graph.blocks)
    return replace(graph, ops=tuple(ops), values=values, blocks=blocks)


def split_time(
    graph: Graph, rules: Mapping[str, OpRule], microbatches: int, batch_inputs: dict[str, int]
) -> Schedule:
    """Which factor the time axis splits in every operator.

    ``rules``: the rule of every op by name; ``batch_inputs``: {input: its batch dim}. Raises PlanError naming the first
    operator that cannot be accumulated, or an input whose batch the micro-batches do not divide.
    """
    if microbatches == 1:
        return Schedule()
    for name, dim in batch_inputs.items():
        if graph.values[name].shape[dim] % microbatches:
            raise PlanError(f"microbatches={microbatches} does not divide the batch {graph.values[name].shape[dim]} of input "
                            f"{name!r}; choose a divisor")
    free, parameters = prologue(graph), {param.value for param in graph.params if not param.buffer}
    late: dict[str, _WholeBatchError] = {}  # value of the epilogue -> what needs the whole batch before it
    epilogue: set[str] = set()
    state: dict[str, int | str | None] = {}  # value -> dim split over time, "+" or None (the same in every micro-batch)
    state.update(batch_inputs)
    time: dict[str, str] = {}
    mesh = Mesh((TIME,), (microbatches,))
    where = _batch_of_prologue(graph, rules, free, batch_inputs)
    for op in graph.ops:
        if op.name in free:
            state.update({name: where[name] for name in op.outputs if name in where})
    for op in graph.ops:
        if op.name in free:
            continue
        try:
            reason = next((late[name] for name in op.inputs if name in late), None)
            factor = None if reason is not None else _factor(op, rules[op.name], state, graph, time, rules, free)
        except _WholeBatchError as error:
            reason = error
        if reason is not None:
            if not parameters.isdisjoint(op.inputs):
                raise PlanError(str(reason))
            epilogue.add(op.name)
            late.update(dict.fromkeys(op.outputs, reason))
            continue
        if factor is None:
            state.update(dict.fromkeys(op.outputs))
            continue
        time[op.name] = factor
        if not rules[op.name].legal({TIME: factor}, mesh):
            raise PlanError(f"microbatches={microbatches} cannot split {op.target} of {op.module or 'the model'} ({op.source})")
        placed = place(rules[op.name], {TIME: factor}, mesh, [True] * len(op.inputs))
        for name, sharding in zip(op.outputs, placed.results, strict=True):
            kind = sharding.kind(TIME)
            state[name] = None if kind == "" else kind
    if graph.loss is not None and graph.loss not in late and state.get(graph.loss) != "+":
        raise PlanError(f"the loss is not a sum over samples divided by a count, so it cannot be accumulated over "
                        f"microbatches={microbatches}; {_INSTEAD}")
    if graph.mutations:
        changed = next(param.fqn for param in graph.params if param.value == graph.mutations[0][0])
        raise PlanError(f"the forward changes buffer {changed!r} once a call (as a batch norm its statistics and a spectral "
                        f"norm its vectors), which {microbatches} micro-batches would do {microbatches} times: needs "
                        f"microbatches=1, or statistics that the forward does not change")
    epilogue |= _fills_of(graph, epilogue)
    return Schedule(microbatches, time, free, frozenset(epilogue), run_ahead(graph, rules, epilogue, free))


def split_alike(
    graph: Graph, rules: Mapping[str, OpRule], microbatches: int, batch_inputs: dict[str, int], like: Schedule
) -> Schedule | None:
    """``split_time`` of more than one micro-batch as of another count, which it depends on where a batch or a factor does not
    divide alone; None if one does not."""
    mesh = Mesh((TIME,), (microbatches,))
    whole = all(graph.values[name].shape[dim] % microbatches == 0 for name, dim in batch_inputs.items())
    if not whole or not all(rules[name].legal({TIME: factor}, mesh) for name, factor in like.time.items()):
        return None
    return replace(like, microbatches=microbatches)


def check_groups(graph: Graph, rules: Mapping[str, OpRule], schedule: Schedule, ranks: int) -> None:
    """Raise PlanError where micro-batches of a batch that ``ranks`` share part samples which an operator groups: a micro-batch
    has its rows from every rank's share, so that each of these pieces must hold whole groups."""
    pieces = schedule.microbatches * ranks
    if schedule.microbatches == 1 or batch_size(graph) % pieces:
        return
    for op in graph.ops:
        size = rules[op.name].sizes.get(schedule.time.get(op.name, ""), 0)
        if size % pieces:
            raise PlanError(
                f"microbatches={schedule.microbatches} of {ranks} ranks each take their samples from every rank's share, which "
                f"parts the {size} groups of {op.target} of {op.module or 'the model'} ({op.source}); take microbatches=1, or "
                f"micro-batches and data ranks whose product divides {size}"
            )


def _fills_of(graph: Graph, epilogue: set[str]) -> set[str]:
    """The fills that the epilogue alone reads."""
    readers, leaving = graph.consumers(), frozenset(graph.outputs)
    fills = [op for op in graph.ops if op.target == FILL and leaving.isdisjoint(op.outputs)]
    read = {op.name: {graph.ops[at].name for name in op.outputs for at in readers[name]} for op in fills}
    return {name for name, found in read.items() if found and found <= epilogue}


def prologue(graph: Graph) -> frozenset[str]:
    """What runs once a step.

    A fill that one operator of the micro-batches reads is made there, as large as it reads it: made before, it would be whole,
    for every micro-batch at once.
    """
    free, readers, leaving = graph.parameter_free, graph.consumers(), frozenset(graph.outputs)

    def read_there(op: Op) -> bool:
        found = [graph.ops[index] for name in op.outputs for index in readers[name]]
        return len(found) == 1 and found[0].name not in free and leaving.isdisjoint(op.outputs)

    return frozenset(op.name for op in graph.ops if op.name in free and not (op.target == FILL and read_there(op)))


def made_alone(graph: Graph, operators: Operators) -> frozenset[str]:
    """Values that are made once a step and stay for others to read: those whose memory these read (``storages``)."""
    once, base = prologue(graph), storages(graph, operators)
    made = {name for op in graph.ops if op.name in once for name in op.outputs}
    read = (name for op in graph.ops if op.name not in graph.parameter_free for name in op.inputs)
    return frozenset(base[name] for name in read if name in made).difference(graph.inputs)


def _batch_of_prologue(
    graph: Graph, rules: Mapping[str, OpRule], free: frozenset[str], batch_inputs: dict[str, int]
) -> dict[str, int]:
    """The batch dim of prologue values, followed from the inputs through pass-through factors."""
    where: dict[str, int] = dict(batch_inputs)
    for op in graph.ops:
        if op.name not in free:
            continue
        rule = rules[op.name]
        for position, name in enumerate(op.inputs):
            if name not in where:
                continue
            factor = rule.operands[position][where[name]]
            for output, dims in zip(op.outputs, rule.results, strict=True):
                if factor is not None and factor in dims:
                    where.setdefault(output, dims.index(factor))
    return where


def _factor(
    op: Op,
    rule: OpRule,
    state: dict[str, int | str | None],
    graph: Graph,
    time: dict[str, str],
    rules: Mapping[str, OpRule],
    free: frozenset[str],
) -> str | None:
    """The factor the time axis splits in ``op``, given its operands' states; None: nothing of it depends on time."""
    factors, pending = set(), set()
    for position, name in enumerate(op.inputs):
        kind = state.get(name)
        prologue = name in graph.inputs or (name in graph.producers and graph.ops[graph.producers[name]].name in free)
        if kind == "+":
            pending.add(position)
        elif isinstance(kind, int):
            factor = rule.operands[position][kind]
            if factor is not None or not prologue:
                factors.add(factor)
    if pending and not (factors - {None}):
        for index, group in enumerate(rule.linear):
            if group == pending:
                return f"+{index}"
    if not pending and not factors:
        return None
    added_once = any(rule.adds(position, factor) for position in rule.added for factor in factors if factor is not None)
    if pending or added_once or len(factors) != 1 or None in factors or factors & (rule.whole | rule.internal.keys()):
        raise _WholeBatchError(
            f"{op.target} of {op.module or 'the model'} ({op.source}) needs the whole batch at once, so it cannot be "
            f"accumulated over micro-batches; {_INSTEAD}"
        )
    factor = next(iter(factors))
    assert factor is not None
    for position, name in enumerate(op.inputs):
        dims = rule.operands[position]
        if factor in dims and state.get(name) is None:
            _demand(name, dims.index(factor), op, state, graph, time, rules, free)
    return factor


def _demand(
    name: str,
    dim: int,
    reader: Op,
    state: dict[str, int | str | None],
    graph: Graph,
    time: dict[str, str],
    rules: Mapping[str, OpRule],
    free: frozenset[str],
) -> None:
    """Make a value that was the same in every micro-batch (an expanded position table) come split along ``dim``."""
    if name in graph.inputs or (name in graph.producers and graph.ops[graph.producers[name]].name in free):
        state[name] = dim  # cut where the prologue ends
        return
    if name in graph.producers:
        op = graph.ops[graph.producers[name]]
        rule = rules[op.name]
        factor = rule.results[op.outputs.index(name)][dim]
        readers = [other for other in graph.ops if name in other.inputs]
        if factor is not None and factor not in rule.whole and op.name not in time and readers[0] == reader:
            for position, operand in enumerate(op.inputs):
                if factor in rule.operands[position]:
                    _demand(operand, rule.operands[position].index(factor), op, state, graph, time, rules, free)
            time[op.name] = factor
            state[name] = dim
            return
    raise PlanError(
        f"{reader.target} of {reader.module or 'the model'} ({reader.source}) reads %{name}, which is not cut into "
        "micro-batches; use microbatches=1"
    )
