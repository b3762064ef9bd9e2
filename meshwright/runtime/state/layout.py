"""Where a stored tensor lies: which box of the global tensor each rank holds at rest, and what a segment reads of it.

At rest a tensor is cut twice: by ``Stored.tensor`` (tensor parallelism), then, along ``split_dim``, over the shard axes
(FSDP2). Both cut by ceiling, so a rank's share is always one box, (offset, length) per dim: what materializing reads,
checkpoints write and the full state dict gathers. DTensor placements say the same to the outside.

A fused parameter (qkv in one) is no exception at rest: its split dim is cut like any other, so that its state dict, its
optimizer state and its checkpoints need no knowledge of the fusion. A segment needs the r-th piece of *every* part:

    at rest, 2 ranks, 3 parts        q q k | k v v
    in a segment (``split_parts``)   q k v | q k v

which is one uneven all-to-all of rows, undone in the backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from meshwright.ir.mesh import PP, Mesh
from meshwright.ir.program import Stored
from meshwright.ir.sharding import ShardingError, ceil_div, format_sharding, piece
from meshwright.runtime.collectives import Group, exchange_rows
from meshwright.runtime.groups import Groups, live

Box = tuple[tuple[int, int], ...]
"""(offset, length) per dim."""


def under_fsdp(stored: Stored, mesh: Mesh) -> bool:
    """Whether FSDP2 gathers it and reduces its gradient; FSDP2 takes no tensors without dims or elements."""
    return stored.trainable and bool(live(mesh, stored.data_axes)) and bool(stored.shape) and 0 not in stored.shape


def split_dim(stored: Stored, mesh: Mesh) -> int:
    """The dim that FSDP2 cuts: the first; or, if that has fewer rows than there are shards, one that the shards divide. One of
    no length, where there is one: its pieces are the whole."""
    if 0 in stored.shape:
        return stored.shape.index(0)
    shards = mesh.size(live(mesh, stored.shard_axes))
    lengths = [piece(size, mesh, axes, None)[1] for size, axes in zip(stored.shape, stored.tensor.dims, strict=True)]
    if lengths[0] >= shards:
        return 0
    whole = [mesh.size(axes) * shards for axes in stored.tensor.dims]
    return next((dim for dim, size in enumerate(stored.shape) if size % whole[dim] == 0), 0)


def box(stored: Stored, mesh: Mesh, coordinates: Mapping[str, int]) -> Box:
    """This rank's share at rest."""
    result = [piece(size, mesh, axes, coordinates) for size, axes in zip(stored.shape, stored.tensor.dims, strict=True)]
    shards = live(mesh, stored.shard_axes)
    if under_fsdp(stored, mesh) and shards:
        dim = split_dim(stored, mesh)
        offset, length = result[dim]
        step = ceil_div(length, mesh.size(shards))
        start = min(length, step * mesh.index(coordinates, shards))
        result[dim] = offset + start, min(step, length - start)
    return tuple(result)


def owner(stored: Stored, mesh: Mesh, coordinates: Mapping[str, int]) -> bool:
    """Whether this rank is the first of those that hold the same box."""
    cut = {*stored.tensor.split_axes, *(stored.shard_axes if under_fsdp(stored, mesh) else ())}
    first = {PP: stored.holders[0]} if stored.holders else {}
    return all(coordinates[axis] == first.get(axis, 0) for axis in mesh.axes if axis not in cut)


def take(whole: Tensor, box_: Box) -> Tensor:
    """The box of a whole tensor, as a view."""
    for dim, (offset, length) in enumerate(box_):
        whole = whole.narrow(dim, offset, length)
    return whole


def placements(stored: Stored, axes: tuple[str, ...]) -> tuple[Placement, ...]:
    """DTensor placements of ``Stored.tensor`` over these axes of the mesh, which are in mesh order."""
    return tuple(
        Shard(kind) if isinstance(kind := stored.tensor.kind(axis), int) else Replicate() for axis in axes
    )


def global_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    stride, result = 1, []
    for size in reversed(shape):
        result.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(result))


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, without autograd; a plain tensor as it is. Shares storage."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


