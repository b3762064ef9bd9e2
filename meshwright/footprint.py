"""The memory of a plan, exactly: its program for the rank that holds most, replayed (``cost.memory.peak``).

The search counts memory as a sum over blocks or units, which is what a linear program can hold. A plan is judged by its
program: what is alive at the worst moment of the step. The first rank (of a stage) has the largest piece of everything that
is split. ``Footprints.fits`` is what the search is handed, so that it need not know the passes that lower a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from meshwright.cost.catalogue import Device
from meshwright.cost.memory.fsdp import OWN, Software
from meshwright.cost.memory.peak import Peak, peak
from meshwright.ir.plan import Plan
from meshwright.ir.prediction import Prediction
from meshwright.ir.program import Program
from meshwright.ir.rule import Rules
from meshwright.passes import PASSES, cut_for_ranks, fuse_gathers, rank_program

LOOKED_AT = 4
"""Ranks of a pipeline that a plan is judged by: those that hold most by the search's sum, beside the first and the last
stage's. The rest keep that sum, which is a little higher than the replay."""


def footprints(
    plan: Plan, rules: Rules, state_bytes: float, ranks: Collection[int] | None = None, device: Device | None = None,
    room: float | None = None,
) -> dict[int, Peak]:
    """The worst moment of a training step, of a rank of every stage group by pipeline rank (without a pipeline: of rank 0).
    ``ranks``: of the pipeline, all if not given; ``device``: its software may hold more, or less, than programs of this
    package do; ``room``: bytes of a device for which torch's allocator is replayed, too (``Peak.reserved``)."""
    return dict(_peaks(plan, rank_program(plan, rules, 0, _passes(device)), state_bytes, ranks, _software(device), room))


def _passes(device: Device | None) -> list[Callable[[Program], Program]]:
    """What lowers a plan to a program that holds what a device's software holds."""
    return [step for step in PASSES if step is not fuse_gathers or device is None or not device.keeps_gathered]


def _software(device: Device | None) -> Software:
    if device is None:
        return OWN
    return Software(
        device.narrow_sums, device.buckets, device.plain_loss, device.kept_logits, device.keeps_heads, device.flat_state,
        device.plain_collectives, device.packed, device.narrow_loss, device.fused_activations, device.flat_units,
        device.own_units, device.gather_buffer,
    )


def _peaks(
    plan: Plan, program: Program, state_bytes: float, ranks: Collection[int] | None, software: Software,
    room: float | None = None,
) -> Iterator[tuple[int, Peak]]:
    """``program``: of rank 0 of the whole model."""
    if plan.pipeline is None:
        yield 0, peak(program, state_bytes, software, room)
        return
    apart = plan.mesh.world // plan.pipeline.degree
    chosen = range(plan.pipeline.degree) if ranks is None else ranks
    parts = cut_for_ranks(program, plan.pipeline, [r * apart for r in chosen])
    for rank, part in zip(chosen, parts, strict=True):
        yield rank, peak(part, state_bytes, software, room)


@dataclass
class Footprints:
    """Judges plans one after the other: the program of the whole model is lowered once for plans that differ in recomputation
    alone. ``device``: its software may hold more, or less, than programs of this package do; ``all_ranks``: of a plan that does
    not fit, too, not only those up to the first for which a device has no room."""

    rules: Rules
    state_bytes: float
    device: Device
    all_ranks: bool = True
    _lowered: tuple[Plan, Program] | None = None

    def fits(self, plan: Plan) -> Prediction:
        """The plan's prediction with the bytes that its program holds; ``.fits`` says whether a device has room for them."""
        assert plan.predicted is not None
        counted = plan.predicted.bytes_per_pipeline_rank
        ranks: list[int] = []
        if plan.pipeline is not None:
            fullest_first = sorted(range(len(counted)), key=lambda rank: -counted[rank])
            ranks = list(dict.fromkeys((*fullest_first[:LOOKED_AT], 0, plan.pipeline.stage_rank[-1])))
        found = dict[int, Peak]()
        for rank, one in _peaks(plan, self._program(plan), self.state_bytes, ranks, _software(self.device)):
            found[rank] = one
            if one.bytes > plan.predicted.capacity_bytes and not self.all_ranks:
                break
        fullest = max(found.values(), key=lambda one: one.bytes)
        held = {rank: one.bytes for rank, one in found.items()}
        return replace(
            plan.predicted, bytes_per_rank=fullest.bytes, bytes_by_kind=dict(fullest.kinds),
            bytes_per_pipeline_rank=tuple(held.get(rank, min(sum_, fullest.bytes)) for rank, sum_ in enumerate(counted)),
        )

    def _program(self, plan: Plan) -> Program:
        if self._lowered is None or not _alike(plan, self._lowered[0]):
            self._lowered = plan, rank_program(plan, self.rules, 0, _passes(self.device))
        recompute = {group.path: group.recompute for group in plan.groups}
        program = self._lowered[1]
        segments = (replace(s, recompute=recompute[s.path]) if s.repeated else s for s in program.segments)
        return replace(program, segments=tuple(segments))


def _alike(plan: Plan, other: Plan) -> bool:
    """Whether two plans lower to the same program but for recomputation."""
    groups = [[replace(group, recompute="none") for group in one.groups] for one in (plan, other)]
    same = plan.graph is other.graph and plan.assignments is other.assignments and plan.copies is other.copies
    settings = [(one.mesh, one.pipeline, one.precision) for one in (plan, other)]
    return same and plan.schedule is other.schedule and groups[0] == groups[1] and settings[0] == settings[1]
