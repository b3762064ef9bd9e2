"""Which storages the operators of a lowered segment make and let go, forward and backward, as torch runs them eagerly.

A value lives from the operator that makes it to its last reader in the segment; longer if it leaves the segment, entered it
(the caller holds it), or is kept for the backward (``memory.saved_for_backward``, each storage once). In the backward the
operators come in reverse order. One

    reads the gradients of its results, makes those of its operands, then lets go of the former and of what it had kept;

an operand that several operators read sums theirs. Gradients of views and of plain sums are the gradient they come from.
Beside that an operator needs work space while it runs (``Cost.space``): copies of the logits in cross entropy, the buffer that
a gather along an inner dim is put in order from.

Recomputation: "full" keeps the segment's inputs and runs its forward again before its backward, up to the last operator that
keeps anything; torch stops before that one if it keeps operands only, and lets go of the inputs only with the last of what it
kept, at the end of the segment's backward. "selective" also keeps the results of operators that are
declared costly (matrix products, reductions between ranks), and does not run those again; what it stopped short of stays until
the segment's backward is done.

A split backward makes the gradients of what entered first. Those that reach operators which read weights wait for its second
half, and so does what is kept by all that these come from; what is kept above them (by the loss) is let go when the first one
is done with all segments, for which torch retains the graph. The second half
lets go of what such an operator kept when it has run, of all else when it is done. Where a weight is read at several places it
passes through what lies between these once more (``_comes_again``).

Gradients of a weight that several operators read meet before they are added to a sum (``done``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from meshwright.cost.memory.allocator import Arena, Stretch
from meshwright.cost.memory.saved import saved_beside, saved_for_backward, storages
from meshwright.ir.declared.operator import Operators, Work
from meshwright.ir.graph import Graph, Op

WORK, ACTIVATIONS, GRADIENTS = "transient", "activations", "gradients"
Half = Literal["both", "inputs", "weights"]
"""Of a split backward: gradients of what entered, then those of the weights; or all at once."""


class Storage:
    """A piece of memory: bytes, what it is for, and how many hold it; ``late``: whether collectives of a stream of their own
    use it."""

    __slots__ = ("block", "bytes", "holders", "kind", "late")

    def __init__(self, bytes_: float, kind: str, block: Stretch | None = None) -> None:
        self.bytes, self.kind, self.holders, self.block, self.late = bytes_, kind, 1, block, False


class Heap:
    """The storages alive: their sum by kind, and as it was when the sum was highest. ``room``: of a device, in which they are
    laid into the segments of torch's allocator, too (``arena``); ``late``: the part of what is standing that comes behind a
    first step (``restart``)."""

    def __init__(self, standing: Mapping[str, float], room: float | None = None, late: float = 0.0) -> None:
        self.standing, self.kinds = dict(standing), dict(standing)
        self.arena = None if room is None else Arena(sum(standing.values()) - late, room)
        self.blocks: dict[int, Stretch] = {}
        self.total = sum(standing.values())
        self.buffer: Storage | None = None
        self.peak, self.at_peak = self.total, dict(standing)

    def new(self, bytes_: float, kind: str) -> Storage:
        """A storage with one holder."""
        self.kinds[kind] = self.kinds.get(kind, 0.0) + bytes_
        self.total += bytes_
        self._mark()
        block = None if self.arena is None else self.arena.take(bytes_)
        if block is not None:
            self.blocks[id(block)] = block
        return Storage(bytes_, kind, block)

    def drop(self, storage: Storage) -> None:
        """One holder fewer; the last one frees it."""
        storage.holders -= 1
        if not storage.holders:
            self.kinds[storage.kind] -= storage.bytes
            self.total -= storage.bytes
            if self.arena is not None and storage.block is not None:
                del self.blocks[id(storage.block)]
                if storage.late:
                    self.arena.give_late(storage.block)
                else:
                    self.arena.give(storage.block)

    def launch(self, kernels: int, waits: bool = False) -> None:
        """So many kernels more, before which the host waits for the device or not."""
        if self.arena is not None:
            self.arena.launches += kernels
            if waits:
                self.arena.wait()

    def restart(self, late: Iterable[float], beside: float | None = None) -> None:
        """Behind a first step: what comes late is laid into the segments as that step left them, beside what it still holds
        (``beside``: so many bytes instead); then that is let go."""
        assert self.arena is not None
        if beside is not None:
            self._let_go()
            self.new(beside, GRADIENTS)
        for bytes_ in late:
            self.arena.take(bytes_)
        self._let_go()
        self.kinds, self.total = dict(self.standing), sum(self.standing.values())

    def _let_go(self) -> None:
        assert self.arena is not None
        self.arena.wait()
        for block in self.blocks.values():
            self.arena.give(block)
        self.blocks.clear()
        self.buffer = None

    def become(self, storage: Storage, kind: str) -> None:
        """The same memory, from now on for something else."""
        self.kinds[storage.kind] -= storage.bytes
        self.kinds[kind] = self.kinds.get(kind, 0.0) + storage.bytes
        storage.kind = kind

    def space(self, bytes_: float) -> None:
        """Memory taken and given back at once."""
        if bytes_:
            self.drop(self.new(bytes_, WORK))

    def keep(self, bytes_: float) -> None:
        """One buffer that stays, as large as the most that it was asked for."""
        if self.buffer is None or self.buffer.bytes < bytes_:
            if self.buffer is not None:
                self.drop(self.buffer)
            self.buffer = self.new(bytes_, WORK)

    def _mark(self) -> None:
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.kinds)


def comes_late(*storages: Storage) -> None:
    """Collectives of a stream of their own use them."""
    for storage in storages:
        storage.late = True


def hold(storage: Storage) -> Storage:
    """One holder more."""
    storage.holders += 1
    return storage


@dataclass(frozen=True)
class Script:
    """A segment as the replay needs it: what each operator keeps, and after which one a value is let go."""

    graph: Graph
    base: Mapping[str, str]
    kept: tuple[tuple[tuple[str, ...], float], ...]  # per op: (values, bytes beside them)
    last: Mapping[int, tuple[str, ...]]  # op -> roots nobody in the segment reads after it
    weights: frozenset[str]  # parameters and what shows their storage
    results_kept: Mapping[str, frozenset[int]]  # recomputation -> the operators whose results it keeps
    gradients: tuple[tuple[tuple[str, float, bool], ...], ...]  # per op: (operand, bytes, whether it is the result's)
    spaces: tuple[tuple[float, float], ...]  # per op: bytes beside what it reads and makes, forward and backward
    kernels: tuple[tuple[int, int], ...]  # per op: forward and backward
    exchanges: frozenset[int] = frozenset()  # ops in which collectives of a stream of their own move data
    waits: frozenset[int] = frozenset()  # ops before which the host waits for the device
    pieces: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # of an op, what it receives before it has its result
    ahead: frozenset[str] = frozenset()  # values that other segments of its stage make ahead of all that enters that
    stays: frozenset[str] = frozenset()  # values that others read where what these come from is kept for the second half
    leads: frozenset[str] | None = None  # values whose gradients come again in the second half, where any do

    @cached_property
    def readers(self) -> Mapping[str, int]:
        """Of every weight the operator that reads it first, whose backward is its last reader's."""
        found = dict[str, int]()
        for index, op in enumerate(self.graph.ops):
            for name in self.weights.intersection(op.inputs):
                found.setdefault(name, index)
        return found

    @cached_property
    def moving(self) -> frozenset[str]:
        """Values that depend on what enters the stage, with a gradient: those that a split backward's first half goes
        through."""
        values, beside = self.graph.values, self.weights | self.ahead
        found = {name for name in self.graph.inputs if values[name].differentiable and name not in beside}
        for op in self.graph.ops:
            if not found.isdisjoint(op.inputs):
                found |= {name for name in op.outputs if values[name].differentiable}
        return frozenset(found)

    @cached_property
    def waiting(self) -> frozenset[int]:
        """Operators that read weights beside these: the gradients that reach them wait for the second half."""
        values = self.graph.values
        beside = (any(values[name].differentiable and name not in self.moving for name in op.inputs) for op in self.graph.ops)
        return frozenset(i for i, (op, one) in enumerate(zip(self.graph.ops, beside, strict=True))
                         if one and not self.moving.isdisjoint(op.outputs))

    @cached_property
    def below(self) -> frozenset[int]:
        """Operators that these come from, and themselves: what they keep stays for the second half."""
        found, read = set[int](), set(self.stays)
        for index in reversed(range(len(self.graph.ops))):
            op = self.graph.ops[index]
            if index in self.waiting or not read.isdisjoint(op.outputs):
                found.add(index)
                read.update(op.inputs)
        return frozenset(found)