class Locals(Function):
    """The local tensors of many DTensors at once: DTensor's own conversion costs more than a small operator, each time."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.specs = [
            (t.device_mesh, t.placements, t.shape, t.stride()) if isinstance(t, DTensor) else None for t in tensors
        ]
        locals_ = tuple(local_of(t) for t in tensors)
        # or a rotary table would take a gradient, and every product with it keep its other factor
        ctx.mark_non_differentiable(*(t for t, need in zip(locals_, ctx.needs_input_grad, strict=True) if not need))
        ctx.set_materialize_grads(False)
        return locals_

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # a copy: autograd adds to a gradient in place when it alone refers to the DTensor, but two of them may share one local
        # tensor (both operands of an addition have the same gradient)
        return tuple(
            grad if grad is None or spec is None
            else DTensor.from_local(grad.clone(), spec[0], spec[1], run_check=False, shape=spec[2], stride=spec[3])
            for grad, spec in zip(grads, ctx.specs, strict=True)
        )


@dataclass(frozen=True)
class Parts:
    """The exchange that turns a plain piece into the same piece of every fused part. ``sends[j]``: (start, length) in this
    rank's rows of what rank j needs; ``receives[j]``: number of rows from rank j. Received rows are in their global order."""

    dim: int
    group: Group
    sends: tuple[tuple[tuple[int, int], ...], ...]
    receives: tuple[int, ...]

    @property
    def sent(self) -> list[int]:
        return [sum(length for _, length in rows) for rows in self.sends]


def parts(stored: Stored, groups: Groups) -> Parts | None:
    """How a segment gets its piece of every part; None if the parameter is not fused or not split."""
    mesh, dim = groups.mesh, stored.fused_dim
    if stored.fused == 1 or not (axes := live(mesh, stored.tensor.dims[dim])):
        return None
    size = stored.shape[dim]
    if size % stored.fused:
        what = f"fused parameter {stored.fqns[0]!r} {format_sharding(stored.tensor, stored.shape)}"
        raise ShardingError(f"{what}: dim {dim} must be a multiple of its {stored.fused} parts")
    group, part = groups.group(axes), size // stored.fused
    here = groups.coordinates
    fixed = {axis: at for axis, at in here.items() if axis not in axes}
    indices = itertools.product(*(range(mesh.size(axis)) for axis in axes))
    members = [{**fixed, **dict(zip(axes, index, strict=True))} for index in indices]
    at_rest = [piece(size, mesh, axes, member) for member in members]
    in_use = [
        [(k * part + offset, length) for k in range(stored.fused)]
        for offset, length in (piece(part, mesh, axes, member) for member in members)
    ]
    mine = at_rest[group.rank]
    sends = tuple(tuple((start - mine[0], n) for start, n in _overlaps([mine], wanted)) for wanted in in_use)
    receives = tuple(sum(n for _, n in _overlaps([theirs], in_use[group.rank])) for theirs in at_rest)
    return Parts(dim, group, sends, receives)


def _overlaps(these: list[tuple[int, int]], those: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result = []
    for a, n in these:
        for b, m in those:
            start, stop = max(a, b), min(a + n, b + m)
            if stop > start:
                result.append((start, stop - start))
    return result


class _SplitParts(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, how: Parts) -> Tensor:
        ctx.how, ctx.rows = how, local.shape[how.dim]
        rows = local.movedim(how.dim, 0)
        outgoing = torch.cat([rows.narrow(0, start, length) for to in how.sends for start, length in to] or [rows[:0]])
        return exchange_rows(outgoing, how.sent, list(how.receives), how.group).movedim(0, how.dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        how: Parts = ctx.how
        returned = exchange_rows(grad.movedim(how.dim, 0), list(how.receives), how.sent, how.group)
        rows = returned.new_empty(ctx.rows, *returned.shape[1:])
        pieces = [place for to in how.sends for place in to]
        blocks = returned.split([length for _, length in pieces]) if pieces else ()
        for (start, length), block in zip(pieces, blocks, strict=True):
            rows.narrow(0, start, length).copy_(block)
        return rows.movedim(0, how.dim).contiguous(), None


def split_parts(local: Tensor, how: Parts) -> Tensor:
    """This rank's piece of every fused part, from its piece of the whole."""
    result: Tensor = _SplitParts.apply(local, how)
    return result
