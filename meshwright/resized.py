"""A captured graph as it were of another sequence length or batch, for prices: no model is at hand, only its plan.

    dims       of the inputs that are a sequence or the batch, by where they lead (``structure.dims``), times the factor
    literals   that depend on them follow from the rules: what an operator is called with on half of the dim, its localizer
               says, and literals are a constant and a multiple of the size
    values     have the shapes that the operators make of these, run on tensors without contents

    mixtures   have as many rows as their tokens ask for
    views      that join dims, or part them again, have the sizes of what they join; of several dims made of one it is the
               sequence that is longer, or the one that is not the batch

What does not follow so is refused: parameters as long as the sequence, tables of positions that are too short, operators that
would communicate.

The tables of a captured graph are looked at as well (``check_positions``): a model without contents is captured whatever it
reads. Where the rows follow from inputs, a step checks them (``passes.bounds``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from meshwright.compiler.structure.dims import Dim, DimClasses, batch_inputs, handed_on, sequence_classes
from meshwright.errors import InputError, PlanError
from meshwright.ir.declared.draws import draws
from meshwright.ir.declared.experts import EXPERTS, Experts, arguments
from meshwright.ir.gradients.custom import CUSTOM, CustomFunction
from meshwright.ir.graph import Graph, Op, Ref, Value
from meshwright.ir.mesh import Mesh
from meshwright.ir.operators import overload
from meshwright.ir.program import DRAW
from meshwright.ir.rule import Local, OpRule, Rules, place
from meshwright.rules import rules_of
from meshwright.runtime.interpret import call

VIEWS = "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"
CONVOLUTIONS = "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default"
"""Called with no size, so that what they make is right: a window's width more than their operand, where they are causal."""
EMBEDDING, SLICE, SCATTER = "aten.embedding.default", "aten.slice.Tensor", "aten.slice_scatter.default"
MOST_INDICES = 1 << 22
"""Of a table of positions, whose rows are looked at."""


def of_length(graph: Graph, factor: Fraction) -> Graph:
    """The graph for sequences ``factor`` times as long, as many of them. Raises PlanError where that does not follow."""
    rules, _ = rules_of(graph)
    classes = DimClasses(graph, rules, alike=True)
    batch = classes.of(batch_inputs(graph).items())
    sequence = sequence_classes(graph, handed_on(graph), classes, batch)
    lengths = {size for name in graph.inputs for dim, size in enumerate(graph.values[name].shape)
               if classes.find((name, dim)) in sequence}
    alike = {(name, dim) for name in graph.inputs for dim, size in enumerate(graph.values[name].shape)
             if size in lengths and classes.find((name, dim)) not in batch}  # labels, which are shifted before they are read
    found = _times(graph, rules, classes, sequence | classes.of(alike), batch, factor, "the sequence")
    if factor > 1:
        _positions_fit(found)
    return found


def of_batch(graph: Graph, factor: Fraction) -> Graph:
    """The graph for ``factor`` times as many sequences of the same length. Raises PlanError where that does not follow."""
    rules, _ = rules_of(graph)
    classes = DimClasses(graph, rules)
    return _times(graph, rules, classes, classes.of(batch_inputs(graph).items()), frozenset(), factor, "the batch")


def check_positions(graph: Graph) -> None:
    """Raises InputError for a table that is read beyond its end."""
    for op, rows, largest in positions(graph):
        if largest is not None and largest >= rows:
            where = f" ({op.source})" if op.source else ""
            raise InputError(f"the table of {op.module or 'the model'}{where} has {rows} positions, and the example reads row "
                             f"{largest}; give a sequence of at most {rows}, or a model with more positions")


def positions(graph: Graph) -> Iterator[tuple[Op, int, int | None]]:
    """(look-up, rows of its table, the largest row that it reads) of those whose indices the graph makes of nothing; None where
    these are too many to look at."""
    known, makers = set[str](), {out: op for op in graph.ops for out in op.outputs}
    env: dict[str, torch.Tensor] = {}

    def read(ref: Ref) -> torch.Tensor:
        if ref.name not in env:
            op = makers[ref.name]
            made = call(op, read)
            env.update(zip(op.outputs, made if isinstance(made, tuple | list) else (made,), strict=False))
        return env[ref.name]

    for op in graph.ops:
        if known.issuperset(op.inputs) and not draws(op):
            known.update(op.outputs)
        if op.target == EMBEDDING and op.inputs[1] in known:
            few = graph.values[op.inputs[1]].numel <= MOST_INDICES
            indices = read(Ref(op.inputs[1])) if few else None
            yield op, graph.values[op.inputs[0]].shape[0], None if indices is None else int(indices.max())


