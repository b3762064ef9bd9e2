"""How a value lives on a mesh, and the one notation for it.

    f32[8@dp, 4096, 14336@tp]        dim 0 split over dp, dim 2 over tp, dim 1 whole
    f32[16@(dp,tp), 4096]            dim 0 split over dp, each piece again over tp
    f32[8@dp, 4096, 4096] +tp        every tp rank holds a term: the value is their sum (pending)
    f32[4096] ~dp                    every dp rank holds the same value, but its *gradient* is pending a sum
    f32[8, 4096@cp*]                 dim 1 split over cp in two chunks a rank: it is *mirrored*

An axis that appears nowhere is *invariant*: the same value on each of its ranks, and the same, complete gradient. In the
local SPMD calculus of ``spmd_types`` these are Shard, Partial (``+``), Replicate (``~``) and Invariant. Differentiation
swaps the two marks: the gradient of a pending sum is whole everywhere (``~``), the gradient of a ``~`` value is a pending
sum (``+``); a split stays a split.

Mirrored over p ranks, a dim of 2 p equal chunks has chunks r and 2 p - 1 - r on rank r, in this order: under causal attention,
where row i looks at keys 0..i, every rank then has the same work.

Any other split is by ceiling, as ``torch.chunk`` and ``DTensor`` do: size n over p ranks gives pieces of ceil(n / p), the last
ones shorter, perhaps empty.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from meshwright.errors import MeshwrightError
from meshwright.ir.mesh import Mesh

if TYPE_CHECKING:  # importing DTensor takes most of a second, and only the two conversions need it
    from torch.distributed.tensor.placement_types import Placement

DTYPES: Mapping[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
    "bool": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_TYPE = re.compile(r"(?:(\w+))?\[(.*)\]\s*((?:[+~]\w+\s*)*)")
_DIM = re.compile(r"(\d+|_)(?:@(?:(\w+\*?)|\(([\w,\s*]+)\)))?")


class ShardingError(MeshwrightError, ValueError):
    """A sharding that contradicts itself, its mesh or its value."""


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Sharding:
    """Placement of one value.

    ``dims``: for each tensor dim the ordered axes it is split over, major first. ``partial``: axes over which the value is
    a pending sum (``+``). ``varying``: axes along which the value is replicated but read differently on each rank, so that
    its gradient is a pending sum (``~``). ``mirrored``: axes whose split of a dim is in two chunks a rank (``*``).
    """

    dims: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()
    varying: frozenset[str] = frozenset()
    mirrored: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.mirrored and not self.mirrored.issubset(self.split_axes):
            raise ShardingError(f"what splits no dim cannot be mirrored: {', '.join(sorted(self.mirrored))}")
        used = [*itertools.chain.from_iterable(self.dims), *self.partial, *self.varying]
        if len(used) > 1 and len(set(used)) != len(used):
            raise ShardingError(f"an axis is used twice in {format_sharding(self)}")

    @classmethod
    def whole(cls, ndim: int) -> Sharding:
        """Invariant over every axis."""
        return cls(((),) * ndim)

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes that split some dim."""
        return tuple(axis for dim in self.dims for axis in dim)

    def gradient(self) -> Sharding:
        """The sharding of this value's gradient.

        >>> print(format_sharding(parse_sharding("[_@dp, _] +tp").gradient()))
        [_@dp, _] ~tp
        """
        return Sharding(self.dims, self.varying, self.partial, self.mirrored)

    def at_rest(self) -> Sharding:
        """Without the ``~`` marks, which say how a value is read, not how it is stored."""
        return replace(self, varying=frozenset())

    def kind(self, axis: str) -> int | str:
        """What one axis does: the dim it splits, "+", "~", or "" (invariant)."""
        for index, dim in enumerate(self.dims):
            if axis in dim:
                return index
        return "+" if axis in self.partial else "~" if axis in self.varying else ""

    def local_shape(self, shape: Sequence[int], mesh: Mesh, coordinates: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Shape of the piece at ``coordinates`` (default: the first rank's, which is the largest)."""
        return tuple(
            piece(size, mesh, axes, coordinates)[1] if axes else size
            for size, axes in zip(shape, self.dims, strict=True)
        )

    def validate(self, shape: Sequence[int], mesh: Mesh) -> None:
        """Raise ShardingError if this cannot be the placement of a value of ``shape`` on ``mesh``."""
        if len(shape) != self.ndim:
            raise ShardingError(f"{format_sharding(self)} has {self.ndim} dims, the value {tuple(shape)} has {len(shape)}")
        for axis in (*self.split_axes, *self.partial, *self.varying):
            if axis not in mesh.axes:
                raise ShardingError(f"{format_sharding(self)} names axis {axis!r}, which mesh {mesh} lacks")

    def __str__(self) -> str:
        return format_sharding(self)


def shared_split(needs: Sequence[Sharding]) -> Sharding:
    """The splits that several ways to read a tensor share, of every dim the outer axes; at least one must be given.

    >>> print(shared_split([parse_sharding("[_@(dp, tp), _]"), parse_sharding("[_@dp, _@tp]")]))
    [_@dp, _]
    """
    dims = []
    for dim in range(needs[0].ndim):
        common = needs[0].dims[dim]
        for need in needs[1:]:
            pairs = zip(common, need.dims[dim], strict=False)
            common = tuple(axis for axis, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        dims.append(common)
    return Sharding(tuple(dims))


def piece(size: int, mesh: Mesh, axes: Sequence[str], coordinates: Mapping[str, int] | None) -> tuple[int, int]:
    """(offset, length) of the piece of a dim of ``size`` split over ``axes``, major first, at ``coordinates``.

    >>> piece(10, Mesh.of(a=4), ("a",), {"a": 3})
    (9, 1)
    """
    offset, length = 0, size
    for axis in axes:
        step = ceil_div(length, mesh.size(axis))
        start = min(length, step * (coordinates[axis] if coordinates else 0))
        offset, length = offset + start, min(step, length - start)
    return offset, length


def format_sharding(sharding: Sharding, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> str:
    """Print in the one notation; without a shape, sizes are ``_``."""
    sizes = [str(size) for size in shape] if shape is not None else ["_"] * sharding.ndim
    dims = []
    for size, axes in zip(sizes, sharding.dims, strict=True):
        axes = tuple(axis + "*" * (axis in sharding.mirrored) for axis in axes)
        dims.append(size + ("" if not axes else f"@{axes[0]}" if len(axes) == 1 else f"@({','.join(axes)})"))
    marks = [f"+{axis}" for axis in sorted(sharding.partial)] + [f"~{axis}" for axis in sorted(sharding.varying)]
    return " ".join([(DTYPE_NAMES[dtype] if dtype else "") + "[" + ", ".join(dims) + "]", *marks])


def parse_type(text: str) -> tuple[torch.dtype | None, tuple[int, ...] | None, Sharding]:
    """Read the notation: (dtype or None, shape or None, sharding).

    >>> dtype, shape, sharding = parse_type("f32[8@dp, 4096, 16@(cp,tp)] +ep")
    >>> shape, sharding.dims, format_sharding(sharding, shape, dtype)
    ((8, 4096, 16), (('dp',), (), ('cp', 'tp')), 'f32[8@dp, 4096, 16@(cp,tp)] +ep')
    >>> str(parse_sharding("[8, 4096@(cp*,tp)]"))
    '[_, _@(cp*,tp)]'
    """
    match = _TYPE.fullmatch(text.strip())
    if not match:
        raise ShardingError(f"cannot read {text!r}; the notation is like 'f32[8@dp, 4096] +tp'")
    name, inside, marks = match.groups()
    if name and name not in DTYPES:
        raise ShardingError(f"unknown dtype {name!r} in {text!r}; known: {', '.join(DTYPES)}")
    sizes: list[int | None] = []
    dims: list[tuple[str, ...]] = []
    for part in re.split(r",(?![^()]*\))", inside) if inside.strip() else []:
        found = _DIM.fullmatch(part.strip())
        if not found:
            raise ShardingError(f"cannot read dim {part.strip()!r} in {text!r}; a dim is like '8', '8@dp', '8@(dp,tp)' or '_'")
        size, one, many = found.groups()
        sizes.append(None if size == "_" else int(size))
        dims.append((one,) if one else tuple(axis.strip() for axis in many.split(",")) if many else ())
    shape = None if any(size is None for size in sizes) else tuple(size for size in sizes if size is not None)
    by_mark = {mark: frozenset(word[1:] for word in marks.split() if word[0] == mark) for mark in "+~"}
    mirrored = frozenset(axis[:-1] for dim in dims for axis in dim if axis.endswith("*"))
    plain = tuple(tuple(axis.removesuffix("*") for axis in dim) for dim in dims)
    return DTYPES[name] if name else None, shape, Sharding(plain, by_mark["+"], by_mark["~"], mirrored)


def parse_sharding(text: str) -> Sharding:
    """The sharding alone, sizes ignored."""
    return parse_type(text)[2]


def to_placements(sharding: Sharding, mesh: Mesh, axes: Iterable[str] | None = None) -> tuple[Placement, ...]:
    """DTensor placements over ``axes`` of the mesh (default all), in mesh order.

    DTensor splits a dim in mesh-axis order, so the axes of a dim must be in that order; otherwise ShardingError.
    """
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    if sharding.mirrored:
        raise ShardingError(f"{format_sharding(sharding)} is in two chunks a rank, which no DTensor is")
    result: list[Placement] = []
    for axes_of_dim in sharding.dims:
        positions = [mesh.axes.index(axis) for axis in axes_of_dim]
        if positions != sorted(positions):
            raise ShardingError(f"{format_sharding(sharding)} splits a dim against the axis order of mesh {mesh}")
    for axis in axes if axes is not None else mesh.axes:
        kind = sharding.kind(axis)
        result.append(Shard(kind) if isinstance(kind, int) else Partial() if kind == "+" else Replicate())
    return tuple(result)
