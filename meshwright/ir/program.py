"""The rank program: what one rank runs, with nothing left to decide.

A ``Program`` is a list of ``Segment``s executed in order over one environment of named LOCAL tensors. A segment is a
lowered ``Graph``: local shapes, ``aten.*`` operators on local tensors and ``mw.*`` operators with mesh-axis names as
literals. A segment with a module path is a repeated block: its parameters are gathered and freed together (one FSDP2
module); segments without one belong to the root.

Micro-batches are an axis in time: every input with a ``time_dim`` is cut into ``microbatches`` pieces along that (local)
dim; segments marked ``prologue`` run once per step on the whole local batch, before the first micro-batch (they hold what
every micro-batch needs of the whole batch, such as the count of valid labels) and take no gradient; the others run once
per micro-batch. An output over the micro-batches is summed, joined along a dim, or taken from the last one.

Segments marked ``epilogue`` run once per step behind the micro-batches, on what is ``collected`` of all of them: a loss that is
no sum over micro-batches is made there. The gradient of the loss in what is collected is what every micro-batch goes back from.
Where it depends on collected values, the micro-batches run once before, without gradients, up to these (``Collected.ahead``).

With a pipeline the program of a rank has the segments of its stages only, each stage an environment of its own: what it reads
of earlier stages enters with ``Stages.crossing``, and leaves for the next stage likewise. The prologue has what the rank's
stages need, made from the inputs on every rank, never sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.ir.declared.operator import Operators
from meshwright.ir.graph import Graph, Op, Ref, Value
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedules import Table
from meshwright.ir.sharding import Sharding

SEED = "seed"
"""Name of the input from which random operators draw: two int64 numbers, that of the step and that of the micro-batch, the same
on every rank. A call that draws names it in its keyword ``DRAW`` (``meshwright.ir.declared.draws``)."""
SEEDS = 2
DRAW = "draw"

JOINED = 1 << 18
"""Elements up to which a parameter's gradient is summed together with others' (``Stored.late_axes``): to send them takes a
latency more than a bandwidth, and to copy them next to nothing."""

DEPENDENCY = "dependency"
"""Name of a value without content that crosses between stages where nothing else with a gradient does: the backward of a stage
begins at what comes back across, and a split backward finds only the weights that hang on something that came in."""


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer on this mesh. ``shape`` is GLOBAL.

    ``tensor``: placement over the axes that the program's own collectives handle (no marks); ``data_axes``: axes over which
    it is read differently (``~``) and FSDP2 reduces its gradient (a sum) - empty for buffers and frozen parameters;
    ``shard_axes``: the inner ones of ``data_axes`` over which it is also split at rest (ZeRO; the others are replicas: HSDP).
    Inside a segment the value has the ``tensor`` placement. ``fused``: how many equal parts lie one after the other along
    ``fused_dim``, each split on its own (fused qkv: 3; plain: 1). ``holders``: the pipeline ranks
    that store it (a tied weight: several), in order; empty: all. ``late_axes``: further axes over which a small parameter is
    read differently (``~``), such as a norm's under sequence parallelism: its gradient stays a pending sum over them, which the
    runtime completes together with others': with one micro-batch those of its segment, with several all of the step at its end.
    """

    value: str
    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    buffer: bool
    persistent: bool
    tensor: Sharding
    data_axes: tuple[str, ...] = ()
    shard_axes: tuple[str, ...] = ()
    fused: int = 1
    fused_dim: int = 0
    holders: tuple[int, ...] = ()
    late_axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Segment:
    """A part of the program. ``graph.inputs``: values it reads from the environment; ``graph.params``: the stored values it
    reads, by value name; ``graph.outputs``: what it adds to the environment. ``zero``: 0 (replicas), 1, 2 or 3;
    ``recompute``: "none" | "selective" | "full"; ``stage``: pipeline stage; ``prologue``, ``epilogue``: run once a step, before
    the micro-batches or behind them."""

    path: str
    graph: Graph
    prologue: bool = False
    zero: int = 0
    recompute: str = "none"
    stage: int = 0
    epilogue: bool = False

    @property
    def repeated(self) -> bool:
        """Whether every micro-batch runs it."""
        return not (self.prologue or self.epilogue)

    def towards(self, wanted: Collection[str]) -> Segment | None:
        """What of it makes the ``wanted`` values; None if nothing does."""
        needed, ops = set(wanted), list[Op]()
        for op in reversed(self.graph.ops):
            if not needed.isdisjoint(op.outputs):
                ops.append(op)
                needed.update(op.inputs)
        if not ops:
            return None
        graph = self.graph
        read, made = {name for op in ops for name in op.inputs}, {name for op in ops for name in op.outputs}
        return replace(self, graph=replace(
            graph, ops=tuple(ops[::-1]),
            output_tree=tuple(Ref(name) for name in graph.outputs if name in needed and name in made),
            inputs=tuple(name for name in graph.inputs if name in read),
            params=tuple(param for param in graph.params if param.value in read),
            values={name: value for name, value in graph.values.items() if name in read or name in made},
        ))


