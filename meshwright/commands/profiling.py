"""A model's operators timed on the device at hand, as the tables of a cluster file that stand before the formulas.

Every distinct call of the captured graph is run alone, on random operands, forward and backward, whole and in the pieces that
``DEGREES`` devices would have:

    products    [M, N, K] of every matrix product of the forward and the backward: one of the three dims in pieces, or two
    streams     seconds by bytes moved, for every kind of work that is bound by memory: pieces of the batch
    attentions  [batch, heads, queries, keys, head dim]: pieces of the batch and of the heads
    collectives seconds by message size, where a process group is there: of every kind, over 2, 4, 8, ... ranks of a node and of
                every node, and over all; one group at a time, the others wait

Whole calls come before their pieces, the tables in turn; what does not fit into the memory that is free, or into the time that
was asked for, is left out and counted. Medians of torch's own timer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.benchmark import Timer

from meshwright.cost import compute
from meshwright.cost.catalogue import Device, device_for
from meshwright.cost.cluster import Cluster
from meshwright.errors import InputError
from meshwright.ir.declared.operator import Operator, Work
from meshwright.ir.graph import Graph, Op
from meshwright.ir.sharding import DTYPE_NAMES
from meshwright.rules import rules_of
from meshwright.runtime.interpret import call

DEGREES = (1, 2, 4, 8)
"""Devices in whose pieces operands are timed beside the whole."""
LEAST_SECONDS = 0.02
"""Time over which one call is repeated, at least."""
REPEATED = 5
"""Times that a call runs at the least: to warm up, to find how often it fits into ``LEAST_SECONDS``, forward and backward."""
FREE = 0.25
"""Part of the free memory that the operands of one call may take; its results, gradients and work space take the rest."""
MESSAGES = tuple(4**k * 2**16 for k in range(7))
"""Bytes of a collective's full buffer on one rank: 64 KiB to 256 MiB."""
SLOW = 2.0
"""Seconds of a message from which on no larger one is sent."""

Row = tuple[tuple[Any, ...], tuple[float, ...]]
"""Where a measurement belongs in its table, and its seconds."""


@dataclass(frozen=True)
class Case:
    """One call to time.

    ``table``: where it belongs. ``pieces``: of how many the call is one. ``bytes_``: of its operands. ``seconds``: that the
    formulas expect. ``run``: makes the call and returns the seconds for the keys of ``spots``, the rows that it fills.
    """

    table: tuple[Any, ...]
    pieces: int
    bytes_: float
    seconds: float
    run: Callable[[], tuple[float, ...]]
    spots: tuple[tuple[Any, ...], ...]


