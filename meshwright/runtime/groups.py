"""Process groups and device meshes from a ``Mesh``.

An axis of degree 1 has no group and no mesh dim: what runs along it is local. The device mesh over the other axes carries
the DTensors at the edge; FSDP2 gets meshes of its own with the axes in the order that it wants,

    (replicas, shards, the other axes)

where several data axes are one fused dim and no shard axis (ZeRO-0) is a dim of one rank: FSDP2 shards over the second dim,
all-reduces over the first, and carries the tensor-parallel placement of a parameter on the others.

Along a pipeline axis the ranks hold different stages, so no tensor is replicated over it: every stage has a device mesh of its
own, without that axis, cut from the ``root`` of all ranks.

A world of one rank without ``torch.distributed`` initialized has no device mesh: nothing there is a DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.ir.mesh import Mesh, MeshError
from meshwright.runtime.collectives import Group

ALONE = Group("", 0, 1)
"""The group of an axis of degree 1."""


@dataclass(frozen=True)
class Groups:
    """This rank's place on the mesh. ``by_axes``: the group of one or several axes of degree above 1, in mesh order.
    ``device_mesh``: of the ranks of this stage; ``root``: of all. ``pipeline``: the ranks with the other stages of this rank's
    place; ``sharing``: {some of their indices in it: the group of these}."""

    mesh: Mesh
    rank: int
    device: torch.device
    device_mesh: DeviceMesh | None
    by_axes: Mapping[tuple[str, ...], Group]
    root: DeviceMesh | None = None
    pipeline: dist.ProcessGroup | None = None
    sharing: Mapping[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)

    @property
    def coordinates(self) -> dict[str, int]:
        return self.mesh.coordinates(self.rank)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that ``device_mesh`` has dims for."""
        return (self.device_mesh.mesh_dim_names or ()) if self.device_mesh is not None else ()

    def group(self, axes: str | Iterable[str]) -> Group:
        """The group of one axis, or of several together."""
        key = live(self.mesh, (axes,) if isinstance(axes, str) else axes)
        if not key:
            return ALONE
        if key not in self.by_axes:
            raise MeshError(f"no process group was made for axes {key} of mesh {self.mesh}")
        return self.by_axes[key]


@dataclass(frozen=True)
class DataMesh:
    """The mesh of FSDP2 units: ``data`` are its (replicas, shards) or (shards,) dims, ``rest`` the axes beside them."""

    whole: DeviceMesh
    data: tuple[str, ...]
    rest: tuple[str, ...]


def live(mesh: Mesh, axes: Iterable[str]) -> tuple[str, ...]:
    """The axes of degree above 1 among ``axes``, in mesh order."""
    wanted = set(axes)
    mesh.size(wanted)  # raises for an unknown one
    return tuple(axis for axis in mesh.axes if axis in wanted and mesh.size(axis) > 1)


def make_groups(
    mesh: Mesh, device: torch.device, fused: Iterable[Iterable[str]] = (), stages: str | None = None,
    sharing: Iterable[tuple[int, ...]] = (),
) -> Groups:
    """Groups of every axis, and of each set of axes in ``fused``. Every rank calls this, with a mesh of the whole world.

    ``stages``: the axis along which pipeline stages lie, if any; ``sharing``: sets of indices along it that need a group, the
    same on every rank.
    """
    if not dist.is_initialized():
        if mesh.world > 1:
            raise MeshError(f"mesh {mesh} has {mesh.world} ranks but torch.distributed is not initialized; start the processes "
                            f"with torchrun and call torch.distributed.init_process_group()")
        return Groups(mesh, 0, device, None, {})
    if dist.get_world_size() != mesh.world:
        raise MeshError(f"mesh {mesh} has {mesh.world} ranks, the process group has {dist.get_world_size()}; "
                        f"start {mesh.world} processes or plan for {dist.get_world_size()}")
    rank, axes = dist.get_rank(), live(mesh, mesh.axes)
    inside = tuple(axis for axis in axes if axis != stages)
    names = axes if inside else (*axes, next((axis for axis in mesh.axes if axis not in axes), "one"))
    root = DeviceMesh(device.type, torch.arange(mesh.world).view([_size(mesh, name) for name in names]), mesh_dim_names=names)
    by_axes: dict[tuple[str, ...], Group] = {(axis,): _group(root.get_group(axis)) for axis in axes}
    for key in _agreed(live(mesh, several) for several in fused):
        if key and key not in by_axes:
            mine, _ = dist.new_subgroups_by_enumeration([list(members) for members in mesh.groups(key)])
            by_axes[key] = _group(mine)
    if stages not in axes:
        return Groups(mesh, rank, device, root, by_axes, root)
    pipeline = root.get_group(stages)
    small = {chosen: _sharing(mesh, stages, chosen, pipeline) for chosen in sorted(set(sharing))}
    return Groups(mesh, rank, device, root[inside or names[-1:]], by_axes, root, pipeline, small)


def _size(mesh: Mesh, name: str) -> int:
    return mesh.size(name) if name in mesh.axes else 1


def _sharing(mesh: Mesh, stages: str, chosen: tuple[int, ...], pipeline: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The group of the chosen indices along the pipeline axis; None on ranks with another index."""
    if len(chosen) == mesh.size(stages):
        return pipeline
    members = [[column[index] for index in chosen] for column in mesh.groups((stages,))]
    mine: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(members)[0]
    return mine


def make_data_mesh(groups: Groups, data_axes: Iterable[str], shard_axes: Iterable[str]) -> DataMesh:
    """The mesh for parameters whose gradients are summed over ``data_axes`` and that are split over ``shard_axes``.

    Every rank calls this. ``data_axes`` has an axis of degree above 1.
    """
    mesh = groups.mesh
    data, shards = live(mesh, data_axes), live(mesh, shard_axes)
    replicas = tuple(axis for axis in data if axis not in shards)
    rest = tuple(axis for axis in groups.axes if axis not in data)
    assert groups.root is not None
    outer = tuple(name for name in groups.root.mesh_dim_names or () if name not in groups.axes)
    if shards and (*replicas, *shards, *rest) == groups.axes and len(replicas) <= 1 and len(shards) == 1:
        whole, names = groups.root, (replicas, shards)
        used = tuple(name[0] for name in names if name)
    else:
        known = (*outer, *groups.axes)
        order = [known.index(axis) for axis in (*outer, *replicas, *shards, *rest)]
        ranks = torch.arange(mesh.world).view([mesh.size(axis) for axis in known]).permute(order)
        used = ("_".join(replicas), "_".join(shards) or "unsplit") if replicas else ("_".join(shards),)
        sizes = [mesh.size(replicas)] * bool(replicas) + [mesh.size(shards)]
        sizes = [*(mesh.size(axis) for axis in outer), *sizes, *(mesh.size(axis) for axis in rest)]
        whole = DeviceMesh(groups.device.type, ranks.reshape(sizes), mesh_dim_names=(*outer, *used, *rest))
    return DataMesh(whole, used, rest)


def _group(process_group: dist.ProcessGroup) -> Group:
    return Group(process_group.group_name, process_group.rank(), process_group.size())


def _agreed(keys: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """All ranks' keys in one order: making a group is collective, and stages of a pipeline may ask for different ones."""
    per_rank: list[list[tuple[str, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(per_rank, sorted(set(keys)))
    return sorted({key for keys_ in per_rank for key in keys_})
