"""Groups of axes and the meshes that FSDP2 gets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from meshwright.ir.mesh import Mesh, MeshError
from meshwright.runtime.groups import ALONE, live, make_data_mesh, make_groups

CPU = torch.device("cpu")


def test_degree_one_has_no_group() -> None:
    mesh = Mesh.of(pp=1, dp=2, tp=1)
    assert live(mesh, ("tp", "dp", "pp")) == ("dp",)
    groups = make_groups(Mesh.of(dp=1, tp=1), CPU)
    assert groups.device_mesh is None
    assert groups.group("tp") is groups.group(("dp", "tp")) is ALONE
    with pytest.raises(MeshError, match=r"torch\.distributed is not initialized"):
        make_groups(mesh, CPU)
    with pytest.raises(MeshError, match="no axis 'xp'"):
        groups.group("xp")


def groups_of(rank: int) -> None:
    mesh = Mesh.of(a=2, one=1, b=2)
    # what a rank asks for beyond single axes may differ: stages of a pipeline
    groups = make_groups(mesh, CPU, [("a", "b")] if rank == 0 else [])
    at = mesh.coordinates(rank)
    assert groups.axes == ("a", "b")
    for axes in ("a", "b", ("a",), ("b", "a"), ("a", "one", "b")):
        group = groups.group(axes)
        names = (axes,) if isinstance(axes, str) else tuple(axis for axis in mesh.axes if axis in axes)
        assert (group.rank, group.size) == (mesh.index(at, names), mesh.size(names))
        (members,) = [ranks for ranks in mesh.groups(names) if rank in ranks]
        total = torch.tensor(rank)
        total = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(total, "sum", group.name))
        assert total == sum(members)
    with pytest.raises(MeshError, match="has 8 ranks"):
        make_groups(Mesh.of(a=8), CPU)


def test_groups(pool: Callable) -> None:
    pool(world=4).run(groups_of)


def data_meshes(rank: int) -> None:
    def members(found: torch.distributed.device_mesh.DeviceMesh) -> list[list[int]]:
        return [dist.get_process_group_ranks(group) for group in found.get_all_groups()]

    mesh = Mesh.of(a=2, b=2)
    groups = make_groups(mesh, CPU)
    column, row = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    cases = {  # (data axes, shard axes): (groups of the data mesh, rest)
        (("a", "b"), ("b",)): ([column, row], ()),
        (("a", "b"), ("a",)): ([row, column], ()),
        (("a", "b"), ("a", "b")): ([[0, 1, 2, 3]], ()),
        (("a", "b"), ()): ([[0, 1, 2, 3], [rank]], ()),
        (("a",), ("a",)): ([column], ("b",)),
        (("b",), ("b",)): ([row], ("a",)),
        (("b",), ()): ([row, [rank]], ("a",)),
    }
    for (data, shard), (expected, rest) in cases.items():
        found = make_data_mesh(groups, data, shard)
        assert members(found.whole[found.data]) == expected, (data, shard)
        assert found.rest == rest
        if rest:
            assert members(found.whole[rest]) == [column if rest == ("a",) else row]


def test_data_meshes(pool: Callable) -> None:
    pool(world=4).run(data_meshes)