@dataclass
class Profile:
    """What was measured: {table: {place in it: seconds of every call that belongs there}}, and how many calls were left out."""

    device: str
    tables: dict[tuple[Any, ...], dict[tuple[Any, ...], list[tuple[float, ...]]]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def add(self, table: tuple[Any, ...], key: tuple[Any, ...], seconds: tuple[float, ...]) -> None:
        """One more measurement of a place."""
        self.tables.setdefault(table, {}).setdefault(key, []).append(seconds)

    def leave_out(self, why: str) -> None:
        """One call more that was not timed."""
        self.left_out[why] = self.left_out.get(why, 0) + 1

    def rows(self, table: tuple[Any, ...]) -> list[Row]:
        """The places of a table in order, with the medians of their seconds."""
        return [(key, tuple(map(median, zip(*self.tables[table][key], strict=True)))) for key in sorted(self.tables[table])]

    @property
    def measured(self) -> int:
        """Places of all tables."""
        return sum(map(len, self.tables.values()))


def profile(
    graph: Graph, like: str, place: torch.device, *, seconds: float = 60.0, report: Callable[[str, float], None] | None = None,
    nodes: int = 1,
) -> Profile:
    """Time a graph's operators on the device ``place`` for about so many seconds; ``like``: the device of the catalogue whose
    other numbers it shares; ``nodes``: over which the processes are spread. Raises InputError for a device that is not there,
    and for nodes that do not divide the processes."""
    if dist.is_initialized():
        _check_nodes(dist.get_world_size(), nodes)
    device = Cluster.parse(f"{like}:1x1").device
    found, begun = Profile(like), perf_counter()
    cases = _in_turn(_cases(graph, device, place))
    for index, case in enumerate(cases):
        if perf_counter() - begun + REPEATED * case.seconds > seconds:
            found.leave_out("for lack of time")
            continue
        if case.bytes_ > FREE * _free(place):
            found.leave_out("for lack of memory")
            continue
        if report is not None:
            report(f"timing {case.table[0]}", index / len(cases))
        try:
            measured = case.run()
        except torch.OutOfMemoryError:
            found.leave_out("for lack of memory")
            continue
        except (RuntimeError, TypeError, ValueError, IndexError):  # a piece whose literals say other sizes
            found.leave_out("that cannot run alone or in pieces")
            continue
        width = 2 if case.table[0] == "attentions" else 1
        for at, key in enumerate(case.spots):
            if min(*key, *(values := measured[at * width : (at + 1) * width])) > 0:
                found.add(case.table, key, values)
    if dist.is_initialized() and dist.get_world_size() > 1:
        collectives(found, place, nodes)
    return found


def write(
    path: Path, graph: Graph, *, like: str | None, name: str, nodes: int, seconds: float, report: Callable[[str, float], None]
) -> Profile:
    """Profile a graph on this process's device and write the cluster file; under torchrun, rank 0 writes, and collectives are
    measured. ``like``: a device of the catalogue; None: what the driver reports, or "cpu". Raises InputError, where nothing was
    measured too, and ClusterError."""
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    title = "one CPU process"
    if place.type == "cuda":
        torch.cuda.set_device(place)
        title = torch.cuda.get_device_name(place)
        like = like or device_for(title, torch.cuda.get_device_properties(place).total_memory)
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        found = profile(graph, like or "cpu", place, seconds=seconds, report=report, nodes=nodes)
        if not found.tables:
            left = "; ".join(f"{count} calls were left out {why}" for why, count in sorted(found.left_out.items()))
            raise InputError(f"nothing was measured within {seconds:g} s, so {path} is not written: {left or 'no calls'}; give "
                             "it more --seconds, or a smaller batch")
        text = as_toml(found, name, f"measured on {title}, torch {torch.__version__}", nodes)
        if not several or dist.get_rank() == 0:
            path.write_text(text, encoding="utf-8")
    finally:
        if several:
            dist.destroy_process_group()
    return found


def check_request(path: Path, name: str, nodes: int) -> None:
    """Raise InputError for what ``write`` could not write, before anything is captured or measured."""
    if path.suffix != ".toml":
        raise InputError(f"{path} would not be read as a cluster file; give it a name that ends with .toml")
    if not (name.isidentifier() and name.isascii()):
        raise InputError(f"{name!r} cannot be the name of a device in a cluster file; use letters, digits and underscores")
    _check_nodes(int(os.environ.get("WORLD_SIZE", 1)), nodes)


def _in_turn(cases: Iterable[Case]) -> list[Case]:
    """The first case of every table, then the second of every one, ...; in a table whole calls first, then the shortest."""
    ranks: dict[tuple[Any, ...], int] = {}
    placed = []
    for case in sorted(cases, key=lambda case: (case.pieces, case.seconds)):
        placed.append((ranks.setdefault(case.table, 0), case))
        ranks[case.table] += 1
    return [case for _, case in sorted(placed, key=lambda pair: pair[0])]


def _cases(graph: Graph, device: Device, place: torch.device) -> Iterator[Case]:
    """Every distinct call, whole and in pieces."""
    operators = rules_of(graph)[0].operators
    seen: set[Any] = set()
    for op in graph.ops:
        operator, whole = operators[op.target], Work.of(op, graph)
        if operator.kind == "matmul":
            yield from _products(operator, whole, device, place, seen)
        elif operator.kind == "attention":
            yield from _attentions(op, operator, whole, graph, device, place, seen)
        elif operator.kind not in ("view", "factory"):
            yield from _streams(op, operator, whole, graph, device, place, seen)


def _products(operator: Operator, work: Work, device: Device, place: torch.device, seen: set[Any]) -> Iterator[Case]:
    name = DTYPE_NAMES[work.makes]
    for batch, m, n, k in compute.products(operator, work):
        for sides in ((m, n, k), (m, k, n), (k, n, m)) if batch == 1 else ():
            for cuts in product(DEGREES, repeat=3):
                shape = tuple(size // cut for size, cut in zip(sides, cuts, strict=True))
                exact = all(size % cut == 0 for size, cut in zip(sides, cuts, strict=True)) and sorted(cuts)[0] == 1
                if not exact or (shape, name) in seen:
                    continue
                seen.add((shape, name))
                rows, columns, inner = shape
                bytes_ = (rows * inner + inner * columns + rows * columns) * work.makes.itemsize

                def run(rows: int = rows, columns: int = columns, inner: int = inner) -> tuple[float, ...]:
                    left = torch.randn(rows, inner, device=place).to(work.makes)
                    right = torch.randn(inner, columns, device=place).to(work.makes)
                    return (_time(lambda: torch.mm(left, right)),)

                expected = 2.0 * math.prod(shape) / device.flops(work.makes)
                yield Case(("products", name), math.prod(cuts), bytes_, expected, run, (shape,))


def _attentions(
    op: Op, operator: Operator, work: Work, graph: Graph, device: Device, place: torch.device, seen: set[Any]
) -> Iterator[Case]:
    name, causal = DTYPE_NAMES[work.makes], compute.is_causal(work)
    query, key = work.operands[:2]
    expected = sum(compute.seconds(operator, work, device))
    if len(query) != 4 or query[1] != key[1] or query[-1] != work.operands[2][-1]:
        return  # grouped heads: the formula's scale comes from those that are not
    for batches, heads in product(DEGREES, repeat=2):
        if query[0] % batches or query[1] % heads:
            continue
        cut = [_divided(shape, {0: (query[0], batches), 1: (query[1], heads)}) for shape in work.operands]
        shape = (*cut[0][:3], cut[1][2], cut[0][3])
        if (shape, name, causal, len(cut)) in seen:
            continue
        seen.add((shape, name, causal, len(cut)))
        yield Case(
            ("attentions", name, causal), batches * heads, sum(map(math.prod, cut)) * work.makes.itemsize,
            expected / (batches * heads), _caller(op, graph, cut, work, place), (shape,),
        )


def _streams(
    op: Op, operator: Operator, work: Work, graph: Graph, device: Device, place: torch.device, seen: set[Any]
) -> Iterator[Case]:
    """Calls in pieces of their first dim; seconds of the forward and of the backward are rows of one table, by bytes moved."""
    lead = max((shape[0] for shape in (*work.operands, *work.results) if shape), default=1)
    speed = compute.memory_speed(device)
    for degree in DEGREES:
        if lead % degree:
            continue
        cut = tuple(_divided(shape, {0: (lead, degree)}) for shape in work.operands)
        made = tuple(_divided(shape, {0: (lead, degree)}) for shape in work.results)
        local = Work(cut, made, work.reads, work.makes, work.needs, work.args, work.kwargs)
        moved = [seconds_ * speed for seconds_ in compute.seconds(operator, local, device)]
        dtype = DTYPE_NAMES.get(work.reads if operator.kind == "loss" else work.makes)
        same = (op.target, cut, repr(op.args), repr(op.kwargs), dtype)
        if dtype is None or min(moved) < 0 or moved[0] == 0 or same in seen:
            continue
        seen.add(same)
        spots = tuple((round(bytes_),) for bytes_ in moved)
        expected = sum(moved) / speed
        yield Case(("streams", operator.kind, dtype), degree, sum(moved), expected, _caller(op, graph, cut, work, place), spots)


def _divided(shape: tuple[int, ...], cuts: Mapping[int, tuple[int, int]]) -> tuple[int, ...]:
    """A shape whose dims of the given sizes are in pieces."""
    return tuple(
        size // cuts[dim][1] if dim in cuts and size == cuts[dim][0] else size for dim, size in enumerate(shape)
    )


def _caller(
    op: Op, graph: Graph, shapes: Sequence[tuple[int, ...]], work: Work, place: torch.device
) -> Callable[[], tuple[float, ...]]:
    """Makes operands of these shapes, and times the call and its backward (0 where there is none)."""

    def run() -> tuple[float, ...]:
        operands: dict[str, Tensor] = {}
        for name, shape, needs in zip(op.inputs, shapes, work.gradients, strict=True):
            value = _random(shape, graph.values[name].dtype, place)
            operands[name] = value.requires_grad_() if needs and value.is_floating_point() else value

        def run() -> Any:
            return call(op, lambda ref: operands[ref.name])

        forward = _time(run)
        results = run()
        first = results[0] if isinstance(results, tuple | list) else results
        wanted = [value for value in operands.values() if value.requires_grad]
        if not wanted or not first.requires_grad:
            return forward, 0.0
        gradient = _random(tuple(first.shape), first.dtype, place)
        return forward, _time(lambda: torch.autograd.grad(first, wanted, gradient, retain_graph=True, allow_unused=True))

    return run


def _random(shape: tuple[int, ...], dtype: torch.dtype, place: torch.device) -> Tensor:
    """Random numbers; zeros where they may be an index, so that they are in range."""
    if dtype.is_floating_point:
        return torch.randn(shape, device=place).to(dtype)
    return torch.full(shape, dtype == torch.bool, dtype=dtype, device=place)


def _time(timed: Callable[[], Any]) -> float:
    """Median seconds of a call, after one that warms up."""
    timed()
    timer = Timer("timed()", globals={"timed": timed}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=LEAST_SECONDS).median)


def _free(place: torch.device) -> float:
    """Bytes of memory that are free on a device."""
    if place.type == "cuda":
        return float(torch.cuda.mem_get_info(place)[0])
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(float(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def groups_of(world: int, nodes: int) -> list[tuple[int, int, list[int]]]:
    """(ranks, nodes, who they are) of the groups whose collectives are measured: 2, 4, 8, ... neighbours of a node, as many of
    every node, and all.

    >>> [(ranks, nodes) for ranks, nodes, _ in groups_of(8, 2)], groups_of(8, 2)[2]
    ([(2, 1), (4, 1), (2, 2), (4, 2), (8, 2)], (2, 2, [0, 4]))
    """
    per_node = world // nodes
    each = [*(2**n for n in range(per_node.bit_length()) if 2**n < per_node), per_node]
    return [
        (several * near, several, [node * per_node + rank for node in range(several) for rank in range(near)])
        for several in dict.fromkeys((1, nodes)) for near in each if several * near > 1
    ]


def collectives(found: Profile, place: torch.device, nodes: int = 1, messages: Sequence[int] = MESSAGES) -> None:
    """Measure collectives group by group, the slowest rank's seconds; every rank calls this at the same time."""
    for ranks, across, members in groups_of(dist.get_world_size(), nodes):
        group = dist.new_group(members)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            for bytes_ in messages:
                count = max(1, bytes_ // 4 // ranks)
                seconds = _slowest(kind, count, ranks, group, dist.get_rank() in members, place)
                found.add(("collectives", kind, ranks, across), (count * ranks * 4,), (seconds,))
                if seconds > SLOW:
                    break
        if dist.get_rank() in members:
            dist.destroy_process_group(group)


def _slowest(kind: str, count: int, ranks: int, group: Any, member: bool, place: torch.device) -> float:
    """Median seconds of the slowest rank of a group; ``count``: numbers of a rank's part."""
    full, part = torch.zeros(count * ranks, device=place), torch.zeros(count, device=place)
    calls: Mapping[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(full, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(full), full, group=group),
    }
    taken = []
    for turn in range(6 * member):
        dist.barrier(group=group)
        begun = perf_counter()
        calls[kind]()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        if turn:
            taken.append(perf_counter() - begun)
    slowest = torch.tensor(median(taken) if taken else 0.0, dtype=torch.float64, device=place)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _check_nodes(world: int, nodes: int) -> None:
    """Raise InputError for nodes that do not divide the processes."""
    if world % nodes:
        raise InputError(f"{world} process{'es' * (world > 1)} on {nodes} nodes: give a number of nodes that divides the "
                         "processes (torchrun starts several)")


def as_toml(found: Profile, name: str, source: str, nodes: int = 1) -> str:
    """A cluster file: a device ``like`` the catalogue's with the tables, and a node where collectives were measured."""
    world = max((table[2] for table in found.tables if table[0] == "collectives"), default=1)
    _check_nodes(world, nodes)
    node = Cluster.parse(f"{found.device}:1x1").node.name
    lines = [f"# {source}", "[cluster]", f'devices = "{name}@{name}:{nodes}x{world // nodes}"', "",
             f"[device.{name}]", f'like = "{found.device}"', "", f"[node.{name}]", f'like = "{node}"']

    def column(key: str, values: Sequence[float], unit: str) -> str:
        shown = ", ".join(f"{value:.6g}" if unit == "us" else f"{value:.0f}" for value in values)
        return f'{key} = {{values = [{shown}], unit = "{unit}", source = "{source}"}}'

    for table in sorted(found.tables, key=repr):
        rows, kind = found.rows(table), table[0]
        seconds = [[value * 1e6 for value in column_] for column_ in zip(*(taken for _, taken in rows), strict=True)]
        if kind == "collectives":
            lines += ["", f"[[node.{name}.collectives]]", f'kind = "{table[1]}"', f"ranks = {table[2]}",
                      f"nodes = {table[3]}", column("bytes", [key[0] for key, _ in rows], "B"),
                      column("seconds", seconds[0], "us")]
            continue
        lines += ["", f"[[device.{name}.{kind}]]"]
        if kind == "streams":
            lines += [f'kind = "{table[1]}"', f'dtype = "{table[2]}"', column("bytes", [key[0] for key, _ in rows], "B"),
                      column("seconds", seconds[0], "us")]
            continue
        lines += [f'dtype = "{table[1]}"', f"shapes = {[list(key) for key, _ in rows]}"]
        if kind == "attentions":
            lines += [f"causal = {str(table[2]).lower()}", column("forward", seconds[0], "us"),
                      column("backward", seconds[1], "us")]
        else:
            lines.append(column("seconds", seconds[0], "us"))
    return "\n".join(lines) + "\n"
