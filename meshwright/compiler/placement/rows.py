"""The result of a placement: the time and memory that every distinct position of a model takes (see ``placement``), and the
choices of every position, which ``decisions`` writes out for the operators of the whole graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.compiler.placement.costs import Vector
from meshwright.compiler.placement.problem import Problem
from meshwright.compiler.structure.folding import Folded
from meshwright.cost.memory.working import NOTHING, Halves, handed_back
from meshwright.ir.declared.experts import EXPERTS
from meshwright.ir.graph import Graph, Op, Value
from meshwright.ir.rule import Placed
from meshwright.ir.sharding import Sharding

DATA, EP, CONTEXT, TENSOR = "dp", "ep", "cp", "tp"
NONE = "none"


@dataclass(frozen=True)
class Mixture:
    """A call of a mixture in a row of a placement.

    op, placed, assignment: the operator, the shardings of its tensors, and the factors that the axes split
    recomputed: for every recomputation the matrix that turns its resources into those it has then
    shapes: of its operands and of its results in a micro-batch, whole
    space: bytes beside all else while its backward runs, before gradients of its weights are copied
    """

    op: Op
    placed: Placed
    assignment: Mapping[str, str]
    recomputed: Mapping[str, Vector]
    shapes: tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]
    space: float


@dataclass(frozen=True)
class DataMove:
    """A value of a row of a placement that is laid out otherwise over the data ranks between who makes and who reads it.

    have, want: its shardings
    bytes_: of the whole value within a micro-batch
    often: how many of them a micro-batch has; a part of one where it happens once a step
    differentiable, by_linears: as ``Costs.reshard`` has it
    recomputed: for every recomputation the matrix that turns its resources into those it has then
    """

    have: Sharding
    want: Sharding
    bytes_: float
    often: float
    differentiable: bool
    by_linears: bool
    recomputed: Mapping[str, Vector]


@dataclass(frozen=True)
class Use:
    """A parameter or buffer as a position reads it.

    value, need: the parameter, and the sharding in which it is read
    trainable: whether it takes a gradient, None: a buffer
    group: trainable elements of its unit
    first: whether a tied weight is charged here where all its readers share a rank
    late: elements whose gradients are summed together with others'
    """

    value: Value
    need: Sharding
    trainable: bool | None
    group: float
    first: bool = True
    late: float = 0.0


@dataclass(frozen=True)
class PrologueSeconds:
    """What a position makes of inputs alone: once a step before the first micro-batch, or within the only one.

    whole, each: of the device, whatever a rank has, and of the samples of every micro-batch
    host: of the host, which starts it
    within: by recomputation, the resources that it adds to the only micro-batch
    """

    whole: float = 0.0
    each: float = 0.0
    host: float = 0.0
    within: Mapping[str, Vector] = field(default_factory=dict)

    def before(self, microbatches: int) -> float:
        """Before the first of several micro-batches."""
        return max(self.whole + self.each * microbatches, self.host) if microbatches > 1 else 0.0


@dataclass(frozen=True)
class PlacedPosition:
    """One distinct position of a placement; see ``placement``.

    activations: by recomputation, the resources of a micro-batch, without the time of ``prologue``
    weight: the part of its backward seconds that makes gradients of weights
    uses: the parameters that it reads
    block: whether it is a block
    ahead: the part of its forward that runs once more, ahead of all micro-batches
    mixtures, moves: calls of mixtures in it, and what data ranks exchange of its values, which is another price where these
        ranks are two axes; of models with mixtures alone
    beside_output: bytes of gradients of weights that are made while an output of the model is held (``working``): not in a
        pipeline, which puts it among those of all micro-batches before
    waiting: bytes of the gradients from which those of weights are made, which wait for W where the backward is split
    made: bytes of the gradients of a block's weights in the compute dtype, those at its worst moment among its transient bytes
    with_weights: bytes that its worst moment has more in a pipeline, where gradients of its weights, in the compute dtype, stay
        until its backward is done, and where each is added to a sum when it is made; the same where pieces are copied
    forward: bytes beside what it keeps while its forward runs, as a loss does
    halves: what it holds in each half of a split backward beside what it keeps
    entering: bytes saved of what it is handed, among those of its activations
    prologue: seconds of what is made of inputs alone, once a step
    """

    activations: Mapping[str, Vector]
    weight: float
    uses: tuple[Use, ...]
    block: bool
    ahead: float = 0.0
    mixtures: tuple[Mixture, ...] = ()
    moves: tuple[DataMove, ...] = ()
    beside_output: float = 0.0
    waiting: float = 0.0
    made: float = 0.0
    with_weights: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    forward: float = 0.0
    halves: Halves = NOTHING
    entering: float = 0.0
    prologue: PrologueSeconds = PrologueSeconds()

    def of_microbatch(self, recompute: str, microbatches: int) -> Vector:
        """The resources of one of so many micro-batches under a recomputation."""
        found = self.activations[recompute]
        return found + self.prologue.within[recompute] if microbatches == 1 and self.prologue.within else found


@dataclass(frozen=True)
class Solved:
    """A solution of a problem on the graph without copies of repeated layers: ``choices`` of every position of the whole
    graph, as indices into those of the problem's models."""

    folded: Folded
    problem: Problem
    choices: Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class SharedExperts:
    """How a placement whose data ranks share out the experts differs from one in which every rank has them all.

    axes: what stands in place of the data axis
    splits: by the experts of a mixture and what its axes split there, what they split here
    """

    axes: tuple[str, ...]
    splits: Mapping[object, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """The solved placement of one tensor degree and one number of samples.

    tensor, samples: the ranks that split tensors, the samples that a rank has at a time
    rows: the distinct positions
    sequence: for every position of the whole graph, which of the rows it is
    crossing: bytes that a stage boundary behind each position hands on
    sent: those of them that are sent; the rest each stage makes again
    again: of what is made again, (the position that makes it, the last that reads it, seconds of a micro-batch's forward and
        backward)
    outputs: bytes that a micro-batch hands back to the caller; outputs_kept: those of them that its backward keeps anyway, less
        those that are put in another order besides
    alone: bytes of what is made of inputs alone for others to read (masks), which every rank has of all its micro-batches: of
        what does not depend on the samples that a rank has, and of a micro-batch
    seconds, bound: of a micro-batch through all positions, and ahead; no placement takes less than ``bound``
    time_rows: what of a position's resources follows each other; its seconds are the most of them
    solved: the choices of every position
    shared: where data ranks share out the experts, how
    """

    tensor: int
    samples: int
    rows: tuple[PlacedPosition, ...]
    sequence: tuple[int, ...]
    crossing: tuple[float, ...]
    sent: tuple[float, ...]
    again: tuple[tuple[int, int, float, float], ...]
    outputs: float
    outputs_kept: float
    alone: tuple[float, float]
    seconds: float
    bound: float
    time_rows: Vector
    solved: Solved
    shared: SharedExperts | None = None

    @property
    def slack(self) -> float:
        """What part of its seconds any placement takes at least; all where a micro-batch makes nothing but of inputs alone."""
        return self.bound / self.seconds if self.seconds else 1.0

    def repeated(self, start: int) -> tuple[float, float]:
        """Seconds of a micro-batch's forward and backward for what a stage that starts at this position makes again."""
        found = [(forward, backward) for made, last, forward, backward in self.again if made < start <= last]
        return sum(ahead for ahead, _ in found), sum(back for _, back in found)

    def collected(self, microbatches: int) -> float:
        """The same of a pipeline's last rank at any time."""
        return microbatches * self.outputs - self.outputs_kept * (microbatches == 1)

    def at_work(self, microbatches: int) -> float:
        """Bytes of the outputs of the micro-batch at work, until they are among those collected."""
        return max(0.0, self.outputs - self.outputs_kept) * (microbatches > 1)

    def handed_back(self, microbatches: int) -> float:
        """Bytes that a rank holds of what a step hands back, beside what micro-batches keep."""
        return handed_back(microbatches) * self.outputs - self.outputs_kept

    def prologue_seconds(self, microbatches: int) -> list[float]:
        """Seconds, for every position, of what is made of inputs alone before the first of several micro-batches."""
        each = [row.prologue.before(microbatches) for row in self.rows]
        return [each[row] for row in self.sequence]

    def made_alone(self, microbatches: int) -> float:
        """Bytes of a rank of what is made of inputs alone."""
        whole, each = self.alone
        return whole + each * microbatches


def decisions(placement: Placement, graph: Graph) -> tuple[dict[str, dict[str, str]], dict[str, Sharding]]:
    """(assignments by operator, shardings of values with several readers) of the whole graph, in the axes of the placement."""
    folded, problem, shared = placement.solved.folded, placement.solved.problem, placement.shared
    assignments: dict[str, dict[str, str]] = {}
    copies: dict[str, Sharding] = {}
    elsewhere = {name for position in folded.positions for name in position.shared_in}
    for n, at in enumerate(folded.serves):
        position, model, chosen = folded.positions[n], problem.model(at), placement.solved.choices[n]
        serving = problem.positions[problem.serves(at)]
        names = _names(serving.ops(folded.graph), position.ops(graph))
        for i, op in enumerate(position.ops(graph)):
            assignments[op.name] = model.op_choices[i][chosen[i]]
        for name, (var, options) in model.copies.items():
            if names[name] not in elsewhere:
                copies[names[name]] = options[chosen[var]]
    if shared is None:
        return assignments, copies
    calls = {op.name: op.args[0] for op in graph.ops if op.target == EXPERTS}
    split = {
        name: dict(shared.splits.get(call_key(calls.get(name), one)) or _also(one, shared.axes))
        for name, one in assignments.items()
    }
    return split, {name: over_all(one, shared.axes) for name, one in copies.items()}


def _names(first: Sequence[Op], other: Sequence[Op]) -> dict[str, str]:
    """Values of some operators -> those of others that are alike."""
    names: dict[str, str] = {}
    for a, b in zip(first, other, strict=True):
        names.update(zip(a.inputs, b.inputs, strict=True))
        names.update(zip(a.outputs, b.outputs, strict=True))
    return names


def call_key(experts: object, assignment: Mapping[str, str]) -> object:
    """What calls of mixtures that are split alike have alike."""
    return experts, frozenset(assignment.items())


def _also(assignment: Mapping[str, str], axes: tuple[str, ...]) -> dict[str, str]:
    """What the data axis splits, all ``axes`` in its place."""
    found: dict[str, str] = {}
    for axis, factor in assignment.items():
        found.update(dict.fromkeys(axes if axis == DATA else (axis,), factor))
    return found


def over_all(sharding: Sharding, axes: tuple[str, ...]) -> Sharding:
    """With all ``axes`` in place of the data axis."""

    def all_of(some: Sequence[str]) -> tuple[str, ...]:
        return tuple(new for axis in some for new in (axes if axis == DATA else (axis,)))

    return replace(
        sharding, dims=tuple(map(all_of, sharding.dims)), partial=frozenset(all_of(sorted(sharding.partial))),
        varying=frozenset(all_of(sorted(sharding.varying))),
    )
