"""How two plans differ, equal blocks together, in the one notation: ``diff(old, new)``.

    heads        mesh, cluster, precision, what is predicted
    time         every part of the step that differs, memory by kind
    blocks       how parameters are kept, their shardings, and those of results
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from meshwright.cost.cluster import ClusterError
from meshwright.ir.plan import Plan
from meshwright.ir.prediction import Prediction
from meshwright.ir.quantities import bytes_text, seconds_text
from meshwright.ir.writing.canonical import canonical
from meshwright.ir.writing.paths import fold_paths
from meshwright.views.facts import Facts, facts_of
from meshwright.views.prices import Prices
from meshwright.views.words import cluster_words, time_parts

WIDTH = 120
_TIMES = ("compute", "collectives", "parameters beside compute")


def diff(old: Plan, new: Plan) -> str:
    """What is different in ``new``; "no differences" if nothing a run depends on is."""
    if [op.name for op in old.graph.ops] != [op.name for op in new.graph.ops]:  # one comes from a file, or from another trace
        old, new = canonical(old), canonical(new)
    before, after = facts_of(old), facts_of(new)
    lines = [f"{what}: {a} -> {b}" for what, a, b in _heads(old, new) if a != b]
    theirs = {op.name: (op.target, op.args) for op in old.graph.ops}
    ours = {op.name: (op.target, op.args) for op in new.graph.ops}
    if theirs != ours or {n: v.shape for n, v in old.graph.values.items()} != {n: v.shape for n, v in new.graph.values.items()}:
        changed = sum(theirs.get(name) != ours.get(name) for name in {**theirs, **ours})
        lines.append(f"the plans are for different models or inputs: {changed} of {len({**theirs, **ours})} operators differ")
    for change, paths in _grouped(_group_changes(old, new)).items():
        blocks = [path for path in paths if path]
        lines += [f"block {fold_paths(blocks)}: {change}"] if blocks else []
        lines += [f"outside the blocks: {change}"] if "" in paths else []
    for change, fqns in _grouped(_parameter_changes(before, after)).items():
        lines.append(f"parameter {fold_paths(fqns)}: {change}")
    for change, modules in _grouped(_result_changes(before, after)).items():
        lines.append(f"result of {fold_paths(list(dict.fromkeys(modules)))}: {change}")
    lines += _times(before, after)
    return "\n".join(map(_wrapped, lines)) or "no differences"


def _wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _times(old: Facts, new: Facts) -> list[str]:
    """Seconds of every block and of what is outside that differ by more than a part in a thousand, equal changes together."""
    try:
        before, after = _seconds(old), _seconds(new)
    except ClusterError:
        return []
    changes: dict[str, list[str]] = {}
    for path, theirs in before.items():
        pairs = zip(_TIMES, theirs, after.get(path, theirs), strict=True)
        words = [f"{name} {_seconds_or_none(a)} -> {_seconds_or_none(b)}" for name, a, b in pairs
                 if abs(a - b) > 1e-3 * max(a, b)]
        if words:
            changes.setdefault(", ".join(words), []).append(path)
    lines = []
    for change, paths in changes.items():
        blocks = [path for path in paths if path]
        lines += [f"time of block {fold_paths(blocks)}: {change}"] if blocks else []
        lines += [f"time outside the blocks: {change}"] if "" in paths else []
    return lines


def _seconds_or_none(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "none"


def _seconds(facts: Facts) -> dict[str, tuple[float, float, float]]:
    """{block: seconds of a step: compute, collectives, and parameters gathered and reduced beside compute}."""
    prices, found = Prices(facts), dict[str, tuple[float, float, float]]()
    for number, op in enumerate(facts.plan.graph.ops):
        path, work = facts.plan.group_of(number).path, prices.op(op)
        moved = sum(edge.seconds for edge in prices.edges(op)) + sum(move.seconds for move in work.inside)
        own = (work.compute_seconds, moved, work.gather_seconds + work.reduce_seconds)
        so_far = found.get(path, (0.0, 0.0, 0.0))
        found[path] = (so_far[0] + own[0], so_far[1] + own[1], so_far[2] + own[2])
    return found


def _heads(old: Plan, new: Plan) -> list[tuple[str, str, str]]:
    def head(plan: Plan) -> dict[str, str]:
        known = plan.predicted
        return {
            "mesh": str(plan.mesh), "cluster": cluster_words(plan), "precision": plan.precision, "optimizer": plan.optimizer,
            "micro-batches": str(plan.schedule.microbatches),
            "predicted step": "unknown" if known is None else seconds_text(known.step_seconds),
            "predicted memory": "unknown" if known is None else bytes_text(known.bytes_per_rank),
            **_parts(known),
        }

    before, after = head(old), head(new)
    return [(what, before.get(what, "none"), after.get(what, "none")) for what in {**before, **after}]


def _parts(predicted: Prediction | None) -> dict[str, str]:
    """Parts of the step and of the memory, as far as they are known."""
    if predicted is None:
        return {}
    times = {f"  time of {name}": seconds_text(seconds) for name, seconds in time_parts(predicted) if name != "the rest"}
    return times | {f"  memory of {kind}": bytes_text(bytes_) for kind, bytes_ in predicted.bytes_by_kind.items()}


def _grouped(changes: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """{change: where}, so that equal changes of equal blocks become one line."""
    result: dict[str, list[str]] = {}
    for where, change in changes:
        result.setdefault(change, []).append(where)
    return result


def _group_changes(old: Plan, new: Plan) -> Iterator[tuple[str, str]]:
    theirs = {group.path: group for group in old.groups}
    for group in new.groups:
        before = theirs.get(group.path)
        if before is None:
            yield group.path, "new"
            continue
        words = [f"{name} {_show(getattr(before, name))} -> {_show(getattr(group, name))}"
                 for name in ("zero", "data_axes", "shard_axes", "recompute", "stage")
                 if getattr(before, name) != getattr(group, name)]
        if words:
            yield group.path, ", ".join(words)


def _show(value: object) -> str:
    return (",".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def _parameter_changes(old: Facts, new: Facts) -> Iterator[tuple[str, str]]:
    theirs = {stored.fqns[0]: old.type_of(value) for value, stored in old.stored.items()}
    for value, stored in new.stored.items():
        before, after = theirs.get(stored.fqns[0]), new.type_of(value)
        if before is not None and before != after:
            yield stored.fqns[0], f"{before} -> {after}"


def _result_changes(old: Facts, new: Facts) -> Iterator[tuple[str, str]]:
    for op in new.plan.graph.ops:
        for name in op.outputs:
            if name in old.plan.graph.values and new.plan.graph.values[name].differentiable and op.name in old.placed:
                before, after = old.type_of(name), new.type_of(name)
                if before != after:
                    yield op.module or "the model", f"{before} -> {after}"
