"""State dicts and checkpoints of a parallel module, independent of the plan that wrote them.

Every stored tensor is known as one box of its global tensor on each rank (``layout.box``), which is all that
``torch.distributed.checkpoint`` needs: ``_Share`` hands it the box and the local tensor. So any mesh can read what any other
wrote, uneven pieces too. ``full_state_dict`` sends the boxes to rank 0, one tensor at a time.

A checkpoint is written beside its folder and renamed when it is whole; ``runtime.state.storage`` says what lies in it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.ir.program import Stored
from meshwright.runtime.groups import Groups
from meshwright.runtime.state import optimizer as optim
from meshwright.runtime.state.layout import Box, box, local_of, owner, take
from meshwright.runtime.state.storage import Index, Reader, TensorEntry, Writer, check_files, put_in_place, read_index
from meshwright.runtime.verdict import together


class _Share(Tensor):
    """One rank's box of a global tensor, in the protocol that the checkpoint planners speak; shares the local storage."""

    whole: tuple[int, ...]
    box: Box

    @staticmethod
    def of(local: Tensor, whole: tuple[int, ...], box_: Box) -> _Share:
        share = local.as_subclass(_Share)
        share.whole, share.box = whole, box_
        return share

    def _chunks(self) -> list[ChunkStorageMetadata]:
        if not all(length for _, length in self.box):
            return []
        return [ChunkStorageMetadata(torch.Size(at for at, _ in self.box), torch.Size(n for _, n in self.box))]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.as_subclass(Tensor))
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.whole)),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:
        """Of the whole, as of a DTensor."""
        return torch.Size(self.whole) if dim is None else self.whole[dim]


COUNTERS = "module.counters"

Entries = Mapping[str, tuple[Stored, Tensor | None]]
"""{fully qualified name: what is stored under it, its tensor at rest}, in the order of the model's state dict; the same names
on every rank, None where the tensor is another pipeline stage's."""


# --- the whole, on rank 0 ------------------------------------------------------------------------------------------------


def gather_state_dict(entries: Entries, groups: Groups, dtype: Callable[[Stored], torch.dtype]) -> dict[str, Tensor]:
    """Plain CPU tensors on rank 0 (an empty dict elsewhere), one tensor in flight at a time. Every rank calls this.

    ``dtype``: of a tensor at rest.
    """
    result: dict[str, Tensor] = {}
    wholes: dict[str, Tensor] = {}
    for fqn, (stored, tensor) in entries.items():
        if stored.value not in wholes:
            local = torch.empty(0, dtype=dtype(stored), device=groups.device) if tensor is None else local_of(tensor)
            wholes[stored.value] = _gather(stored, local, groups)
        if groups.rank == 0:
            result[fqn] = wholes[stored.value]
    return result


def _gather(stored: Stored, local: Tensor, groups: Groups) -> Tensor:
    """The whole tensor on rank 0; elsewhere nothing."""
    mesh = groups.mesh
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.world)]
    boxes = {r: box(stored, mesh, at) for r, at in enumerate(coordinates) if owner(stored, mesh, at)}
    boxes = {r: share for r, share in boxes.items() if all(length for _, length in share)}
    if groups.rank != 0:
        if groups.rank in boxes:
            _wait([dist.P2POp(dist.isend, local.contiguous(), 0)])
        return local.new_empty(0)
    whole = torch.empty(stored.shape, dtype=local.dtype)
    parts = {r: local if r == 0 else local.new_empty([length for _, length in share]) for r, share in boxes.items()}
    _wait([dist.P2POp(dist.irecv, part, r) for r, part in parts.items() if r != 0])
    for r, part in parts.items():
        take(whole, boxes[r]).copy_(part)
    return whole


def _wait(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


# --- folders ---------------------------------------------------------------------------------------------------------------


Counters = Mapping[str, int]
"""Numbers beside the tensors that a run goes on from: where the random numbers are. Those of ``COUNTED``."""
COUNTED = ("seed", "calls")


def save(
    entries: Entries, groups: Groups, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None,
    counters: Counters,
) -> None:
    """Write the model, ``counters``, and the optimizer's state and groups, as a folder that all ranks reach: see
    ``runtime.state.storage``.

    The folder appears when everything is written, in place of one that was there. Every rank calls this. Raises CheckpointError
    on every rank if one of them cannot write, or if the ranks' optimizers have different groups.
    """
    target = Path(folder).absolute()
    draft = target.with_name(f".{target.name}.partial")

    def clear() -> None:
        if groups.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)

    def publish() -> None:
        if groups.rank == 0:
            put_in_place(draft, target)

    values: dict[str, Any] = {COUNTERS: dict(counters)}
    state: dict[str, Any] = {}
    if optimizer is not None:
        parameters = together(lambda: optim.savable(optimizer, _parameters(entries)))
        values[optim.GROUPS] = optim.of_all_ranks(optim.describe(optimizer, parameters))
        state = _optimizer_shares(parameters, groups, optimizer)

    def content() -> tuple[dict[str, Any], Writer]:
        everything = {**_model_shares(entries, groups), **state}
        mine = {name: value for name, value in everything.items() if not isinstance(value, Tensor)}
        return {name: value for name, value in everything.items() if name not in mine}, Writer(draft, {**values, **mine})

    with _on_disk(f"cannot write checkpoint {target}"):
        together(clear)
        tensors, writer = together(content)
        state_dict_saver.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
        together(publish)


