"""Checkpoint folders: tensors in safetensors files, everything else in one JSON file. Nothing is pickled, nothing executed.

    folder/rank-00000.safetensors   what rank 0 wrote: boxes of global tensors, each under its tensor's name
    folder/checkpoint.json          the index, written last: a folder without it is no checkpoint

``torch.distributed.checkpoint`` plans who writes and reads what; ``Writer`` and ``Reader`` are its storage. The index holds

    files     {name: [bytes, CRC-32]}
    tensors   {name: {dtype, shape, chunks: [[offsets, lengths, file]]}}
    values    {name: number, text, None, or lists, tuples and dicts of these}
    digest    SHA-256 of the rest

and is checked as a whole before it is used: types, ranges, that files are plain names within the folder, and that the chunks of
a tensor fill it without overlap. So what is truncated, missing or altered is an error, never other numbers. The files carry
torch's own sharding note too, so that ``torch.distributed.checkpoint.HuggingFaceStorageReader`` reads them (complex tensors
appear there with a last dim of 2).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from meshwright.errors import CheckpointError, MissingCheckpointError
from meshwright.ir.sharding import DTYPE_NAMES, DTYPES

INDEX = "checkpoint.json"
VERSION = 2
"""Of the index. 1: an optimizer's groups did not say which states their parameters had."""
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_KINDS: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}
"""Names of dtypes in safetensors files."""
_PIECE = 1 << 24
"""Bytes read at once for a checksum."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the file that holds it."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a checkpoint: GLOBAL shape, and the boxes that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds. ``files``: {name: (bytes, CRC-32)}."""

    files: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, Any]


# --- the index -------------------------------------------------------------------------------------------------------------


