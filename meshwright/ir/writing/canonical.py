"""A plan under names that the trace has no part in: what is written is the same for the same model captured again.

    operators     their names in pins ("model.layers.0.mlp.up_proj:linear"); what they make: the same, "[1]" of several
    parameters    "@" and their own name; inputs keep theirs, which are the forward's
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from meshwright.ir.decisions import Decisions
from meshwright.ir.declared.experts import Experts
from meshwright.ir.gradients.custom import CustomFunction
from meshwright.ir.graph import Graph, Ref
from meshwright.ir.writing.names import names_of

T = TypeVar("T")
P = TypeVar("P", bound=Decisions)


def canonical(plan: P) -> P:
    """The same plan, everything under its own name."""
    ops, values = _names(plan.graph)
    schedule = plan.schedule
    return replace(
        plan, graph=_renamed(plan.graph, ops, values),
        assignments={ops[name]: one for name, one in plan.assignments.items()},
        copies={values[name]: one for name, one in plan.copies.items()},
        groups=tuple(replace(group, path=ops.get(group.path, group.path)) for group in plan.groups),
        schedule=replace(schedule, time={ops[name]: one for name, one in schedule.time.items()},
                         prologue=_under(ops, schedule.prologue), epilogue=_under(ops, schedule.epilogue),
                         ahead=_under(ops, schedule.ahead)),
    )


def _under(ops: Mapping[str, str], names: frozenset[str]) -> frozenset[str]:
    return frozenset(ops[name] for name in names)


def _names(graph: Graph, inner: bool = False) -> tuple[Mapping[str, str], dict[str, str]]:
    """New names of operators and of values. ``inner``: of a graph within an operator, whose inputs are named by nobody."""
    names = names_of(graph)
    values = {name: f"@{value.name}" for name, value in graph.values.items()} | dict(names.values)
    values |= {param.value: f"@{param.fqn}" for param in graph.params}
    values |= {name: f"input {n}" if inner else name for n, name in enumerate(graph.inputs)}
    values |= {name: f"constant {n}" for n, name in enumerate(graph.constants) if inner and name not in graph.producers}
    return names.ops, values


def _renamed(graph: Graph, ops: Mapping[str, str], values: Mapping[str, str]) -> Graph:
    def tree(one: T) -> T:
        return _tree(one, values)

    blocks = tuple(replace(block, path=ops.get(block.path, block.path)) for block in graph.blocks)
    changes = graph.changes
    return replace(
        graph, values={values[name]: replace(value, name=values[name]) for name, value in graph.values.items()},
        inputs=tuple(values[name] for name in graph.inputs),
        params=tuple(replace(param, value=values[param.value]) for param in graph.params),
        ops=tuple(
            replace(op, name=ops[op.name], args=tree(op.args), kwargs=tree(op.kwargs),
                    outputs=tuple(values[name] for name in op.outputs)) for op in graph.ops
        ),
        output_tree=tree(graph.output_tree), loss=graph.loss and values[graph.loss],
        mutations=tuple((values[old], values[new]) for old, new in graph.mutations), blocks=blocks,
        constants={values[name]: tensor for name, tensor in graph.constants.items()},
        changes=None if changes is None else _renamed(changes, *_names(changes)),
    )


def _tree(one: T, values: Mapping[str, str]) -> T:
    found: object = one
    if isinstance(one, Ref):
        found = Ref(values[one.name])
    elif isinstance(one, tuple | list):
        found = type(one)(_tree(item, values) for item in one)
    elif isinstance(one, Mapping):
        found = {key: _tree(item, values) for key, item in one.items()}
    elif isinstance(one, CustomFunction):
        found = replace(one, forward=_own(one.forward), backward=_own(one.backward))
    elif isinstance(one, Experts):
        found = replace(one, graph=_own(one.graph))
    return found  # type: ignore[return-value]


def canonical_inside(one: T) -> T:
    """Arguments in which what operators compute inside is under its own names; names of values stay."""
    found: object = one
    if isinstance(one, tuple | list):
        found = type(one)(canonical_inside(item) for item in one)
    elif isinstance(one, Mapping):
        found = {key: canonical_inside(item) for key, item in one.items()}
    elif isinstance(one, CustomFunction | Experts):
        found = _tree(one, {})
    return found  # type: ignore[return-value]


def _own(graph: Graph) -> Graph:
    return _renamed(graph, *_names(graph, inner=True))