def load(
    entries: Entries, groups: Groups, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None
) -> Counters:
    """Read what ``save`` wrote, under this or any other plan and world: the tensors, the optimizer's state and the options of
    its groups in place; returns the counters. Every rank calls this.

    Raises MissingCheckpointError (a FileNotFoundError) or CheckpointError, on every rank and before anything is changed, if the
    folder holds no checkpoint, a damaged one, or another model's; or if the optimizer's groups are not those that were saved.
    """
    source = Path(folder)

    def look() -> tuple[Index, dict[Tensor, Stored]]:
        index = read_index(source)
        _compare(entries, index, source)
        counts = index.values.get(COUNTERS)
        if not isinstance(counts, dict) or counts.keys() != set(COUNTED) or not all(
                type(n) is int and 0 <= n < 1 << 62 for n in counts.values()):
            raise CheckpointError(f"checkpoint {source} is damaged: its {COUNTERS} are no counts; take another one")
        return index, optim.named(_parameters(entries), optimizer) if optimizer is not None else {}

    with _on_disk(f"cannot read checkpoint {source}"):
        index, parameters = together(look)
        together(lambda: check_files(source, index, groups.rank, groups.mesh.world))
        content: dict[str, Any] = dict(_model_shares(entries, groups))
        if optimizer is not None:
            present = optim.of_all_ranks(optim.describe(optimizer, parameters), same=False)
            saved = optim.match(index.values.get(optim.GROUPS), present)
            states = _states(index)
            together(lambda: optim.complete(optimizer, parameters, saved, states))
            content |= together(lambda: _allocate_optimizer_state(parameters, groups, optimizer, states))
            optim.restore(optimizer, saved)
        state_dict_loader.load(content, storage_reader=Reader(source, index), no_dist=not dist.is_initialized())
    counters: Counters = index.values[COUNTERS]
    return counters


@contextmanager
def _on_disk(what: str) -> Iterator[None]:
    """What goes wrong with files becomes a CheckpointError; torch raises its own kind on every rank, whoever failed."""
    try:
        yield
    except CheckpointException as error:
        reasons = [f"rank {rank}: {type(reason).__name__}: {reason}" for rank, (reason, _) in error.failures.items()]
        raise CheckpointError(f"{what}: {'; '.join(reasons)}") from error
    except MeshwrightError:
        raise
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


def _compare(entries: Entries, index: Index, source: Path) -> None:
    """Raise CheckpointError unless the checkpoint has every tensor of the model, those of all stages: all ranks judge alike."""
    wanted = {f"model.{stored.fqns[0]}": stored.shape for stored, _ in entries.values()}
    missing = sorted(name for name, shape in wanted.items() if name not in index.tensors and 0 not in shape)
    if missing:
        raise CheckpointError(f"checkpoint {source} lacks {len(missing)} tensors of this model, the first: {missing[:3]}; it "
                              f"was written by another model")
    for name, shape in wanted.items():
        if name in index.tensors and index.tensors[name].shape != shape:
            raise CheckpointError(f"checkpoint {source} has {name!r} with shape {index.tensors[name].shape}, this model's is "
                                  f"{shape}")


def _share(stored: Stored, tensor: Tensor, groups: Groups) -> _Share:
    return _Share.of(local_of(tensor), stored.shape, box(stored, groups.mesh, groups.coordinates))


def _model_shares(entries: Entries, groups: Groups) -> dict[str, _Share]:
    """By canonical name: a tied weight is written once."""
    return {
        f"model.{stored.fqns[0]}": _share(stored, tensor, groups) for stored, tensor in entries.values() if tensor is not None
    }


def _parameters(entries: Entries) -> dict[Tensor, Stored]:
    return {tensor: stored for stored, tensor in entries.values() if tensor is not None}


def _optimizer_shares(
    parameters: Mapping[Tensor, Stored], groups: Groups, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """State that lies as its parameter does is a share like it, other tensors are whole."""
    shares: dict[str, Any] = {}
    for parameter, stored in parameters.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and optim.is_like(parameter, name, value.shape):
                value = _share(stored, value, groups)
            elif isinstance(value, DTensor):
                value = value.full_tensor()
            shares[optim.key_of(stored, name)] = value
    return shares


def _states(index: Index) -> dict[str, dict[str, Any]]:
    """{what a parameter's states begin with: {name: its entry, or its value}} of a checkpoint."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in (*index.values.items(), *index.tensors.items()):
        name = key.rpartition(".")[2]
        found.setdefault(key.removesuffix(name), {})[name] = value
    return found


def _allocate_optimizer_state(
    parameters: Mapping[Tensor, Stored], groups: Groups, optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Make the state that the checkpoint has, in place of the old: tensors ready to be read into, and what is no tensor."""
    states: dict[str, Any] = {}
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for parameter, stored in parameters.items():
        if not parameter.numel():
            continue  # tensors without elements are not stored: it keeps what it has
        found = dict(saved.get(optim.key_of(stored, ""), {}))
        for name, entry in found.items():
            if isinstance(entry, TensorEntry):
                found[name] = optim.allocate(parameter, group_of[parameter], name, entry.shape, entry.dtype)
                like = optim.is_like(parameter, name, entry.shape)
                states[optim.key_of(stored, name)] = _share(stored, found[name], groups) if like else local_of(found[name])
        optimizer.state.pop(parameter, None)
        if found:
            optimizer.state[parameter] = found
    return states