def script_of(graph: Graph, held: Iterable[str], operators: Operators, alone: Collection[str] = ()) -> Script:
    """``held``: the stored values, whose memory is accounted for elsewhere; ``alone``: mesh axes of one rank, over which
    nothing is exchanged."""
    base = storages(graph, operators)
    held = set(held)
    weights = frozenset(name for name, root in base.items() if root in held)
    work = [Work.of(op, graph) for op in graph.ops]
    kept = tuple(_kept(op, one, graph, operators, weights) for op, one in zip(graph.ops, work, strict=True))
    results_kept = {
        recompute: frozenset(i for i, op in enumerate(graph.ops) if operators[op.target].keeps_results(recompute))
        for recompute in ("selective", "full")
    }
    spaces = tuple(
        (0.0, 0.0) if (space := operators[op.target].cost.space) is None else space(one)
        for op, one in zip(graph.ops, work, strict=True)
    )
    gradients = tuple(_gradients(op, one, graph, operators, alone) for op, one in zip(graph.ops, work, strict=True))
    kernels = tuple(_kernels(op, found, operators) for op, found in zip(graph.ops, gradients, strict=True))
    last = _last_reads(graph, base, weights)
    return Script(graph, base, kept, last, weights, results_kept, gradients, spaces, kernels)