def put_in_place(draft: Path, target: Path) -> None:
    """A folder that is written takes the place of one that may be there, which stays whole until then."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    draft.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def read_index(folder: Path) -> Index:
    """The index of a checkpoint, checked. Raises MissingCheckpointError, CheckpointError."""
    path = folder / INDEX
    if not path.is_file():
        pickled = (folder / ".metadata").exists()
        hint = ("; its .metadata is a pickle of torch.distributed.checkpoint, which is never read: load it with that library "
                "into parallel.state_dict()") if pickled else ""
        raise MissingCheckpointError(f"{folder} is no checkpoint (it has no {INDEX}); give a folder written by save(){hint}")
    try:
        data = json.loads(path.read_bytes())
        found = data.pop("digest")
        if data["meshwright"] != VERSION:
            raise CheckpointError(f"checkpoint {folder} is of format {data['meshwright']!r}, this version reads {VERSION}: "
                                  f"load it with the meshwright that wrote it, and keep its full_state_dict()")
        if found != _digest(data):
            raise CheckpointError(f"checkpoint {folder} is damaged: {INDEX} was altered after it was written; take another one")
        index = Index(
            {name: (int(size), int(crc)) for name, (size, crc) in data["files"].items()},
            {name: _entry(entry) for name, entry in data["tensors"].items()},
            {name: _plain(value) for name, value in data["values"].items()},
        )
        _check(index)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a file that is no index makes of itself
        raise CheckpointError(f"checkpoint {folder} is damaged: {INDEX} cannot be read ({type(error).__name__}: {error}); take "
                              f"another one") from error
    return index


def write_index(folder: Path, index: Index) -> None:
    """Write the index; the file is whole or not there."""
    data: dict[str, Any] = {
        "meshwright": VERSION,
        "files": {name: list(how) for name, how in index.files.items()},
        "tensors": {
            name: {
                "dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape),
                "chunks": [[list(chunk.offsets), list(chunk.lengths), chunk.file] for chunk in entry.chunks],
            }
            for name, entry in index.tensors.items()
        },
        "values": {name: _packed(value, name) for name, value in index.values.items()},
    }
    draft = folder / f".{INDEX}"
    draft.write_text(json.dumps({**data, "digest": _digest(data)}), encoding="utf-8")
    draft.rename(folder / INDEX)


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _entry(data: Mapping[str, Any]) -> TensorEntry:
    chunks = tuple(Chunk(tuple(offsets), tuple(lengths), file) for offsets, lengths, file in data["chunks"])
    return TensorEntry(DTYPES[data["dtype"]], tuple(data["shape"]), chunks)


def _check(index: Index) -> None:
    """Raise CheckpointError unless files are plain names and every tensor is filled by its chunks, each element once."""
    for name in index.files:
        if not _FILE.fullmatch(name):
            raise CheckpointError(f"a checkpoint's index names the file {name!r}; files are called rank-00000.safetensors")
    room = {name: size for name, (size, _) in index.files.items()}
    for name, entry in index.tensors.items():
        numbers = [*entry.shape, *(n for chunk in entry.chunks for n in (*chunk.offsets, *chunk.lengths))]
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
            raise CheckpointError(f"tensor {name!r} of a checkpoint has sizes that are no counts: {numbers}")
        for chunk in entry.chunks:
            inside = len(chunk.offsets) == len(chunk.lengths) == len(entry.shape) and all(
                at + n <= size for at, n, size in zip(chunk.offsets, chunk.lengths, entry.shape, strict=True)
            )
            if not inside or chunk.file not in index.files:
                raise CheckpointError(f"tensor {name!r} of a checkpoint has a chunk outside it, or in no file: {chunk}")
            room[chunk.file] -= math.prod(chunk.lengths) * entry.dtype.itemsize
        held = sum(math.prod(chunk.lengths) for chunk in entry.chunks)
        if held != math.prod(entry.shape) or _overlap(entry.chunks):
            raise CheckpointError(f"tensor {name!r} of a checkpoint has {math.prod(entry.shape)} elements, of which its chunks "
                                  f"hold {held}, or some twice")
    short = [name for name, left in room.items() if left < 0]
    if short:
        raise CheckpointError(f"a checkpoint's index says that {short[0]} holds more tensors than it has bytes")


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether two boxes share an element. Boxes are swept along the first dim that cuts them, those open at a time compared."""
    if len(chunks) < 2 or not chunks[0].lengths:
        return len(chunks) > 1
    dim = max(range(len(chunks[0].lengths)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    open_: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
        open_ = [other for other in open_ if other.offsets[dim] + other.lengths[dim] > chunk.offsets[dim]]
        for other in open_:
            if all(a < b + m and b < a + n for a, n, b, m in
                   zip(chunk.offsets, chunk.lengths, other.offsets, other.lengths, strict=True)):
                return True
        open_.append(chunk)
    return False


def _packed(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {"tuple": [_packed(item, name) for item in value]}
    if isinstance(value, list):
        return [_packed(item, name) for item in value]
    if isinstance(value, Mapping):
        return {"map": [[_packed(key, name), _packed(item, name)] for key, item in value.items()]}
    raise CheckpointError(f"cannot save {name!r}: a {type(value).__name__} is no tensor, number, text, or list, tuple or dict "
                          f"of these; a checkpoint holds nothing else, so that reading it runs no code")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        if "tuple" in value:
            return tuple(_plain(item) for item in value["tuple"])
        return {_plain(key): _plain(item) for key, item in value["map"]}
    return value


# --- writing ---------------------------------------------------------------------------------------------------------------


class Writer(StorageWriter):
    """The storage of one save. ``values``: what is no tensor, by name; every rank gives those that it has."""

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.folder, self.values, self.everything = folder, values, dict(values)
        for name, value in values.items():
            _packed(value, name)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Every rank sees the same folder."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """With this rank's values."""
        return replace(plan, storage_data=dict(self.values))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: all values, and a number for every rank's file."""
        for plan in plans:
            self.everything.update(plan.storage_data)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file; none if there is nothing to write."""
        done: Future[list[WriteResult]] = Future()
        name = f"rank-{plan.storage_data:05}.safetensors"
        done.set_result(_write(self.folder / name, plan.items, planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: the index."""
        files: dict[str, tuple[int, int]] = {}
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for rank in results for result in rank):
            chunk, size, crc = result.storage_data
            chunks[result.index.fqn].append(chunk)
            files[chunk.file] = size, crc
        tensors = {}
        for name, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata)
            tensors[name] = TensorEntry(found.properties.dtype, tuple(found.size), tuple(chunks[name]))
        index = Index(files, tensors, self.everything)
        _check(index)
        write_index(self.folder, index)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Folders are given to the constructor."""
        return False


def _write(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """One safetensors file, tensor by tensor, so that no second copy of everything is in memory."""
    parts: dict[str, tuple[WriteItem, torch.dtype, list[int]]] = {}
    for item in items:
        assert item.tensor_data is not None
        assert item.index.fqn not in parts
        dtype, lengths = item.tensor_data.properties.dtype, list(item.tensor_data.chunk.sizes)
        parts[item.index.fqn] = item, dtype, lengths
    order = sorted(parts, key=lambda name: (-_real(parts[name][1]).itemsize, name))  # so that every tensor is aligned
    note = {name: {"saved_offsets": list(parts[name][0].tensor_data.chunk.offsets) + [0] * parts[name][1].is_complex}  # type: ignore[union-attr]
            for name in order}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(note)}}
    at = 0
    for name in order:
        _, dtype, lengths = parts[name]
        if _real(dtype) not in _KINDS:
            raise CheckpointError(f"cannot save {name!r}: a checkpoint holds no tensors of {dtype}")
        size = math.prod(lengths) * dtype.itemsize
        shape = lengths + [2] * dtype.is_complex
        header[name] = {"dtype": _KINDS[_real(dtype)], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    crc = 0
    with path.open("wb") as file:
        for data in (struct.pack("<Q", len(text)), text):
            crc = zlib.crc32(data, crc)
            file.write(data)
        for name in order:
            tensor = planner.resolve_data(parts[name][0])
            assert isinstance(tensor, Tensor)
            raw = _bytes(tensor.detach()).numpy().data
            crc = zlib.crc32(raw, crc)
            file.write(raw)
        file.flush()
        os.fsync(file.fileno())
        total = file.tell()
    return [
        WriteResult(item.index, math.prod(lengths) * dtype.itemsize,
                    (Chunk(tuple(item.tensor_data.chunk.offsets), tuple(lengths), path.name), total, crc))  # type: ignore[union-attr]
        for item, dtype, lengths in parts.values()
    ]


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1).view(torch.uint8)


# --- reading ---------------------------------------------------------------------------------------------------------------


class Reader(StorageReader):
    """The storage of one load."""

    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__()
        self.folder, self.index = folder, index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self) -> Metadata:
        """The index in torch's words."""
        return Metadata({
            name: TensorStorageMetadata(
                TensorProperties(dtype=entry.dtype), torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.lengths)) for chunk in entry.chunks],
            )
            for name, entry in self.index.tensors.items()
        })

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """{chunk: its file}."""
        self.files = {
            MetadataIndex(name, chunk.offsets): chunk.file
            for name, entry in self.index.tensors.items() for chunk in entry.chunks
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every piece into its place, file by file."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            if 0 not in item.lengths:
                by_file.setdefault(self.files[item.storage_index], []).append(item)
        for name, items in by_file.items():
            with safe_open(self.folder / name, framework="pt") as file:
                for item in items:
                    key = item.storage_index.fqn
                    pieces = tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))
                    found = file.get_slice(key)[pieces] if pieces else file.get_tensor(key)
                    dtype = self.index.tensors[key].dtype
                    if dtype.is_complex:  # in memory of its own: in the file pairs are not aligned as torch wants them
                        found = torch.view_as_complex(found.clone())
                    target = planner.resolve_tensor(item).detach()
                    if found.dtype != dtype or found.shape != target.shape:
                        raise CheckpointError(f"{name} holds {key!r} as {found.dtype}{list(found.shape)}; the index says "
                                              f"{dtype}{list(target.shape)}")
                    planner.commit_tensor(item, target.copy_(found))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Folders are given to the constructor."""
        return False


def check_files(folder: Path, index: Index, share: int, shares: int) -> None:
    """Raise CheckpointError if one of a share of the files is missing or not as it was written."""
    for name in sorted(index.files)[share::shares]:
        size, want = index.files[name]
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"of {path.stat().st_size} bytes" if path.is_file() else "missing"
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} is {found}, it was written with {size} bytes; take "
                                  f"another one")
        crc = 0
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                crc = zlib.crc32(piece, crc)
        if crc != want:
            raise CheckpointError(f"checkpoint {folder} is damaged: the contents of {name} are not those that were written; "
                                  f"take another one")
