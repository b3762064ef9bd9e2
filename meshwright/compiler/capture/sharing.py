"""Tensors of a model that lie in the same memory.

In one process what is written into one is seen in the other. A parallel module gives every tensor memory of its own, so this
would end silently. Buffers and attributes that are the same memory, read the same way, are kept one tensor with several names
(``one_memory``). A parameter that shares memory with anything else (``nn.Parameter(other.weight.data)``, a slice, a transpose,
an attribute ``self.w = self.weight.data``), and tensors that overlap only partly, are refused with both names. Disjoint slices
of one storage (a checkpoint mapped from a file) share nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.compiler.capture.shadow import ModelTensor
from meshwright.errors import CaptureError
from meshwright.ir.graph import Graph

_COUNTED = 1 << 22
"""Elements up to which two strided tensors are compared one by one; larger ones overlap if their ranges do."""


@dataclass(frozen=True)
class Extent:
    """Bytes [start, stop) of a memory: a device's, or a storage without contents (meta)."""

    memory: Any
    start: int
    stop: int


def extent(tensor: Tensor) -> Extent | None:
    """Where a tensor lies; None if nowhere that can be told."""
    if not tensor.numel() or tensor.layout != torch.strided:
        return None
    try:
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        if tensor.is_meta:
            memory, start = tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.itemsize
        else:
            memory, start = str(tensor.device), tensor.data_ptr()
    except RuntimeError:  # a subclass that has no memory of its own
        return None
    return Extent(memory, int(start), int(start + reach * tensor.itemsize)) if start or tensor.is_meta else None


def one_memory(owned: Sequence[ModelTensor]) -> tuple[list[ModelTensor], frozenset[str]]:
    """The tensors, those that are one joined; and the names of attributes that overlap others, which the forward may not
    change. Raises CaptureError naming two that share memory and cannot be kept one, or one that is no dense tensor."""
    for item in owned:
        if item.tensor.layout != torch.strided:
            raise CaptureError(f"{_kind(item)} {item.fqns[0]!r} is of layout {item.tensor.layout}, and a parallel module holds "
                               f"dense tensors: keep the places and the values as two dense buffers, and multiply by gather "
                               f"and scatter_add (index_add) in the forward, or keep it .to_dense()")
    joined: dict[int, ModelTensor] = dict(enumerate(owned))
    fixed: set[str] = set()
    for pair in _overlaps([extent(item.tensor) for item in owned]):
        i, j = sorted(pair)
        a, b = owned[i], owned[j]
        if not _overlap(a.tensor, b.tensor):
            continue
        if a.buffer and b.buffer and _same(a.tensor, b.tensor) and (a.persistent == b.persistent or b.plain):
            first = next(k for k in sorted(joined) if owned[i].fqns[0] in joined[k].fqns)
            if j in joined and first != j:
                other = joined.pop(j)
                whole = joined[first]
                joined[first] = replace(whole, fqns=(*whole.fqns, *other.fqns), also=(*whole.also, other.tensor, *other.also))
        elif a.plain and b.plain:
            fixed |= {a.fqns[0], b.fqns[0]}
        else:
            raise _refusal(_kind(a), a.fqns[0], _kind(b), b.fqns[0], bool(not a.buffer and not b.buffer))
    return list(joined.values()), frozenset(fixed)


def check_strays(model: nn.Module, owned: Sequence[ModelTensor], strays: Sequence[Tensor]) -> None:
    """Raise CaptureError if a tensor that the model keeps in a list, dict or object shares memory with a registered one."""
    extents = [extent(item.tensor) for item in owned]
    for stray in strays:
        for i, j in _overlaps([*extents, extent(stray)]):
            at = min(i, j)
            if max(i, j) == len(owned) and not owned[at].plain and _overlap(owned[at].tensor, stray):
                raise _refusal(_kind(owned[at]), owned[at].fqns[0], "what is kept in", _home(model, stray), False)


def check_graph(graph: Graph, owned: Sequence[ModelTensor], fixed: frozenset[str]) -> None:
    """Raise CaptureError if the forward changes an attribute that overlaps another, or reads a buffer that requires a gradient,
    which would go nowhere."""
    mutated, read = {old for old, _ in graph.mutations}, {name for op in graph.ops for name in op.inputs}
    needs = {item.fqns[0] for item in owned if item.buffer and not item.plain and item.tensor.requires_grad}
    for param in graph.params:
        if param.value in mutated and param.fqn in fixed:
            raise CaptureError(f"the forward changes {param.fqn!r}, which shares memory with another attribute of the model: "
                               f"make one of them a .clone()")
        if param.value in read and param.fqn in needs:
            raise CaptureError(f"the forward reads {param.fqn!r}, a buffer that requires a gradient, so "
                               f"the gradient would be lost: make it an nn.Parameter, compute it in the forward, or .detach() "
                               f"it")


def _overlaps(extents: Sequence[Extent | None]) -> Iterator[tuple[int, int]]:
    """Pairs whose ranges share a byte."""
    order = sorted((one.start, i) for i, one in enumerate(extents) if one is not None)
    open_: list[int] = []
    for start, i in order:
        mine = extents[i]
        assert mine is not None
        open_ = [j for j in open_ if (other := extents[j]) is not None and (other.stop > start or other.memory != mine.memory)]
        yield from ((j, i) for j in open_ if (other := extents[j]) is not None and other.memory == mine.memory)
        open_.append(i)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose ranges do share an element: columns of one matrix do not."""
    if a.itemsize != b.itemsize or max(a.numel(), b.numel()) > _COUNTED:
        return True
    first, second = extent(a), extent(b)
    assert first is not None
    assert second is not None
    shift, rest = divmod(second.start - first.start, a.itemsize)
    return bool(rest) or bool(torch.isin(_offsets(a), _offsets(b) + shift).any())


def _offsets(x: Tensor) -> Tensor:
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return places.flatten()


def _same(a: Tensor, b: Tensor) -> bool:
    return extent(a) == extent(b) and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def _kind(item: ModelTensor) -> str:
    return "attribute" if item.plain else "buffer" if item.buffer else "parameter"


def _refusal(kind: str, name: str, other_kind: str, other: str, both: bool) -> CaptureError:
    way = "give both modules the same nn.Parameter object (b.weight = a.weight), or make one a .clone()" if both else \
        "make one of them a .clone(), or compute it in the forward from the other"
    return CaptureError(f"{kind} {name!r} and {other_kind} {other!r} share memory: what is written into one changes the other, "
                        f"and a parallel module would separate them. What to do: {way}")


def _home(model: nn.Module, stray: Tensor) -> str:
    mine = extent(stray)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or isinstance(value, Tensor):
                continue
            if any(isinstance(leaf, Tensor) and extent(leaf) == mine for leaf in pytree.tree_leaves(value)):
                return f"{path}.{name}" if path else name
    return "an object"