def _last_reads(graph: Graph, base: Mapping[str, str], weights: Collection[str]) -> dict[int, tuple[str, ...]]:
    """{operator: the storages that nobody in the segment reads after it}."""
    last: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        last.update((base[name], index) for name in (*op.inputs, *op.outputs))
    leaving = {base[name] for name in graph.outputs}
    going: dict[int, list[str]] = {}
    for root, index in last.items():
        if root not in leaving and root not in weights:
            going.setdefault(index, []).append(root)
    return {index: tuple(roots) for index, roots in going.items()}


def of_one_stage(scripts: Sequence[Script], leaving: Collection[str] = ()) -> list[Script]:
    """The same segments, which follow each other in a stage with a split backward: what of each depends on what entered it, and
    what of its gradients comes again in the second half (``_comes_again``). ``leaving``: values that the stage hands on."""
    found, ahead, stays = list[Script](), frozenset[str](), frozenset[str]()
    for script in scripts:
        found.append(replace(script, ahead=ahead))
        made = {name for op in script.graph.ops for name in op.outputs if script.graph.values[name].differentiable}
        ahead |= made - found[-1].moving
    for at in reversed(range(len(found))):
        found[at] = replace(found[at], stays=stays)
        stays |= {name for index in found[at].below for name in scripts[at].graph.ops[index].inputs}
    return _comes_again(found, leaving)


