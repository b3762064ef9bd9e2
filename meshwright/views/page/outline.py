"""The operators that a page shows, and the modules that they lie in: repeated blocks folded.

    Shown      an operator that stands for equal ones of other blocks, or for itself
    Entry      a module, a run of equal blocks that follow each other on one stage, or an operator

Of a run of blocks with the same choices the first stands for all. A module whose only content is one operator is that operator.
What is made of inputs and constants alone (masks, position tables) is gathered in an entry of its own beside the module's other
operators, because nobody looks for it there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.ir.graph import Op
from meshwright.ir.plan import Plan
from meshwright.ir.writing.paths import fold_paths

GLUE = "masks and positions"
MOST_RUNS = 12


@dataclass(frozen=True)
class Shown:
    """An operator that stands for equal ones.

    op: the first of them
    copies: all of them, itself among them
    run: the first of the blocks that it stands in, -1 outside of blocks
    stages: those of the first copy and of the last
    """

    op: Op
    copies: tuple[Op, ...]
    run: int
    stages: tuple[int, int]


@dataclass
class OutlineEntry:
    """One line of the outline.

    kind: "module", "run" or "op"
    label: what it is called there
    path: of the module
    parent: the index of the entry that it lies in, -1 for the root's
    times, run: of a run, how many blocks it stands for, and the first of them
    shown: of an operator
    children: indices of the entries that lie in it
    """

    kind: str
    label: str
    path: str
    parent: int
    times: int = 1
    run: int = -1
    shown: Shown | None = None
    children: list[int] = field(default_factory=list)


def shown(plan: Plan) -> list[Shown]:
    """The operators to show, in order."""
    graph, found, at = plan.graph, list[Shown](), 0
    for run in _runs(plan):
        first = graph.blocks[run[0]]
        found += [_alone(plan, number) for number in range(at, first.start)]
        starts = [graph.blocks[number].start for number in run]
        for offset in range(first.stop - first.start):
            copies = tuple(graph.ops[start + offset] for start in starts)
            stages = _stage(plan, starts[0] + offset), _stage(plan, starts[-1] + offset)
            found.append(Shown(copies[0], copies, run[0], stages))
        at = graph.blocks[run[-1]].stop
    return found + [_alone(plan, number) for number in range(at, len(graph.ops))]


def _alone(plan: Plan, number: int) -> Shown:
    op, stage = plan.graph.ops[number], _stage(plan, number)
    return Shown(op, (op,), -1, (stage, stage))


def _stage(plan: Plan, number: int) -> int:
    return 0 if plan.pipeline is None else plan.pipeline.stage_of(number)


def _runs(plan: Plan) -> list[list[int]]:
    """Indices of equal blocks that follow each other without anything between. Stages part them, and so does how they are kept,
    as long as that leaves few runs to look at."""
    for fine in (("stage", "kept"), ("kept",), ()):
        runs = list(_equal(plan, fine))
        if len(runs) <= MOST_RUNS:
            break
    return runs


def _equal(plan: Plan, fine: Sequence[str]) -> Iterator[list[int]]:
    """Runs of blocks with the same choices for their operators, and the same ``fine`` things."""
    graph, run = plan.graph, list[int]()
    readers = graph.consumers()
    last: object = None
    for number, block in enumerate(graph.blocks):
        ops = graph.ops[block.start : block.stop]
        choices = tuple(tuple(plan.assignments.get(op.name, {}).items()) for op in ops)
        inner = (name for op in ops for name in op.outputs if readers[name] and readers[name][-1] < block.stop)
        stages = {_stage(plan, at) for at in (block.start, block.stop - 1)}
        key = (
            block.kind, choices, tuple(plan.copies.get(name) for name in inner),
            replace(plan.groups[number], path="", stage=0) if "kept" in fine else None,
            tuple(sorted(stages)) if "stage" in fine else None,
        )
        whole = "stage" not in fine or len(stages) == 1
        if run and not (graph.blocks[run[-1]].stop == block.start and whole and key == last):
            yield run
            run = []
        run.append(number)
        last = key
    if run:
        yield run


def outline(plan: Plan, ops: Sequence[Shown]) -> list[OutlineEntry]:
    """The nodes in the order of the operators, parents before their children; the first is the model."""
    nodes = [OutlineEntry("module", "the model", "", -1)]
    at: dict[tuple[str, int], int] = {("", -1): 0}
    free = plan.graph.parameter_free
    runs = {one.run: len(one.copies) for one in ops if one.run >= 0}
    for one in ops:
        parent = _home(plan, one, nodes, at, runs)
        if one.run < 0 and one.op.name in free:
            parent = _child(nodes, at, (f"{one.op.module}\0", -1), OutlineEntry("module", GLUE, one.op.module, parent))
        nodes.append(OutlineEntry("op", short(one.op), one.op.module, parent, shown=one))
    for number, node in enumerate(nodes):
        if node.parent >= 0:
            nodes[node.parent].children.append(number)
    return _merged(nodes)


def _home(plan: Plan, one: Shown, nodes: list[OutlineEntry], at: dict[tuple[str, int], int], runs: Mapping[int, int]) -> int:
    """The node of an operator's module, made with all around it where it is new."""
    block = plan.graph.blocks[one.run] if one.run >= 0 else None
    parent, path = 0, ""
    for part in one.op.module.split(".") if one.op.module else []:
        path = f"{path}.{part}" if path else part
        inside = block is not None and (path == block.path or path.startswith(f"{block.path}."))
        made = OutlineEntry("module", part, path, parent)
        if block is not None and path == block.path:
            blocks = plan.graph.blocks[one.run : one.run + runs[one.run]]
            folded = fold_paths([b.path for b in blocks])
            label = folded.removeprefix(path.removesuffix(part))
            made = OutlineEntry("run", label, path, parent, times=len(blocks), run=one.run)
        parent = _child(nodes, at, (path, one.run if inside else -1), made)
    return parent


def _child(nodes: list[OutlineEntry], at: dict[tuple[str, int], int], key: tuple[str, int], node: OutlineEntry) -> int:
    if key not in at:
        at[key] = len(nodes)
        nodes.append(node)
    return at[key]


def _merged(nodes: list[OutlineEntry]) -> list[OutlineEntry]:
    """The nodes without modules that hold one operator and nothing else: it takes their name."""
    gone: set[int] = set()
    for number, node in enumerate(nodes):
        if node.kind == "module" and number and len(node.children) == 1 and nodes[node.children[0]].kind == "op":
            child = nodes[node.children[0]]
            if node.label != GLUE:
                child.label = f"{node.label} · {child.label}"
            child.parent = node.parent
            gone.add(number)
    index = {old: new for new, old in enumerate(number for number in range(len(nodes)) if number not in gone)}
    kept = [nodes[number] for number in index]
    for node in kept:
        node.parent, node.children = index.get(node.parent, -1), []
    for number, node in enumerate(kept):
        if node.parent >= 0:
            kept[node.parent].children.append(number)
    return kept


def short(op: Op) -> str:
    """The operator's name without library and overload: "linear" of aten.linear.default."""
    return op.target.split(".", 2)[1] if op.target.count(".") else op.target


def keys(ops: Sequence[Op]) -> dict[str, tuple[str, str, int]]:
    """{name: (module, target, which of them)}: the same operator in another capture of the same model."""
    count: dict[tuple[str, str], Iterator[int]] = {}
    return {op.name: (op.module, op.target, next(count.setdefault((op.module, op.target), itertools.count()))) for op in ops}
