"""What is declared about an operator, apart from how it splits: what it costs, what autograd keeps, how it is recomputed.

An operator has one declaration, made by one call: a line of a table in ``compiler/rules``, or ``register_rule``. Its sharding
rule stays there. The rest is an ``Operator``, a value of this file, so that prices, passes and the runtime read it without
knowing the tables: whoever needs it is handed the ``Operators`` by target (``Rules.operators``, ``Program.operators``). No
other file lists operators by name to say that they have a property.

**Kinds of work** (``Cost.kind``) decide the price:

    view        no work, the result shows the operand's memory
    pointwise   element by element: bound by memory, fuses with its neighbours
    linear      pointwise, and its gradient needs nothing (add, neg, casts, cat, masks that do not change)
    reduce      bound by memory, fuses with the pointwise operators around it
    norm        layer_norm and its kin: one pass over the data
    gather      rows picked by an index: embedding, index
    copy        moves data and fuses with nothing: clone, sort, pad
    matmul      matrix products and convolutions; ``Cost.products`` says which
    attention   fused (flash) attention of the operands query, key and value
    loss        cross entropy of the first operand
    factory     made from literals

**What autograd keeps** (``Saves``) is written as words, operands by their position among the tensor operands, results by "r"
and their position, each with the operands for whose gradients it is needed after a colon:

    saves  := [word (" " word)*]         word := ("r" INT) | INT [":" INT ("," INT)*]

    "0:1 1:0"   a product: operand 0 if operand 1 takes a gradient, operand 1 if operand 0 does
    "0 r0"      operand 0 and result 0 whenever a gradient flows through the results
    ""          nothing
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from meshwright.ir.graph import Graph, Op, Ref
from meshwright.ir.notation import RuleError

Shape = tuple[int, ...]
KINDS_OF_WORK = ("view", "pointwise", "linear", "reduce", "norm", "gather", "copy", "matmul", "attention", "loss", "factory")
LAYOUTS = ("", "reshape", "contiguous", "first")
RECOMPUTE = ("allowed", "costly", "forbidden")
PIECES, MLP = "mw.linear_cross_entropy", "mw.mlp"
"""The loss in pieces: logits and their cross entropy, a few rows at a time."""
SCORE_ROWS = 1024
"""Rows of which attention that no flash kernel takes forms the scores at a time."""
FUSING = ("pointwise", "linear", "reduce", "norm", "factory", "view")
"""Kinds that torch.compile puts into one kernel with their pointwise neighbours."""


@dataclass(frozen=True, slots=True)
class Work:
    """One call on one device, as its cost sees it.

    ``operands``, ``results``: LOCAL shapes of the tensor operands (in the order of ``Op.inputs``) and of the results.
    ``reads``, ``makes``: dtypes of the first operand and of the first result.
    ``needs``: for every operand whether it takes a gradient; None: all do.
    ``args``, ``kwargs``: those of the call, tensors as ``Ref``.
    """

    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    reads: torch.dtype = torch.float32
    makes: torch.dtype = torch.float32
    needs: tuple[bool, ...] | None = None
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(
        cls, op: Op, graph: Graph, operands: Sequence[Shape] | None = None, results: Sequence[Shape] | None = None
    ) -> Work:
        """An op of a graph; shapes that are not given are the graph's."""
        read, made = [graph.values[name] for name in op.inputs], [graph.values[name] for name in op.outputs]
        return cls(
            tuple(value.shape for value in read) if operands is None else tuple(operands),
            tuple(value.shape for value in made) if results is None else tuple(results),
            read[0].dtype if read else torch.float32, made[0].dtype if made else torch.float32,
            tuple(value.differentiable for value in read), op.args, op.kwargs,
        )

    @property
    def gradients(self) -> tuple[bool, ...]:
        """For every operand whether it takes a gradient."""
        return (True,) * len(self.operands) if self.needs is None else self.needs

    def read_bytes(self, position: int = 0) -> int:
        """Bytes of an operand, which is of the first one's dtype."""
        return math.prod(self.operands[position]) * self.reads.itemsize

    def made_bytes(self) -> int:
        """Bytes of the first result."""
        return math.prod(self.results[0]) * self.makes.itemsize

    def literal(self, position: int, name: str, default: Any) -> Any:
        """An argument by its position in the schema or its name."""
        return self.args[position] if position < len(self.args) else dict(self.kwargs).get(name, default)