def _comes_again(scripts: list[Script], leaving: Collection[str]) -> list[Script]:
    """The gradients of weights are made from where those of inputs left off, of each weight apart. If some weight is read where
    it meets what entered at several places (as the table of a bias that all blocks add), those of all weights are made at once,
    in a walk that passes through all that lies between these places and makes the gradients of that anew. What a stage hands on
    meets where it leaves."""
    weights, places = dict[str, frozenset[str]](), dict[str, set[tuple[int, int]]]()
    led = set[str]()
    for at, script in enumerate(scripts):
        values = script.graph.values
        weights.update((name, frozenset([name])) for name in script.weights if values[name].differentiable)
        for index, op in enumerate(script.graph.ops):
            read = frozenset[str]().union(*(weights.get(name, ()) for name in op.inputs))
            if index in script.waiting:
                for name in read:
                    places.setdefault(name, set()).add((at, index))
            if index in script.waiting or not led.isdisjoint(op.inputs):
                led |= script.moving.intersection(op.outputs)
            weights.update((name, read) for name in op.outputs if read and name not in script.moving)
    for name in {name for value in leaving for name in weights.get(value, ())}:
        places.setdefault(name, set()).add((len(scripts), 0))
    if all(len(found) < 2 for found in places.values()):
        return scripts
    return [replace(script, leads=frozenset(led)) for script in scripts]


def with_plain_loss(script: Script, operators: Operators) -> Script:
    """The same segment under torch's own cross entropy: of a loss's backward the gradient of the picked logarithms, as wide as
    the logits, lies beside that of the logits."""
    losses = {i: script.graph.values[op.inputs[0]] for i, op in enumerate(script.graph.ops) if _loses(op, operators)}
    spaces = [(forward, backward + (float(losses[i].bytes_) if i in losses else 0.0))
              for i, (forward, backward) in enumerate(script.spaces)]
    return replace(script, spaces=tuple(spaces))


def with_whole_heads(script: Script, operators: Operators) -> Script:
    """The same segment where attention's values are a slice of one product with queries and keys, which is kept whole for them,
    where its result is laid out anew, and kept so as well, if there are several samples, and where queries and keys are each
    turned by a cosine and a sine that are picked by position and kept, of one head."""
    values, kept = script.graph.values, list(script.kept)
    for index, op in enumerate(script.graph.ops):
        if operators[op.target].kind == "attention" and kept[index][0]:
            query, key, result = (values[name] for name in (*op.inputs[:2], op.outputs[0]))
            again = result.bytes_ if result.shape[0] > 1 else 0
            turns = 2 * (query.bytes_ / query.shape[1] + key.bytes_ / key.shape[1])
            kept[index] = kept[index][0], kept[index][1] + float(query.bytes_ + key.bytes_ + again + turns)
    return replace(script, kept=tuple(kept))


def with_plain_collectives(script: Script, operators: Operators) -> Script:
    """The same segment with torch.distributed's own functions, which run on a stream of their own. What a gather along the
    last dim receives is a list of pieces, of which the rank has one, all of them in one tensor before; they are joined. Along
    another one (the sequence) data lies as it is sent."""
    exchanges = frozenset(i for i, op in enumerate(script.graph.ops) if operators[op.target].exchanges)
    spaces, pieces = list(script.spaces), dict[int, tuple[float, ...]]()
    for index in exchanges:
        op = script.graph.ops[index]
        sent, made = (script.graph.values[names[0]] for names in (op.inputs, op.outputs))
        if operators[op.target].kind != "copy":
            continue
        if made.bytes_ > sent.bytes_ > 0 and made.shape[:-1] == sent.shape[:-1]:
            pieces[index] = (*[float(sent.bytes_)] * (round(made.bytes_ / sent.bytes_) - 1), float(made.bytes_))
        spaces[index] = 0.0, 0.0
    return replace(script, exchanges=exchanges, spaces=tuple(spaces), pieces=pieces)


def with_sequence_first(script: Script, operators: Operators) -> tuple[Script, float]:
    """The same segment where the sequence is the first dim, along which data lies as it is sent and received, and what linears
    gather along it lies in a buffer that stays; and the bytes that this buffer needs for it."""
    spaces, buffer = list(script.spaces), 0.0
    for index, op in enumerate(script.graph.ops):
        operator = operators[op.target]
        if operator.exchanges and operator.kind == "matmul":
            read, made = (script.graph.values[names[0]] for names in (op.inputs, op.outputs))
            whole = float(math.prod(made.shape[:-1]) * read.shape[-1] * read.dtype.itemsize)
            spaces[index], buffer = (0.0, whole), max(buffer, whole)
        elif operator.exchanges and operator.kind == "copy" and script.graph.values[op.inputs[0]].shape[2:]:
            spaces[index] = 0.0, 0.0
    return replace(script, spaces=tuple(spaces)), buffer


