"""A plan's decisions as pins (``pins_of``): planning with all of them gives that plan, with some of them what is open is
searched. Blocks that decide the same are written once, "model.layers.0..30.mlp.up_proj:linear"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.ir.decisions import Decisions
from meshwright.ir.declared.operator import MLP, PIECES
from meshwright.ir.pins import ROOT, Pins
from meshwright.ir.sharding import format_sharding
from meshwright.ir.writing.names import CanonicalNames, Kept, choice_text, kept_text, names_of
from meshwright.ir.writing.paths import fold_parts


def pins_of(plan: Decisions) -> Pins:
    """Everything that was decided."""
    names, graph, pipeline = names_of(plan.graph), plan.graph, plan.pipeline
    found: dict[str, Any] = {
        "axes": {axis + "*" * (axis in plan.mesh.mirrored): plan.mesh.size(axis) for axis in plan.mesh.axes},
        "microbatches": plan.schedule.microbatches,
        "blocks": _blocks(plan, names),
        "operators": folded_names(
            plan, {name: choice_text(plan.assignments.get(op, {})) for op, name in names.ops.items()}, names
        ),
        "values": folded_names(plan, {names.values[name]: format_sharding(one) for name, one in plan.copies.items()}, names),
    }
    in_pieces = [op.args[6] for op in graph.ops if op.target == PIECES]
    found |= {"loss_rows": in_pieces[0]} if in_pieces else {}
    in_pieces = [op.args[5] for op in graph.ops if op.target == MLP]
    found |= {"mlp_rows": in_pieces[0]} if in_pieces else {}
    if pipeline is not None:
        starts = dict(zip((block.start for block in graph.blocks), names.blocks, strict=True))
        cuts = tuple(starts.get(at, names.ops[graph.ops[at].name]) for at in pipeline.cuts[1:-1])
        found |= {"schedule": pipeline.schedule, "virtual_stages": pipeline.stages // pipeline.degree, "stage_cuts": cuts}
    return Pins(**found)


def _blocks(plan: Decisions, names: CanonicalNames) -> dict[str, str]:
    """{paths: how their parameters are kept}."""
    kept: dict[str, list[str]] = {}
    for name, group in zip((*names.blocks, ROOT), plan.groups, strict=True):
        one = Kept(group.zero, group.data_axes, group.shard_axes, group.recompute, group.keep)
        kept.setdefault(kept_text(one) + "\n" * (name == ROOT), []).append(name)
    return {part: text.rstrip() for text, paths in kept.items() for part in parts(paths)}


def parts(paths: Sequence[str]) -> Iterator[str]:
    """The paths in as few texts as can be."""
    yield from fold_parts(paths)


def folded_names(plan: Decisions, texts: Mapping[str, str], names: CanonicalNames | None = None) -> dict[str, str]:
    """{name: text}, the names of equal blocks that say the same as one, in the order of the graph."""
    graph, names = plan.graph, names or names_of(plan.graph)
    alike: dict[tuple[int, int, int, str], list[str]] = {}
    kind_of = {}
    for block in graph.blocks:
        for at in range(block.start, block.stop):
            op = graph.ops[at]
            for result, name in enumerate(op.outputs):
                kind_of[names.values[name]] = (block.kind, at - block.start, result)
            kind_of[names.ops[op.name]] = (block.kind, at - block.start, 0)
    for number, (name, text) in enumerate(texts.items()):
        alike.setdefault((*kind_of.get(name, (-1, number, 0)), text), []).append(name)
    found: dict[str, str] = {}
    for (*_, text), together in alike.items():
        ends = {name.partition(":")[2] for name in together}
        if len(together) > 1 and len(ends) == 1 and all(":" in name for name in together):
            end = ends.pop()
            found.update((f"{part}:{end}", text) for part in parts([name.partition(":")[0] for name in together]))
        else:
            found.update(dict.fromkeys(together, text))
    return found
