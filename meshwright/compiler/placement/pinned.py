"""Pins that name a model's parameters, operators, values and blocks: whether they name any, and what they fix.

What is named becomes ``FixedDecisions`` over the axes of one mesh, so the degrees of that mesh must be pinned as well.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from meshwright.compiler.placement.costs import Variant
from meshwright.compiler.placement.fixed import NOTHING_FIXED, FixedDecisions
from meshwright.compiler.structure.measured import ModuleTimes
from meshwright.compiler.structure.positions import Position, operands
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import HEADS, PP
from meshwright.ir.pins import ROOT, PinError, Pins, named_by
from meshwright.ir.sharding import Sharding, ShardingError, format_sharding, parse_type
from meshwright.ir.writing.names import CanonicalNames, Kept, choice_of, kept_of, names_of
from meshwright.ir.writing.paths import unfold_paths

T = TypeVar("T")


def check_tensor_pins(pins: Pins, graph: Graph) -> None:
    """Raise PinError for a pin of a parameter that the model does not have, or of another shape."""
    params = {fqn: param for param in graph.params if not param.buffer for fqn in param.fqns}
    for pattern, text in pins.tensors.items():
        found = named_by(pattern, params)
        if not found:
            raise PinError(f"pin {pattern!r} names no parameter of the model{_near(pattern, params)}")
        for fqn in found:
            shape = graph.values[params[fqn].value].shape
            sharding, sizes = read_pin(text)
            if sharding.partial or sharding.varying:
                raise PinError(f"pin {pattern!r}: {text!r} has a mark + or ~, which is for results; a parameter is only split")
            if sharding.ndim != len(shape):
                raise PinError(f"pin {text!r} has {sharding.ndim} dims, the parameter has {len(shape)}")
            if any(size not in (None, there) for size, there in zip(sizes, shape, strict=True)):
                raise PinError(f"pin {pattern!r}: {text!r} is of another shape than {fqn}, which is {list(shape)}; write _ for "
                               "a size that does not matter")


_DIM = re.compile(r"\([^)]*\)|([\[,]\s*)[A-Za-z]\w*(?=\s*[@,\]])")
"""The name of a dim, which may be any; the axes of one in brackets are none."""


def read_pin(text: str) -> tuple[Sharding, list[int | None]]:
    """A sharding as it is printed, or with names for dims ("[h, f@tp]"), and the sizes that it states. Raises PinError."""
    plain = _DIM.sub(lambda found: found[0] if found[1] is None else f"{found[1]}_", text)
    try:
        sharding = parse_type(plain)[2]
    except ShardingError as error:
        raise PinError(f"pin {text!r} is no sharding: {error}") from error
    dims = re.findall(r"(?:^|[\[,])\s*(\d+|_)(?=\s*[@,\]])", re.sub(r"\([^)]*\)", "()", plain[plain.index("["):]))
    return sharding, [None if dim == "_" else int(dim) for dim in dims]


def told_apart(
    pins: Pins, fixed: FixedDecisions, graph: Graph, modules: ModuleTimes | None = None
) -> Callable[[Position, Graph], object]:
    """Equal for positions of which the same is pinned, of their parameters and of what is ``fixed``, and that are measured by
    the same tables."""
    pinned = {
        param.value: texts for param in graph.params
        if (texts := tuple(text for pattern, text in pins.tensors.items() if named_by(pattern, param.fqns)))
    }

    def of(position: Position, graph: Graph) -> object:
        read = operands(position.ops(graph)) if pinned else ()
        measured = modules.apart(position.ops(graph)) if modules is not None else None
        return fixed.told_apart(position, graph), tuple(pinned.get(name) for name in read), measured

    return of


def fixed_by(pins: Pins, graph: Graph, world: int) -> FixedDecisions:
    """What the pins hold of operators, values and blocks, on ``world`` devices. Raises PinError for a name that the model does
    not have, a text that says nothing or names an axis that no mesh under the pins has, or degrees that are open."""
    if not (pins.operators or pins.values or pins.blocks):
        return NOTHING_FIXED
    if pins.axes is None and None in (pins.dp, pins.tp):
        raise PinError("pins operators, values and blocks name axes of one mesh; pin axes, or the degrees dp and tp, as well")
    names = names_of(graph)
    assignments = _read("operators", pins.operators, names.op_of, choice_of)
    copies = _read("values", pins.values, names.value_of, lambda text: read_pin(text)[0])
    for name, one in copies.items():
        if one.ndim != len(graph.values[name].shape):
            raise PinError(f"pin {names.values[name]!r}: {format_sharding(one)} has {one.ndim} dims, the value has "
                           f"{len(graph.values[name].shape)}")
    kept = {name: Variant(one.zero, one.data_axes, one.shard_axes, one.recompute)
            for name, one in kept_by(pins, graph, names).items()}
    fixed, axes = FixedDecisions(assignments, copies, kept), _axes_under(pins, world)
    used = fixed.axes | {axis for variant in kept.values() for axis in variant.data_axes}
    if stray := sorted(axis for axis in used if axis not in axes):
        raise PinError(f"pins operators, values or blocks name axis {stray[0]!r}; under the other pins a mesh has no more than "
                       f"{', '.join(sorted(axes))}; leave that axis out of them, or pin a mesh that has it")
    return fixed


def _axes_under(pins: Pins, world: int) -> set[str]:
    """The axes that something may be split over on a mesh under the pins, be it pinned or found by the search."""
    if pins.axes is not None:
        return {axis.removesuffix("*") for axis in pins.axes} - {PP}
    data, rest = pins.dp or 1, world // ((pins.dp or 1) * (pins.tp or 1))
    found = {"dp", "dp_replicate", "dp_shard", "tp"}
    if any(pins.allows("cp", n) for n in range(2, rest + 1) if rest % n == 0):
        found |= {"cp", HEADS}
    if any(pins.allows("ep", n) for n in range(2, data * rest + 1) if data * rest % n == 0):
        found.add("ep")
    return found


def kept_by(pins: Pins, graph: Graph, names: CanonicalNames) -> dict[str, Kept]:
    """How parameters are kept, by the first operator of the block; "" is what lies outside of the blocks."""
    known = {name: graph.ops[block.start].name for name, block in zip(names.blocks, graph.blocks, strict=True)}
    found = _read("blocks", pins.blocks, {**known, ROOT: ""}, kept_of)
    if any(one.keep for one in found.values()):
        raise PinError("pin blocks: weights that stay gathered over the step are not planned; drop these words")
    return found


def _read(what: str, pins: Mapping[str, str], known: Mapping[str, str], read: Callable[[str], T]) -> dict[str, T]:
    """{what is named: what its text says}. Raises PinError."""
    found: dict[str, T] = {}
    for pattern, text in pins.items():
        try:
            meaning = read(text)
        except ValueError as error:
            raise PinError(f"pin {what}: {pattern!r}: {error}") from error
        for name in _named(what, pattern, known):
            if found.setdefault(name, meaning) != meaning:
                raise PinError(f"pin {what}: {pattern!r} says otherwise than another pin of the same; drop one")
    return found


def _named(what: str, pattern: str, known: Mapping[str, str]) -> list[str]:
    """What a name with folded numbers or "*" stands for. Raises PinError if that is nothing."""
    try:
        paths = [pattern] if pattern in known else unfold_paths(pattern)
    except ValueError as error:
        raise PinError(f"pin {what}: {error}") from error
    found = []
    for path in paths:
        if path in known:
            found.append(known[path])
            continue
        form = re.compile("[^:]*".join(map(re.escape, path.split("*")))) if "*" in path else None
        matched = [name for key, name in known.items() if form is not None and form.fullmatch(key)]
        if not matched:
            raise PinError(f"pin {what}: {path!r} is none of the model's{_near(path, known)}")
        found += matched
    return found


def _near(name: str, known: Collection[str] | Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    return f"; did you mean {near[0]!r}?" if near else ""
