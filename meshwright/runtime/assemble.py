"""Wire a program into an engine: which tensor lives in which unit, the units sharded by FSDP2, the segments in their places.

Parameters are made on the meta device and sharded there, then given memory for this rank's share alone; their contents come
from ``runtime.state.materialize``. Home of a parameter is the one block segment that reads it, else the root.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from meshwright.ir.graph import collector_paused, refs
from meshwright.ir.plan import PlanError
from meshwright.ir.program import Program, Segment, Stored
from meshwright.ir.sharding import ShardingError
from meshwright.runtime.collectives import Group
from meshwright.runtime.engine import Engine, Gathered, Runner, SegmentStep, Slot
from meshwright.runtime.groups import DataMesh, Groups, live, make_data_mesh
from meshwright.runtime.state.layout import box, global_stride, parts, placements, split_dim, under_fsdp

ROOT, UNUSED = -1, -2


def rest_dtype(stored: Stored, program: Program) -> torch.dtype:
    """The dtype at rest: parameters computed with in ``compute_dtype`` are kept in fp32."""
    is_master = program.compute_dtype is not None and not stored.buffer and stored.dtype == program.compute_dtype
    return torch.float32 if is_master else stored.dtype


def use_dtype(stored: Stored, program: Program) -> torch.dtype:
    """The dtype segments read."""
    cast = program.compute_dtype is not None and not stored.buffer and stored.dtype.is_floating_point
    return program.compute_dtype if cast and program.compute_dtype is not None else stored.dtype


def fused_axes(program: Program) -> set[tuple[str, ...]]:
    """Sets of axes that the program needs one group over."""
    mesh = program.mesh
    found = {axes for stored in program.stored for axes in (*stored.tensor.dims, stored.data_axes, stored.late_axes)}
    for segment in program.segments:
        for op in segment.graph.ops:
            for name, axes in op.kwargs:
                if op.target.startswith("mw.") and name in ("axis", "axes") and axes is not None and not isinstance(axes, str):
                    found.add(tuple(axes))
    return {key for axes in found if len(key := live(mesh, axes)) > 1}


Meshes = dict[tuple[tuple[str, ...], tuple[str, ...]], DataMesh]
"""{(data axes, shard axes): the mesh of units whose parameters are kept so}."""


def data_meshes(stored: Sequence[Stored], groups: Groups) -> Meshes:
    """The meshes that these tensors need. Making one is collective: every rank calls this with the same tensors in order."""
    meshes: Meshes = {}
    for one in stored:
        key = _data_mesh_key(one, groups)
        if under_fsdp(one, groups.mesh) and key not in meshes:
            meshes[key] = make_data_mesh(groups, *key)
    return meshes


@collector_paused()
def assemble(
    program: Program, groups: Groups, meshes: Meshes | None = None, known: Mapping[str, Tensor] | None = None,
    lend: Callable[[Stored], Callable[[], Tensor]] | None = None,
) -> Engine:
    """The engine, its tensors allocated on ``groups.device`` but not filled. Every rank calls this.

    ``meshes``: of ``data_meshes``, where the program is one rank's share of a pipeline. ``known``: tensors that other stages of
    this rank made: those that FSDP2 does not take are shared with them. ``lend``: the program has no tensors of its own, this
    gives a function that fetches each; it trains none.
    """
    meshes = data_meshes(program.stored, groups) if meshes is None else meshes
    return _Assembly(program, groups, meshes, known or {}, lend).run()


def home_of(program: Program) -> dict[str, int]:
    """{stored value: index of the one block segment that reads it, ROOT, or UNUSED}."""
    homes = {stored.value: UNUSED for stored in program.stored}
    for index, segment in enumerate(_main(program)):
        for param in segment.graph.params:
            alone = bool(segment.path) and homes[param.value] == UNUSED
            homes[param.value] = index if alone else ROOT
        for name in segment.graph.inputs:
            if name in homes:
                homes[name] = ROOT
    for name in _leaving(program):
        if name in homes:
            homes[name] = ROOT
    return homes


class _Assembly:
    """The tables while they are filled."""

    def __init__(
        self, program: Program, groups: Groups, meshes: Meshes, known: Mapping[str, Tensor],
        lend: Callable[[Stored], Callable[[], Tensor]] | None,
    ) -> None:
        self.program, self.groups, self.mesh = program, groups, program.mesh
        self.homes = home_of(program)
        self.slots: dict[str, Slot] = {}
        self.units: list[tuple[FSDPModule, int]] = []
        self.meshes, self.known, self.lend = meshes, known, lend
        self.tensors: dict[str, Tensor] = {}
        self.engine = Engine(program, self.tensors)

    def run(self) -> Engine:
        tensors, engine = self.tensors, self.engine
        for stored in self.program.stored:
            if not under_fsdp(stored, self.mesh):
                self.slots[stored.value] = self._loose(stored)
        runners = {id(segment): Runner(segment, self.groups, self.program.operators) for segment in self.program.segments}
        calls: list[Callable[..., tuple[object, ...]]] = []
        children: list[nn.Module] = []
        main = _main(self.program)
        for index, segment in enumerate(main):
            call = self._gather(self._sharded(index), runners[id(segment)], segment.zero, ())
            calls.append(call)
            children += [call] if isinstance(call, nn.Module) else []
        unused = self._gather(self._sharded(UNUSED), None, 1, ())
        children += [unused] if isinstance(unused, nn.Module) else []
        engine.root = self._root(engine, children, max((s.zero for s in main if not s.path), default=1))
        for stored in self.program.stored if self.lend is None else ():
            tensors[stored.value] = self.slots[stored.value].tensor()
        engine.units = self.units[::-1]
        engine.late = {s.value: group for s in self.program.stored if (group := self.slots[s.value].late) is not None}
        self._steps(engine, main, runners, calls)
        return engine

    def _sharded(self, home: int) -> list[Stored]:
        return [s for s in self.program.stored if self.homes[s.value] == home and under_fsdp(s, self.mesh)]

    def _loose(self, stored: Stored) -> Slot:
        """A tensor held as it is, with this rank's memory, or lent."""
        if self.lend is not None:
            use, cut = use_dtype(stored, self.program), parts(stored, self.groups)
            return Slot(None, "", None, use, cut, None, lent=self.lend(stored))
        tensor = self.known[stored.value] if stored.value in self.known else self._allocate(stored)
        data = live(self.mesh, stored.data_axes) if stored.trainable else ()
        group = self.groups.group(data) if data else None
        use, cut = use_dtype(stored, self.program), parts(stored, self.groups)
        return Slot(None, "", tensor, use, cut, group, self._late(stored), casts=self.engine.casts)

    def _late(self, stored: Stored) -> Group | None:
        """Over which its gradient is summed together with others'."""
        axes = live(self.mesh, stored.late_axes) if stored.trainable else ()
        return self.groups.group(axes) if axes else None

    def _allocate(self, stored: Stored) -> Tensor:
        share = box(stored, self.mesh, self.groups.coordinates)
        local = torch.empty([n for _, n in share], dtype=rest_dtype(stored, self.program), device=self.groups.device)
        mesh, axes = self.groups.device_mesh, self.groups.axes
        tensor: Tensor = local if mesh is None else DTensor.from_local(
            local, mesh, placements(stored, axes), run_check=False, shape=torch.Size(stored.shape),
            stride=global_stride(stored.shape),
        )
        if not stored.buffer:
            tensor = nn.Parameter(tensor, requires_grad=stored.trainable)
        return tensor

    def _gather(
        self, stored: Sequence[Stored], inside: Callable[..., object] | None, zero: int, children: Sequence[nn.Module]
    ) -> Callable[..., tuple[object, ...]]:
        """``inside`` with the parameters gathered around it: one unit per mesh and dtype, nested."""
        families: dict[tuple[object, ...], list[Stored]] = {}
        for one in stored:
            key = (_data_mesh_key(one, self.groups), rest_dtype(one, self.program), use_dtype(one, self.program))
            families.setdefault(key, []).append(one)
        for members in families.values():
            inside = self._unit(members, inside, zero, children)
            children = (inside,)
        return inside  # type: ignore[return-value]

    def _root(self, engine: Engine, children: Sequence[nn.Module], zero: int) -> Callable[..., dict[str, object]]:
        """The outermost unit. FSDP2 wants one around all others, with or without parameters of its own."""
        zero = min(zero, 2)  # its parameters are needed again at once: gathered once per step
        root = self._gather(self._sharded(ROOT), engine.body, zero, children)
        if not isinstance(root, nn.Module) and children:
            root = Gathered({}, engine.body, children)
            mesh = next(iter(self.meshes.values()))
            self.units.append((fully_shard(root, mesh=mesh.whole[mesh.data], reshard_after_forward=False), zero))
        if isinstance(root, nn.Module):
            root.to_empty(device=self.groups.device)
        return root  # type: ignore[return-value]

    def _unit(
        self, members: Sequence[Stored], inside: Callable[..., object] | None, zero: int, children: Sequence[nn.Module]
    ) -> Gathered:
        data_mesh = self.meshes[_data_mesh_key(members[0], self.groups)]
        rest = data_mesh.rest
        if len(rest) > 2:  # FSDP2 carries two dims beside its own
            rest = tuple(axis for axis in rest if any(axis in one.tensor.split_axes for one in members))
            if len(rest) > 2:
                raise ShardingError(f"parameters gathered with {members[0].fqns[0]!r} are split over {rest}: FSDP2 takes at "
                                    f"most two such axes beside the data axes")
        parameters = {f"p{i}": self._meta_parameter(one, data_mesh, rest) for i, one in enumerate(members)}
        dims = {id(parameter): split_dim(one, self.mesh) for parameter, one in zip(parameters.values(), members, strict=True)}
        unit = Gathered(parameters, inside, children)
        at_rest, in_use = rest_dtype(members[0], self.program), use_dtype(members[0], self.program)
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if at_rest != in_use and self.homes[members[0].value] != UNUSED:  # of what is never gathered torch casts no gradient
            policy = MixedPrecisionPolicy(param_dtype=in_use, reduce_dtype=torch.float32, cast_forward_inputs=False)
        sharded = fully_shard(
            unit, mesh=data_mesh.whole[data_mesh.data], reshard_after_forward=zero == 3, mp_policy=policy,
            shard_placement_fn=lambda parameter: Shard(dims[id(parameter)]),
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # the factor alone asks for an operation that gloo lacks
        self.units.append((sharded, zero))
        for name, one in zip(parameters, members, strict=True):
            self.slots[one.value] = Slot(unit, name, None, in_use, parts(one, self.groups), None, self._late(one))
        return unit

    def _meta_parameter(self, stored: Stored, data_mesh: DataMesh, rest: tuple[str, ...]) -> nn.Parameter:
        shape = stored.tensor.local_shape(stored.shape, self.mesh, self.groups.coordinates)
        local = torch.empty(shape, dtype=rest_dtype(stored, self.program), device="meta")
        if not rest:
            return nn.Parameter(local)
        return nn.Parameter(DTensor.from_local(
            local, data_mesh.whole[rest], placements(stored, rest), run_check=False, shape=torch.Size(stored.shape),
            stride=global_stride(stored.shape),
        ))

    def _steps(
        self, engine: Engine, main: Sequence[Segment], runners: Mapping[int, Runner], calls: Sequence[Callable[..., object]]
    ) -> None:
        """Segments in order. What the root owns is read once, before the first, and lies in the environment."""
        segments, program = self.program.segments, self.program
        engine.prologue = [self._once(s, runners[id(s)]) for s in segments if s.prologue]
        engine.epilogue = [self._once(s, runners[id(s)]) for s in segments if s.epilogue]
        engine.shared = {name: self.slots[name] for name, home in self.homes.items() if home == ROOT}
        late = {name for s in segments if s.epilogue for name in s.graph.outputs}
        leaving = [*(name for name in _leaving(program) if name not in late), *(one.value for one in program.collected)]
        engine.leaving = tuple(dict.fromkeys(leaving))
        engine.main = self._in_order(main, runners, calls, engine.leaving)
        engine.grounds = tuple(one.value for one in program.collected if one.ahead)
        engine.ahead = self._ahead(main, runners, calls, engine.grounds)

    def _once(self, segment: Segment, runner: Runner) -> SegmentStep:
        """What runs once a step, on what lies there."""
        read = [p.value for p in segment.graph.params]
        runner.arguments, runner.slots = (*segment.graph.inputs, *read), [self.slots[name] for name in read]
        gathered = [name for name in read if self.slots[name].holder is not None]
        if gathered:
            raise PlanError(f"what runs once a step reads parameters {gathered}, which are gathered per micro-batch; it may "
                            f"read inputs, buffers and frozen parameters")
        return SegmentStep(runner, runner, segment.graph.inputs, segment.graph.outputs)

    def _in_order(
        self, main: Sequence[Segment | None], runners: Mapping[int, Runner], calls: Sequence[Callable[..., object]],
        leaving: Collection[str],
    ) -> list[SegmentStep]:
        """The steps of these segments, None where one does not run. ``calls``: of each, with its parameters gathered."""
        steps: list[SegmentStep] = []
        needed = set(leaving)
        for index, segment in reversed(list(enumerate(main))):
            if segment is None:
                continue
            runner = runners[id(segment)]
            own = [p.value for p in segment.graph.params if self.homes[p.value] == index]
            shared = [p.value for p in segment.graph.params if self.homes[p.value] != index]
            inputs = (*segment.graph.inputs, *shared)
            runner.arguments, runner.slots = (*inputs, *own), [self.slots[name] for name in own]
            drops = {*inputs, *segment.graph.outputs} - needed
            needed |= set(inputs)
            steps.append(SegmentStep(runner, calls[index], inputs, segment.graph.outputs, tuple(sorted(drops))))  # type: ignore[arg-type]
        return steps[::-1]

    def _ahead(
        self, main: Sequence[Segment], runners: Mapping[int, Runner], calls: Sequence[Callable[..., object]],
        grounds: Collection[str],
    ) -> list[SegmentStep]:
        """The steps that make the ``grounds``. What has parameters gathered around it runs whole, the rest as far as needed."""
        found: list[Segment | None] = [None] * len(main)
        parts, ways, wanted = dict(runners), list(calls), set(grounds)
        for index, segment in reversed(list(enumerate(main))):
            part = segment.towards(wanted)
            if part is None:
                continue
            if isinstance(calls[index], nn.Module):
                part = segment
            else:
                ways[index] = parts[id(part)] = Runner(part, self.groups, self.program.operators)
            found[index] = part
            wanted.update(part.graph.inputs, (p.value for p in part.graph.params))
        return self._in_order(found, parts, ways, grounds)


def _data_mesh_key(stored: Stored, groups: Groups) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return live(groups.mesh, stored.data_axes), live(groups.mesh, stored.shard_axes)


def _main(program: Program) -> list[Segment]:
    return [segment for segment in program.segments if segment.repeated]


def _leaving(program: Program) -> list[str]:
    """Values that leave the program."""
    names = [port.name for port in program.outputs] + [ref.name for ref in refs(program.output_tree)]
    return [*names, *(new for _, new in program.mutations), *([program.loss] if program.loss else [])]