def towards(segments: Iterable[Segment], wanted: Collection[str]) -> list[Segment]:
    """What of some segments in order makes the ``wanted`` values."""
    found, needed = list[Segment](), set(wanted)
    for segment in reversed(list(segments)):
        if (part := segment.towards(needed)) is not None:
            found.append(part)
            needed.update(part.graph.inputs, (param.value for param in part.graph.params))
    return found[::-1]


@dataclass(frozen=True)
class Collected:
    """What the epilogue reads of all micro-batches: ``whole`` is its name there.

    ``time``: how it is put together, as in ``Port``. ``ahead``: whether the gradients of the epilogue depend on it, so that it
    must be known before any micro-batch goes back.
    """

    value: str
    whole: str
    time: int | str | None
    ahead: bool


@dataclass(frozen=True)
class Port:
    """An input or output of the program: GLOBAL shape, and its sharding over the mesh.

    ``time``: None (the same in every micro-batch; an output: that of the last one), "sum", or the dim that the micro-batches
    cut (input) or are joined along (output).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: Sharding
    time: int | str | None = None


@dataclass(frozen=True)
class Stages:
    """What a rank knows of the whole pipeline, the same on every rank of a pipeline group.

    ``table``: in which order every rank works; ``crossing[s]``: what goes from stage s to s + 1, in order, with the LOCAL shape
    of one micro-batch; ``made``: {output, or new value of a buffer: the stage that makes it}, those of the prologue left out;
    ``stored``: every stored tensor of all stages, in one order; ``unreached``: those that are trained, and that no gradient of
    the loss reaches: they have none, as on one device, where an optimizer leaves them alone.
    """

    table: Table
    crossing: tuple[tuple[Value, ...], ...]
    made: Mapping[str, int]
    stored: tuple[Stored, ...]
    unreached: frozenset[str] = frozenset()

    @property
    def stage_rank(self) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return self.table.stage_rank

    @property
    def last(self) -> int:
        return len(self.stage_rank) - 1


@dataclass(frozen=True)
class Limit:
    """Every index in ``value`` is in [low, high), or is ``ignored``. ``what``: who looks up; ``source``: its input."""

    value: str
    low: int
    high: int
    ignored: int | None
    what: str
    source: str


@dataclass(frozen=True)
class InputRanges:
    """What inputs must be for look-ups to be within their tables: ``graph`` makes the indices from the inputs, ``limits`` are
    their ranges."""

    graph: Graph
    limits: tuple[Limit, ...]


@dataclass(frozen=True)
class Program:
    """Everything one rank needs to run. ``output_tree`` has ``Ref``s to output ports; ``loss`` names the scalar output that
    ``backward`` starts from; ``mutations``: (stored buffer value, environment value that replaces it after the step).
    ``operators``: what is declared of the operators that it runs.
    ``cuts``: (value computed by the prologue, local dim along which every micro-batch reads its piece).
    ``constants``: contents of stored buffers that the model does not register, by value name.
    ``signature``: how a call binds to ``inputs`` (see ``meshwright.ir.signature``). ``compute_dtype``: None, or the
    dtype parameters are cast to when gathered or read (bf16), gradients being reduced in fp32. ``stages``: of a
    program cut into pipeline stages (``outputs`` then lists those of all stages). ``changes``, ``classes``: as in ``Graph``.
    ``bounds``: what is checked of the inputs. ``again``: values that stages make again instead of being sent them.
    ``collected``: what the epilogue reads of the micro-batches.
    """

    mesh: Mesh
    rank: int
    segments: tuple[Segment, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    stored: tuple[Stored, ...]
    output_tree: Any
    loss: str | None
    mutations: tuple[tuple[str, str], ...]
    operators: Operators
    microbatches: int = 1
    cuts: tuple[tuple[str, int], ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    compute_dtype: torch.dtype | None = None
    signature: Mapping[str, Any] | None = None
    stages: Stages | None = None
    changes: Graph | None = None
    classes: Mapping[str, type] = field(default_factory=dict)
    bounds: InputRanges | None = None
    again: frozenset[str] = frozenset()
    collected: tuple[Collected, ...] = ()
