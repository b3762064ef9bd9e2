"""The words in which every view says the same things: header lines, degrees, parts of a step, how a block is kept.

Numbers are printed with their unit by ``ir.quantities``; shardings in the one notation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.cost.spread import apart
from meshwright.ir.mesh import PP, ROUTED, SEQUENCE, role_of
from meshwright.ir.pins import ATTENTION, ULYSSES, WINDOW
from meshwright.ir.plan import GroupChoice, Plan
from meshwright.ir.prediction import Prediction, SeenCandidate
from meshwright.ir.quantities import bytes_text, count_text, seconds_text
from meshwright.ir.rule import SHARED, VARYING
from meshwright.ir.serialize import digest
from meshwright.ir.writing.canonical import canonical
from meshwright.ir.writing.versions import prices
from meshwright.views.facts import Facts

_PARTS = (
    ("compute", "compute_seconds"), ("exposed communication", "exposed_communication_seconds"),
    ("recomputation", "recomputation_seconds"), ("optimizer", "optimizer_seconds"),
    ("pipeline bubble", "pipeline_bubble_seconds"), ("outside the schedule", "outside_schedule_seconds"),
)


def as_read(plan: Plan) -> Plan:
    """The plan as its file says it, where pieces of the graph that are no modules are blocks: these are called by their first
    operators, and what a trace calls an operator says nothing to a reader."""
    ops = {op.name for op in plan.graph.ops}
    return canonical(plan) if any(block.path in ops for block in plan.graph.blocks) else plan


def cluster_words(plan: Plan) -> str:
    """The cluster's name; with a digest of its numbers where they are not those of the catalogue."""
    own = f" (numbers of its own, {digest(plan.devices)[:8]})" if plan.devices else ""
    return (plan.cluster or "an unnamed cluster") + own


def header(facts: Facts) -> list[tuple[str, str]]:
    """(what, text): the lines above every view of a plan."""
    plan, graph = facts.plan, facts.plan.graph
    count = sum(not param.buffer for param in graph.params)
    total = sum(graph.values[param.value].numel for param in graph.params if not param.buffer)
    lines = [
        ("plan", f"{plan.mesh} on {cluster_words(plan)}, {count_text(plan.mesh.world, 'device')}"),
        ("axes", axes_words(facts)),
        ("model", f"{total:,} parameters in {count} tensors, {len(graph.ops)} operators, {len(graph.blocks)} blocks"),
        ("step", step_words(plan)),
        ("predicted", predicted_words(plan.predicted)),
        ("time", time_words(plan.predicted)),
        ("memory", memory_words(plan.predicted)),
    ]
    proof = plan.certificate
    if proof is None:
        return lines
    if proof.considered:
        lines.append(("search", f"{count_text(proof.considered, 'candidate')} considered, {proof.pruned:,} pruned by bound, "
                                f"{proof.infeasible:,} impossible, {proof.solved:,} solved"))
    if proof.runner_up:
        lines.append(("runner-up", proof.runner_up))
    lines.append(("certificate", f"gap {proof.gap:.2%} (objective {seconds_text(proof.objective_seconds)}, lower bound "
                                 f"{seconds_text(proof.bound_seconds)}, {proof.status})"))
    if proof.assumes:
        lines.append(("", f"an estimate, which assumes: {'; '.join(proof.assumes)}"))
    return lines


def axis_roles(facts: Facts) -> dict[str, list[str]]:
    """{axis: what it does}: "stages" (of the pipeline), "sequence" (it splits that; how attention runs), "data" (gradients are
    summed over it), "tensor" (it splits parameters), "experts" (it splits those), "zero" (it splits their state at rest)."""
    staged = facts.plan.pipeline is not None
    roles: dict[str, list[str]] = {axis: ["stages"] if staged and axis == PP else [] for axis in facts.plan.mesh.axes}
    for axis, found in roles.items():
        if role_of(axis) == SEQUENCE:
            forms = sorted(_attention_forms(facts, axis))
            found.append(f"sequence, attention by {' and '.join(forms)}" if forms else "sequence")
        if any(axis in group.data_axes for group in facts.plan.groups):
            found.append("data")
        if any(axis in stored.tensor.split_axes for stored in facts.stored.values()):
            found.append("experts" if role_of(axis) in ROUTED else "tensor")
        if any(group.zero and axis in group.shard_axes for group in facts.plan.groups):
            found.append("zero")
    return roles


def _attention_forms(facts: Facts, axis: str) -> set[str]:
    """How attention runs that an axis splits along the sequence: by an algorithm of its rule, or by heads."""
    found = set()
    for op in facts.plan.graph.ops:
        factor = facts.plan.assignments.get(op.name, {}).get(axis)
        if factor is not None and facts.rules[op.name].algorithms:
            found.add(factor if factor in facts.rules[op.name].algorithms else ULYSSES)
    return found


def axes_words(facts: Facts) -> str:
    """Every axis with its size and what it does."""
    roles, mesh = axis_roles(facts), facts.plan.mesh
    return ", ".join(f"{axis}={mesh.size(axis)} ({' + '.join(roles[axis]) or 'replicas'})" for axis in mesh.axes) or "none"


