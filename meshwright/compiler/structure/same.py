"""Whether a plan's graph computes what a captured model does; what differs is named.

A plan is run on the model that it was made for: same parameters (names, tying, shapes, dtypes, what is trained), same operators
with the same literals on the same operands, same outputs. The order of operators and the names of what they make may differ,
since a model that walks a set is captured in another order by every process; so every value is known by a digest of what it is
computed from, and operators are compared as a collection of such digests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import PlanError
from meshwright.ir.declared.experts import balanced
from meshwright.ir.graph import Graph, Op, Param, map_refs
from meshwright.ir.serialize import digest, elements, packed
from meshwright.ir.sharding import DTYPE_NAMES
from meshwright.ir.writing.canonical import canonical_inside

_LITERAL = "_constant_"
"""How tensor literals of the model's code are called: these are known by their contents."""


def aligned(planned: Graph, captured: Graph) -> Graph:
    """The plan's graph, with what a file cannot be trusted with (contents of constants, classes of the output, where operators
    come from) and the order of the output's dicts taken from the captured one. Raises PlanError naming the first difference."""
    captured = _tied_as(planned, captured)
    theirs, ours = _KnownSame(planned), _KnownSame(captured)
    for difference in (*_inputs(planned, captured), *_params(planned, captured)):
        raise _another(difference)
    theirs.walk()
    ours.walk()
    if Counter(theirs.ops.values()) != Counter(ours.ops.values()):
        raise _another(_operators(theirs, ours))
    for what, mine, other in zip(("output", "loss", "new values of buffers"), theirs.ends(), ours.ends(), strict=True):
        if mine != other:
            raise _another(f"its {what} is computed otherwise")
    if (planned.changes is None) != (captured.changes is None):
        raise _another("one of them changes its inputs in place, or asserts something of them, and the other does not")
    changes = None if planned.changes is None or captured.changes is None else aligned(planned.changes, captured.changes)
    signature = _signature(planned, captured)
    twins = {ours.ops[op.name]: op for op in captured.ops}
    ops = tuple(replace(op, module=twins[theirs.ops[op.name]].module, source=twins[theirs.ops[op.name]].source)
                for op in planned.ops)
    held = {ours.made[param.value]: param.value for param in captured.params}
    contents = {param.value: held[theirs.made[param.value]] for param in planned.params}
    constants = {name: captured.constants[other] for name, other in contents.items() if other in captured.constants}
    return replace(planned, ops=ops, constants=constants, changes=changes, signature=signature, classes=captured.classes,
                   foreign=False, output_tree=_in_order(planned.output_tree, captured.output_tree))


def _tied_as(planned: Graph, captured: Graph) -> Graph:
    """The captured graph with the names of each tied tensor in the plan's order: that in which modules are registered, which
    may be each process's own."""
    order = {frozenset(param.fqns): param.fqns for param in planned.params}
    params = (replace(param, fqns=order.get(frozenset(param.fqns), param.fqns)) for param in captured.params)
    return replace(captured, params=tuple(params))


def _in_order(tree: Any, like: Any) -> Any:
    """A tree of outputs with its dicts in the order of another's, which holds the same."""
    if isinstance(tree, Mapping):
        return {key: _in_order(tree[key], like[key]) for key in like}
    if isinstance(tree, tuple | list):
        return type(tree)(_in_order(*pair) for pair in zip(tree, like, strict=True))
    return tree


def _sorted(tree: Any) -> Any:
    """A tree of outputs, whatever the order of its dicts."""
    if isinstance(tree, Mapping):
        return {key: _sorted(tree[key]) for key in sorted(tree)}
    return [_sorted(item) for item in tree] if isinstance(tree, tuple | list) else tree


def _another(difference: str) -> PlanError:
    error = PlanError(f"the plan was made for another model: {difference}; plan again for this model, or give the model (and "
                      f"the loss_fn and precision) that the plan was made for")
    error.difference = difference
    return error


@dataclass
class _KnownSame:
    """What every value of a graph is computed from, as digests."""

    graph: Graph

    def __post_init__(self) -> None:
        self.made: dict[str, str] = {}
        self.ops: dict[str, str] = {}

    def walk(self) -> None:
        graph = self.graph
        self.made.update((name, digest(["input", name, self.kind(name)])) for name in graph.inputs)
        self.made.update((param.value, digest([_name(param, graph), self.kind(param.value)])) for param in graph.params)
        for op in graph.ops:
            call = digest([op.target, self.known(op.args), self.known(dict(sorted(op.kwargs)))])
            self.made.update((name, digest([call, number, self.kind(name)])) for number, name in enumerate(op.outputs))
            self.ops[op.name] = digest([self.made[name] for name in op.outputs])

    def known(self, tree: Any) -> Any:
        return packed(map_refs(canonical_inside(balanced(tree)), lambda ref: self.made[ref.name]))

    def kind(self, name: str) -> list[Any]:
        value = self.graph.values[name]
        return [DTYPE_NAMES[value.dtype], list(value.shape), value.differentiable]

    def ends(self) -> tuple[Any, Any, Any]:
        """The outputs, the loss, and what buffers become."""
        graph = self.graph
        renewed = sorted([self.made[old], self.made[new]] for old, new in graph.mutations)
        return self.known(_sorted(graph.output_tree)), graph.loss and self.made[graph.loss], renewed


