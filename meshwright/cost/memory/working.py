"""Bytes that are there beside what autograd keeps: while a call runs, and with an output of the model.

    space              of calls that are as large as anything: a loss's gradients of the logits, linears and losses in pieces,
                       attention whose algorithm forms scores or passes pieces on
    beside_output      the gradient of the weight that makes an output (the logits), which is made before anything is let go
    copied             a weight of several parts that is split, of which every rank makes its piece of each
    backward_peak      gradients of activations while a block's backward runs, beyond what it has let go of by then
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from meshwright.cost.memory.saved import saved_for_backward, storages
from meshwright.ir.declared.operator import Operator, Operators, Work
from meshwright.ir.graph import Graph, Op
from meshwright.ir.mesh import Mesh
from meshwright.ir.program import DRAW
from meshwright.ir.rule import Local, OpRule, Placed, factors_of
from meshwright.ir.sharding import Sharding

_WIDE = 4
"""Bytes of an element in fp32."""
Shapes = Sequence[tuple[int, ...]]


def run_as(
    op: Op, rule: OpRule, assignment: Mapping[str, str], where: Placed, operators: Operators, graph: Graph, mesh: Mesh,
    shapes: tuple[Shapes, Shapes], work: Work,
) -> tuple[Operator, Work]:
    """The operator that a rank runs for a call of so much ``work``, and its own: where an algorithm splits the call, what the
    program calls in its place (``OpRule.localize``) on the first rank. ``shapes``: of operands and results before they are
    split."""
    if rule.localize is None or not any(name in rule.algorithms for name in assignment.values()):
        return operators[op.target], work
    local = Local(mesh, dict.fromkeys(mesh.axes, 0), assignment, where, tuple(shapes[0]), tuple(shapes[1]))
    target, args, kwargs = rule.localize(op, local)
    call = replace(op, target=target, args=args, kwargs=tuple(pair for pair in kwargs if pair[0] != DRAW))
    return operators[target], Work.of(call, graph, list(work.operands), list(work.results))


def space(operator: Operator, work: Work, assignment: Mapping[str, str], mesh: Mesh, split: bool, later: float = 0.0) -> float:
    """Bytes that a call needs beside operands and results while it runs as ``operator`` (``run_as``). ``split``: by an
    algorithm; ``later``: bytes that later operators of its block keep (``kept_later``), which a backward has let go of when it
    comes to this one; they are split as this one is (assumed). A loss's gradient of the logits counts as space of it."""
    loss, declared = operator.kind == "loss", operator.cost.space
    if not loss and not split and operator.cost.again is None:
        return 0.0
    forward, backward = declared(work) if declared is not None else (0.0, 0.0)
    if loss and work.operands:
        return float(max(forward, backward + math.prod(work.operands[0]) * work.reads.itemsize))
    return float(max(0.0, max(forward, backward) - later / mesh.size([a for a, one in assignment.items() if factors_of(one)])))


def kept_later(graph: Graph, operators: Operators) -> dict[str, float]:
    """Of every operator the bytes that those after it keep, each value once: of its block, or of what lies between two."""
    base, found = storages(graph, operators), dict[str, float]()
    params = {param.value for param in graph.params}
    ends = sorted({0, len(graph.ops), *(at for block in graph.blocks for at in (block.start, block.stop))})
    for start, stop in pairwise(ends):
        seen, total = set[str](), 0.0
        for op in reversed(graph.ops[start:stop]):
            found[op.name] = total
            operands, results = saved_for_backward(op, graph, operators)
            for name in (*(op.inputs[at] for at in operands), *(op.outputs[at] for at in results)):
                if (root := base[name]) not in seen | params:
                    seen.add(root)
                    total += graph.values[name].bytes_
    return found


def beside_output(
    op: Op, placed: Placed, state: Sharding, weights: Collection[str], graph: Graph, mesh: Mesh, itemsize: int
) -> float:
    """Bytes of the gradients of trainable ``weights`` of which a call makes an output of the model: the output is held while
    they are made, beside its own gradient. Nothing where it is cast for the loss, whose fp32 gradient is larger and gone by
    then, or held in another order. A piece of a weight whose gradient FSDP2 sums is copied once."""
    if itemsize < _WIDE or state.mirrored:
        return 0.0
    total = 0.0
    for name, need in zip(op.inputs, placed.operands, strict=True):
        if name in weights:
            parts = mesh.size(need.split_axes)
            total += graph.values[name].numel / parts * itemsize * (1 + (1 < parts < mesh.world))
    return total


def held_outputs(microbatches: int, saved: bool, state: Sharding) -> int:
    """How many times the bytes of a micro-batch's output a step holds beside what its backward keeps: of all micro-batches
    joined, and the one at work, which is not what is kept if it is a sum yet to be made; what lies in another order than
    the caller's is handed back as a copy, and is there once more while pieces of chunks come back from where they were
    meanwhile (``ir.reshard``)."""
    return handed_back(microbatches) - (saved and not state.mirrored and not state.partial) + comes_aside(state)


def comes_aside(state: Sharding) -> bool:
    """Whether an output is there once more while pieces of its chunks come back from where they were meanwhile."""
    return any(state.mirrored.intersection(axes[:-1]) for axes in state.dims)