def _times(
    graph: Graph, rules: Rules, classes: DimClasses, dims: frozenset[Dim], still: frozenset[Dim], factor: Fraction, what: str
) -> Graph:
    """The graph with some dims, a union of classes, ``factor`` times as large, and others as they are; ``what`` they are, in
    words."""
    shapes = {name: _scaled(name, graph.values[name], dims, classes, factor, what) for name in graph.inputs}
    if all(shapes[name] == graph.values[name].shape for name in graph.inputs):
        ones = [name for name in graph.inputs for dim, size in enumerate(graph.values[name].shape)
                if size == 1 and classes.find((name, dim)) in dims]
        raise PlanError(f"{what} of {ones[0]} is 1, and of the model's dims of 1 it is not known which grow with it" if ones
                        else f"no input of the model has {what.replace('the ', 'a ')}")
    held = {param.value: param.fqn for param in graph.params}
    for name, fqn in held.items():
        if any(size > 1 and classes.find((name, dim)) in dims for dim, size in enumerate(graph.values[name].shape)):
            raise PlanError(f"{fqn} is as long as {what}")
    ops = tuple(_resized(op, rules[op.name], graph, dims, classes, factor) for op in graph.ops)
    scaled = {op.outputs[0] for op in graph.ops if op.target == SLICE and classes.find((op.outputs[0], op.args[1])) in dims}
    values = dict(graph.values) | {name: replace(graph.values[name], shape=shapes[name]) for name in graph.inputs}

    def kind(dim: Dim) -> int:
        found = classes.find(dim)
        return 1 if found in dims else -1 if found in still else 0

    ops = _run(graph, ops, values, held, scaled, kind, factor, what)
    return replace(graph, ops=ops, values=values)


def _scaled(
    name: str, value: Value, dims: frozenset[Dim], classes: DimClasses, factor: Fraction, what: str
) -> tuple[int, ...]:
    found = [size * factor if size > 1 and classes.find((name, dim)) in dims else Fraction(size)
             for dim, size in enumerate(value.shape)]
    if any(size.denominator > 1 for size in found):
        raise PlanError(f"{factor} times {what} of {name} is no whole number")
    return tuple(map(int, found))


def _resized(
    op: Op, rule: OpRule, graph: Graph, scaled: frozenset[Dim], classes: DimClasses, factor: Fraction
) -> Op:
    """The operator with its literals for the other size."""
    if op.target == EXPERTS:  # its rows follow from its tokens (``_answered``)
        return op
    if rule.algorithms:
        return _of_rows_in_order(op, rule, scaled, classes, factor)
    if rule.localize is None:
        return op
    pairs = [*zip(op.inputs, rule.operands, strict=True), *zip(op.outputs, rule.results, strict=True)]
    factors = {one: None for name, dims in pairs for dim, one in enumerate(dims)
               if one is not None and one not in rule.whole and rule.sizes[one] > 1 and classes.find((name, dim)) in scaled}
    if not factors:
        return op
    assignment = {f"s{number}": one for number, one in enumerate(factors)}

    def part(ranks: int) -> Any:
        mesh = Mesh(tuple(assignment), (ranks,) * len(assignment))
        if not rule.legal(assignment, mesh):
            raise PlanError(f"{op.target} cannot be halved")
        local = Local(
            mesh, dict.fromkeys(assignment, 0), assignment, place(rule, assignment, mesh, [True] * len(op.inputs)),
            tuple(graph.values[name].shape for name in op.inputs), tuple(graph.values[name].shape for name in op.outputs),
        )
        assert rule.localize is not None
        target, args, kwargs = rule.localize(op, local)
        return target, args, tuple(pair for pair in kwargs if pair[0] != DRAW)

    whole, half = part(1), part(2)
    if draws(op) and whole[0] != op.target:  # dropout, which is called with no size
        return op
    if whole[0] != half[0]:
        raise PlanError(f"{op.target} is another operator on a part of its dims")
    return replace(op, target=whole[0], args=_between(whole[1], half[1], factor), kwargs=_between(whole[2], half[2], factor))


def _of_rows_in_order(op: Op, rule: OpRule, scaled: frozenset[Dim], classes: DimClasses, factor: Fraction) -> Op:
    """What works along a sequence. One that is called with its length has the new one, if that alone can be meant, and if what
    else it is called with (how far it sees) stays less."""
    lengths = {size for algorithm in rule.algorithms.values() for size in algorithm.lengths}
    numbers = [arg for arg in op.args if type(arg) is int and arg > 1]
    along = {(name, dim) for algorithm in rule.algorithms.values()
             for name, dim in zip(op.inputs, algorithm.operands, strict=True) if dim is not None}
    if lengths.isdisjoint(numbers) or not any(classes.find(dim) in scaled for dim in along):
        return op
    if len(lengths) > 1 or sum(number in lengths for number in numbers) > 1:
        raise PlanError(f"{op.target} is called with its length")
    after = lengths.pop() * factor
    if after.denominator > 1 or any(number >= after for number in numbers if number * factor != after):
        raise PlanError(f"{op.target} sees further than {after} rows")
    return replace(op, args=tuple(int(after) if type(arg) is int and arg * factor == after else arg for arg in op.args))


