"""The graph: what a captured model computes, as frozen values.

A ``Graph`` is a list of ``Op`` in execution order over named ``Value``s, in single static assignment: every value is an
input, a parameter or buffer, or an output of exactly one op, and is defined before it is read. Operators are functional;
what the model mutates (batch-norm statistics) is an output listed in ``mutations``.

An op's ``args``/``kwargs`` are those of the ATen overload ``target`` ("aten.linear.default"), with tensors as ``Ref``;
lists of tensors are tuples of ``Ref``. ``mw.*`` targets are meshwright's own operators (``meshwright.runtime.ops``).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from meshwright.errors import MeshwrightError
from meshwright.ir.sharding import DTYPE_NAMES

FILL = "aten.full.default"
"""One number everywhere, so that any piece is like any other; the only spelling of a fill in a graph."""
ASSERTED = "mw.asserted"
"""In ``Graph.changes``: (what must hold, a text that says what it is) -> the former, or an error."""

LITERALS: frozenset[type] = frozenset({int, float, bool, str, type(None)})
"""Types of most arguments that are no values of the graph: what walks arguments asks this first."""
_LISTS = (tuple, list)


class GraphError(MeshwrightError, ValueError):
    """A graph that is not well formed."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of a value by name."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: its name, GLOBAL shape and dtype. ``differentiable``: a gradient flows back through it to a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes_(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"%{self.name}: {DTYPE_NAMES[self.dtype]}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter or buffer. ``fqns``: every fully qualified name it goes under, the canonical one first (tied weights)."""

    value: str
    fqns: tuple[str, ...]
    trainable: bool
    buffer: bool = False
    persistent: bool = True

    @property
    def fqn(self) -> str:
        return self.fqns[0]


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call. ``module``: path of the module that made it; ``source``: "file:line" of the model's code; ``inputs``:
    names of the tensor operands, in order of appearance, repeats kept."""

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[str, ...]
    module: str = ""
    source: str = ""
    inputs: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        found = tuple(ref.name for ref in refs((self.args, tuple(value for _, value in self.kwargs))))
        object.__setattr__(self, "inputs", found)  # read far more often than operators are made

    def __str__(self) -> str:
        words = [_show(arg) for arg in self.args] + [f"{key}={_show(value)}" for key, value in self.kwargs]
        left = ", ".join(f"%{name}" for name in self.outputs)
        return f"{left} = {self.target}({', '.join(words)})" + (f"  # {self.module}" if self.module else "")


@dataclass(frozen=True, slots=True)
class Block:
    """A run of consecutive ops made by one module; equal ``kind`` means equal up to names (a repeated layer)."""

    path: str
    kind: int
    start: int
    stop: int


@dataclass(frozen=True)
class Graph:
    """A captured model at the GLOBAL batch.

    ``inputs``: names of the user's tensors in order; ``output_tree``: nested tuple/dict/None/number structure whose tensor
    leaves are ``Ref`` (``signature["output"]``: how to rebuild the user's container, see ``meshwright.ir.signature``);
    ``loss``: the scalar to differentiate, if any; ``mutations``: (buffer value, the value that replaces it); ``constants``:
    the contents, by value name, of buffers that are no registered buffers of the model (literals, plain attributes);
    ``changes``: from the inputs, {input: its new value} for those that the forward changes in place, and what it asserts of
    inputs (``ASSERTED``), if there is anything.
    ``classes``: those of the output's containers by name, as the capture met them. ``foreign``: read from a file, and not (yet)
    found to compute what a captured model does.
    """

    values: Mapping[str, Value]
    inputs: tuple[str, ...]
    params: tuple[Param, ...]
    ops: tuple[Op, ...]
    output_tree: Any
    loss: str | None = None
    mutations: tuple[tuple[str, str], ...] = ()
    blocks: tuple[Block, ...] = ()
    signature: Any = None  # JSON-able description of the call: see meshwright.ir.signature
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    changes: Graph | None = None
    classes: Mapping[str, type] = field(default_factory=dict, compare=False, repr=False)
    foreign: bool = field(default=False, compare=False)
    producers: Mapping[str, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "producers", {out: i for i, op in enumerate(self.ops) for out in op.outputs})

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that leave the graph (with the mutated buffers' new values), without repeats."""
        names = [ref.name for ref in refs(self.output_tree)] + [new for _, new in self.mutations]
        return tuple(dict.fromkeys(names))

    @cached_property
    def parameter_free(self) -> frozenset[str]:
        """Names of the ops that depend on inputs, buffers and constants only: masks, position tables, labels."""
        made = {param.value for param in self.params if not param.buffer}
        free = set()
        for op in self.ops:
            if made.isdisjoint(op.inputs):
                free.add(op.name)
            else:
                made.update(op.outputs)
        return frozenset(free)

    @cached_property
    def parameter_free_values(self) -> frozenset[str]:
        """What these ops make."""
        return frozenset(name for op in self.ops if op.name in self.parameter_free for name in op.outputs)

    def consumers(self) -> dict[str, list[int]]:
        """For every value the indices of the ops that read it (once per op)."""
        result: dict[str, list[int]] = {name: [] for name in self.values}
        for index, op in enumerate(self.ops):
            for name in dict.fromkeys(op.inputs):
                result[name].append(index)
        return result

    def verify(self) -> None:
        """Raise GraphError unless every value is defined exactly once, before use, and known."""
        defined: set[str] = set()
        for name in (*self.inputs, *(param.value for param in self.params)):
            if name in defined:
                raise GraphError(f"value %{name} is defined twice")
            defined.add(name)
        for op in self.ops:
            for name in op.inputs:
                if name not in defined:
                    raise GraphError(f"op {op} reads %{name} before it is defined")
            for name in op.outputs:
                if name in defined:
                    raise GraphError(f"value %{name} is defined twice, the second time by {op}")
                defined.add(name)
        for name in self.outputs:
            if name not in defined:
                raise GraphError(f"output %{name} is not defined")
        for name in defined:
            if name not in self.values:
                raise GraphError(f"value %{name} has no shape and dtype")

    def __str__(self) -> str:
        lines = [f"input {self.values[name]}" for name in self.inputs]
        lines += [f"{'buffer' if p.buffer else 'parameter'} {self.values[p.value]}  # {', '.join(p.fqns)}" for p in self.params]
        lines += [str(op) for op in self.ops]
        lines += [f"mutate %{old} <- %{new}" for old, new in self.mutations]
        return "\n".join([*lines, f"return {_show(self.output_tree)}"])


def refs(tree: Any) -> Iterator[Ref]:
    """Every Ref in nested tuples, lists and dicts, in order."""
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, _LISTS):
        for item in tree:
            yield from refs(item)
    elif type(tree) not in LITERALS and isinstance(tree, Mapping):
        for item in tree.values():
            yield from refs(item)


def map_refs(tree: Any, rename: Any) -> Any:
    """The same tree with every Ref replaced by ``rename(ref)``."""
    if isinstance(tree, Ref):
        return rename(tree)
    if type(tree) in LITERALS:
        return tree
    if isinstance(tree, tuple):
        return tuple(map_refs(item, rename) for item in tree)
    if isinstance(tree, list):
        return [map_refs(item, rename) for item in tree]
    if isinstance(tree, Mapping):
        return {key: map_refs(item, rename) for key, item in tree.items()}
    return tree


def renamed(op: Op, names: Sequence[str]) -> Op:
    """The operator reading these values, in the order of ``inputs``."""
    if (*names,) == op.inputs:
        return op
    queue = iter(names)

    def next_(ref: Ref) -> Ref:
        return Ref(next(queue))

    return replace(op, args=map_refs(op.args, next_), kwargs=map_refs(op.kwargs, next_))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the cyclic garbage collector, which walks a growing graph again and again (a sixth of the time that making one
    takes); graphs and what is made of them have no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def arguments(op: Op, read: Callable[[Ref], Any]) -> tuple[list[Any], dict[str, Any]]:
    """What an operator of torch is called with: every Ref is ``read``, and tuples are lists, which its schemas ask for."""
    def given(arg: Any) -> Any:
        found = map_refs(arg, read)
        return list(found) if isinstance(found, tuple) else found

    return [given(arg) for arg in op.args], {key: given(arg) for key, arg in op.kwargs}


def _show(arg: Any) -> str:
    if isinstance(arg, tuple | list):
        return "[" + ", ".join(map(_show, arg)) + "]"
    if isinstance(arg, Mapping):
        return "{" + ", ".join(f"{key}: {_show(value)}" for key, value in arg.items()) + "}"
    return repr(arg)