class Product(NamedTuple):
    """``batch`` matrix products of m x k by k x n."""

    batch: int
    m: int
    n: int
    k: int


Products = Callable[[Work], Sequence[tuple[int, int, int, int]]]
Bytes = Callable[[Work], float]


@dataclass(frozen=True, slots=True)
class Cost:
    """What an operator does to a device's time and memory while it runs; the functions are pure, on LOCAL shapes.

    ``kind``: see the head of this file.
    ``products``: the matrix products that it consists of, (batch, m, n, k) each; ``kind`` is "matmul".
    ``moves``: bytes that it reads and writes beside its products: (forward, backward).
    ``left``: the operand that is the left side of the products; those after it are the right side.
    ``space``: bytes that it needs beside operands, results and gradients while it runs: (forward, backward).
    ``passes``: positions of the operands whose gradient is the result's, or shows its memory.
    ``layout``: how the result lies in memory. "": as the kind says (views keep the order of the dims, pointwise operators lay
    their result out as the first operand). "reshape": a view where that is possible, else a copy; "contiguous": the same, in
    the order of the dims; "first": as the first operand.
    ``order``: of a view that permutes dims, for every dim of the result the operand's.
    ``copies``: of a view, whether this call has its result in memory of its own all the same.
    ``again``: the products of the forward that the backward runs once more.
    ``kernels``: those that it starts, (forward, backward), where they are more than its products.
    ``looked``: of attention, keys that a row sees in the mean, if not all or (causal) half of them.
    """

    kind: str = "copy"
    products: Products | None = None
    left: int = 0
    space: Callable[[Work], tuple[float, float]] | None = None
    passes: Callable[[Work], Collection[int]] | None = None
    layout: str = ""
    order: Callable[[Work], Sequence[int]] | None = None
    copies: Callable[[Work], bool] | None = None
    looked: Bytes | None = None
    moves: Callable[[Work], tuple[float, float]] | None = None
    again: Products | None = None
    kernels: Callable[[Work], tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS_OF_WORK:
            raise RuleError(f"the kind of work {self.kind!r} is unknown; the kinds are {', '.join(KINDS_OF_WORK)}")
        if self.layout not in LAYOUTS:
            raise RuleError(f"the layout {self.layout!r} is unknown; the layouts are {', '.join(map(repr, LAYOUTS))}")


@dataclass(frozen=True, slots=True)
class Saves:
    """What autograd keeps of a call for the backward.

    ``operands``: (position, positions of the operands for whose gradients it is needed, or () for any).
    ``results``: positions of results.
    ``extra``: bytes that are neither (masks, statistics), on LOCAL shapes.

    >>> print(Saves.parse("0:1 1:0 r0"), Saves.parse("0:1 1:0 r0").operands)
    0:1 1:0 r0 ((0, (1,)), (1, (0,)))
    """

    operands: tuple[tuple[int, tuple[int, ...]], ...] = ()
    results: tuple[int, ...] = ()
    extra: Bytes | None = None

    @classmethod
    def parse(cls, text: str, extra: Bytes | None = None) -> Saves:
        """Read words such as "0:1 r0"; RuleError for any other."""
        operands, results = [], []
        for word in text.split():
            if re.fullmatch(r"r\d+", word):
                results.append(int(word[1:]))
            elif re.fullmatch(r"\d+(:\d+(,\d+)*)?", word):
                position, _, needed = word.partition(":")
                operands.append((int(position), tuple(int(other) for other in needed.split(",") if other)))
            else:
                raise RuleError(f"cannot read {word!r} in saves={text!r}: a word is an operand's position, perhaps with the "
                                'operands whose gradients need it ("0", "0:1", "1:0,2"), or "r" and a result\'s ("r0")')
        return cls(tuple(operands), tuple(results), extra)

    def kept(self, needs: Sequence[bool], results: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Positions of the operands and results that a call keeps through which a gradient flows.

        ``needs``: for every operand whether it takes a gradient; ``results``: how many there are.
        """
        operands = tuple(
            at for at, wanted in self.operands
            if at < len(needs) and (not wanted or any(other < len(needs) and needs[other] for other in wanted))
        )
        return operands, tuple(at for at in self.results if at < results)

    def __str__(self) -> str:
        words = [f"{at}:{','.join(map(str, wanted))}" if wanted else str(at) for at, wanted in self.operands]
        return " ".join([*words, *(f"r{at}" for at in self.results)])


class Linear(NamedTuple):
    """A call read as ``x @ weight.T + bias``: the weight holds ``parts`` weights in one, turned if ``transposed``."""

    x: Ref
    weight: Ref
    bias: Ref | None
    parts: int = 1
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """What is declared about an operator apart from its rule.

    ``cost``, ``saves``: see there. One that nobody declared moves its data and keeps its first operand.
    ``recompute``: "allowed": it may run again in the backward, and makes the same; "costly": the same, and selective
    recomputation keeps its results instead; "forbidden": a second run would make something else (it draws from a generator of
    its own, it counts its calls), so its results are kept under every recomputation.
    ``runs``: what torch's dispatcher runs in its place, where that is not the operator itself (aten.linear: aten.mm).
    ``gradient``: False where no gradient flows through it (detach, and what only lends a shape).
    ``elementwise``: whether the result at an index depends on the operands there alone (which may broadcast).
    ``saves_of``: what autograd keeps of a call with these arguments, where calls differ.
    ``updates``: positions of the operands that are a buffer of which the call makes the new value; in training no other result
    depends on them.
    ``linear``: reads a call as a linear, or says None. A gather that feeds linears alone runs within them
    (``passes.fuse``), so that only the shard is kept.
    ``exchanges``: whether ranks exchange data in it, forward or backward.
    ``dense``: whether its kernel may ask that its operands lie in memory in the order of their dims.
    """

    cost: Cost = field(default_factory=Cost)
    saves: Saves = field(default_factory=lambda: Saves(((0, ()),)))
    recompute: str = "allowed"
    runs: tuple[str, ...] = ()
    gradient: bool = True
    elementwise: bool = False
    saves_of: Callable[[tuple[Any, ...]], Saves] | None = None
    linear: Callable[[Op], Linear | None] | None = None
    updates: tuple[int, ...] = ()
    exchanges: bool = False
    dense: bool = True

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise RuleError(f"recompute={self.recompute!r} is unknown; choose one of {', '.join(RECOMPUTE)}")

    @property
    def kind(self) -> str:
        """The kind of work."""
        return self.cost.kind

    @property
    def fuses(self) -> bool:
        """Whether torch.compile would put it into one kernel with its pointwise neighbours."""
        return self.cost.kind in FUSING

    def saved(self, args: tuple[Any, ...]) -> Saves:
        """What autograd keeps of a call with these arguments."""
        return self.saves if self.saves_of is None else self.saves_of(args)

    def keeps_results(self, recompute: str) -> bool:
        """Whether a segment recomputed so ("none", "selective", "full") keeps what the operator makes."""
        return recompute != "none" and (self.recompute == "forbidden" or (recompute, self.recompute) == ("selective", "costly"))


UNKNOWN = Operator()


@dataclass(frozen=True)
class Operators:
    """Every declared operator by target. One that is not declared moves its data and keeps its first operand.

    >>> Operators({"aten.relu.default": Operator(Cost("pointwise"))})["aten.relu.default"].kind, Operators()["a.b.c"].kind
    ('pointwise', 'copy')
    """

    declared: Mapping[str, Operator] = field(default_factory=lambda: MappingProxyType({}))

    def __getitem__(self, target: str) -> Operator:
        return self.declared.get(target, UNKNOWN)

    def kept_by(self, graph: Graph, recompute: str) -> frozenset[str]:
        """What the dispatcher must keep of a graph that is recomputed so: names of overloads."""
        names: set[str] = set()
        for target in {op.target for op in graph.ops}:
            if self[target].keeps_results(recompute):
                names.update(self[target].runs or (target,))
        return frozenset(names)