def _name(param: Param, graph: Graph) -> Any:
    if param.fqn.startswith(_LITERAL) and param.value in graph.constants:
        return elements(graph.constants[param.value])
    return list(param.fqns)


def _inputs(planned: Graph, captured: Graph) -> Iterator[str]:
    if set(planned.inputs) != set(captured.inputs):
        yield f"its inputs are {', '.join(planned.inputs)}, this call's {', '.join(captured.inputs)}"
        return
    for name in planned.inputs:
        mine, other = planned.values[name], captured.values[name]
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            yield f"its input {mine}, this model's {other}"


def _params(planned: Graph, captured: Graph) -> Iterator[str]:
    """Differences of what the models hold, by name."""
    theirs = {param.fqn: param for param in planned.params if not param.fqn.startswith(_LITERAL)}
    ours = {param.fqn: param for param in captured.params if not param.fqn.startswith(_LITERAL)}
    for fqn, mine in theirs.items():
        if fqn not in ours:
            yield f"its {_kind(mine)} {fqn!r} is none of this model"
            continue
        other, value, here = ours[fqn], planned.values[mine.value], captured.values[ours[fqn].value]
        if value.shape != here.shape:
            yield f"it has {_kind(mine)} {fqn!r} of shape {value.shape}, this model's is of shape {here.shape}"
        if value.dtype != here.dtype:
            yield f"{_kind(mine)} {fqn!r} is {DTYPE_NAMES[value.dtype]} there and {DTYPE_NAMES[here.dtype]} here (precision?)"
        if mine.fqns != other.fqns:
            yield f"{fqn!r} is tied to {mine.fqns[1:] or 'nothing'} there and to {other.fqns[1:] or 'nothing'} here"
        if (mine.buffer, mine.persistent) != (other.buffer, other.persistent):
            yield f"{fqn!r} is a {_kind(mine)} there and a {_kind(other)} here"
        if mine.trainable != other.trainable:
            yield f"parameter {fqn!r} is {'trained' if mine.trainable else 'frozen'} there and " \
                  f"{'trained' if other.trainable else 'frozen'} here"
    for fqn, other in ours.items():
        if fqn not in theirs:
            yield f"this model's {_kind(other)} {fqn!r} is not in the plan"


def _kind(param: Param) -> str:
    return ("buffer" if param.persistent else "buffer that is not saved") if param.buffer else "parameter"


def _operators(theirs: _KnownSame, ours: _KnownSame) -> str:
    """The first operator that has no counterpart though its operands have."""
    there, here = set(ours.ops.values()), set(theirs.ops.values())
    left = [op for op in theirs.graph.ops if theirs.ops[op.name] not in there]
    right = [op for op in ours.graph.ops if ours.ops[op.name] not in here]
    if not left or not right:
        many = f"{len(theirs.graph.ops)} there and {len(ours.graph.ops)} here"
        alone = next(iter((*left, *right)), None)
        return f"operator {alone} is in one of them only" if alone else f"some operators run another number of times: {many}"
    mine, other = left[0], next((op for op in right if op.module == left[0].module), right[0])
    return f"{_call(mine)} there, {_call(other)} here" + _literal(mine, other)


def _call(op: Op) -> str:
    return f"{op.module or 'the model'}: {op.target}"


def _literal(mine: Op, other: Op) -> str:
    """What two calls of one operator differ in."""
    if mine.target != other.target:
        return ""
    left, right = dict([*enumerate(mine.args), *mine.kwargs]), dict([*enumerate(other.args), *other.kwargs])
    pairs = [(name, left.get(name), right.get(name)) for name in dict.fromkeys((*left, *right))
             if map_refs(left.get(name), lambda _: "%") != map_refs(right.get(name), lambda _: "%")]
    if pairs:
        name, a, b = pairs[0]
        return f", argument {name}: {a!r} there and {b!r} here"
    return " on other operands, or with a result of another shape, dtype or gradient"


def _signature(planned: Graph, captured: Graph) -> Any:
    """The plan's; its output's classes and the order of its dicts are those of the captured model."""
    if planned.signature is None or captured.signature is None:
        return captured.signature if planned.signature is None else planned.signature
    mine, other = planned.signature, captured.signature
    shown = [[(parameter["name"], parameter["kind"]) for parameter in one["parameters"]] for one in (mine, other)]
    if shown[0] != shown[1]:
        raise _another(f"its forward takes {[name for name, _ in shown[0]]}, this model's "
                       f"{[name for name, _ in shown[1]]}")
    if _nameless(mine["output"]) != _nameless(other["output"]) or len(mine["targets"]) != len(other["targets"]):
        raise _another("its output or its targets are other containers")
    return {**mine, "parameters": other["parameters"], "output": other["output"]}


def _nameless(output_type: Any) -> Any:
    """A type of output without the names of named tuples' items, which older plans do not have."""
    if not isinstance(output_type, dict):
        return output_type
    items = output_type["items"]
    inner = {key: _nameless(item) for key, item in items.items()} if isinstance(items, dict) else [_nameless(i) for i in items]
    return output_type["kind"], output_type["class"], inner