def handed_back(microbatches: int) -> int:
    """How many times the bytes of a micro-batch's output a step holds: of all micro-batches joined, and the one at work."""
    return microbatches + (microbatches > 1)


class BackwardStep(NamedTuple):
    """The backward of one operator: ``results`` and ``operands``, bytes of the gradient of each that has one (a value may be
    two operands); ``passed``: operands whose gradient is that of the result; ``weights``: bytes of the gradients of weights
    that it makes; ``copied``: of the largest of these that is a piece of a weight, of which FSDP2 takes a copy;
    ``space``: bytes beside while it runs; ``released``: bytes that nothing keeps any more when it is done;
    ``own``: whether its space holds the gradients that it makes; ``trained``: these weights; ``waits``: whether the gradients
    of its results wait for W where the backward is split."""

    results: Mapping[str, float]
    operands: Sequence[tuple[str, float]]
    passed: Collection[str]
    weights: float
    space: float
    released: float
    own: bool = False
    copied: float = 0.0
    trained: Sequence[str] = ()
    waits: bool = False


def backward_peak(steps: Iterable[BackwardStep], leaving: Mapping[str, float], stay: bool, copies: bool) -> float:
    """Bytes of gradients and space beyond what was kept when a backward begins, at its worst moment. ``steps``: in the order of
    the backward, each after what reads its results; ``leaving``: gradients that it begins with; ``stay``: whether gradients of
    weights do, else each is gone when it is made, for it is added to a sum; ``copies``: whether those of pieces are copied."""
    peak, weights = sum(leaving.values()), 0.0
    for step, bytes_ in _without_weights(steps, leaving):
        weights = weights * stay + step.weights
        peak = max(peak, bytes_ + weights + step.copied * copies)
    return peak


def _without_weights(steps: Iterable[BackwardStep], leaving: Mapping[str, float]) -> Iterator[tuple[BackwardStep, float]]:
    """The steps that a gradient reaches, and what is there as each runs but for gradients of weights."""
    alive, released = dict(leaving), 0.0
    for step in steps:
        if not any(name in alive for name in step.results):
            released += step.released
            continue
        made = sum(bytes_ for name, bytes_ in step.operands if name not in step.passed) * (not step.own)
        yield step, sum(alive.values()) + made + step.space - released
        handed = max((alive.pop(name) for name in step.results if name in alive), default=0.0)
        for name, bytes_ in step.operands:  # of a total's operand it is one number, seen as many
            alive[name] = max(min(bytes_, handed) if name in step.passed else bytes_, alive.get(name, 0.0))
        released += step.released


class MadeInW(NamedTuple):
    """The gradient of the weight of a ``name``, in W: what that has let go of when it is made (``gone``); if I has not run
    before, what is there ``beside`` it, and the most since the one before it was made (``since``)."""

    name: str
    gone: float
    beside: float
    since: float


class Halves(NamedTuple):
    """Bytes beyond what was kept when a half of a split backward begins.

    inputs: the most in I, in which nothing is let go, and gradients wait
    released: let go in W before its end
    weights: of each weight, as W comes to it
    after: if I has not run before, the most in W when all of these are made
    above: let go when I is done, as what a loss keeps
    """

    inputs: float = 0.0
    released: float = 0.0
    weights: tuple[MadeInW, ...] = ()
    after: float = 0.0
    above: float = 0.0


NOTHING = Halves()


def halves(steps: Sequence[BackwardStep], leaving: Mapping[str, float], moving: Collection[str]) -> Halves:
    """Of ``backward_peak``'s steps. ``moving``: values with gradients that depend on what enters."""
    beside = {id(step): bytes_ for step, bytes_ in _without_weights(steps, leaving)}
    alive, waiting, peak = {name: bytes_ for name, bytes_ in leaving.items() if name in moving}, 0.0, 0.0
    for step in steps:
        if any(name in alive for name in step.results):
            found = {name: bytes_ for name, bytes_ in step.operands if name in moving}
            made = sum(bytes_ for name, bytes_ in found.items() if name not in step.passed) * (not step.own)
            peak = max(peak, sum(alive.values()) + made + waiting + step.space)
            handed = sum(alive.pop(name) for name in step.results if name in alive)
            waiting += handed * step.waits
            for name, bytes_ in found.items():
                passed = name in step.passed
                alive[name] = max(min(bytes_, handed) * (not step.waits) if passed else bytes_, alive.get(name, 0.0))
    weights, released, since = list[MadeInW](), 0.0, sum(leaving.values())
    for step in steps:
        own = beside.get(id(step), 0.0)
        since = max(since, own)
        for name in step.trained:
            weights.append(MadeInW(name, released, own, since))
            since = own
        released += step.released * step.waits
    return Halves(max(peak, waiting + sum(alive.values())), released, tuple(weights), since)


def copied(op: Op, rule: OpRule, placed: Placed, graph: Graph, mesh: Mesh, itemsize: int) -> float:
    """Bytes of the pieces of weights of several parts (``OpRule.fused``) that a call reads split: a copy, held as what autograd
    keeps is."""
    return sum(
        graph.values[op.inputs[at]].numel / mesh.size(placed.operands[at].split_axes) * itemsize
        for at, (dim, parts) in rule.fused.items()
        if parts > 1 and at < len(op.inputs) and mesh.size(placed.operands[at].dims[dim]) > 1
    )

