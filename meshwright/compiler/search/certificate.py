"""The certificate of a search: the candidates that it looked at, which came second and why, and the proven bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.compiler.placement.choices import attended
from meshwright.compiler.search.bounds import ROUNDING
from meshwright.compiler.search.candidates import PIECE, SHORT, Candidate
from meshwright.compiler.search.fitting import Result, prediction_of
from meshwright.compiler.search.sweep import Sweep
from meshwright.compiler.structure.structure import SLIGHT
from meshwright.ir.prediction import Certificate, Prediction, SeenCandidate
from meshwright.ir.quantities import seconds_text

_SHOWN = 12
"""Candidates of data and tensor ranks that are listed, best first."""


def certificate(best: Result, sweep: Sweep) -> Certificate:
    """Of the best result.

    If its program left room that the search had not counted, it is faster than was counted, as other candidates may be: then no
    more is proven than the gap of what was counted.
    """
    bound, gap_asked = sweep.bound, sweep.task.gap
    gap = max(0.0, 1.0 - bound / max(best.seconds, best.counted_seconds))
    late = sweep.late or best.fitted.status == "time_limit"
    return Certificate(
        objective_seconds=best.seconds,
        bound_seconds=(1.0 - gap) * best.seconds,
        status="optimal" if gap <= gap_asked else "time_limit" if late else "gap",
        considered=sweep.bounds.counts.considered,
        pruned=sweep.pruned,
        infeasible=sweep.bounds.counts.infeasible,
        solved=len(sweep.solved) + sum(one.step_seconds is not None for one in sweep.seen),
        runner_up=_runner_up(best, sweep),
        candidates=(*sweep.seen, *(
            SeenCandidate(str(e.candidate), e.candidate.microbatches, e.seconds, e.zero) for e in sweep.solved[:_SHOWN]
        )),
        assumes=tuple(_assumptions(sweep, bound)),
    )


def _assumptions(sweep: Sweep, bound: float) -> Iterator[str]:
    """What the bound takes for granted."""
    if sweep.solved or sweep.pruned:
        yield "placements are those that are best with memory unlimited"
    if sweep.solved[1:] or sweep.pruned:
        slower = f"of pipelines, and of what so takes {sweep.near:.0%} longer than the best or does not fit"
        alike = slower if sweep.unlike else "of what was not made into a plan"
        yield f"data ranks and micro-batches divide the batch; {alike}, blocks keep parameters alike"
    pins, cluster = sweep.task.pins, sweep.task.cluster
    staged = cluster.world > 1 and pins.pp != 1 and (sweep.solved or sweep.pruned)
    if staged and len(sweep.task.recompute) > 1:
        yield "stages recompute no more than memory asks for"
    if staged and pins.stage_cuts is None:
        yield "stages start where a block does, or what is before and behind them"
    if not pins.says("shard") and cluster.world > 2 and (sweep.solved or sweep.pruned):
        yield "the state of a parameter is shared by all data ranks, by those of a node or by those of 4, 16, ... nodes"
    if sweep.task.experts > 1 and pins.ep != 1 and (sweep.solved or sweep.pruned):
        yield ("where data ranks share out experts, these read and leave tokens as they would if each rank had them all; a "
               "token goes once to each rank that has some of its experts, or once to those of them on a node")
    if cluster.world > 1 and pins.tp != 1 and (sweep.solved or sweep.pruned):
        yield (f"tensor ranks split every operator with weights that they can split, if these are more than 1/{SLIGHT} of the "
               "largest beside them")
    if not sweep.freed and cluster.world > 1:
        yield "an axis of the mesh is for data, for tensors or for stages"
    if cluster.world > 1 and not pins.says("cp") and attended(sweep.task.graph, sweep.task.rules):
        yield (f"a rank's piece of a sequence has {PIECE} tokens or more, {SHORT} where a node has more ranks than there are "
               "pieces, and their number is a power of two unless they are a node's that have no sample each")
        if not pins.says("attention") and pins.ulysses is None:
            yield ("ranks of a sequence that exchange it for heads, beside others that do not, are as many as fill a node, or "
                   "on one node as there are heads for where that is not all")
    if sweep.freed and cluster.world > 2 and pins.dp is None and pins.tp is None:
        yield "a mesh whose axes may split anything has at most two, a node's devices together where there are several nodes"
        if sweep.aside:
            yield f"of such meshes {len(sweep.aside)} are left out, for memory is short: not the nodes and their devices"
    if sweep.firm < bound * (1 - 1e-12):
        yield (f"rounding to whole tiles saves a sample at most {ROUNDING:.0%} of its share of a large batch, exchanging a "
               "sequence for heads what it waits for without")
    if sweep.limited or sweep.task.falls > 1.0 or any(one.outcome == "does not fit" for one in sweep.seen):
        yield ("memory is what is counted block by block, and micro-batches other than those tried, powers of two and three "
               "times them, do not help")


def _runner_up(best: Result, sweep: Sweep) -> str:
    """The best of another layout or schedule than the plan's, and the part of the step that it spends more time on."""
    parts = _parts(prediction_of(best.fitted.plan))
    others = [(one.seconds, one.name, _parts(prediction_of(one.fitted.plan)), one.candidate) for one in sweep.results]
    others += [(one.seconds, str(one), dict(one.parts), one.candidate) for one in sweep.open]
    others = [other for other in others if _shape(other[-1]) != _shape(best.candidate)]
    if not others:
        return ""
    seconds, name, theirs, _ = min(others, key=lambda other: other[0])
    if parts.keys() != theirs.keys():
        parts, theirs = _coarse(parts), _coarse(theirs)
    more = {part: theirs.get(part, 0.0) - parts.get(part, 0.0) for part in {**theirs, **parts}}
    most = max(more, key=lambda part: more[part])
    return f"{name}: {seconds_text(seconds)}, {seconds_text(max(0.0, more[most]))} more of {most}"


def _shape(candidate: Candidate) -> tuple[object, ...]:
    if candidate.layout is not None:
        return (candidate.layout.mesh,)
    return candidate.pp, candidate.data, candidate.tensor, candidate.schedule


def _parts(predicted: Prediction) -> dict[str, float]:
    """Seconds of the step by what they are spent on, as far as these are told apart."""
    found = {
        "compute": predicted.compute_seconds, "exposed communication": predicted.exposed_communication_seconds,
        "recomputation": predicted.recomputation_seconds, "optimizer": predicted.optimizer_seconds,
        "pipeline bubble": predicted.pipeline_bubble_seconds, "outside the schedule": predicted.outside_schedule_seconds,
    }
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def _coarse(parts: Mapping[str, float]) -> dict[str, float]:
    """With recomputation and optimizer in compute, as blocks are predicted."""
    inner = ("compute", "recomputation", "optimizer")
    rest = {name: seconds for name, seconds in parts.items() if name not in inner}
    return {"compute": sum(parts.get(name, 0.0) for name in inner), **rest}