def with_narrow_loss(script: Script, operators: Operators) -> Script:
    """The same segment under a cross entropy that does not widen the logits that the model makes, and works in their place: its
    softmax lies where they lay. While its backward runs, a copy of that lies beside the gradient."""
    values, makers, base = script.graph.values, script.graph.producers, dict(script.base)
    gradients, spaces = list(script.gradients), list(script.spaces)
    for index, op in enumerate(script.graph.ops):
        wide = base[op.inputs[0]] if _loses(op, operators) else ""
        cast = makers.get(wide)
        if cast is None or operators[script.graph.ops[cast].target].kind != "linear":
            continue
        read = script.graph.ops[cast].inputs[0]
        part = values[read].dtype.itemsize / values[wide].dtype.itemsize
        base = {name: base[read] if root == wide else root for name, root in base.items()}
        gradients[index] = tuple((name, part * bytes_, same) for name, bytes_, same in gradients[index])
        gradients[cast] = tuple((name, bytes_, True) for name, bytes_, _ in gradients[cast])
        spaces[index] = 0.0, part * values[wide].bytes_
    last = _last_reads(script.graph, base, script.weights)
    return replace(script, base=base, last=last, gradients=tuple(gradients), spaces=tuple(spaces))


def with_fused_activations(script: Script, operators: Operators) -> Script:
    """The same segment where pointwise operators that feed each other are one kernel each way, which keeps what it reads and
    makes again what it needs in between (Megatron-LM's SwiGLU)."""
    pointwise = [operators[op.target].kind == "pointwise" for op in script.graph.ops]
    known = {name for names, _ in script.kept for name in names}
    between = {name for op, fuses in zip(script.graph.ops, pointwise, strict=True) if fuses for name in op.outputs
               if known.issuperset(read for read in op.inputs if script.graph.values[read].differentiable)}
    kept = tuple((tuple(name for name in names if not (fuses and name in between)), extra)
                 for (names, extra), fuses in zip(script.kept, pointwise, strict=True))
    return replace(script, kept=kept)


def with_packed_attention(script: Script, operators: Operators) -> Script:
    """The same segment with attention over packed sequences, the longest of which the host asks the device for in its
    forward."""
    attention = frozenset(i for i, op in enumerate(script.graph.ops) if operators[op.target].kind == "attention")
    return replace(script, waits=attention)


def logits_of(script: Script, operators: Operators) -> int:
    """Numbers of the logits that a segment's losses read."""
    return sum(script.graph.values[op.inputs[0]].numel for op in script.graph.ops if _loses(op, operators))


def _loses(op: Op, operators: Operators) -> bool:
    return operators[op.target].kind == "loss"


def _kept(
    op: Op, work: Work, graph: Graph, operators: Operators, weights: frozenset[str]
) -> tuple[tuple[str, ...], float]:
    if not any(graph.values[name].differentiable for name in op.outputs):
        return (), 0.0
    operands, results = saved_for_backward(op, graph, operators)
    names = [op.inputs[at] for at in operands] + [op.outputs[at] for at in results]
    return tuple(name for name in names if name not in weights), float(saved_beside(operators[op.target], work))


@dataclass
class Tape:
    """What one run of a segment left for its backward: what each operator keeps, and the results that are not made again."""

    script: Script
    inputs: dict[str, Storage]
    recompute: str
    kept: dict[int, list[Storage]] = field(default_factory=dict)
    results: dict[int, list[Storage]] = field(default_factory=dict)
    waits: dict[int, dict[str, Storage]] = field(default_factory=dict)  # gradients of its results, between two halves
    ends: list[Storage] = field(default_factory=list)  # what is let go of when a half is done with all segments