def _between(whole: Any, half: Any, factor: Fraction) -> Any:
    """The literals at ``factor`` times the size, from those at the whole and at half of it."""
    if isinstance(whole, tuple | list):
        if not isinstance(half, tuple | list) or len(whole) != len(half):
            raise PlanError("arguments differ in number on a part of a dim")
        return type(whole)(_between(one, other, factor) for one, other in zip(whole, half, strict=True))
    if isinstance(whole, CustomFunction) and isinstance(half, CustomFunction):
        forward = _graph_between(whole.forward, half.forward, factor)
        return replace(whole, forward=forward, backward=_graph_between(whole.backward, half.backward, factor))
    if type(whole) is int and type(half) is int and whole != half:
        found = whole + 2 * (factor - 1) * (whole - half)
        if found.denominator > 1:
            raise PlanError(f"{found} is no whole number")
        return int(found)
    if whole != half:
        raise PlanError("arguments differ in kind on a part of a dim")
    return whole


def _graph_between(whole: Graph, half: Graph, factor: Fraction) -> Graph:
    """The graph inside a function at ``factor`` times the size."""
    values = {name: replace(value, shape=_between(value.shape, half.values[name].shape, factor))
              for name, value in whole.values.items()}
    ops = tuple(replace(op, args=_between(op.args, other.args, factor), kwargs=_between(op.kwargs, other.kwargs, factor))
                for op, other in zip(whole.ops, half.ops, strict=True))
    return replace(whole, values=values, ops=ops)


def _sliced(op: Op, old: Mapping[str, Value], new: Mapping[str, Value], scaled: bool, factor: Fraction) -> Op:
    """A slice that ended where its operand does still does, and so does one that leaves out the last (labels that are shifted);
    one of so many positions of a table has as many more. ``scaled``: what it makes is a sequence."""
    if op.target not in (SLICE, SCATTER):
        return op
    first = 1 if op.target == SLICE else 2
    if len(op.args) < first + 3:
        return op
    dim, start, end = op.args[first : first + 3]
    before, after = (values[op.inputs[0]].shape[dim] for values in (old, new))
    if end >= before - 1 > start and before != after:
        end = after - max(0, before - end)
    elif scaled:
        end = start + math.ceil((end - start) * factor)
    return replace(op, args=(*op.args[: first + 2], end, *op.args[first + 3 :]))


def _viewed(op: Op, old: Mapping[str, Value], new: Mapping[str, Value], kind: Callable[[Dim], int]) -> Op:
    """A view of as many elements as its operand has now. ``kind``: 1 of dims that are larger, -1 of those that are not, 0 of
    those of which nothing is known."""
    if op.target not in VIEWS or -1 in op.args[1] or math.prod(op.args[1]) == math.prod(new[op.inputs[0]].shape):
        return op
    before, after, made = old[op.inputs[0]].shape, new[op.inputs[0]].shape, old[op.outputs[0]].shape
    sizes = list(made)
    for ins, outs in _groups(before, made):
        times = Fraction(math.prod(after[dim] for dim in ins), math.prod(before[dim] for dim in ins))
        known = [(kind((op.outputs[0], dim)), dim) for dim in outs if made[dim] > 1]
        larger = [dim for one, dim in known if one == max(known)[0] and (one >= 0 or len(known) == 1)]
        if times != 1 and len(larger) == 1:
            sizes[larger[0]] = int(made[larger[0]] * times)
    return replace(op, args=(op.args[0], type(op.args[1])(sizes), *op.args[2:]))


