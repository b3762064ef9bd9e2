"""From the plan to one rank's program: shapes become local, placements become collectives.

Walk the graph in order. For every operator the rule and the plan's assignment say what each operand must be
(``rule.place``); a value that is not so yet is resharded by the steps of ``reshard`` - the same steps that were priced -
first to the sharding its readers share (``plan.copies``), then to what this reader needs, each form once per segment. The
call is then localized by its rule. Runs of operators of one block (and of one pipeline stage) become a segment, what lies
between them root segments; operators of the prologue come first, in a segment of their own, those of the epilogue last, which
read what micro-batches made under names of its own: there it is whole.

A parameter enters a segment in its tensor placement, read differently (``~``) over the group's data axes: FSDP2 gathers it
and sums its gradient. Over another axis over which all its readers want ``~`` the runtime sums it too, if it is small (a norm
weight under sequence parallelism; ``Stored.late_axes``); else the segment itself varies it. Over a data axis where an operator
reads it as invariant, ``unvary`` shares its gradient out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch

from meshwright.ir.declared.again import made_again
from meshwright.ir.declared.precision import PRECISIONS
from meshwright.ir.gradients.ahead import grounds, run_ahead
from meshwright.ir.graph import Graph, Op, Param, Ref, Value, map_refs, refs, renamed
from meshwright.ir.mesh import ROUTED, Mesh, role_of
from meshwright.ir.plan import TIME, Plan, PlanError
from meshwright.ir.program import JOINED, SEED, SEEDS, Collected, Port, Program, Segment, Stored
from meshwright.ir.reshard import ReshardStep, reshard
from meshwright.ir.rule import Local, Placed, Rules, place
from meshwright.ir.sharding import Sharding, shared_split
from meshwright.ir.writing.names import names_of
from meshwright.passes.bounds import find_bounds

EPILOGUE = -3
PROLOGUE = -2
ROOT = -1


@dataclass
class _Draft:
    """A segment being written: its ops, and for each graph value the local names it has in each sharding."""

    block: int
    stage: int = 0
    ops: list[Op] = field(default_factory=list)
    forms: dict[str, dict[Sharding, str]] = field(default_factory=dict)


def lower(plan: Plan, rules: Rules, rank: int) -> Program:
    """The program of one rank.

    ``rules``: the rule of every operator of ``plan.graph`` by op name. Raises PlanError where the plan does not fit them.
    """
    return _Lowering(plan, rules, rank).run()


class _Lowering:
    """The state of one walk: what every value has become so far."""

    def __init__(self, plan: Plan, rules: Rules, rank: int) -> None:
        self.plan, self.rules, self.rank = plan, rules, rank
        self.graph, self.mesh = plan.graph, plan.mesh
        count = plan.schedule.microbatches
        self.timed = self.mesh.innermost(TIME, count) if count > 1 else self.mesh
        self.here = self.mesh.coordinates(rank)
        self.values: dict[str, Value] = {}
        self.placed: dict[str, Placed] = {}
        self.produced: dict[str, Sharding] = {}
        self.time_dim: dict[str, int | str | None] = {}
        self.home: dict[str, _Draft] = {}
        self.drafts: list[_Draft] = []
        self.prologue = _Draft(PROLOGUE)
        self.epilogue = _Draft(EPILOGUE, 0 if plan.pipeline is None else plan.pipeline.stages - 1)
        schedule = plan.schedule
        self.grounds = grounds(self.graph, rules, schedule.epilogue, schedule.prologue)
        if run_ahead(self.graph, rules, schedule.epilogue, schedule.prologue) != schedule.ahead:
            raise PlanError("the plan is damaged: schedule.ahead: these are not the operators on which the gradients of its "
                            "epilogue depend")
        self.collected: dict[str, Collected] = {}
        self.cuts: dict[str, int] = {}
        self.cut_names: dict[tuple[str, Sharding, int], str] = {}
        self.frame = self._frame()
        self.block_of = {at: i for i, b in enumerate(self.graph.blocks) for at in range(b.start, b.stop)}
        self.owner, self.called = _owners(plan, self.block_of), names_of(plan.graph).ops
        self.params = {param.value: param for param in self.graph.params}
        self.at_first = {**self.here, TIME: 0}  # where the rank stands in the first micro-batch
        self.ports: dict[str, Port] = {}
        self.names: set[str] = set(self.graph.values)
        self.origin: dict[str, str] = {}  # local name -> the graph value it is a form of
        self.whole: dict[str, tuple[int, ...]] = {name: value.shape for name, value in self.graph.values.items()}

    def run(self) -> Program:
        self._inputs()
        self._parameters()
        for index, op in enumerate(self.graph.ops):
            self._op(op, self._draft(index, op))
        outputs = self._outputs()
        mutations = tuple((old, self._mutation(old, new)) for old, new in self.graph.mutations)
        in_order = sorted(self.drafts, key=lambda draft: draft.stage)  # what completes a stage's outputs was drafted last
        drafts = [draft for draft in (self.prologue, *in_order, self.epilogue) if draft.ops]
        leaving = {port.name for port in outputs} | {new for _, new in mutations}
        readers: dict[str, set[int]] = {name: {-1} for name in leaving | {one.value for one in self.collected.values()}}
        for number, draft in enumerate(drafts):
            for op in draft.ops:
                for name in op.inputs:
                    readers.setdefault(name, set()).add(number)
        segments = tuple(self._segment(number, draft, readers) for number, draft in enumerate(drafts))
        used = {name for segment in segments for name in segment.graph.inputs} | {port.name for port in outputs}
        ports = tuple(self.ports.values())
        dtype = PRECISIONS[self.plan.precision].compute
        return Program(
            mesh=self.mesh, rank=self.rank, segments=segments, inputs=ports, outputs=outputs,
            stored=tuple(self.stored.values()),
            output_tree=map_refs(self.graph.output_tree, lambda ref: Ref(self.out_names[ref.name])),
            loss=None if self.graph.loss is None else self.out_names[self.graph.loss],
            mutations=mutations, operators=self.rules.operators, microbatches=self.plan.schedule.microbatches,
            cuts=tuple((name, dim) for name, dim in self.cuts.items() if name in used),
            constants=self.graph.constants, compute_dtype=dtype, signature=self.graph.signature,
            changes=self.graph.changes, classes=self.graph.classes, bounds=find_bounds(self.graph),
            again=made_again(self.graph, self.rules.operators) if self.plan.pipeline is not None else frozenset(),
            collected=tuple(self.collected.values()),
        )

    # what enters

    def _inputs(self) -> None:
        for name in self.graph.inputs:
            value = self.graph.values[name]
            sharding = self.plan.copies.get(name, Sharding.whole(len(value.shape)))
            if sharding.mirrored:  # what a caller hands over is in one piece
                sharding = Sharding.whole(len(value.shape))
            self.values[name] = replace(value, shape=sharding.local_shape(value.shape, self.mesh, self.here))
            self.produced[name] = sharding
            self.home[name] = self.prologue
            self.prologue.forms[name] = {sharding: name}
            self.ports[name] = Port(name, value.shape, value.dtype, sharding)

    def _parameters(self) -> None:
        needs: dict[str, list[Sharding]] = {}
        fused: dict[str, tuple[int, int]] = {}
        for op in self.graph.ops:
            placed = self._placed(op)
            for name, need in zip(op.inputs, placed.operands, strict=True):
                needs.setdefault(name, []).append(need)
            fused.update({op.inputs[position]: how for position, how in self.rules[op.name].fused.items()})
        self.stored: dict[str, Stored] = {}
        for param in self.graph.params:
            value = self.graph.values[param.value]
            group = self.plan.groups[self.owner[param.value]]
            tensor = _tensor_placement(param, value, needs.get(param.value, []))
            data = tuple(axis for axis in group.data_axes if not _split_by_expert(axis, tensor)) if param.trainable else ()
            clash = [axis for axis in data if axis in tensor.split_axes]
            if clash:
                raise PlanError(f"parameter {param.fqn!r} is split over {clash}, which its block sums gradients over")
            dim, parts = fused.get(param.value, (0, 1))
            if parts > 1 and len(needs[param.value]) > 1:
                raise PlanError(f"parameter {param.fqn!r} holds {parts} weights in one, so only one operator may read it")
            shard = tuple(axis for axis in group.shard_axes if axis in data) if param.trainable and group.zero else ()
            late = _late_axes(tensor, value, needs.get(param.value, []), self.mesh, data) if param.trainable else ()
            self.stored[param.value] = Stored(
                param.value, param.fqns, value.shape, value.dtype, param.trainable, param.buffer, param.persistent,
                tensor, data, shard, parts, dim, late_axes=late,
            )
            self.values[param.value] = replace(value, shape=tensor.local_shape(value.shape, self.mesh, self.here))
            self.produced[param.value] = replace(tensor, varying=frozenset((*data, *late)))
        for name in fused.keys() - self.stored.keys():
            raise PlanError(f"%{name} is read part by part, which only a parameter can be: it is laid out for its reader")

    def _frame(self) -> tuple[str, ...] | None:
        """The axes that split the batch when it is cut into micro-batches: those that split whatever is cut, so that all pieces
        are of the same rows (``passes.infer``). None if nothing is cut."""
        whole = {*self.graph.inputs}.union(*(op.outputs for op in self.graph.ops if op.name in self.plan.schedule.prologue))
        splits = [
            need.dims[dims.index(time)] for op in self.graph.ops if (time := self.plan.schedule.time.get(op.name))
            for name, need, dims in zip(op.inputs, self._placed(op).operands, self.rules[op.name].operands, strict=True)
            if name in whole and time in dims
        ]
        same = takewhile(lambda axes: len(set(axes)) == 1, zip(*splits, strict=False))
        return tuple(axes[0] for axes in same) if splits else None

    def _framed(self, sharding: Sharding, dim: int | str | None) -> Sharding:
        """With the dim along which micro-batches were cut, and are put together again, split as it was then, and no other dim
        by the same axes."""
        if not isinstance(dim, int) or self.frame is None:
            return sharding
        others = (tuple(axis for axis in axes if axis not in self.frame) for axes in sharding.dims)
        return replace(sharding, dims=tuple(self.frame if at == dim else axes for at, axes in enumerate(others)))

    # one operator

    def _draft(self, index: int, op: Op) -> _Draft:
        if op.name in self.plan.schedule.prologue:
            return self.prologue
        if op.name in self.plan.schedule.epilogue:
            return self.epilogue
        block = self.block_of.get(index, ROOT)
        stage = 0 if self.plan.pipeline is None else self.plan.pipeline.stage_of(index)
        if not self.drafts or (self.drafts[-1].block, self.drafts[-1].stage) != (block, stage):
            self.drafts.append(_Draft(block, stage))
        return self.drafts[-1]

    def _placed(self, op: Op) -> Placed:
        if op.name not in self.placed:
            differentiable = tuple(self._takes_gradient(name) for name in op.inputs)
            assignment = self.plan.assignments.get(op.name, {})
            self.placed[op.name] = place(self.rules[op.name], assignment, self.mesh, differentiable)
        return self.placed[op.name]

    def _takes_gradient(self, name: str) -> bool:
        return self.graph.values[name].differentiable

    def _op(self, op: Op, draft: _Draft) -> None:
        rule, placed = self.rules[op.name], self._placed(op)
        time = self.plan.schedule.time.get(op.name)
        names = []
        for position, (name, need) in enumerate(zip(op.inputs, placed.operands, strict=True)):
            dims = rule.operands[position]
            cut = dims.index(time) if time is not None and time in dims else None
            names.append(self._operand(name, need, cut, draft))
        assignment = {axis: f for axis, f in self.plan.assignments.get(op.name, {}).items() if self.mesh.size(axis) > 1}
        if time:
            assignment[TIME] = time
        timed = place(rule, assignment, self.timed, (True,) * len(op.inputs))
        local = Local(
            self.timed, self.at_first, assignment, timed,
            tuple(self.graph.values[name].shape for name in op.inputs),
            tuple(self.graph.values[name].shape for name in op.outputs), name=self.called[op.name],
        )
        here = renamed(op, names)
        if rule.localize is not None:
            target, args, kwargs = rule.localize(here, local)
            here = replace(here, target=target, args=args, kwargs=kwargs)
        draft.ops.append(here)
        for index, (name, sharding) in enumerate(zip(op.outputs, placed.results, strict=True)):
            value = self.graph.values[name]
            self.values[name] = replace(value, shape=local.result_shape(index))
            self.produced[name] = sharding
            self.home[name] = draft
            draft.forms[name] = {sharding: name}
            kind = timed.results[index].kind(TIME) if time else None
            self.time_dim[name] = "sum" if kind == "+" else kind if isinstance(kind, int) else None
            if isinstance(kind, int):
                count = self.plan.schedule.microbatches
                self.whole[name] = (*value.shape[:kind], value.shape[kind] // count, *value.shape[kind + 1 :])

    def _operand(self, name: str, need: Sharding, cut: int | None, draft: _Draft) -> str:
        """The local name of a value in the sharding a reader needs; ``cut``: the dim of which it reads a micro-batch."""
        if name in self.stored:
            return self._stored_operand(name, need, draft)
        home = self.home[name]
        if home is self.prologue and draft is not self.prologue:
            framed = self._framed(need, cut)
            local = self._form(name, framed, self.prologue)
            if cut is None:
                return local
            piece = self._cut(name, local, framed, cut)
            forms = draft.forms.setdefault(piece, {framed: piece})
            if need not in forms:
                forms[need] = self._steps(piece, framed, need, draft)
            return forms[need]
        return self._form(name, need, draft)

    def _form(self, name: str, need: Sharding, draft: _Draft) -> str:
        if name not in draft.forms and draft is self.epilogue:
            framed = self._framed(self.produced[name], self.time_dim[name])
            draft.forms[name] = {framed: self._collect(name, self._form(name, framed, self.home[name]))}
        forms = draft.forms.setdefault(name, {self.produced[name]: name})
        made = next(iter(forms))
        if need in forms:
            return forms[need]
        shared = self.plan.copies.get(name)
        if shared is not None and shared not in forms and need != made:
            forms[shared] = self._steps(forms[made], made, shared, draft)
            if need in forms:
                return forms[need]
        source = shared if shared is not None and _reachable(shared, need) else made
        forms[need] = self._steps(forms[source], source, need, draft)
        return forms[need]

    def _cut(self, name: str, local: str, need: Sharding, dim: int) -> str:
        """A prologue value of which every micro-batch reads a piece: the piece's name."""
        key = (name, need, dim)
        if key not in self.cut_names:
            count = self.plan.schedule.microbatches
            value = self.values[local]
            size = value.shape[dim]
            if size % count:
                raise PlanError(f"microbatches={count} does not divide the local batch {size} of %{name}")
            piece = self._fresh(name)
            self.prologue.ops.append(Op(piece, "mw.identity", (Ref(local),), (), (piece,)))
            shape = (*value.shape[:dim], size // count, *value.shape[dim + 1 :])
            self.values[piece] = replace(value, name=piece, shape=shape)
            whole = self.whole[local]
            self.whole[piece] = (*whole[:dim], whole[dim] // count, *whole[dim + 1 :])
            self.origin[piece] = self.origin.get(local, local)
            self.cuts[piece] = dim
            self.cut_names[key] = piece
        return self.cut_names[key]

    def _collect(self, name: str, local: str) -> str:
        """What micro-batches make, under a local name, as the epilogue reads it: its name there."""
        time, whole, count = self.time_dim[name], self.graph.values[name].shape, self.plan.schedule.microbatches
        shape = self.values[local].shape
        if isinstance(time, int):
            shape = (*shape[:time], shape[time] * count, *shape[time + 1 :])
        fresh = self._fresh(name)
        self.origin[fresh], self.whole[fresh] = name, whole
        self.values[fresh] = replace(self.values[local], name=fresh, shape=shape)
        self.collected[name] = Collected(local, fresh, time, name in self.grounds)
        return fresh

    def _stored_operand(self, name: str, need: Sharding, draft: _Draft) -> str:
        forms = draft.forms.setdefault(name, {self.produced[name]: name})
        if need not in forms:
            source, local = self.produced[name], name
            if not self._takes_gradient(name):
                source = source.at_rest()
            local, source = self._alike(local, source, need, draft, front=True)
            forms[need] = self._steps(local, source, need, draft, front=True)
        return forms[need]

    def _alike(
        self, local: str, source: Sharding, need: Sharding, draft: _Draft, front: bool = False
    ) -> tuple[str, Sharding]:
        """What is equal on all ranks, and has a gradient that is summed over them, as read alike: the gradient counts once."""
        for axis in sorted(source.varying - need.varying):
            local = self._emit(local, "mw.unvary", (), {"axis": axis}, self.values[local].shape, draft, front)
        return local, replace(source, varying=source.varying & need.varying)

    # resharding

    def _steps(self, local: str, source: Sharding, target: Sharding, draft: _Draft, front: bool = False) -> str:
        for step in reshard(source, target):
            local = self._step(local, step, draft, front)
        return local

    def _step(self, local: str, step: ReshardStep, draft: _Draft, front: bool) -> str:
        shape = list(self.values[local].shape)
        after = step.after.local_shape(self.whole[local], self.mesh, self.here)
        kwargs: dict[str, object] = {"axis": step.axis}
        args: tuple[object, ...] = ()
        if step.kind in ("slice", "reduce_scatter"):
            args, kwargs["size"] = (step.dim,), shape[step.dim]
        elif step.kind in ("all_gather", "gather_vary"):
            args, kwargs["size"] = (step.dim,), after[step.dim]
        elif step.kind == "all_to_all":
            args = (step.dim, step.to_dim)
            kwargs["size"], kwargs["to_size"] = after[step.dim], shape[step.to_dim]
        elif step.kind == "mirror":
            args = (step.dim,)
        ahead, behind = step.axis in step.after.mirrored, step.axis in step.before.mirrored
        mirrored = behind if step.kind in ("all_gather", "gather_vary", "all_to_all") else ahead
        kwargs |= {"mirrored": True} if mirrored else {}
        kwargs |= {"to_mirrored": True} if step.kind == "all_to_all" and ahead else {}
        return self._emit(local, f"mw.{step.kind}", args, kwargs, after, draft, front)

    def _emit(
        self, local: str, target: str, args: tuple[object, ...], kwargs: dict[str, object], shape: tuple[int, ...],
        draft: _Draft, front: bool = False,
    ) -> str:
        base = self.origin.get(local, local)
        name = self._fresh(base)
        self.origin[name], self.whole[name] = base, self.whole[local]
        self.values[name] = replace(self.values[local], name=name, shape=shape)
        producer = self.graph.producers.get(base)
        module = self.graph.ops[producer].module if producer is not None else ""
        op = Op(name, target, (Ref(local), *args), tuple(kwargs.items()), (name,), module)
        if front:
            at = next((i for i, other in enumerate(draft.ops) if local in other.outputs), -1) + 1
            draft.ops.insert(at, op)
        else:
            draft.ops.append(op)
        return name

    def _fresh(self, base: str) -> str:
        count = 1
        while f"{base}_{count}x" in self.names:
            count += 1
        self.names.add(f"{base}_{count}x")
        return f"{base}_{count}x"

    # what leaves

    def _outputs(self) -> tuple[Port, ...]:
        self.out_names: dict[str, str] = {}
        ports = []
        for name in dict.fromkeys(ref.name for ref in refs(self.graph.output_tree)):
            value = self.graph.values[name]
            sharding = Sharding.whole(0) if not value.shape else replace(  # in the order of the caller
                self.produced[name], partial=frozenset(), varying=frozenset(), mirrored=frozenset()
            )
            if name in self.stored:
                local = self._stored_operand(name, sharding, self._last(0))
            else:
                home = self.home[name]
                draft = home if home is self.prologue or home is self.epilogue else self._last(home.stage)
                sharding = self._framed(sharding, self.time_dim.get(name))
                alike, source = self._alike(self._form(name, self.produced[name], draft), self.produced[name], sharding, draft)
                local = self._form(name, sharding, draft) if alike == name else self._steps(alike, source, sharding, draft)
            if name in self.graph.inputs and local == name:
                local = self._emit(local, "mw.identity", (), {}, self.values[local].shape, self.prologue)
            self.out_names[name] = local
            ports.append(Port(local, value.shape, value.dtype, sharding, self.time_dim.get(name)))
        return tuple(ports)

    def _last(self, stage: int) -> _Draft:
        """The draft outside the blocks that ends a stage."""
        own = [draft for draft in self.drafts if draft.stage == stage]
        if not own or own[-1].block != ROOT:
            self.drafts.append(_Draft(ROOT, stage))
            return self.drafts[-1]
        return own[-1]

    def _mutation(self, old: str, new: str) -> str:
        """A buffer's new value, placed as the buffer is."""
        draft = self.prologue if self.home[new] is self.prologue else self._last(self.home[new].stage)
        return self._form(new, self.stored[old].tensor, draft)

    def _segment(self, number: int, draft: _Draft, readers: Mapping[str, set[int]]) -> Segment:
        """``readers``: the drafts that read each value; -1 where it leaves the program."""
        inside = {name for op in draft.ops for name in op.outputs}
        read = list(dict.fromkeys(name for op in draft.ops for name in op.inputs if name not in inside))
        owned = [name for name in read if name in self.stored and self._owned_by(name, draft)]
        leaves = [name for op in draft.ops for name in op.outputs if readers.get(name, set()) - {number}]
        group = self.plan.groups[draft.block if draft.block >= 0 else -1]
        values = {name: self.values[name] for name in (*read, *(n for op in draft.ops for n in op.outputs)) if name != SEED}
        if SEED in read:
            values[SEED] = Value(SEED, (SEEDS,), torch.int64)
        graph = Graph(
            values, tuple(name for name in read if name not in owned), tuple(self.params[name] for name in owned),
            tuple(draft.ops), tuple(Ref(name) for name in leaves),
        )
        graph.verify()
        path = self.graph.blocks[draft.block].path if draft.block >= 0 else ""
        recompute = "none" if draft.block in (PROLOGUE, EPILOGUE) else group.recompute
        zero = 2 if group.zero == 3 and group.keep else group.zero  # kept over the micro-batches, it runs as ZeRO-2 does
        return Segment(path, graph, draft.block == PROLOGUE, zero, recompute, draft.stage, draft.block == EPILOGUE)

    def _owned_by(self, name: str, draft: _Draft) -> bool:
        owner = self.owner[name]
        root = len(self.plan.groups) - 1
        return owner == (draft.block if draft.block >= 0 else root)


def _split_by_expert(axis: str, tensor: Sharding) -> bool:
    """Whether a parameter's experts are split over an axis, whose other ranks then have nothing to add to its gradient."""
    return role_of(axis) in ROUTED and axis in tensor.split_axes


def _owners(plan: Plan, block_of: Mapping[int, int]) -> dict[str, int]:
    """{parameter value: index of its group}: the block that alone reads it, else the root."""
    graph, root = plan.graph, len(plan.groups) - 1
    owners: dict[str, int] = {}
    stored = {param.value for param in graph.params}
    apart = plan.schedule.prologue | plan.schedule.epilogue
    for index, op in enumerate(graph.ops):
        block = root if op.name in apart else block_of.get(index, root)
        for name in op.inputs:
            if name in stored:
                owners[name] = block if owners.get(name, block) == block else root
    return {name: owners.get(name, root) for name in stored}


def _tensor_placement(param: Param, value: Value, needs: list[Sharding]) -> Sharding:
    """How a parameter is split by the program itself: the splits that all its readers share."""
    return shared_split(needs) if needs else Sharding.whole(len(value.shape))


def _late_axes(
    tensor: Sharding, value: Value, needs: Sequence[Sharding], mesh: Mesh, data: Sequence[str]
) -> tuple[str, ...]:
    """The axes over which a parameter's gradient is summed together with others'."""
    if not needs or math.prod(tensor.local_shape(value.shape, mesh)) > JOINED:
        return ()
    everywhere = frozenset.intersection(*(need.varying for need in needs))
    return tuple(axis for axis in mesh.axes if axis in everywhere and axis not in data and mesh.size(axis) > 1)


def _reachable(source: Sharding, target: Sharding) -> bool:
    return source.varying <= target.varying | target.partial
