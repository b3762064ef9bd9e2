"""Boxes at rest, and the exchange that gives a segment its piece of every fused part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ir.mesh import Mesh
from meshwright.ir.program import Stored
from meshwright.ir.sharding import Sharding, piece
from meshwright.runtime.groups import make_groups
from meshwright.runtime.state.layout import box, owner, parts, split_parts, take


def stored_of(shape: tuple[int, ...], dims: tuple[tuple[str, ...], ...], fused: int = 1, **more: Any) -> Stored:
    return Stored("w", ("w",), shape, torch.float32, True, False, True, Sharding(dims), fused=fused, **more)


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)), st.permutations(["dp", "rp", "tp"]),
    st.sampled_from([(), ("dp",), ("dp", "rp")]),
    st.sampled_from([((), ()), (("tp",), ()), ((), ("tp",))]),
)
def test_owners_boxes_tile_the_tensor(shape: tuple[int, int], order: list[str], shards: tuple[str, ...], dims: tuple) -> None:
    mesh = Mesh(tuple(order), (2, 3, 2))
    stored = stored_of(shape, dims, data_axes=("dp", "rp"), shard_axes=shards)
    seen = torch.zeros(shape, dtype=torch.int)
    for rank in range(mesh.world):
        at = mesh.coordinates(rank)
        if owner(stored, mesh, at):
            take(seen, box(stored, mesh, at)).add_(1)
    assert torch.equal(seen, torch.ones(shape, dtype=torch.int))


def exchange(rank: int, size: int, dim: int, fused: int) -> None:
    mesh = Mesh.of(a=2, b=2)
    shape = (size, 3) if dim == 0 else (3, size)
    dims = (("a", "b"), ()) if dim == 0 else ((), ("a", "b"))
    stored = stored_of(shape, dims, fused, fused_dim=dim)
    groups = make_groups(mesh, torch.device("cpu"), [("a", "b")])
    whole = torch.arange(3.0 * size).reshape(shape)
    how = parts(stored, groups)
    mine = take(whole, box(stored, mesh, groups.coordinates)).clone().requires_grad_()
    got = split_parts(mine, how)
    offset, length = piece(size // fused, mesh, ("a", "b"), groups.coordinates)
    expected = torch.cat([part.narrow(dim, offset, length) for part in whole.chunk(fused, dim)], dim)
    assert torch.equal(got, expected)
    got.backward(2 * expected)
    assert torch.equal(mine.grad, 2 * mine)


@pytest.mark.parametrize(("size", "dim", "fused"), [(24, 0, 3), (15, 1, 3), (9, 0, 3), (10, 1, 2)])
def test_split_parts(pool: Callable, size: int, dim: int, fused: int) -> None:
    pool(world=4).run(exchange, size, dim, fused)
