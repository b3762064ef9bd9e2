"""How pins and plan files name operators, values and blocks, and how they write a choice and how a block is kept.

    operator    its module, its kind and, of several, which one it is: "model.layers.0.mlp.up_proj:linear", "layers.0:add#1"
    value       the operator that makes it, and of several results which: "model.layers.0.self_attn:split[1]"; an input as
                "input:input_ids", a parameter by its own name
    block       its path; where that is empty or not its own, the name of its first operator
    choice      "dp=b0, tp=n", or "" where every rank does all of it
    kept        "ZeRO 3, recompute full, gradients summed over dp, state split over dp"

Names of the trace are not used, so all this holds for the model captured again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.ir.graph import Graph

ROOT = "outside the blocks"
"""The name, among blocks, of what lies outside of them."""
_KEPT = re.compile(
    r"ZeRO (?P<zero>[0-3]), recompute (?P<recompute>none|selective|full)"
    r"(?:, gradients summed over (?P<data>\w+(?:, \w+)*?))?(?:, state split over (?P<shard>\w+(?:, \w+)*?))?"
    r"(?P<keep>, weights stay gathered over the step)?(?:, stage \d+)?"
)


@dataclass(frozen=True)
class CanonicalNames:
    """Those of one graph: ``ops`` and ``values`` by their names in the graph, ``blocks`` in order; and the way back."""

    ops: Mapping[str, str]
    values: Mapping[str, str]
    blocks: tuple[str, ...]
    op_of: Mapping[str, str] = field(default_factory=dict, repr=False)
    value_of: Mapping[str, str] = field(default_factory=dict, repr=False)


def names_of(graph: Graph) -> CanonicalNames:
    """The names of everything in a graph."""
    count: Counter[str] = Counter()
    ops: dict[str, str] = {}
    values = {name: f"input:{name}" for name in graph.inputs}
    values |= {param.value: param.fqn for param in graph.params}
    for op in graph.ops:
        ops[op.name] = key = key_of(op.module, op.target, count)
        several = len(op.outputs) > 1
        values.update({name: f"{key}[{n}]" if several else key for n, name in enumerate(op.outputs)})
    paths = Counter(block.path for block in graph.blocks)
    blocks = tuple(
        block.path if block.path and paths[block.path] == 1 and block.path not in ops else ops[graph.ops[block.start].name]
        for block in graph.blocks
    )
    back = [{key: name for name, key in names.items()} for names in (ops, values)]
    return CanonicalNames(ops, values, blocks, *back)


def key_of(module: str, target: str, count: Counter[str]) -> str:
    """The name of the next operator of a module; ``count``: of those before it, kept here."""
    base = f"{module}:{target.split('.')[1] if '.' in target else target}"
    number = count[base]
    count[base] += 1
    return f"{base}#{number}" if number else base


def choice_text(assignment: Mapping[str, str]) -> str:
    """A choice in words.

    >>> choice_text({"dp": "b0", "tp": "n"}), choice_of("dp=b0, tp=n")
    ('dp=b0, tp=n', {'dp': 'b0', 'tp': 'n'})
    """
    return ", ".join(f"{axis}={factor}" for axis, factor in assignment.items())


def choice_of(text: str) -> dict[str, str]:
    """Read what ``choice_text`` writes. Raises ValueError for anything else."""
    found: dict[str, str] = {}
    for part in text.split(",") if text.strip() else ():
        axis, equals, factor = (word.strip() for word in part.partition("="))
        if not (axis and equals and factor) or axis in found:
            raise ValueError(f"{text!r} is no choice, as in 'dp=b0, tp=n'")
        found[axis] = factor
    return found


@dataclass(frozen=True, slots=True)
class Kept:
    """How the parameters of a block are kept: the fields of a ``GroupChoice`` that say so."""

    zero: int = 0
    data_axes: tuple[str, ...] = ()
    shard_axes: tuple[str, ...] = ()
    recompute: str = "none"
    keep: bool = False


def kept_text(kept: Kept) -> str:
    """How a block keeps its parameters, in the words of every view.

    >>> kept_text(Kept(2, ("dp", "cp"), ("dp",)))
    'ZeRO 2, recompute none, gradients summed over dp, cp, state split over dp'
    """
    words = [f"ZeRO {kept.zero}", f"recompute {kept.recompute}"]
    words += [f"gradients summed over {', '.join(kept.data_axes)}"] if kept.data_axes else []
    words += [f"state split over {', '.join(kept.shard_axes)}"] if kept.shard_axes else []
    words += ["weights stay gathered over the step"] if kept.keep else []
    return ", ".join(words)


def kept_of(text: str) -> Kept:
    """Read what ``kept_text`` writes. Raises ValueError for anything else.

    >>> kept_of("ZeRO 2, recompute none, gradients summed over dp, cp, state split over dp").data_axes
    ('dp', 'cp')
    """
    found = _KEPT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} does not say how a block is kept, as in 'ZeRO 3, recompute none, gradients summed over dp, "
                         "state split over dp'")
    data, shard = (tuple(found[name].split(", ")) if found[name] else () for name in ("data", "shard"))
    if not set(shard) <= set(data):
        raise ValueError(f"{text!r} splits state over axes that its gradients are not summed over")
    return Kept(int(found["zero"]), data, shard, found["recompute"], bool(found["keep"]))
