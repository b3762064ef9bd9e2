"""A graph from a file: every value, operator and reference checked. What the operators compute is not:
``compiler.structure.same`` compares them with the model's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from meshwright.errors import MeshwrightError, PlanError
from meshwright.ir.declared.experts import GIVEN, IMBALANCE, Experts
from meshwright.ir.gradients.custom import CustomFunction
from meshwright.ir.graph import Block, Graph, Op, Param, Ref, Value, refs
from meshwright.ir.operators import TARGET
from meshwright.ir.reading.fields import LARGEST, Field, check_form, unpacked
from meshwright.ir.sharding import DTYPES

_PARAMETER_KINDS = ("*", "**", "keyword", "positional", "either")
"""Kinds of parameters in a signature."""


def graph_from_dict(data: Any) -> Graph:
    """The graph that ``graph_to_dict`` wrote; PlanError with the path of the field if it is none."""
    check_form(data)
    return read_graph(Field(data, "graph"))


def read_graph(field: Field, inner: bool = False, function: bool = False) -> Graph:
    """The graph of a plan; ``inner``: what computes the new values of its inputs."""
    part = field.record("values inputs params ops output_tree loss mutations blocks signature constants changes")
    values: dict[str, Value] = {}
    for row in part["values"].items():
        value = _value(row)
        if value.name in values:
            raise row.wrong(f"a value other than %{value.name}, which there is already")
        values[value.name] = value
    params = tuple(_param(item, values) for item in part["params"].items())
    fqns = [fqn for param in params for fqn in param.fqns]
    if len(set(fqns)) != len(fqns):
        raise part["params"].wrong("names that differ")
    ops = tuple(_op(item, values) for item in part["ops"].items())
    if len({op.name for op in ops}) != len(ops):
        raise part["ops"].wrong("operators whose names differ")
    tree = unpacked(part["output_tree"])
    _check_tree(Field(tree, part["output_tree"].path), values)
    buffers = set(values) if function else {param.value for param in params if param.buffer}
    constants = {name: _constant(item, name, values, buffers) for name, item in part["constants"].mapping().items()}
    graph = Graph(
        values, part["inputs"].names(values, "a value"), params, ops, tree,
        loss=None if part["loss"].value is None else part["loss"].one_of(values, "a value"),
        mutations=tuple(_mutation(item, values, buffers) for item in part["mutations"].items()),
        blocks=_blocks(part["blocks"], len(ops)), signature=part["signature"].value, constants=constants,
        changes=None if part["changes"].value is None else _changes(part["changes"], inner), foreign=True,
    )
    if not function:
        _check_graph(graph, field)
    if graph.signature is not None:
        _check_signature(part["signature"], graph)
    return graph


def _value(row: Field) -> Value:
    name, shape, dtype, differentiable = row.row(4)
    sizes = tuple(size.count() for size in shape.items())
    if math.prod(sizes) > LARGEST:
        raise shape.wrong("the shape of a tensor")
    return Value(name.name(), sizes, DTYPES[dtype.one_of(DTYPES, "a dtype")], differentiable.flag())


def _param(item: Field, values: Collection[str]) -> Param:
    part = item.record("value fqns trainable buffer persistent")
    found = Param(
        part["value"].one_of(values, "a value"), part["fqns"].names(), part["trainable"].flag(), part["buffer"].flag(),
        part["persistent"].flag(),
    )
    if not found.fqns or (found.trainable and found.buffer):
        raise item.wrong("a parameter or a buffer with a name, and only parameters trained")
    return found


def _op(item: Field, values: Collection[str]) -> Op:
    name, target, args, kwargs, outputs, module, source = item.row(7)
    if not TARGET.fullmatch(target.text()):
        raise target.wrong("an operator, as in 'aten.linear.default'")
    given, named = unpacked(args, _GRAPHS), unpacked(kwargs)
    if not isinstance(given, tuple) or not isinstance(named, dict):
        raise item.wrong("a list of arguments and named ones")
    if not all(type(key) is str and key.isascii() and key.isidentifier() for key in named):
        raise kwargs.wrong("arguments with names")
    for ref in refs((given, named)):
        if ref.name not in values:
            raise item.wrong(f"values of the graph; there is no %{ref.name}")
    made = outputs.names(values, "a value")
    if not made:
        raise outputs.wrong("at least one value")
    return Op(name.name(), target.value, given, tuple(named.items()), made, module.text(), source.text())


def _function(field: Field) -> CustomFunction:
    """A function with a backward of its own: two graphs of plain operators, whose constants nobody declares."""
    name, forward, backward, differentiable = field.row(4)
    graphs = [read_graph(part, function=True) for part in (forward, backward)]
    if not all(isinstance(graph.output_tree, tuple) for graph in graphs):
        raise field.wrong("graphs whose outputs are a list")
    return CustomFunction(name.text(), graphs[0], graphs[1], tuple(item.flag() for item in differentiable.items()))


def _experts(field: Field) -> Experts:
    """What experts do with a row: a graph of plain operators."""
    body, count, chosen, scaled, stacked, *assumed = field.row(min(7, max(5, len(field.items()))))
    graph = read_graph(body, function=True)
    flags = tuple(item.flag() for item in stacked.items())
    numbers = count.count(), chosen.count()
    rows = [graph.values[name].shape[:1] for name in graph.inputs[:GIVEN]]
    fits = len(graph.inputs) == GIVEN + len(flags) and isinstance(graph.output_tree, tuple) and len(graph.output_tree) == 1
    if not fits or not isinstance(graph.output_tree[0], Ref) or 0 in numbers or not all(rows) or not rows[0][0]:
        raise field.wrong("the graph of one row of some experts")
    imbalance = assumed[0].number(finite=True) if assumed else IMBALANCE
    if imbalance < 1.0:
        raise assumed[0].wrong("rows of the fullest rank over the mean, 1 or more")
    limited = tuple(item.count() for item in assumed[1].row(2)) if assumed[1:] else (1, 1)
    if limited[0] < 1 or not 1 <= limited[1] <= limited[0] or numbers[0] % limited[0]:
        raise assumed[1].wrong("how many equal groups the experts are in, and how many of them a token's are in")
    return Experts(graph, *numbers, scaled.flag(), flags, imbalance=imbalance, limited=(limited[0], limited[1]))


_GRAPHS: Mapping[str, Callable[[Field], Any]] = {"function": _function, "experts": _experts}


def _constant(item: Field, name: str, values: Mapping[str, Value], buffers: Collection[str]) -> torch.Tensor:
    dtype, shape, numbers = item.row(3)
    if name not in buffers:
        raise item.wrong(f"the contents of a buffer, which %{name} is not")
    value = values[name]
    sizes = tuple(size.count() for size in shape.items())
    if sizes != value.shape or DTYPES[dtype.one_of(DTYPES, "a dtype")] != value.dtype:
        raise item.wrong(f"{value}")
    found = [number.value for number in numbers.items()]
    kinds = {torch.bool: (bool,)}.get(value.dtype, (int, float) if value.dtype.is_floating_point or value.dtype.is_complex
                                      else (int,))
    if len(found) != value.numel * (2 if value.dtype.is_complex else 1) or not all(type(n) in kinds for n in found):
        raise numbers.wrong(f"{value.numel} numbers")
    try:
        if not value.dtype.is_complex:
            return torch.tensor(found, dtype=value.dtype).reshape(value.shape)
        pairs = torch.tensor(found, dtype=value.dtype.to_real()).reshape(-1, 2)
        return torch.view_as_complex(pairs).reshape(value.shape)
    except (RuntimeError, OverflowError, ValueError, TypeError) as error:
        raise PlanError(f"the plan is damaged: {numbers.path}: {error}") from error


def _mutation(item: Field, values: Mapping[str, Value], buffers: Collection[str]) -> tuple[str, str]:
    old, new = item.row(2)
    pair = old.one_of(buffers, "a buffer"), new.one_of(values, "a value")
    if (values[pair[0]].shape, values[pair[0]].dtype) != (values[pair[1]].shape, values[pair[1]].dtype):
        raise item.wrong("a buffer and a value of its shape and dtype")
    return pair


def _blocks(field: Field, ops: int) -> tuple[Block, ...]:
    found = []
    for row in field.items():
        path, kind, start, stop = row.row(4)
        found.append(Block(path.text(), kind.count(), start.count(0, ops), stop.count(1, ops)))
        if found[-1].start >= found[-1].stop:
            raise row.wrong("a run of operators")
    if any(one.stop > other.start for one, other in pairwise(found)):
        raise field.wrong("blocks in order that share no operator")
    return tuple(found)


def _changes(field: Field, inner: bool) -> Graph:
    graph = read_graph(field, inner=True)
    plain = not (inner or graph.blocks or graph.params or graph.mutations or graph.loss)
    if not plain or not isinstance(graph.output_tree, dict) or not set(graph.output_tree) <= set(graph.inputs):
        raise field.wrong("operators that follow from the inputs alone, and give new values of inputs")
    if not all(isinstance(item, Ref) for item in graph.output_tree.values()):
        raise field.wrong("a value for every input that changes")
    return graph


def _check_graph(graph: Graph, field: Field) -> None:
    """What several fields say together."""
    try:
        graph.verify()
    except MeshwrightError as error:
        raise PlanError(f"the plan is damaged: {field.path}: {error}") from error
    held = {*graph.inputs, *(param.value for param in graph.params)}
    if stray := sorted(graph.values.keys() - held - graph.producers.keys()):
        raise PlanError(f"the plan is damaged: {field.path}.values: %{stray[0]} is no input, no parameter, and made by no "
                        "operator")
    if len({old for old, _ in graph.mutations}) != len(graph.mutations):
        raise PlanError(f"the plan is damaged: {field.path}.mutations: a buffer has two new values")
    if graph.loss is not None:
        loss = graph.values[graph.loss]
        if loss.shape or not loss.dtype.is_floating_point or graph.loss not in (ref.name for ref in refs(graph.output_tree)):
            raise PlanError(f"the plan is damaged: {field.path}.loss: expected a number among the outputs, found {loss}")


def _check_tree(field: Field, values: Collection[str]) -> None:
    value = field.value
    if isinstance(value, Ref):
        if value.name not in values:
            raise field.wrong("a value of the graph")
    elif isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                raise field.wrong("names")
            _check_tree(field.at(key), values)
    elif isinstance(value, tuple):
        for i in range(len(value)):
            _check_tree(field.at(i), values)


# --- the signature ---------------------------------------------------------------------------------------------------------


def _check_signature(field: Field, graph: Graph) -> None:
    """How a call binds to the inputs, and how the output is rebuilt: see ``meshwright.ir.signature``."""
    part = field.record("parameters bound targets output")
    names = []
    for item in part["parameters"].items():
        parameter = item.record("name kind", "default")
        names.append(parameter["name"].name())
        parameter["kind"].one_of(_PARAMETER_KINDS, "a kind of parameter")
        if "default" in parameter:
            _check_default(parameter["default"])
    if len(set(names)) != len(names):
        raise part["parameters"].wrong("names that differ")
    leaves = [leaf for spec in part["bound"].mapping().values() for leaf in _leaves(spec)]
    leaves += [leaf for spec in part["targets"].items() for leaf in _leaves(spec)]
    shapes = [tuple(size.count() for size in leaf["shape"].items()) for leaf in leaves]
    if shapes != [graph.values[name].shape for name in graph.inputs]:
        raise field.wrong(f"the {len(graph.inputs)} tensors that are the graph's inputs, with their shapes")
    _check_output(part["output"], graph.output_tree)


def _check_default(field: Field) -> None:
    found = field.mapping()
    if found.keys() == {"opaque"}:
        found["opaque"].text()
    elif found.keys() != {"constant"} or type(found["constant"].value) not in (type(None), bool, int, float, str):
        raise field.wrong("a default value")


def _leaves(field: Field) -> Iterator[dict[str, Field]]:
    """The tensors of an argument, in order."""
    kind = field.mapping()
    if "tensor" in kind:
        part = field.record("tensor shape dtype")
        part["tensor"].name()
        part["dtype"].one_of(DTYPES, "a dtype")
        yield part
    elif "constant" in kind:
        _check_default(field)
    elif "sequence" in kind:
        part = field.record("sequence items")
        part["sequence"].one_of(("list", "tuple"), "list or tuple")
        for item in part["items"].items():
            yield from _leaves(item)
    else:
        part = field.record("mapping items")
        part["mapping"].text()
        for item in part["items"].mapping().values():
            yield from _leaves(item)


def _check_output(field: Field, tree: Any) -> None:
    if field.value == "leaf":
        if isinstance(tree, tuple | dict):
            raise field.wrong("the containers of graph.output_tree")
        return
    part = field.record("kind class items", "fields")
    kind = part["kind"].one_of(("tuple", "list", "namedtuple", "dict", "object"), "a kind of container")
    part["class"].text()
    if "fields" in part and (kind != "namedtuple" or len(part["fields"].names()) != len(part["items"].items())):
        raise part["fields"].wrong("the names of a named tuple's items")
    if kind in ("dict", "object"):
        items = part["items"].mapping()
        if not isinstance(tree, dict) or list(tree) != list(items):
            raise field.wrong("the containers of graph.output_tree")
        for key, item in items.items():
            _check_output(item, tree[key])
    else:
        rows = part["items"].items()
        if not isinstance(tree, tuple) or len(tree) != len(rows):
            raise field.wrong("the containers of graph.output_tree")
        for row, item in zip(rows, tree, strict=True):
            _check_output(row, item)
