"""``mw.experts``: tokens, experts and the width inside an expert split.

    x [*t, h], ids [*t, k], weights [*t, k], operands [e, .., f, ..] -> [*t, h']

Splitting *t alone is data parallelism: experts are read differently on each rank. Splitting e alone lets every rank answer for
its own experts, a term of a sum. Splitting both by one axis (``t0&e``) is expert parallelism: every rank has its tokens and its
experts, and tokens travel: a row for each of their experts, or with ``t0&e:d`` once to every d neighbours
(``runtime.experts.mixture``). Splitting f makes terms of a sum (``rules.custom.inner``).

Rows of a rank are those of its tokens: what experts get is uneven, ``Experts.imbalance`` says by how much the fullest rank
exceeds that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.compiler.rules.book import Declaration, builtin_rules, declare
from meshwright.compiler.rules.call import Call, Operand, Rewritten
from meshwright.compiler.rules.custom.inner import inner, piece_of
from meshwright.cost.memory.saved import saved_for_backward, storages
from meshwright.ir.declared.experts import EXPERTS, GROUPED, ROWS, WEIGHTS, Experts, arguments
from meshwright.ir.declared.operator import Cost, Product, Saves, Work
from meshwright.ir.graph import Op
from meshwright.ir.rule import TOGETHER, Factor, Local, OpRule, RuleError, Traffic, factors_of, neighbourhood


def _experts(call: Call) -> OpRule:
    """The rule of a call; see the file's head."""
    experts: Experts = call["0"]
    x, ids, weights, operands = call["1"], call["2"], call["3"], call["4"]
    if not isinstance(x, Operand) or not isinstance(ids, Operand) or len(operands) != len(experts.operands):
        raise RuleError(f"{EXPERTS} takes experts, x, ids, weights and {len(experts.operands)} operands")
    tokens = [f"t{i}" for i in range(x.ndim - 1)]
    width = inner(experts)
    rows: list[list[Factor | None]] = [[*tokens, None] for given in (x, ids, weights) if given is not None]
    fused: dict[int, tuple[int, int]] = {}
    for name, stacked, operand in zip(experts.operands, experts.stacked, operands, strict=True):
        dims: list[Factor | None] = [None] * operand.ndim
        if stacked:
            dims[0] = "e"
        if width is not None and name in width.operands:
            dim, parts = width.operands[name]
            dims[dim] = "f"
            if parts > 1:
                fused[operand.position] = (dim, parts)
        rows.append(dims)
    units = {"f": width.units} if width is not None else {}
    together = tuple(f"{factor}{TOGETHER}e" for factor in tokens)
    slots, size = math.ceil(math.prod(ids.shape) * experts.imbalance), x.dtype.itemsize
    moved = tuple(
        Traffic("all_to_all", slots * (x.shape[-1] if there else call.shape[-1]), size, backward, x.position, experts.routing)
        for backward in (False, True) for there in (True, False)
    )
    rule = call.rule(rows, [[*tokens, None]], units=units, localize=_local, fused=fused)
    return replace(rule, together=together, internal=dict.fromkeys(together, moved), even=rule.even | {"e"})


def _local(op: Op, local: Local) -> Rewritten:
    """On one rank: the experts' piece of the width, which ranks have which experts, and the axes along which tokens travel."""
    experts, *given = arguments(op.args)
    pieces, travelled = [], []
    for axis in local.axes_of("e"):
        travels = len(factors_of(local.assignment[axis])) > 1
        pieces.append((local.mesh.size(axis), -1 if travels else local.coordinates[axis]))
        travelled += [axis] * travels
    kwargs: tuple[tuple[str, object], ...] = (("pieces", tuple(pieces)),) if pieces else ()
    kwargs += (("axis", tuple(travelled)),) if travelled else ()
    near = neighbourhood(local.assignment[travelled[0]])[1] if travelled else None
    kwargs += (("near", near),) if near is not None else ()
    return EXPERTS, (piece_of(experts, local.mesh.size(local.axes_of("f"))), *given), kwargs


# ------------------------------------------------------------------------------------------------------------------ costs
def _rows(work: Work) -> int:
    """Rows that this rank answers: those of its tokens, more where experts are split."""
    experts: Experts = work.args[0]
    mine = math.prod(work.operands[0][:-1]) * experts.chosen
    return math.ceil(mine * (experts.imbalance if _here(work) < experts.count else 1.0))


def _first(work: Work) -> int:
    """Position of the first operand among the tensor operands."""
    return 2 + (work.args[3] is not None)


def _here(work: Work) -> int:
    """Experts of this rank."""
    experts: Experts = work.args[0]
    at = next((i for i, stacked in enumerate(experts.stacked) if stacked), None)
    return experts.count if at is None else work.operands[_first(work) + at][0]