def forward(script: Script, heap: Heap, env: Mapping[str, Storage], recompute: str = "none") -> tuple[Tape, dict[str, Storage]]:
    """Run a segment: its tape, and its outputs' storages (held once each)."""
    inputs = {name: env[name] for name in script.graph.inputs if name in env}
    tape = Tape(script, inputs, recompute)
    if recompute != "none":
        for storage in inputs.values():
            hold(storage)
    return tape, _run(tape, heap, keep=recompute == "none", stop=len(script.graph.ops))


def _run(tape: Tape, heap: Heap, keep: bool, stop: int, idle: int = -1) -> dict[str, Storage]:
    """Operators before ``stop``; of ``idle`` only what it keeps of its operands."""
    script, frame = tape.script, {name: hold(storage) for name, storage in tape.inputs.items()}
    values = script.graph.values
    for index, op in enumerate(script.graph.ops[:stop]):
        made = tape.results.get(index)
        heap.launch(script.kernels[index][0], index in script.waits)
        received = [heap.new(bytes_, WORK) for bytes_ in script.pieces.get(index, ())] if index != idle else []
        for name in op.outputs if index != idle else ():
            root = script.base[name]
            if root == name and name not in script.weights:
                frame[name] = made.pop(0) if made else heap.new(float(values[name].bytes_), ACTIVATIONS)
        if index in script.exchanges:
            used = (script.base[name] for name in (*op.inputs, *op.outputs))
            comes_late(*received, *(frame[root] for root in used if root in frame))
        for storage in received:
            heap.drop(storage)
        heap.space(script.spaces[index][0] if index != idle else 0.0)
        names, extra = script.kept[index]
        if keep and (names or extra):
            roots = dict.fromkeys(script.base[name] for name in names)
            tape.kept[index] = [hold(frame[root]) for root in roots if root in frame]
            tape.kept[index] += [heap.new(extra, ACTIVATIONS)] if extra else []
        if not keep and index in script.results_kept.get(tape.recompute, ()):
            tape.results[index] = [hold(frame[name]) for name in op.outputs if script.base[name] == name and name in frame]
        for root in script.last.get(index, ()):
            if root in frame and root not in tape.inputs:
                heap.drop(frame.pop(root))
    outputs = {name: hold(frame[script.base[name]]) for name in script.graph.outputs if script.base[name] in frame}
    for storage in frame.values():
        heap.drop(storage)
    return outputs


def backward(
    tape: Tape, heap: Heap, grads: dict[str, Storage], weights: dict[str, Storage], half: Half = "both",
    done: Callable[[str], None] = lambda _: None,
) -> None:
    """Run a segment's backward. ``grads``: by value; those of the results are taken, those of the inputs added.
    ``weights``: gradients of parameters so far; ``half``: of a split backward; ``done``: called with a parameter when the last
    of its readers is."""
    script = tape.script
    if tape.recompute != "none":
        end = max((i for i, (names, extra) in enumerate(script.kept) if names or extra), default=-1)
        idle = end if end >= 0 and _keeps_operands(script, end) else -1
        for storage in _run(tape, heap, keep=True, stop=end + 1, idle=idle).values():
            heap.drop(storage)
    for index in reversed(range(len(script.graph.ops))):
        op = script.graph.ops[index]
        waited, made = tape.waits.pop(index, {}), {name: grads.pop(name) for name in op.outputs if name in grads}
        tape.ends += [hold(storage) for storage in waited.values()]
        for name in made.keys() & waited:  # what waited takes the place of what came again
            heap.drop(made.pop(name))
        made |= waited
        if made:
            first = next(iter(made.values()))
            found = [(name, hold(first) if same else heap.new(bytes_, WORK)) for name, bytes_, same in script.gradients[index]
                     if _made_in(half, name, script)]
            if index in script.exchanges:
                comes_late(*made.values(), *(storage for _, storage in found))
            heap.launch(script.kernels[index][1])
            heap.space(script.spaces[index][1])
            for name, storage in found:
                if name in script.weights and name not in script.graph.producers:
                    add_gradient(heap, weights, name, storage)
                else:
                    _add(heap, grads, name, storage)
        if half == "inputs" and index in script.waiting:
            tape.waits[index] = made
            made = {}
        for storage in made.values():
            heap.drop(storage)
        if half == "weights" and (script.leads is None or not made) and index not in script.waiting:
            tape.ends += tape.kept.pop(index, ())
        if half == "inputs":
            tape.ends += tape.kept.pop(index, ()) if index not in script.below else ()
            continue
        for storage in tape.kept.pop(index, ()):
            heap.drop(storage)
        for name in op.inputs if made else ():
            if script.readers.get(name) == index and name in weights:
                done(name)
    for storage in tape.inputs.values() if tape.recompute != "none" else ():
        heap.drop(storage)
    for left in tape.results.values():  # what recomputation stopped short of
        for storage in left:
            heap.drop(storage)


