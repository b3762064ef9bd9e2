"""From the export's IR to a ``Graph``: values, ops and what is mutated, nothing rewritten yet.

torch.export's training IR is functional but for in-place operators. Those that are plain to replace are replaced (``writes``);
where others are left, ``run_decompositions({})`` makes the program functional, by a second trace that costs more than the
first. In both cases regions under ``torch.no_grad`` are inlined first, with a ``detach`` on every operand: a later trace would
forget them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from meshwright.compiler.capture.exported.regions import (
    AUTOCAST,
    inline_regions,
    module_path,
    refuse_cut_writes,
    refuse_writes,
    show_aliases,
    source_of,
)
from meshwright.compiler.capture.exported.strided import STRIDED, looked_up
from meshwright.compiler.capture.exported.writes import make_functional
from meshwright.compiler.capture.functions import uniform
from meshwright.compiler.capture.shadow import WRAPPED, Leaf, ModelTensor, Traced
from meshwright.compiler.capture.watch import OWN_GENERATOR
from meshwright.errors import CaptureError
from meshwright.ir.gradients.custom import CUSTOM, CustomFunction
from meshwright.ir.graph import ASSERTED, FILL, Graph, Op, Param, Ref, Value

_ASSERTIONS = frozenset({"aten._assert_async.default", "aten._assert_async.msg", "aten._functional_assert_async.msg"})
_MASKED = "keep all rows, and use torch.where or a mask instead of choosing some"
_OF_FIXED_SHAPE: Mapping[str, str] = {
    "bincount": "a bincount is as long as its largest value asks, minlength= only makes it longer; count n kinds by "
                "torch.nn.functional.one_hot(x, n).sum(0), or by torch.zeros(n).scatter_add(0, x, weights)",
    "nonzero": f"{_MASKED}; or torch.nonzero_static(x, size=n)",
    "repeat_interleave": "give output_size=, the length of the result, if it is always the same",
}
"""{operator whose result is as long as its operand's contents say: what to write instead}."""


def import_graph(traced: Traced, owned: Iterable[ModelTensor], inputs: Iterable[str], functional: bool = False) -> Graph:
    """The graph of the traced program, its outputs in the user's containers. ``inputs``: names for the graph's inputs."""
    program = traced.program
    refuse_writes(program)
    refuse_cut_writes(program)
    inline_regions(program.graph_module)
    show_aliases(program.graph)
    graph = None if functional or _hides_writes(program.graph) else make_functional(program.graph)
    if graph is None:
        program.graph_module.recompile()
        program = _decomposed(program)
    importer = _Importer(program, graph or program.graph, traced.functions)
    return importer.run(traced, list(owned), list(inputs))


def _decomposed(program: ExportedProgram) -> ExportedProgram:
    try:
        functional: ExportedProgram = program.run_decompositions({})
        return functional
    except RuntimeError as error:
        if "is mutated in the forward" not in str(error):
            places = _writing(program)
            module, source = places[0] if places else ("", "")
            where = ", ".join(f"module {path or '(root)'!r} ({line})" for path, line in places[:3]) or "the forward"
            raise CaptureError(f"{where} writes into memory in a way that torch cannot make functional "
                               f"({str(error).splitlines()[0]:.200}). What to do: make a new tensor instead of writing into "
                               f"one, or write into a .clone()", module=module, source=source) from error
        raise CaptureError("the forward, or a hook of it, writes into a tensor that is no buffer of its modules, or into one "
                           "that it reaches otherwise than by 'self' (a global, or what a lambda or closure names). What to "
                           "do: make it a buffer (register_buffer), and write into self.NAME; a hook finds its module in its "
                           "first argument") from error


def _writing(program: ExportedProgram) -> list[tuple[str, str]]:
    """(path, "file:line") of every module that writes in place."""
    nodes = (node for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
             and node.target._schema.is_mutable)
    places = {module_path(node): source_of(node.meta.get("stack_trace") or "") for node in nodes}
    return list(places.items())


def _settled(size: Any) -> bool:
    """Whether it is a number, or one that depends on the data and can be one alone, by what the trace has asserted of it."""
    if isinstance(size, int):
        return True
    if isinstance(size, torch.SymBool):
        return size.node.maybe_as_bool() is not None
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is not None


def _hides_writes(graph: fx.Graph) -> bool:
    """Whether something is written by operators whose schema does not say so, or in a region that stays one."""
    return any(
        node.target is AUTOCAST or (str(node.target) == "aten.instance_norm.default" and node.args[3] is not None)
        for node in graph.nodes if node.op == "call_function"
    )


# ------------------------------------------------------------------------------------------------------------------- import
@dataclass
class _Importer:
    """Walks the export's nodes once; ``env`` holds what each stands for."""

    program: ExportedProgram
    graph: fx.Graph
    functions: tuple[CustomFunction, ...]
    values: dict[str, Value] = field(default_factory=dict)
    env: dict[fx.Node, Any] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    params: list[Param] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    random: set[str] = field(default_factory=set)
    asserted: list[Op] = field(default_factory=list)

    def run(self, traced: Traced, owned: list[ModelTensor], inputs: list[str]) -> Graph:
        nodes = list(self.graph.nodes)
        for node in nodes:
            if node.op == "call_function" and "functorch" in _origin(node):  # first: what it is given has no contents either
                self._no_operator(node, "torch.vmap or another transform of torch.func")
        addresses = {_memory(item.tensor): item.fqns[0] for item in owned if _memory(item.tensor)}
        taken = {_identifier(name) for name in inputs}
        owners = self._declare(owned, nodes, taken)
        names = iter(inputs)
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        graph_inputs = []
        for node in nodes:
            if node.op == "placeholder":
                spec = specs[node.name]
                if spec.kind is InputKind.USER_INPUT:
                    name = self._unique(next(names))
                    self._value(name, node.meta["val"])
                    graph_inputs.append(name)
                    self.env[node] = Ref(name)
                elif spec.kind is InputKind.CONSTANT_TENSOR:
                    self._constant(node, self.program.constants[spec.target], addresses)
                elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                    self.env[node] = Ref(owners[spec.target.removeprefix(f"{WRAPPED}.")])
                elif isinstance(self.program.constants.get(spec.target), torch.Generator):
                    user = next(iter(node.users), node)
                    module, source = module_path(user), self._source(user)
                    what, remedy = OWN_GENERATOR  # of an operator that is called by its overload, which no watch sees
                    raise CaptureError(f"module {module!r} ({source}): {what}. What to do: {remedy}", module=module,
                                       source=source)
                else:
                    raise CaptureError(f"the model holds a {spec.kind.name.lower().replace('_', ' ')} {spec.target!r}, which "
                                       f"cannot be in a graph; keep tensors and plain numbers")
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                attribute = getattr(self.program.graph_module, node.target)
                if isinstance(attribute, torch.Tensor):  # else a branch of a control flow operator, which is refused
                    self._constant(node, attribute, addresses)
        outputs = [self.env[arg] if isinstance(arg, fx.Node) else arg for arg in nodes[-1].args[0]]
        mutations, results = self._split_outputs(outputs, owners)
        changed = self._changed(nodes, outputs)
        tree = _fill(traced.tree, results)
        graph = Graph(self.values, tuple(graph_inputs), tuple(self.params), tuple(self.ops), tree, mutations=mutations,
                      constants=self.constants)
        asserted = [op for op in self.asserted if _from_inputs_alone(graph, op.inputs[0], self.random)]
        if not changed and not asserted:
            return graph
        return replace(graph, changes=_changes(graph, changed, asserted, self.random))

    def _declare(self, owned: list[ModelTensor], nodes: list[fx.Node], taken: set[str]) -> dict[str, str]:
        """Declare what the model holds, used or not; {fully qualified name: value name}."""
        vals = {spec.target.removeprefix(f"{WRAPPED}."): spec.arg.name
                for spec in self.program.graph_signature.input_specs if spec.target is not None}
        by_name = {node.name: node for node in nodes if node.op == "placeholder"}
        owners: dict[str, str] = {}
        for item in owned:
            name = self._unique(("b_" if item.buffer else "p_") + item.fqns[0], taken)
            placed = next((by_name[vals[fqn]] for fqn in item.fqns if fqn in vals), None)
            self._value(name, placed.meta["val"] if placed is not None else item.tensor)
            owners |= dict.fromkeys(item.fqns, name)
            trainable = not item.buffer and item.tensor.requires_grad
            self.params.append(Param(name, item.fqns, trainable, item.buffer, item.persistent))
            if item.plain and not item.tensor.is_meta:
                self.constants[name] = item.tensor
        return owners

    def _constant(self, node: fx.Node, tensor: torch.Tensor, addresses: Mapping[int, str]) -> None:
        """A tensor literal of the model's code: a fill if it has one value, else a buffer that the graph carries."""
        if _memory(tensor) in addresses:
            raise CaptureError(f"the forward reads {addresses[_memory(tensor)]!r} through a reference to the module that is "
                               f"not 'self' (a lambda or closure set as an attribute); make it a method of the module's class")
        name = self._unique(node.name)
        self._value(name, tensor)
        self.env[node] = Ref(name)
        if not _memory(tensor) and tensor.numel():
            raise CaptureError(f"module {module_path(node) or '(root)'!r} ({self._source(node)}) reads a tensor that was made "
                               f"in a way a trace cannot follow (it has no contents); compute it by plain tensor operations")
        number = uniform(tensor)
        if number is not None:
            dtype = (("dtype", tensor.dtype),)
            self.ops.append(Op(name, FILL, (tuple(tensor.shape), number), dtype, (name,)))
        else:
            self.params.append(Param(name, (f"_constant_{name}",), False, buffer=True, persistent=False))
            self.constants[name] = tensor.detach()

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source_node, position = node.args
            self.env[node] = self.env[source_node][position]  # type: ignore[index]
            return
        if _settled(node.meta.get("val")):
            self.env[node] = int(node.meta["val"])
            return
        module, source = module_path(node), self._source(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            self._no_operator(node, f"{_origin(node)}.{getattr(node.target, '__name__', node.target)}".strip("."))
        if str(node.target) in _ASSERTIONS:
            self._assertion(node, module, source)
            return
        if str(node.target) == "aten.bincount.default" and (counted := self._counted(node, module, source)):
            self.ops += counted
            self.env[node] = Ref(counted[-1].outputs[0])
            return
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            name = self._unique(node.name)
            self._value(name, val, node)
            outputs: tuple[str, ...] = (name,)
            self.env[node] = Ref(name)
        elif isinstance(val, tuple | list):
            outputs = tuple(self._unique(f"{node.name}_{i}") for i in range(len(val)))
            for name, item in zip(outputs, val, strict=True):
                self._value(name, item if isinstance(item, torch.Tensor) else torch.empty(0, device="meta"), node)
            self.env[node] = tuple(Ref(name) for name in outputs)
        elif val is None:
            return  # an assertion about shapes and dtypes, which the trace has seen to
        else:
            raise CaptureError(
                f"module {module or '(root)'!r} ({source}): {node.target} gives a number that depends on the data, and a "
                "static graph has fixed shapes; use torch.where or a mask. Experts that are handed as many rows as they were "
                "chosen for: sort the rows by expert and use torch._grouped_mm with offsets that stay a tensor",
                module=module, source=source,
            )
        kwargs = tuple((key, self._argument(value)) for key, value in node.kwargs.items())
        args = tuple(self._argument(arg) for arg in node.args)
        name = outputs[0] if len(outputs) == 1 else node.name
        if str(node.target) == "meshwright.custom_function.default":
            called = self.functions[args[1]], args[0]
            self.ops.append(Op(name, CUSTOM, called, (), outputs, module, source))
            return
        op = Op(name, str(node.target), args, kwargs, outputs, module, source)
        self.ops += looked_up(op, node.all_input_nodes[0].meta["val"], self._made) if op.target in STRIDED else [op]
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            self.random.add(name)

    def _no_operator(self, node: fx.Node, name: str) -> NoReturn:
        module, source = module_path(node), self._source(node)
        raise CaptureError(f"module {module or '(root)'!r} ({source}) uses {name}, which has no place in a static graph. What "
                           f"to do: write it as operations on whole tensors", module=module, source=source)

    def _counted(self, node: fx.Node, module: str, source: str) -> list[Op]:
        """A bincount that the model takes to be no longer than ``minlength``, as adding it to as many numbers does: both are an
        error for a larger number, as it is to what this is made of. Nothing for another."""
        x, weights, length = map(self._argument, node.args if len(node.args) == 3 else (*node.args, 0, 0)[:3])
        size = node.meta["val"].shape[0]
        if weights is not None or node.kwargs or not _settled(size) or int(size) != length:
            return []
        given, ops = self.values[x.name], list[Op]()
        if given.dtype != torch.int64:
            cast = self._made(f"{node.name}_numbers", given.shape, torch.int64)
            ops.append(Op(cast, "aten._to_copy.default", (x,), (("dtype", torch.int64),), (cast,), module, source))
            x = Ref(cast)
        chosen = self._made(f"{node.name}_chosen", (*given.shape, length), torch.int64)
        made = self._made(node.name, (length,), torch.int64)
        return [*ops, Op(chosen, "aten.one_hot.default", (x, length), (), (chosen,), module, source),
                Op(made, "aten.sum.dim_IntList", (Ref(chosen), (0,)), (), (made,), module, source)]

    def _assertion(self, node: fx.Node, module: str, source: str) -> None:
        """What must hold of a tensor's contents: no operator of the step, but one of ``Graph.changes``, if it can be there."""
        condition, message = self._argument(node.args[0]), node.args[1] if len(node.args) > 1 else ""
        self.env[node] = condition
        name = self._unique(f"asserted_{len(self.asserted)}")
        self.asserted.append(Op(name, ASSERTED, (condition, str(message)), (), (name,), module, source))

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self.env[arg]
        if isinstance(arg, list | tuple):
            return tuple(self._argument(item) for item in arg)
        return arg

    def _value(self, name: str, tensor: torch.Tensor, node: fx.Node | None = None) -> None:
        """Declare what ``node`` computes, or what the model or the caller holds."""
        shape = tuple(tensor.shape)
        makes = node is not None and torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())
        if not makes and all(map(_settled, shape)):
            shape = tuple(map(int, shape))
        if not all(type(size) is int for size in shape):
            module, source = ("", "") if node is None else (module_path(node), self._source(node))
            made = "" if node is None else f" ({node.target} in module {module or '(root)'!r}, {source})"
            remedy = _OF_FIXED_SHAPE.get("" if node is None else str(node.target).split(".")[1], _MASKED)
            raise CaptureError(f"%{name}{made} has shape {shape}, which depends on the data; a static graph has fixed shapes. "
                               f"What to do: {remedy}", module=module, source=source)
        self.values[name] = Value(name, shape, tensor.dtype)

    def _made(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Declare what no node computes."""
        name = self._unique(name)
        self.values[name] = Value(name, tuple(shape), dtype)
        return name

    def _unique(self, name: str, taken: Iterable[str] = ()) -> str:
        name = base = _identifier(name)
        count = 0
        while name in self.values or name in taken:
            count += 1
            name = f"{base}_{count}"
        return name

    def _source(self, node: fx.Node) -> str:
        trace = node.meta.get("stack_trace") or ""
        if trace not in self.sources:
            self.sources[trace] = source_of(trace)
        return self.sources[trace]

    def _split_outputs(self, outputs: list[Any], owners: Mapping[str, str]) -> tuple[tuple[tuple[str, str], ...], list[Any]]:
        mutations, results = [], []
        for spec, output in zip(self.program.graph_signature.output_specs, outputs, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                results.append(output)
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                mutations.append((owners[str(spec.target).removeprefix(f"{WRAPPED}.")], output.name))
            elif spec.kind is not OutputKind.USER_INPUT_MUTATION:
                raise CaptureError(f"the forward changes {str(spec.target).removeprefix(f'{WRAPPED}.')!r} in place "
                                   f"({spec.kind.name.lower()}); only buffers may change in a forward")
        return tuple(mutations), results

    def _changed(self, nodes: list[fx.Node], outputs: list[Any]) -> dict[str, Ref]:
        """{input that the forward changes in place: what it holds afterwards}."""
        inputs = {node.name: self.env[node].name for node in nodes if node.op == "placeholder" and node in self.env}
        pairs = zip(self.program.graph_signature.output_specs, outputs, strict=True)
        return {inputs[str(spec.target)]: output for spec, output in pairs if spec.kind is OutputKind.USER_INPUT_MUTATION}


def _from_inputs_alone(graph: Graph, name: str, random: set[str]) -> bool:
    """Whether a value follows from inputs and literals, of one input at least, by operators that draw nothing."""
    wanted, seen = [name], set[str]()
    while wanted:
        current = wanted.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in graph.producers:
            op = graph.ops[graph.producers[current]]
            if op.name in random or op.target == CUSTOM:
                return False
            wanted += op.inputs
        elif current not in graph.inputs and current not in graph.constants:
            return False
    return not seen.isdisjoint(graph.inputs)


def _changes(graph: Graph, changed: Mapping[str, Ref], asserted: Sequence[Op], random: set[str]) -> Graph:
    """What computes the new values of inputs, and what is asserted of them, cut out of the graph: every process does it on the
    inputs as they are given."""
    owned = {param.value: param.fqns[0] for param in graph.params if param.value not in graph.constants}
    wanted, ops = {*changed, *(ref.name for ref in changed.values()), *(op.inputs[0] for op in asserted)}, []
    for op in reversed(graph.ops):
        if wanted.isdisjoint(op.outputs):
            continue
        ops.append(op)
        wanted.update(op.inputs, op.outputs)
        reason = next((f"from {owned[name]!r}" for name in op.inputs if name in owned), "")
        if op.name in random:
            reason = f"at random ({op.target})"
        if reason:
            raise CaptureError(f"the forward changes its input {', '.join(map(repr, changed))} in place, {reason}, in module "
                               f"{op.module!r} ({op.source}): only what follows from the inputs alone can be written back to "
                               f"the caller; change a copy (.clone()) and return it", module=op.module, source=op.source)
    inputs = tuple(name for name in graph.inputs if name in wanted)
    values = {name: value for name, value in graph.values.items() if name in wanted}
    values |= {op.name: replace(values[op.inputs[0]], name=op.name) for op in asserted}
    constants = {name: tensor for name, tensor in graph.constants.items() if name in wanted}
    return Graph(values, inputs, (), (*ops[::-1], *asserted), dict(changed), constants=constants)


def _memory(tensor: torch.Tensor) -> int:
    """Address of a real tensor's memory; 0 for tensors without."""
    fake = isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor) or tensor.is_meta
    return 0 if fake or tensor.layout is not torch.strided else tensor.data_ptr()


def _origin(node: fx.Node) -> str:
    """The Python module of what a node calls."""
    return str(getattr(node.target, "__module__", ""))


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _fill(tree: Any, results: list[Any]) -> Any:
    if isinstance(tree, Leaf):
        return results[tree.index]
    if isinstance(tree, tuple | list):
        return type(tree)(_fill(item, results) for item in tree)
    if isinstance(tree, Mapping):
        return {key: _fill(item, results) for key, item in tree.items()}
    return tree