def _groups(before: Sequence[int], made: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The dims of a view's operand and of its result that are the same elements, fewest first; dims of one at the end aside.

    >>> list(_groups((2, 3, 4), (6, 2, 2)))
    [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 3))]
    """
    at, to = 0, 0
    while at < len(before) and to < len(made):
        end, last = at + 1, to + 1
        while (size := math.prod(before[at:end])) != (wanted := math.prod(made[to:last])):
            end, last = (end + 1, last) if size < wanted else (end, last + 1)
        yield range(at, end), range(to, last)
        at, to = end, last


def _run(
    graph: Graph, ops: tuple[Op, ...], values: dict[str, Value], held: Mapping[str, str], scaled: set[str],
    kind: Callable[[Dim], int], factor: Fraction, what: str,
) -> tuple[Op, ...]:
    """The operators, the shapes of what they make filled in; ``held``: parameters and their names. Raises PlanError for one
    that does not run so, and for one that makes neither what it made nor ``factor`` times it."""
    found = list[Op]()
    env = {name: torch.empty(values[name].shape, dtype=values[name].dtype, device="meta") for name in (*graph.inputs, *held)}
    with torch.no_grad():
        for own, op in zip(graph.ops, ops, strict=True):
            op = _sliced(op, graph.values, values, op.outputs[0] in scaled, factor)
            op = _viewed(op, graph.values, values, kind)
            if op.target == EXPERTS:
                op, made = _answered(op, graph, env)
            else:
                try:
                    made = call(_on_meta(op), lambda ref: env[ref.name])
                except Exception as error:  # torch refuses a call of other sizes in its own ways
                    where = f" of {op.module or 'the model'}"
                    given = " and ".join(f"{list(env[name].shape)}{f' ({held[name]})' if name in held else ''}"
                                         for name in op.inputs)
                    raise PlanError(f"{op.target}{where} does not run with {factor} times {what}, on {given}") from error
            inside = op.args[0].forward if op.target == CUSTOM else None
            if inside and any(inside.values[a].shape != env[b].shape for a, b in zip(inside.inputs, op.inputs, strict=True)):
                raise PlanError(f"{op.args[0]} of {op.module or 'the model'} is not known to follow {what}")
            op = own if op.target != own.target and _makes(own, made, env) else op
            found.append(op)
            results = made if isinstance(made, tuple | list) else (made,)
            for name, result in zip(op.outputs, results, strict=False):
                old, new = values[name], tuple(result.shape)
                fits = len(new) == len(old.shape) and (op.target in CONVOLUTIONS or all(
                    b in (a, a * factor) for a, b in zip(old.shape, new, strict=True)))
                if result.dtype != old.dtype or not (fits or name in graph.parameter_free_values):
                    raise PlanError(f"{op} makes {list(new)} of {list(old.shape)}")
                values[name] = replace(old, shape=new)
                env[name] = result
    return tuple(found)


def _makes(op: Op, wanted: Any, env: Mapping[str, torch.Tensor]) -> bool:
    """Whether an operator that is called with no size makes the same of these operands as what runs on pieces in its place."""
    try:
        made = call(_on_meta(op), lambda ref: env[ref.name])
    except Exception:  # torch refuses a call of other sizes in its own ways
        return False
    pairs = zip(*(one if isinstance(one, tuple | list) else (one,) for one in (made, wanted)), strict=False)
    return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


def _answered(op: Op, graph: Graph, env: Mapping[str, torch.Tensor]) -> tuple[Op, torch.Tensor]:
    """A mixture of as many rows as its tokens are now, and what it makes."""
    experts, x, ids, *_ = arguments(op.args)
    before, after = graph.values[ids.name].numel, env[ids.name].numel()
    old = graph.values[op.outputs[0]]
    made = torch.empty((*env[x.name].shape[:-1], old.shape[-1]), dtype=old.dtype, device="meta")
    return replace(op, args=(_of_rows(experts, before, after), *op.args[1:])), made


def _of_rows(experts: Experts, before: int, after: int) -> Experts:
    """The experts of ``after`` rows in the place of ``before``. Raises PlanError where their graph does not tell rows apart."""
    graph = experts.graph
    if any(before in graph.values[name].shape for name in experts.operands):
        raise PlanError(f"a weight of {experts.count} experts is as wide as they have rows")

    def resized(tree: Any) -> Any:
        if isinstance(tree, tuple | list):
            return type(tree)(map(resized, tree))
        return after if type(tree) is int and tree == before else tree

    values = {name: replace(value, shape=resized(value.shape)) for name, value in graph.values.items()}
    ops = tuple(replace(op, args=resized(op.args), kwargs=resized(op.kwargs)) for op in graph.ops)
    return replace(experts, graph=replace(graph, values=values, ops=ops))


def _positions_fit(graph: Graph) -> None:
    """Raises PlanError for a table of positions that is read beyond its end, or that may be."""
    for op, rows, largest in positions(graph):
        if largest is None or largest >= rows:
            raise PlanError(f"the table of {op.module or 'the model'} has {rows} positions")


def _on_meta(op: Op) -> Op:
    """What an operator without operands makes has a device of its own."""
    if op.inputs or not any(argument.name == "device" for argument in overload(op.target)._schema.arguments):
        return op
    return replace(op, kwargs=(*((key, one) for key, one in op.kwargs if key != "device"), ("device", torch.device("meta"))))


__all__ = ["check_positions", "of_batch", "of_length"]
