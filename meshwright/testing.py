"""Test the rule of an operator against the operator itself, without processes.

    check_rule("mylib.rms.default", (torch.randn(4, 8), torch.ones(8)))

The operator runs whole, and once for each simulated rank as its rule says: operands are cut (a pending sum into random terms),
the call is localized, and what the ranks make is joined, pending sums added. Results must equal the whole ones, and so must
gradients, of every operand that autograd gives one. All this for every factor of the rule and every linear group over every
number of ranks up to a limit, even and uneven, and for every pair of them on two axes; so a letter on the wrong dim, a missing
``!``, a wrong unit, a linear group that is none or a localizer that gets a size wrong is found and named.

Ranks are threads where an operator communicates inside; a rendezvous stands in for the all-reduce. What an algorithm for a
sequence in pieces does (``OpRule.algorithms``) is not tested here.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from meshwright.compiler.rules import RuleBook, default_rules, target_name
from meshwright.ir.gradients.custom import CUSTOM
from meshwright.ir.graph import Graph, Op, Ref, Value, map_refs
from meshwright.ir.mesh import Mesh
from meshwright.ir.notation import RuleError
from meshwright.ir.program import DRAW, SEED
from meshwright.ir.rule import Local, OpRule, Placed, neighbourhood, place
from meshwright.ir.sharding import Sharding, piece
from meshwright.runtime import collectives, ops
from meshwright.runtime.collectives import Group
from meshwright.runtime.custom import custom_function
from meshwright.runtime.draws import drawing

Coordinates = Mapping[str, int]
MOST = 4
"""Ranks over which one factor is split, unless the caller says."""


@dataclass(frozen=True)
class Sample:
    """A call of an operator.

    ``args``, ``kwargs``: its arguments, small and on the CPU; in float64 where the operator takes it: sums in pieces round.
    ``fixed``: positions, among the tensors, of float operands that the operator cannot differentiate.
    ``values``: False where what it returns is not determined (random numbers, empty memory), so that only shapes are compared.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    fixed: tuple[int, ...] = ()
    values: bool = True


def check_rule(op: Any, sample: Sample | Sequence[Any], *, most: int = MOST, book: RuleBook | None = None) -> tuple[str, ...]:
    """Check the rule of an operator on a sample call; return what was split, in words ("k over 2", "b0 over 2, k over 3").

    ``op``: "mylib.scale.default", an ``OpOverload``, or what ``torch.library.custom_op`` returned.
    ``sample``: a ``Sample``, or its positional arguments.
    ``most``: the largest number of ranks for one factor.
    ``book``: the rules; not given, those that are registered.

    Raises RuleError, which names the factor and the number of ranks, where a split differs from the whole, and
    where the operator has no rule.
    """
    target, book = target_name(op), book or default_rules()
    if not book.known(target):
        raise RuleError(f"{target} has no rule; declare one with meshwright.register_rule")
    one = sample if isinstance(sample, Sample) else Sample(tuple(sample))
    run = whole_run(target, one.args, one.kwargs, one.fixed)
    rule = book.rule_for(run.op, run.graph)
    single = [Mesh.of(a=ranks) for ranks in range(2, most + 1)]
    seen = []
    for mesh in (*single, Mesh.of(a=2, b=2), Mesh.of(a=2, b=3)):
        for assignment in assignments(rule, mesh, even=False):
            words = ", ".join(f"{factor} over {mesh.size(axis)}" for axis, factor in assignment.items())
            try:
                check(run, rule, assignment, mesh, one.values)
            except Exception as error:
                raise RuleError(
                    f"the rule of {target} is wrong where {words}: the pieces do not make the whole\n  rule: {rule}\n"
                    f"  operator: {run.op}\n  {type(error).__name__}: {error}\nIf this factor cannot be split, mark it whole "
                    "(!); if literals of the call depend on shapes, give localize=") from error
            seen.append(words)
    return tuple(seen)


@dataclass(frozen=True)
class OperatorRun:
    """One operator run whole: the op in a graph of its own, its operands, results and gradients."""

    op: Op
    graph: Graph
    operands: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    differentiable: tuple[bool, ...]
    result_gradients: tuple[torch.Tensor | None, ...]
    gradients: tuple[torch.Tensor | None, ...]