def step_words(plan: Plan) -> str:
    """Micro-batches, stages, ZeRO levels, recomputation, precision, optimizer."""
    words = [f"micro-batches {plan.schedule.microbatches}"]
    pipeline = plan.pipeline
    if pipeline is not None:
        words.append(f"{pipeline.stages} stages on {pipeline.degree} ranks under {pipeline.schedule}")
    words.append("ZeRO " + "/".join(map(str, sorted({group.zero for group in plan.groups}))))
    kinds = sorted({group.recompute for group in plan.groups} - {"none"})
    count = sum(group.recompute != "none" for group in plan.groups)
    words += [f"{'/'.join(kinds)} recomputation of {count} blocks"] if kinds else []
    return ", ".join([*words, f"precision {plan.precision}", f"optimizer {plan.optimizer}"])


def predicted_words(predicted: Prediction | None) -> str:
    """The step, throughput and MFU, as far as they are known; whether they were made with other prices."""
    if predicted is None:
        return "unknown"
    words = [f"step {seconds_text(predicted.step_seconds)}"]
    if predicted.low_seconds is not None and predicted.high_seconds is not None:
        words[0] += f" ({seconds_text(predicted.low_seconds)} to {seconds_text(predicted.high_seconds)})"
    if predicted.tokens_per_second is not None:
        words.append(f"{predicted.tokens_per_second:,.0f} tokens/s")
    if predicted.tflops_per_device is not None:
        rate = predicted.tflops_per_device
        words.append(f"{f'{rate:,.1f}' if rate >= 0.95 else f'{rate:.2g}'} TFLOP/s per device")
    if predicted.mfu is not None:
        words.append(f"MFU {predicted.mfu:.1%}")
    if predicted.prices != prices():
        words.append("by other prices than this version's (mw.reprice makes new ones)")
    return ", ".join(words)


def time_parts(predicted: Prediction | None) -> list[tuple[str, float]]:
    """The parts of the step that are known, in one order; what they leave of it is "the rest"."""
    if predicted is None:
        return []
    least = 1e-9 * predicted.step_seconds  # below is rounding
    found = [(name, seconds) for name, key in _PARTS if (seconds := getattr(predicted, key)) and seconds > least]
    rest = predicted.step_seconds - sum(seconds for _, seconds in found)
    return found + ([("the rest", rest)] if rest > 1e-3 * predicted.step_seconds else [])


def not_told_apart(seen: Sequence[SeenCandidate]) -> list[bool]:
    """Of each of some candidates, whether its prediction is so near the best that measured runs do not tell the two apart
    (``cost.spread.apart``); of none if there is no second one."""
    near = min((one.step_seconds for one in seen if one.step_seconds is not None), default=0.0) * (1 + apart())
    alike = [one.step_seconds is not None and one.step_seconds <= near for one in seen]
    return alike if sum(alike) > 1 else [False] * len(seen)


def time_words(predicted: Prediction | None) -> str:
    """The parts of the step with their shares."""
    parts = time_parts(predicted)
    if predicted is None or not predicted.step_seconds or parts[0][0] == "the rest":
        return "not told apart"
    return " + ".join(f"{name} {seconds_text(part)} ({part / predicted.step_seconds:.1%})" for name, part in parts)


def memory_words(predicted: Prediction | None) -> str:
    """Bytes of the fullest device by kind against what it has."""
    if predicted is None:
        return "unknown"
    total, capacity = predicted.bytes_per_rank, predicted.capacity_bytes
    largest = sorted(predicted.bytes_by_kind.items(), key=lambda item: -item[1])
    kinds = " + ".join(f"{name} {bytes_text(value)}" for name, value in largest if value)
    text = f"{bytes_text(total)} per device of {bytes_text(capacity)} ({total / capacity:.1%})"
    free = f", {bytes_text(predicted.free_bytes)} left free" if predicted.free_bytes else ""
    return text + free + (f" = {kinds}" if kinds else "")


def kept_words(group: GroupChoice) -> str:
    """How a block keeps its parameters."""
    words = [f"ZeRO {group.zero}", f"recompute {group.recompute}"]
    words += [f"gradients summed over {', '.join(group.data_axes)}"] if group.data_axes else []
    words += [f"state split over {', '.join(group.shard_axes)}"] if group.zero and group.shard_axes else []
    words += ["weights stay gathered over the step"] if group.keep else []
    return ", ".join(words)


def assignment_words(assignment: Mapping[str, str]) -> str:
    """The factor that every axis splits."""
    words = [
        f"every rank of {axis} for itself, gradients summed later" if factor == VARYING
        else f"{axis} sums linear group {factor[1:] or 0} later" if factor.startswith("+")
        else f"{axis} splits the sequence by {factor}" if factor in (*ATTENTION, WINDOW)
        else f"{axis} splits query heads, which share key heads" if factor == SHARED else f"{axis} splits {factor}"
        for axis, factor in assignment.items()
    ]
    return ", ".join(words) or "every rank does all of it"
