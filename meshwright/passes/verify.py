"""The lowered program means what the graph means: every value's sharding re-derived on the program itself, without the plan.

Walk the segments in order with an environment {local name: the graph value it is a form of, its sharding}.

    enters      inputs as their ports say, parameters as stored (``~`` over the axes whose ranks FSDP2 sums the gradient of)
    mw.*        collectives are functions on shardings, each legal on some only (``passes.communication``)
    others      the operator of the graph with that name: its rule and what its operands *are* say which factor each axis
                splits (``passes.infer``), hence what the results are; local shapes and rewritten literals must agree
    collected   what micro-batches made is whole to the epilogue if its rows are those of the batch, in their order; that on
                which gradients of the epilogue depend is known ahead
    leaves      outputs as their ports say, the loss complete (a sum over the micro-batches, or made of all of them in the
                epilogue), new buffers as the old

The gradients need no walk of their own: they are the duals of these shardings (``Sharding.gradient``), and right if every
operand of an operator has the mark that ``rule.place`` demands. That each autograd pair in turn does what its sharding says is
checked by ``passes.typecheck`` with other means.

Where the split of a created dim cannot be read off one rank's shapes (a piece of ``arange`` at offset 0), all ways that fit are
carried along as *options* until a reader rules them out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from meshwright.errors import VerifyError
from meshwright.ir.declared.operator import Linear
from meshwright.ir.gradients.ahead import grounds
from meshwright.ir.graph import Graph, Op, Ref, map_refs, refs
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import TIME
from meshwright.ir.program import SEED, Port, Program, Segment, Stored
from meshwright.ir.rule import OpRule
from meshwright.ir.sharding import Sharding, ShardingError, format_sharding
from meshwright.ir.writing.names import names_of
from meshwright.passes.communication import COMMUNICATION
from meshwright.passes.infer import Form, Lengths, MismatchError, Site, assignments, outcome, same_call, same_parts, without

Choices = frozenset[tuple[str, int]]
"""(operator, which of its options) that a form depends on."""
Possible = tuple[list[tuple[Mapping[str, str], list[Form]]], MismatchError | None]
"""(assignment, the results' forms) that fit some operands, and why another assignment does not."""


@dataclass(frozen=True, slots=True)
class KnownForms:
    """A local value: the graph value it is a form of, and the forms it may have (one, unless a created split is open)."""

    origin: str
    options: tuple[tuple[Form, Choices], ...]


def verify(program: Program, graph: Graph, rules: Mapping[str, OpRule]) -> None:
    """Raise VerifyError unless this rank's program computes the graph, values and gradients.

    ``graph``: the captured graph at the global batch; ``rules``: the rule of each of its operators by op name.
    """
    _Verifier(program, graph, rules).run()


class _Verifier:
    """The walk: what is known of every local value so far."""

    def __init__(self, program: Program, graph: Graph, rules: Mapping[str, OpRule]) -> None:
        self.program, self.graph, self.rules = program, graph, rules
        mesh = program.mesh
        self.dead = tuple(axis for axis in mesh.axes if mesh.size(axis) == 1)
        self.axes = tuple(axis for axis in mesh.axes if mesh.size(axis) > 1)
        names, sizes = self.axes, tuple(mesh.size(axis) for axis in self.axes)
        self.count = program.microbatches
        if self.count > 1:
            names, sizes = (*names, TIME), (*sizes, self.count)
        here = mesh.coordinates(program.rank)
        mirrored = program.mesh.mirrored.intersection(names)
        self.site = Site(Mesh(names, sizes, mirrored), {axis: here.get(axis, 0) for axis in names})
        self.ops, self.called = {op.name: op for op in graph.ops}, names_of(graph).ops
        self.stored = {item.value: item for item in program.stored}
        self.env: dict[str, KnownForms] = {}
        self.cuts = dict(program.cuts)
        self.uncut: set[str] = set()  # values of the prologue, which micro-batches share
        self.repeated: set[str] = set()  # values that every micro-batch makes
        self.late: set[str] = set()  # values of the epilogue
        self.excluded: set[Choices] = set()
        self.possible: dict[Any, Possible] = {}

    def run(self) -> None:
        self._enter()
        for segment in self.program.segments:
            if segment.epilogue and not self.late:
                self._collect()
            self._segment(segment)
        self._leave()

    def _collect(self) -> None:
        """What the micro-batches made, as the epilogue reads it."""
        names = {late: {op.name for segment in self.program.segments if (segment.epilogue if late else segment.prologue)
                        for op in segment.graph.ops} for late in (True, False)}
        needed = grounds(self.graph, self.rules, names[True], names[False])
        for one in self.program.collected:
            known = self.env.get(one.value)
            if known is None or one.value not in self.repeated or one.whole in self.env:
                raise VerifyError(f"%{one.whole}", "", "a value of the micro-batches under a new name", f"%{one.value}")
            try:
                self.env[one.whole] = self._map(known, partial(_whole, time=_WHEN.get(one.time, one.time)))
            except MismatchError as error:
                raise _fails(error, f"%{one.whole}", self._module(known.origin, "")) from None
            if known.origin in needed and not one.ahead:
                raise VerifyError(f"%{one.whole}", "", "known before any micro-batch goes back, as gradients depend on it",
                                  "known when all have")
            self.late.add(one.whole)

    # what enters

    def _enter(self) -> None:
        names = [port.name for port in self.program.inputs]
        if names != list(self.graph.inputs):
            raise VerifyError("the inputs", "", f"{list(self.graph.inputs)}", f"{names}")
        for port in self.program.inputs:
            sharding = self._live(port.sharding, f"input {port.name!r}", "", port.shape, port.name)
            if sharding.partial or sharding.varying:
                raise VerifyError(f"input {port.name!r}", "", "a value without marks", format_sharding(sharding))
            self.env[port.name] = KnownForms(port.name, ((Form(sharding), frozenset()),))
        self.uncut.update(names)
        for param in self.graph.params:
            if param.value not in self.stored:
                raise VerifyError(f"parameter {param.fqn!r}", _owner(param.fqn), "a stored tensor", "none")
            self._enter_stored(self.stored[param.value], param.trainable)

    def _enter_stored(self, item: Stored, trainable: bool) -> None:
        node, module = f"parameter {item.fqns[0]!r}", _owner(item.fqns[0])
        sharding = self._live(item.tensor, node, module, item.shape, item.value)
        data = tuple(axis for axis in (*item.data_axes, *item.late_axes) if axis in self.axes)
        if sharding.partial or sharding.varying or set(data) & set(sharding.split_axes) or len(set(data)) < len(data):
            raise VerifyError(node, module, "a placement without marks, apart from the data axes",
                              f"{format_sharding(sharding)} with data axes {data}")
        if not set(item.shard_axes) <= set(item.data_axes) or (data and not (trainable and item.trainable)):
            raise VerifyError(node, module, "shard axes among data axes, and those on trainable parameters only",
                              f"shard axes {item.shard_axes}, data axes {item.data_axes}, late axes {item.late_axes}, "
                              f"trainable={item.trainable}")
        pieces = item.fused * self.program.mesh.size(sharding.dims[item.fused_dim]) if item.shape else 1
        if item.fused != 1 and item.shape[item.fused_dim] % pieces:
            raise VerifyError(node, module, f"parts that the ranks divide along dim {item.fused_dim}", f"fused={item.fused}")
        if self.graph.values[item.value].differentiable:
            sharding = replace(sharding, varying=frozenset(data))
        self.env[item.value] = KnownForms(item.value, ((Form(sharding), frozenset()),))

    def _live(self, sharding: Sharding, node: str, module: str, shape: tuple[int, ...], origin: str) -> Sharding:
        """A declared sharding without the axes of one rank, its shape checked against the graph's."""
        try:
            sharding.validate(shape, self.program.mesh)
        except ShardingError as error:
            raise VerifyError(node, module, "a sharding of its value", str(error)) from None
        if shape != self.graph.values[origin].shape:
            raise VerifyError(node, module, f"the shape {self.graph.values[origin].shape}", f"{shape}")
        return without(sharding, self.dead)

    # segments

    def _segment(self, segment: Segment) -> None:
        inside: dict[str, KnownForms] = {}
        for name in (*segment.graph.inputs, *(param.value for param in segment.graph.params)):
            if name == SEED:
                continue
            if name not in self.env:
                raise VerifyError(f"segment {segment.path!r}", segment.path, f"%{name} of an earlier segment", "no such value")
            if name in (self.repeated if segment.epilogue else self.late):
                raise VerifyError(f"segment {segment.path!r}", segment.path,
                                  "what is collected of all micro-batches, read in the epilogue alone", f"%{name}")
            known = self.env[name]
            if segment.epilogue and name in self.stored and self.graph.values[name].differentiable:
                raise VerifyError(f"segment {segment.path!r}", segment.path, "an epilogue that reads no trained parameter",
                                  f"%{name}")
            if not segment.prologue and name in self.cuts and name in self.uncut:
                known = self._cut(name, known)
            try:
                inside[name] = self._shaped(known, segment.graph.values[name].shape)
            except MismatchError as error:
                raise _fails(error, f"%{name}", self._module(known.origin, segment.path)) from None
        for op in segment.graph.ops:
            try:
                for name, known in zip(op.outputs, self._op(op, inside, segment), strict=True):
                    inside[name] = self._result(name, known, segment)
            except MismatchError as error:
                raise _fails(error, str(op), self._op_module(op, segment)) from None
        for name in segment.graph.outputs:
            self.env[name] = inside[name]
            (self.uncut if segment.prologue else self.late if segment.epilogue else self.repeated).add(name)

    def _result(self, name: str, known: KnownForms, segment: Segment) -> KnownForms:
        """What an operator made, its local shape and place checked."""
        if segment.prologue and self.graph.values[known.origin].differentiable:
            raise MismatchError("no gradient in the prologue", f"%{name} takes one")
        shape = segment.graph.values[name].shape
        if segment.prologue and name in self.cuts:
            self._shaped(self._cut(name, known), shape)  # the program declares the piece that a micro-batch reads
            return known
        return self._shaped(known, shape)

    def _cut(self, name: str, known: KnownForms) -> KnownForms:
        """The piece that one micro-batch reads of a prologue value."""
        dim = self.cuts[name]
        forms = tuple((replace(f, time=dim, frame=f.sharding.dims[dim]), choices) for f, choices in self._alive(known))
        return KnownForms(known.origin, forms)

    def _shaped(self, known: KnownForms, shape: tuple[int, ...]) -> KnownForms:
        """Only the options with this local shape."""
        whole = self.graph.values[known.origin].shape

        def check(form: Form) -> Form:
            want = self._local(form, whole)
            if want != shape:
                raise MismatchError(f"the local shape {list(want)} of {form} of {list(whole)}", f"{list(shape)}")
            return form

        return self._map(known, check)

    def _local(self, form: Form, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Local shape of a form, of one micro-batch if it is cut."""
        if isinstance(form.time, int):
            if whole[form.time] % self.count:
                raise MismatchError(f"a dim that {self.count} micro-batches divide", f"dim {form.time} of {list(whole)}")
            whole = (*whole[: form.time], whole[form.time] // self.count, *whole[form.time + 1 :])
        return form.sharding.local_shape(whole, self.site.mesh, self.site.coordinates)

    # options

    def _alive(self, known: KnownForms) -> list[tuple[Form, Choices]]:
        return [(form, choices) for form, choices in known.options if not any(bad <= choices for bad in self.excluded)]

    def _map(self, known: KnownForms, function: Callable[[Form], Form]) -> KnownForms:
        """The value after a function of its form; options on which it raises MismatchError are excluded for good."""
        found: list[tuple[Form, Choices]] = []
        failure: MismatchError | None = None
        for form, choices in self._alive(known):
            try:
                found.append((function(form), choices))
            except MismatchError as error:
                failure = failure or error
                self.excluded.add(choices)
        if not found:
            raise failure or MismatchError("a value with one of its possible shardings", "none of them possible")
        return KnownForms(known.origin, tuple(found))

    # operators

    def _op(self, op: Op, inside: Mapping[str, KnownForms], segment: Segment) -> list[KnownForms]:
        if op.target in COMMUNICATION:
            return [self._transfer(op, inside[op.inputs[0]], segment)]
        if op.target == "mw.gather_linear":
            return self._gather_linear(op, inside, segment)
        origin = self.ops.get(op.name)
        if origin is None or origin.outputs != op.outputs:
            raise MismatchError("an operator of the graph or a collective", "neither")
        return self._apply(op, origin, [name for name in op.inputs if name != SEED], inside, segment)

    def _transfer(self, op: Op, known: KnownForms, segment: Segment) -> KnownForms:
        """A collective, with the sizes it names."""
        transfer, kwargs = COMMUNICATION[op.target], dict(op.kwargs)
        axis = kwargs.get("axis")
        if axis in self.dead or op.target == "mw.identity":
            return known
        if axis not in self.axes:
            raise MismatchError(f"an axis of mesh {self.program.mesh}", f"{axis!r}")
        before = segment.graph.values[op.inputs[0]].shape
        after = segment.graph.values[op.outputs[0]].shape
        dims = tuple(dim for dim in op.args[1:] if isinstance(dim, int))
        if any(not 0 <= dim < len(before) for dim in dims):
            raise MismatchError(f"a dim of {list(before)}", f"{dims}")
        if (item := self.stored.get(known.origin)) and item.fused > 1 and item.fused_dim in dims:
            raise MismatchError(f"dim {item.fused_dim}, which holds {item.fused} parts, left as it is", op.target)
        mirrors = {name: True for name in ("mirrored", "to_mirrored") if kwargs.get(name)}
        found = self._map(known, lambda form: replace(form, sharding=transfer(form.sharding, str(axis), *dims, **mirrors)))
        lengths = {"mw.slice": before, "mw.reduce_scatter": before, "mw.all_gather": after, "mw.gather_vary": after,
                   "mw.all_to_all": after}
        if op.target == "mw.mirror" or mirrors:
            whole, ranks = self.graph.values[known.origin].shape[dims[0]], self.program.mesh.size(str(axis))
            if mirrors.keys() != {"to_mirrored"} and whole % (2 * ranks):
                raise MismatchError(f"a dim of {2 * ranks} equal chunks", f"{whole}")
        wanted = {"size": lengths[op.target][dims[0]]} if op.target in lengths else {}
        if op.target == "mw.all_to_all":
            wanted["to_size"] = before[dims[1]]
        for key, size in wanted.items():
            if kwargs.get(key) != size:
                raise MismatchError(f"{key}={size}", f"{key}={kwargs.get(key)}")
        return found

    def _gather_linear(self, op: Op, inside: Mapping[str, KnownForms], segment: Segment) -> list[KnownForms]:
        """``gather_vary`` and the linears that read its result, in one."""
        x, weights, biases, dim = op.args
        whole, kwargs = f"{x.name} gathered", dict(op.kwargs)
        shape = list(segment.graph.values[x.name].shape)
        shape[dim] = kwargs["size"]
        gather, axis = COMMUNICATION["mw.gather_vary"], kwargs["axis"]
        gathered = self._map(inside[x.name], lambda form: replace(form, sharding=gather(form.sharding, axis, dim)))
        env = {**inside, whole: self._shaped(gathered, tuple(shape))}
        found: list[KnownForms] = []
        forms = kwargs.get("parts", ((1, False),) * len(weights))
        for weight, bias, (parts, turned) in zip(weights, biases, forms, strict=True):
            outputs = op.outputs[len(found) : len(found) + parts]
            origin = self.graph.ops[self.graph.producers[outputs[0]]] if outputs[0] in self.graph.producers else None
            if origin is None or (how := self._linear(origin)) is None or origin.outputs != outputs:
                raise MismatchError("outputs of linears of the graph", ", ".join(f"%{output}" for output in outputs))
            if (how.bias is None) != (bias is None) or how[3:] != (parts, turned) or origin.inputs.count(how.x.name) != 1:
                raise MismatchError(f"a linear like {origin}", f"bias {bias}, parts {parts}, transposed {turned}")
            read = {how.x: Ref(whole), how.weight: weight, how.bias: bias}
            linear = replace(
                origin, args=map_refs(origin.args, read.__getitem__), kwargs=map_refs(origin.kwargs, read.__getitem__)
            )
            try:
                found += self._apply(linear, origin, list(linear.inputs), env, segment)
            except MismatchError as error:
                raise _fails(error, str(op), origin.module) from None
        return found

    def _linear(self, origin: Op) -> Linear | None:
        """An operator of the graph as a linear, if it is one."""
        read = self.program.operators[origin.target].linear
        return None if read is None else read(origin)

    def _apply(
        self, op: Op, origin: Op, names: list[str], inside: Mapping[str, KnownForms], segment: Segment
    ) -> list[KnownForms]:
        """An operator of the graph on these local operands."""
        operands = [inside[name] for name in names]
        same_parts(self.rules[origin.name], [self.stored.get(known.origin) for known in operands])
        if [known.origin for known in operands] != list(origin.inputs):
            raise MismatchError(f"forms of {', '.join(origin.inputs)}", ", ".join(known.origin for known in operands))
        local = [segment.graph.values[name].shape for name in op.outputs]
        found: list[tuple[list[Form], Choices]] = []
        failure: MismatchError | None = None
        for combination in itertools.product(*map(self._alive, operands)):
            choices = frozenset[tuple[str, int]]().union(*(c for _, c in combination))
            if len(dict(choices)) < len(choices) or any(bad <= choices for bad in self.excluded):
                continue  # two answers to one question, or one that was ruled out
            try:
                several = self._outcomes(op, origin, names, [form for form, _ in combination], local, segment)
            except MismatchError as error:
                failure = failure or error
                self.excluded.add(choices)
                continue
            open_ = len(several) > 1
            found += [(forms, choices | {(op.name, len(found) + i)} if open_ else choices) for i, forms in enumerate(several)]
        if not found:
            raise failure or MismatchError("operands whose shardings go together", "none that do")
        return [KnownForms(name, tuple((forms[i], choices) for forms, choices in found)) for i, name in enumerate(op.outputs)]

    def _outcomes(
        self, op: Op, origin: Op, names: list[str], forms: list[Form], local: list[tuple[int, ...]], segment: Segment
    ) -> list[list[Form]]:
        """The results' forms under every assignment that fits; MismatchError if none does."""
        rule = self.rules[origin.name]
        shapes = tuple((self.graph.values[name].shape, shape) for name, shape in zip(op.outputs, local, strict=True))
        sizes = [tuple(self.graph.values[name].shape for name in values) for values in (origin.inputs, origin.outputs)]
        differentiable = tuple(self.graph.values[name].differentiable for name in origin.inputs)
        possible, failure = self._possible(rule, tuple(forms), differentiable, shapes, not segment.repeated)
        found: list[list[Form]] = []
        for assignment, results in possible:
            try:
                same_call(op, origin, names, rule, assignment, self.site, sizes, self.called[origin.name])
                if results not in found:
                    found.append(results)
            except MismatchError as error:
                failure = failure or error
        if not found:
            shown = ", ".join(str(list(shape)) for shape in local)
            raise failure or MismatchError("a result of its operands' shardings", f"local shapes {shown}")
        return found

    def _possible(
        self, rule: OpRule, forms: tuple[Form, ...], differentiable: tuple[bool, ...], shapes: Lengths, once: bool
    ) -> Possible:
        """(assignment, the results' forms) that fit operands like these, and why another does not; found once for all
        operators that share a rule, as those of equal blocks do."""
        key = (id(rule), forms, differentiable, shapes, once)
        if key not in self.possible:
            axes = self.axes if once or self.count == 1 else self.site.mesh.axes
            found: list[tuple[Mapping[str, str], list[Form]]] = []
            failure: MismatchError | None = None
            for assignment in assignments(rule, forms, differentiable, shapes, self.site, axes):
                try:
                    found.append((assignment, outcome(rule, assignment, forms, differentiable, self.site.mesh)))
                except MismatchError as error:
                    failure = failure or error
            self.possible[key] = found, failure
        return self.possible[key]

    # what leaves

    def _leave(self) -> None:
        origins = []
        for ref in refs(self.program.output_tree):
            port = next((port for port in self.program.outputs if port.name == ref.name), None)
            if port is None or port.name not in self.env:
                raise VerifyError(f"output %{ref.name}", "", "a value that the program computes", "none")
            origins.append(self._output(port))
        wanted = [ref.name for ref in refs(self.graph.output_tree)]
        if origins != wanted:
            raise VerifyError("the outputs", "", f"{wanted}", f"{origins}")
        loss = self.program.loss
        if (None if loss is None else self.env[loss].origin) != self.graph.loss:
            raise VerifyError("the loss", "", f"%{self.graph.loss}", f"%{loss}")
        if loss is not None:
            self._ends(loss, Form(Sharding.whole(0), "+" if self.count > 1 and loss not in self.late else ""), "the loss")
        for (old, new), (want_old, want_new) in itertools.zip_longest(
            self.program.mutations, self.graph.mutations, fillvalue=("nothing", "nothing")
        ):
            if old != want_old or new not in self.env or self.env[new].origin != want_new:
                raise VerifyError(f"the new value of %{want_old}", self._module(want_new, ""), f"%{want_new}", f"%{new}")
            placed = next(item.tensor for item in self.program.stored if item.value == old)
            self._ends(new, Form(without(placed, self.dead)), f"the new value of buffer %{old}")

    def _output(self, port: Port) -> str:
        """Check an output port; the graph value that it is."""
        origin = self.env[port.name].origin
        sharding = self._live(port.sharding, f"output %{port.name}", self._module(origin, ""), port.shape, origin)
        time = _WHEN.get(port.time, port.time)
        frame = sharding.dims[time] if isinstance(time, int) else None
        self._ends(port.name, Form(sharding, time, frame), f"output %{port.name}")
        return origin

    def _ends(self, name: str, want: Form, node: str) -> None:
        """A value that leaves has exactly this form."""
        known = self.env[name]
        uncut = name in self.uncut

        def check(form: Form) -> Form:
            same = form.sharding == want.sharding and form.time == want.time and not (uncut and want.time != "")
            if not same:
                raise MismatchError(str(want), str(form))
            if isinstance(form.time, int) and form.frame not in (None, want.frame):
                raise MismatchError(f"rows cut while split over {want.frame}", f"rows cut while split over {form.frame}")
            return form

        try:
            self._map(known, check)
        except MismatchError as error:
            raise _fails(error, node, self._module(known.origin, "")) from None

    # names for errors

    def _op_module(self, op: Op, segment: Segment) -> str:
        """The module of an op; a collective on a parameter belongs to whoever reads it."""
        if op.module or op.name in self.ops:
            return op.module
        readers = (other.module for other in segment.graph.ops if set(op.outputs) & set(other.inputs))
        return next((module for module in readers if module), segment.path)

    def _module(self, origin: str, default: str) -> str:
        """The module that made a graph value."""
        if origin in self.graph.producers:
            return self.graph.ops[self.graph.producers[origin]].module or default
        return default


_WHEN: Mapping[Any, Any] = {None: "", "sum": "+"}
"""How values are put together over micro-batches, as ports have it -> as forms have it."""


def _whole(form: Form, time: int | str) -> Form:
    """The form of a value that is put together of all micro-batches along ``time``."""
    if form.time != time:
        raise MismatchError(f"{replace(form, time=time)}", str(form))
    if isinstance(time, int) and form.frame not in (None, form.sharding.dims[time]):
        raise MismatchError(f"rows cut while split over {form.sharding.dims[time]}", f"rows cut while split over {form.frame}")
    return Form(form.sharding)


def _owner(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _fails(error: MismatchError, node: str, module: str) -> VerifyError:
    return VerifyError(node, module, error.expected, error.found)
