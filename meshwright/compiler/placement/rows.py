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
    """A parameter or buffer as a position reads it.

    value, need: the parameter, and the sharding in which it is read
    trainable: whether it takes a gradient
    group: trainable elements of its unit
    first: whether a tied weight is charged here where all its readers share a rank
    late: elements whose gradients are summed together with others'
    """

    value: Value
    need: Sharding
    trainable: bool
    group: float
    first: bool = True
    late: float = 0.0


@dataclass(frozen=True)
class PlacedPosition:
    """One distinct position of a placement; see ``placement``.

    activations: by recomputation, the resources of a micro-batch
    weight: the part of its backward seconds that makes gradients of weights
    uses: the parameters that it reads
    block: whether it is a block
    mixtures: calls of mixtures in it
    """

    activations: Mapping[str, Vector]
    weight: float
    uses: tuple[Use, ...]
    block: bool
    mixtures: tuple[Mixture, ...] = ()


@dataclass(frozen=True)
class Placement:
    """The solved placement of one tensor degree and one number of samples.

    tensor, samples: the ranks that split tensors, the samples that a rank has at a time
    rows: the distinct positions
    sequence: for every position of the whole graph, which of the rows it is
    crossing: bytes that a stage boundary behind each position sends
    outputs: bytes that a micro-batch hands back to the caller
    seconds, bound: of a micro-batch through all positions; no placement takes less than ``bound``
    decode: the assignments, and the shardings of values with several readers, of a plan with such micro-batches
    time: the seconds of a row's resources
    calls: the experts of every mixture of the whole graph
    """

    tensor: int
    samples: int
    rows: tuple[PlacedPosition, ...]
    sequence: tuple[int, ...]
    crossing: tuple[float, ...]
    outputs: float
    seconds: float
    bound: float
    decode: Callable[[Schedule], tuple[dict[str, dict[str, str]], dict[str, Sharding]]]
    time: Callable[[Vector], float]
    calls: Mapping[str, Experts]