def _made_in(half: Half, name: str, script: Script) -> bool:
    """Whether a half of a split backward makes the gradient of an operand."""
    if half == "weights" and name in script.moving:
        return script.leads is not None and name in script.leads
    return half != "inputs" or name in script.moving


def _keeps_operands(script: Script, index: int) -> bool:
    """Whether an operator keeps nothing that it makes: then recomputation stops before it runs."""
    names, extra = script.kept[index]
    return not extra and not set(names).intersection(script.graph.ops[index].outputs)


def add_gradient(
    heap: Heap, weights: dict[str, Storage], name: str, storage: Storage, copies: Sequence[float] = ()
) -> None:
    """One more gradient of a weight. ``copies``: by how much larger each copy that is made of it on its way there is than the
    last."""
    _add(heap, weights, name, storage, copies)
    heap.become(weights[name], GRADIENTS)


def _add(heap: Heap, sums: dict[str, Storage], name: str, storage: Storage, copies: Sequence[float] = ()) -> None:
    """One more gradient of a value."""
    for times in copies:
        other = heap.new(times * storage.bytes, storage.kind)
        heap.drop(storage)
        storage = other
    if name not in sums:
        sums[name] = storage
        return
    heap.launch(1)
    if sums[name].holders == 1:  # added in place
        heap.drop(storage)
        return
    total = heap.new(storage.bytes, storage.kind)
    heap.drop(sums[name])
    heap.drop(storage)
    sums[name] = total


# --------------------------------------------------------------------------------------------- gradients of one operator


def _gradients(
    op: Op, work: Work, graph: Graph, operators: Operators, alone: Collection[str]
) -> tuple[tuple[str, float, bool], ...]:
    """(operand, bytes of the gradient that this operator makes for it, whether it is that of the result)."""
    operands = [(at, name, graph.values[name]) for at, name in enumerate(op.inputs) if graph.values[name].differentiable]
    passed_on = passing(op, work, graph, operators) if operands else ()
    if operators[op.target].exchanges and dict(op.kwargs).get("axis") in alone:
        passed_on = [at for at, _, _ in operands]
    dtype = graph.values[op.outputs[0]].dtype
    return tuple((name, float(value.bytes_), at in passed_on and value.dtype == dtype) for at, name, value in operands)


def _kernels(op: Op, gradients: Sequence[tuple[str, float, bool]], operators: Operators) -> tuple[int, int]:
    """One forward, none for views; backward one for each gradient of a product, one for those of another operator that are not
    passed on."""
    kind, made = operators[op.target].kind, sum(not same for _, _, same in gradients)
    return int(kind != "view"), made if kind == "matmul" else min(made, 1)


def passing(op: Op, work: Work, graph: Graph, operators: Operators) -> Collection[int]:
    """Positions of the operands whose gradient is the result's, or a view of it."""
    operator = operators[op.target]
    if operator.cost.passes is not None:
        return operator.cost.passes(work)
    if operator.kind == "view" and len(op.outputs) == 1:
        numel = graph.values[op.outputs[0]].numel
        return [at for at, name in enumerate(op.inputs) if graph.values[name].numel == numel]
    return ()
