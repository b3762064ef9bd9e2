"""The result of a placement: the time and memory that every distinct position of a model takes (see ``placement``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.compiler.placement.costs import Vector
from meshwright.ir.declared.experts import Experts
from meshwright.ir.graph import Op, Value
from meshwright.ir.plan import Schedule
from meshwright.ir.rule import Placed
from meshwright.ir.sharding import Sharding

DATA, EP = "dp", "ep"
NONE = "none"


@dataclass(frozen=True)
class Mixture:
    """A call of a mixture in a row of a placement.

    op, placed, assignment: the operator, the shardings of its tensors, and the factors that the axes split
    recomputed: for every recomputation the matrix that turns its resources into those it has then
    shapes: of its operands and of its results in a micro-batch, whole
    """

    op: Op
    placed: Placed
    assignment: Mapping[str, str]
    recomputed: Mapping[str, Vector]
    shapes: tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]


@dataclass(frozen=True)
class Use:
    """A parameter or buffer as a position reads it. ``group``: trainable elements of its unit; ``first``: the position that a
    tied weight is charged to where all its readers share a rank; ``late``: elements whose gradients are summed together."""

    value: Value
    need: Sharding
    trainable: bool
    group: float
    first: bool = True
    late: float = 0.0


@dataclass(frozen=True)
class Row:
    """One distinct position of a placement: see ``placement``."""

    activations: Mapping[str, Vector]
    weight: float
    uses: tuple[Use, ...]
    block: bool
    mixtures: tuple[Mixture, ...] = ()


@dataclass(frozen=True)
class Placement:
    """The solved placement. ``rows``; ``sequence``: the row of every position of the whole graph; ``crossing``: bytes behind
    each; ``outputs``: bytes; ``bound <= least seconds of a micro-batch <= seconds``; ``time``: seconds of a row's resources;
    ``calls``: the experts of every mixture of the whole graph."""

    tensor: int
    samples: int
    rows: tuple[Row, ...]
    sequence: tuple[int, ...]
    crossing: tuple[float, ...]
    outputs: float
    seconds: float
    bound: float
    decode: Callable[[Schedule], tuple[dict[str, dict[str, str]], dict[str, Sharding]]]
    time: Callable[[Vector], float]
    calls: Mapping[str, Experts]