def call(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The results of one operator; an in-place one works on a copy."""
    if target == CUSTOM:
        found: Any = custom_function(*args, **kwargs)
    elif target.startswith("mw."):
        found = ops.OPS[target](*args, **kwargs)
    else:
        namespace, name, overload = target.split(".")
        if name.endswith("_") and not name.endswith("__"):
            args = (args[0].clone(), *args[1:])
        operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        found = (drawing(operator, torch.device("cpu")) if DRAW in kwargs else operator)(*args, **kwargs)
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def whole_run(target: str, args: Sequence[Any], kwargs: Mapping[str, Any], fixed: Sequence[int] = ()) -> OperatorRun:
    """Run ``target`` on these arguments. Float operands that the result depends on are differentiated, except ``fixed``."""
    operands: list[torch.Tensor] = []

    def operand(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            smooth = (value.is_floating_point() or value.is_complex()) and len(operands) not in fixed
            operands.append(value.detach().requires_grad_(smooth))
            return Ref(f"x{len(operands) - 1}")
        if isinstance(value, tuple | list):
            return tuple(operand(item) for item in value)
        return value

    references = operand(tuple(args)), tuple((name, operand(value)) for name, value in kwargs.items())
    names = {f"x{i}": tensor for i, tensor in enumerate(operands)}
    results = call(target, *_filled(references, names))
    op = Op("op", target, *references, tuple(f"y{i}" for i in range(len(results))))
    torch.manual_seed(1)
    outgoing = tuple(torch.randn_like(y) if y.requires_grad else None for y in results)
    gradients = _gradients(results, outgoing, operands)
    values = {f"x{i}": Value(f"x{i}", tuple(x.shape), x.dtype) for i, x in enumerate(operands)}
    values |= {f"y{i}": Value(f"y{i}", tuple(y.shape), y.dtype) for i, y in enumerate(results)}
    graph = Graph(values, tuple(names), (), (op,), None)
    return OperatorRun(
        op, graph, tuple(x.detach() for x in operands), tuple(y.detach() for y in results),
        tuple(g is not None for g in gradients), outgoing, gradients,
    )


def _filled(tree: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, Any]]:
    args, kwargs = map_refs(tree, lambda ref: tensors[ref.name])
    return args, dict(kwargs)


def _gradients(results: Any, outgoing: Any, operands: Any) -> tuple[torch.Tensor | None, ...]:
    pairs = [(y, dy) for y, dy in zip(results, outgoing, strict=True) if dy is not None]
    leaves = [x for x in operands if x.requires_grad]
    if not pairs or not leaves:
        return (None,) * len(operands)
    try:
        found = iter(torch.autograd.grad([y for y, _ in pairs], leaves, [dy for _, dy in pairs], allow_unused=True))
    except RuntimeError as error:
        if not any(words in str(error) for words in ("derivative for", "no autograd formula was registered")):
            raise
        return (None,) * len(operands)  # the operator has no derivative, or none in this version of torch
    return tuple(next(found) if x.requires_grad else None for x in operands)


def assignments(rule: OpRule, mesh: Mesh, even: bool = True) -> Iterator[dict[str, str]]:
    """Every legal assignment that uses every axis of the mesh."""
    choices = [*rule.splittable, *rule.grouped, *(f"+{k}" for k in range(len(rule.linear)))]
    for chosen in itertools.product(choices, repeat=len(mesh.axes)):
        assignment = dict(zip(mesh.axes, chosen, strict=True))
        if rule.legal(assignment, mesh, even):
            yield assignment


def in_parts(x: torch.Tensor, sharding: Sharding, mesh: Mesh, fused: tuple[int, int] | None) -> torch.Tensor:
    """A tensor of several parts along a dim, its rows in the order in which the ranks that split the dim hold them."""
    if fused is None or (pieces := mesh.size(sharding.dims[fused[0]])) == 1:
        return x
    dim, parts = fused
    split: torch.Tensor = x.unflatten(dim, (parts, pieces, -1))
    return split.transpose(dim, dim + 1).flatten(dim, dim + 2)


def local_piece(x: torch.Tensor, sharding: Sharding, mesh: Mesh, at: Coordinates) -> torch.Tensor:
    """This rank's piece of a tensor; of a pending sum, its term: random, the terms adding up."""
    axes = sorted(sharding.partial)
    if axes:
        count, index = mesh.size(axes), mesh.index(at, axes)
        draw = torch.Generator().manual_seed(x.numel())  # of its own: ranks that communicate are threads
        smooth = x.is_floating_point() or x.is_complex()
        terms = [torch.randn(x.shape, generator=draw, dtype=x.dtype) if smooth else torch.full_like(x, i) for i in range(count)]
        x = terms[index] if index else x - sum(terms[1:])
    for dim, over in enumerate(sharding.dims):
        x = x.narrow(dim, *piece(x.shape[dim], mesh, over, at)) if over else x
    return x.clone()


def same(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    """Assert equality up to rounding; the cheap test first, since most are equal to the bit."""
    if one.dtype != other.dtype or not torch.equal(one, other):
        torch.testing.assert_close(one, other, equal_nan=True, msg=lambda text: f"{what}: {text}")


def joined(parts: Sequence[torch.Tensor], shape: Sequence[int], sharding: Sharding, mesh: Mesh) -> torch.Tensor:
    """The whole value of the ranks' pieces: split dims joined, pending sums added; replicas must be equal."""
    summed = sorted(sharding.partial)
    free = [axis for axis in mesh.axes if axis not in summed]
    copies: dict[tuple[int, ...], torch.Tensor] = {}
    for rank, part in enumerate(parts):
        at = mesh.coordinates(rank)
        key = tuple(at[axis] for axis in free)
        copies[key] = copies[key] + part if key in copies else part
    whole = parts[0].new_zeros(tuple(shape))
    written = torch.zeros(tuple(shape), dtype=torch.bool)
    for key, part in copies.items():
        at = dict(zip(free, key, strict=True))
        window, seen = whole, written
        for dim, over in enumerate(sharding.dims):
            if over:
                offset, length = piece(shape[dim], mesh, over, at)
                window, seen = window.narrow(dim, offset, length), seen.narrow(dim, offset, length)
        assert part.shape == window.shape, f"a piece has shape {tuple(part.shape)}, not {tuple(window.shape)}"
        old = torch.where(seen, window, part)
        same(part, old, "replicas differ")
        window.copy_(part)
        seen.fill_(True)
    assert written.all()
    return whole


class Rendezvous:
    """All-reduce among threads: ``reduce`` has the signature of ``runtime.collectives.reduce``."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=20)
        self.lock = threading.Lock()
        self.shared: dict[Any, dict[int, torch.Tensor]] = {}
        self.turn = threading.local()

    def reduce(self, x: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
        turn = self.turn.value = getattr(self.turn, "value", 0) + 1
        with self.lock:
            parts = self.shared.setdefault((turn, group.name), {})
            parts[group.rank] = x.detach()
        self.barrier.wait()
        stacked = torch.stack([parts[rank] for rank in range(group.size)])
        return stacked.amax(0) if op == "max" else stacked.sum(0)


def check(run: OperatorRun, rule: OpRule, assignment: Mapping[str, str], mesh: Mesh, values: bool = True) -> None:
    """Assert that the operator sharded by ``assignment`` equals the whole run, results and gradients (else shapes alone)."""
    placed = place(rule, assignment, mesh, run.differentiable)
    communicates = any(neighbourhood(factor)[0] in rule.internal for factor in assignment.values())
    meeting = mock.patch.object(collectives, "reduce", Rendezvous(mesh.world).reduce) if communicates else nullcontext()
    with meeting:
        ranks = _on_ranks(lambda rank: one_rank(run, rule, assignment, mesh, placed, rank), mesh.world, communicates)
    if not values:
        return
    for i, whole in enumerate(run.results):
        together = joined([results[i] for results, _ in ranks], whole.shape, placed.results[i], mesh)
        same(together, whole, f"result {i}")
    for i, gradient in enumerate(run.gradients):
        if gradient is not None:
            sharding = placed.operands[i].gradient()
            parts = [gradients[i] for _, gradients in ranks]
            together = joined(parts, gradient.shape, sharding, mesh)
            same(together, in_parts(gradient, sharding, mesh, rule.fused.get(i)), f"gradient {i}")


def _on_ranks(work: Callable[[int], Any], world: int, together: bool) -> list[Any]:
    if not together:
        return [work(rank) for rank in range(world)]
    found: list[Any] = [None] * world

    def one(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:  # raised again by the thread that waits
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for item in found:
        if isinstance(item, BaseException):
            raise item
    return found


def one_rank(run: OperatorRun, rule: OpRule, assignment: Mapping[str, str], mesh: Mesh, placed: Placed, rank: int) -> Any:
    """One rank: its results, and the gradients of its operands."""
    at = mesh.coordinates(rank)
    operands = [
        local_piece(in_parts(x, sharding, mesh, rule.fused.get(i)), sharding, mesh, at)
        for i, (x, sharding) in enumerate(zip(run.operands, placed.operands, strict=True))
    ]
    for x, differentiable in zip(operands, run.differentiable, strict=True):
        x.requires_grad_(differentiable)
    local = Local(
        mesh, at, assignment, placed, tuple(tuple(x.shape) for x in run.operands), tuple(tuple(y.shape) for y in run.results)
    )
    op = run.op
    target, args, kwargs = rule.localize(op, local) if rule.localize else (op.target, op.args, op.kwargs)
    tensors = {f"x{i}": x for i, x in enumerate(operands)} | {SEED: torch.tensor([7, 8])}
    filled = _filled((args, kwargs), tensors)
    filled[1].update({key: _group(mesh, at, value) for key, value in filled[1].items() if key == "axes" and value})
    results = call(target, *filled)
    for i, result in enumerate(results):
        assert tuple(result.shape) == local.result_shape(i), f"{target} on rank {rank} returns {tuple(result.shape)}"
    outgoing = [
        None if dy is None else local_piece(dy, placed.results[i].gradient(), mesh, at)
        for i, dy in enumerate(run.result_gradients)
    ]
    gradients = _gradients(results, outgoing, operands)
    filled_in = [
        torch.zeros_like(x) if g is None and differentiable else g
        for g, x, differentiable in zip(gradients, operands, run.differentiable, strict=True)
    ]
    return [result.detach() for result in results], filled_in


def _group(mesh: Mesh, at: Coordinates, axes: tuple[str, ...]) -> Group:
    rest = ",".join(f"{axis}={at[axis]}" for axis in mesh.axes if axis not in axes)
    return Group(rest, mesh.index(at, axes), mesh.size(axes))