def _products(work: Work) -> Sequence[Product]:
    experts: Experts = work.args[0]
    shapes = dict(zip(experts.operands, work.operands[_first(work) :], strict=True))
    here = max(1, _here(work))
    rows = max(1, -(-_rows(work) // here))
    found = []
    for op in experts.graph.ops:
        if op.target == GROUPED:
            _, left, right = shapes[op.args[1].name]
            k, n = (left, right) if op.args[3] else (right, left)
            found.append(Product(here, rows, n, k))
    return found


def _share(work: Work) -> float:
    """The part of the inner width that this rank has."""
    experts: Experts = work.args[0]
    width = inner(experts)
    if width is None:
        return 1.0
    shapes = dict(zip(experts.operands, work.operands[_first(work) :], strict=True))
    name, (dim, _) = next(iter(width.operands.items()))
    return shapes[name][dim] / experts.graph.values[name].shape[dim]


def _widths(work: Work) -> Mapping[str, float]:
    """Bytes of a row of every value that experts make or read, on this rank's piece of the inner width."""
    experts: Experts = work.args[0]
    graph, width, share = experts.graph, inner(experts), _share(work)
    slots = graph.values[graph.inputs[ROWS]].shape[0]
    return {
        name: value.bytes_ / slots * (share if width is not None and isinstance(width.states[name], int) else 1.0)
        for name, value in graph.values.items() if name not in experts.operands and value.shape[:1] == (slots,)
    }


def _kept(work: Work) -> float:
    """What autograd keeps of the rows, with where they belong; the answers if they are still to be multiplied."""
    experts: Experts = work.args[0]
    graph, widths, operators = experts.graph, _widths(work), builtin_rules().operators
    memory, kept = storages(graph, operators), set[str]()
    for op in graph.ops:
        operands, results = saved_for_backward(op, graph, operators)
        kept.update(memory[name] for name in (*(op.inputs[i] for i in operands), *(op.outputs[i] for i in results)))
    if experts.scaled and work.args[3] is not None:
        kept |= {memory[experts.output], graph.inputs[WEIGHTS]}
    moved = 8.0 * (1 + (_here(work) < experts.count))  # the order of the rows, there and here
    return _rows(work) * (moved + sum(widths[name] for name in kept if name in widths))


def _moves(work: Work) -> tuple[float, float]:
    """Bytes that rows pass through memory, forward and backward: picked from the tokens, sorted by expert where they arrived
    from other ranks, read and written by what lies between the products, put back, weighed and summed. What lies between is
    counted as one kernel; in the backward every pass has one like it, and one more reads what was kept."""
    experts: Experts = work.args[0]
    widths, graph = _widths(work), experts.graph
    row, answer = widths[graph.inputs[ROWS]], widths[experts.output]
    passes = 2.0 * row + 3.0 * answer  # picked; zeros, put, read
    if _here(work) < experts.count:
        passes += 2.0 * row + 3.0 * answer
    if experts.scaled and work.args[3] is not None:
        passes += 2.0 * answer
    products = [op for op in graph.ops if op.target == GROUPED]
    made = {name for op in products for name in op.outputs} - {experts.output}
    read = {op.args[0].name for op in products} - {graph.inputs[ROWS]}
    between = sum(widths[name] for name in made | read if name in widths)
    return _rows(work) * (passes + between), _rows(work) * (passes + 2.0 * between)


def _space(work: Work) -> tuple[float, float]:
    """Answers at their slots and times their weights. In the backward the gradients of these, when no operand has one yet, or
    those between the first product and the last, when the answers are gone and the last product's weight has its own: what
    these exceed the gradients of all operands by, which are counted beside."""
    experts: Experts = work.args[0]
    widths, rows = _widths(work), _rows(work)
    row, answer, widest = widths[experts.graph.inputs[ROWS]], widths[experts.output], max(widths.values())
    sizes = [math.prod(shape) * work.reads.itemsize for shape in work.operands]
    last = next((op.args[1].name for op in reversed(experts.graph.ops) if op.target == GROUPED), None)
    at = _first(work) + experts.operands.index(last) if last in experts.operands else None
    made = sum(size for size, needed in zip(sizes, work.gradients, strict=True) if needed)
    between = rows * (1.5 * widest - answer) + (sizes[at] if at is not None and work.gradients[at] else 0)
    return 2.0 * rows * max(row, answer), max(0.0, rows * 3.0 * answer - made, between - made)


def _saves(args: tuple[object, ...]) -> Saves:
    """Beside the rows the experts themselves."""
    experts = args[0]
    assert isinstance(experts, Experts)
    first = 2 + (args[3] is not None)
    return Saves(tuple((first + i, (first + i, 0)) for i in range(len(experts.operands))), (), _kept)


RULES: Mapping[str, Declaration] = {
    EXPERTS: declare(_experts, cost=Cost("matmul", products=_products, space=_space, moves=_moves), saves_of=_saves),
    GROUPED: declare(None, cost=Cost("matmul", products=lambda work: ()), saves="0:1 1:0"),
}
