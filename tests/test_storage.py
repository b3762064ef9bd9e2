"""Checkpoint folders: what is written comes back, what is damaged is refused on every rank, and nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, state_dict_loader, state_dict_saver

from meshwright.errors import CheckpointError
from meshwright.runtime.state import storage
from meshwright.runtime.state.storage import Chunk, Index, Reader, TensorEntry, Writer, check_files, read_index, write_index
from tests.test_plan_files import mutant
from tests.test_runtime import PLAIN, SHARDED, prepare, whole

TENSORS: dict[str, torch.Tensor] = {
    "f32": torch.randn(3, 5), "f64": torch.randn(2, dtype=torch.float64), "bf16": torch.randn(7).bfloat16(),
    "f16": torch.randn(1, 3).half(), "bool": torch.tensor([True, False, True]), "i64": torch.arange(4),
    "step": torch.tensor(3.0), "u8": torch.arange(5, dtype=torch.uint8), "turned": torch.randn(4, 3).t(),
    "c64": torch.randn(3, 2, dtype=torch.complex64),
    "c128": torch.randn((), dtype=torch.complex128), "f8": torch.randn(6).to(torch.float8_e4m3fn), "none": torch.zeros(0, 4),
}
VALUES: dict[str, Any] = {
    "betas": (0.9, 0.999), "none": None, "names": ["a", {"b": True, 3: float("inf")}], "nothing": float("nan"), "step": 7,
}


def write(folder: Path) -> None:
    state_dict_saver.save(dict(TENSORS), storage_writer=Writer(folder, VALUES), no_dist=True)


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    write(tmp_path / "c")
    index = read_index(tmp_path / "c")
    check_files(tmp_path / "c", index, 0, 1)
    assert pickle.dumps({**index.values, "nothing": 0}) == pickle.dumps({**VALUES, "nothing": 0})
    assert index.values["nothing"] != index.values["nothing"]
    got = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    state_dict_loader.load(got, storage_reader=Reader(tmp_path / "c", index), no_dist=True)
    for name, tensor in TENSORS.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name].view(torch.uint8) if name == "f8" else got[name],
                           tensor.view(torch.uint8) if name == "f8" else tensor), name


def test_plain_torch_reads_it_without_pickle_too(tmp_path: Path) -> None:
    write(tmp_path)
    got = {name: torch.zeros_like(TENSORS[name]) for name in ("f32", "turned", "i64", "step")}
    state_dict_loader.load(got, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for name, tensor in got.items():
        assert torch.equal(tensor, TENSORS[name])


@pytest.mark.parametrize("value", [torch.nn.Linear(1, 1), {1, 2}, b"raw", [object()]], ids=lambda value: type(value).__name__)
def test_only_plain_values_are_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot save 'odd'"):
        Writer(tmp_path, {"odd": value})


CHUNK = Chunk((0, 0), (2, 3), "rank-00000.safetensors")


@pytest.mark.parametrize(("shape", "chunks"), [
    ((4, 3), [CHUNK]),  # half is missing
    ((2, 3), [CHUNK, CHUNK]),  # twice
    ((2, 2), [CHUNK]),  # outside
    ((2, 3, 1), [CHUNK]),
    ((3, 3), [CHUNK, Chunk((1, 0), (1, 3), CHUNK.file)]),  # one row twice, one never
    ((2, 3), [Chunk((0, 0), (2, 3), "rank-00001.safetensors")]),
    ((2, True), [CHUNK]), ((-2, -3), [CHUNK]), ((2.0, 3), [CHUNK]), ((), [CHUNK, CHUNK]),
], ids=str)
def test_chunks_that_do_not_make_up_their_tensor(tmp_path: Path, shape: Any, chunks: list[Chunk]) -> None:
    write_index(tmp_path, Index({CHUNK.file: (10, 1)}, {"x": TensorEntry(torch.float32, shape, tuple(chunks))}, {}))
    with pytest.raises(CheckpointError, match="tensor 'x'"):
        read_index(tmp_path)


def test_files_are_named_within_the_folder(tmp_path: Path) -> None:
    write_index(tmp_path, Index({"../rank-00000.safetensors": (10, 1)}, {}, {}))
    with pytest.raises(CheckpointError, match="names the file"):
        read_index(tmp_path)


def test_another_format_is_named(tmp_path: Path) -> None:
    """Not called damaged: who wrote it can read it."""
    write_index(tmp_path, Index({}, {}, {}))
    data = json.loads((tmp_path / storage.INDEX).read_text())
    (tmp_path / storage.INDEX).write_text(json.dumps({**data, "meshwright": 1}))
    with pytest.raises(CheckpointError, match="of format 1, this version reads 2"):
        read_index(tmp_path)


class Bomb:
    """A pickle that makes a folder when it is read."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (self.place,)


def damages(folder: Path, seed: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Ways to damage a checkpoint: (what, do it)."""
    generator = random.Random(seed)
    bomb = pickle.dumps(Bomb(str(folder.parent / "executed")))
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        yield f"{path.name} is a pickle", lambda path=path: path.write_bytes(bomb)  # type: ignore[misc]
        yield f"{path.name} is missing", lambda path=path: path.unlink()  # type: ignore[misc]
        yield f"{path.name} is empty", lambda path=path: path.write_bytes(b"")  # type: ignore[misc]
        yield f"{path.name} is a folder", lambda path=path: (path.unlink(), path.mkdir())  # type: ignore[misc, func-returns-value]
        for at in sorted(generator.sample(range(len(data)), 6)):
            flipped = data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1:]
            yield f"{path.name} ends at byte {at}", lambda p=path, d=data[:at]: p.write_bytes(d)  # type: ignore[misc]
            yield f"byte {at} of {path.name} differs", lambda p=path, d=flipped: p.write_bytes(d)  # type: ignore[misc]
    index = folder / storage.INDEX
    yield "it nests too deep", lambda: index.write_text("[" * 100_000)  # type: ignore[func-returns-value]
    yield "it is no object", lambda: index.write_text("[1]")  # type: ignore[func-returns-value]
    yield "a field is missing", lambda: index.write_text(json.dumps({"meshwright": 1}))  # type: ignore[func-returns-value]

    def pickled() -> None:
        index.unlink()
        (folder / ".metadata").write_bytes(bomb)

    yield "it has a pickled .metadata", pickled


@contextmanager
def copied(folder: Path, to: Path) -> Iterator[Path]:
    shutil.copytree(folder, to)
    try:
        yield to
    finally:
        shutil.rmtree(to)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "c")
    for number in range(len(list(damages(tmp_path / "c", 0)))):
        with copied(tmp_path / "c", tmp_path / "d") as folder:
            what, damage = list(damages(folder, 0))[number]
            damage()
            try:
                check_files(folder, read_index(folder), 0, 1)
            except CheckpointError:
                continue
            raise AssertionError(f"nobody noticed that {what}")
    assert not (tmp_path / "executed").exists()


def refuses(rank: int, sizes: dict[str, int], options: dict[str, Any], folder: str) -> list[str]:
    """Damaged checkpoints, and files that one rank cannot read or write: the errors of this rank, after which nothing changed
    and a good checkpoint loads."""
    _, parallel, batch = prepare(rank, sizes, options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1, foreach=False)
    parallel(**batch)[0].backward()
    optimizer.step()
    good = Path(folder) / "good"
    parallel.save(good, optimizer)
    before = {name: whole(p).clone() for name, p in parallel.state_dict().items()}  # type: ignore[union-attr]
    fresh = torch.optim.AdamW(parallel.parameters(), lr=0.1, foreach=False)
    errors = []

    def attempt(what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except CheckpointError as error:
            errors.append(f"{what}: {error}")
        else:
            raise AssertionError(f"rank {rank} did not notice that {what}")

    for number in range(0, len(list(damages(good, 1))), 2):
        bad = Path(folder) / f"bad{number}"
        if rank == 0:
            shutil.copytree(good, bad)
        torch.distributed.barrier()
        what, damage = list(damages(bad, 1))[number]
        torch.distributed.barrier()
        if rank == 0:
            damage()
        torch.distributed.barrier()
        attempt(what, lambda bad=bad: parallel.load(bad, fresh))  # type: ignore[misc]
    attempt("only rank 0 sees it", lambda: parallel.load(good if rank == 0 else good / "elsewhere", fresh))
    stranger = torch.optim.AdamW(parallel.parameters() if rank == 0 else nn.Linear(2, 2).parameters())
    attempt("one rank has another optimizer", lambda: parallel.load(good, stranger))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(storage, "_write", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        attempt("rank 1 cannot write", lambda: parallel.save(good, optimizer))
    assert not fresh.state
    for name, tensor in parallel.state_dict().items():
        assert torch.equal(whole(tensor), before[name]), name  # type: ignore[arg-type]
    parallel.load(good, fresh)
    assert len(fresh.state) == len(optimizer.state)
    return [error.split(":")[0] for error in errors]


@pytest.mark.parametrize("case", [PLAIN, SHARDED])
def test_damaged_checkpoints_are_refused_on_every_rank(pool: Callable, tmp_path: Path, case: Any) -> None:
    world = torch.Size(case[0].values()).numel()
    first, *others = pool(world=world).run(refuses, *case, str(tmp_path))
    assert len(first) > 10
    assert all(other == first for other in others)
    assert not (tmp_path / "executed").exists()


TWO: Any = ({"dp": 2}, {"data": ("dp",), "shard": ("dp",), "zero": 3})


def forge(folder: Path, generator: random.Random) -> None:
    """Alter something of a checkpoint, and make its checksums right."""
    index = json.loads((folder / storage.INDEX).read_text())
    index.pop("digest")
    if generator.random() < 0.3:
        path = folder / generator.choice(sorted(index["files"]))
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        text = json.dumps(mutant(json.loads(data[8:8 + size]), generator)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size:])
        index["files"][path.name] = [path.stat().st_size, zlib.crc32(path.read_bytes())]
    else:
        part = generator.choice((*index, "values", "tensors", ""))
        if isinstance(index.get(part), dict):
            index[part] = mutant(index[part], generator)
        else:
            index = mutant(index, generator)
    (folder / storage.INDEX).write_text(json.dumps({**index, "digest": storage._digest(index)}))


def forged(rank: int, folder: str, count: int, seed: int = 0, case: Any = TWO) -> Counter[str]:
    """What two ranks say of forged checkpoints: refused by both, or loaded by both, after which the module learns."""
    _, parallel, batch = prepare(rank, *case)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1, foreach=False)
    parallel(**batch)[0].backward()
    optimizer.step()
    good, bad = Path(folder) / "good", Path(folder) / "bad"
    parallel.save(good, optimizer)
    generator, found = random.Random(seed), Counter[str]()
    for _ in range(count):
        if rank == 0:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            forge(bad, generator)
        torch.distributed.barrier()
        try:
            parallel.load(bad, optimizer)
        except CheckpointError:
            found["refused"] += 1
        else:
            parallel(**batch)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            found["loaded"] += 1
    parallel.load(good, optimizer)
    return found


def test_forged_checkpoints_are_refused_or_loaded_on_every_rank(pool: Callable, tmp_path: Path) -> None:
    first, *others = pool(2).run(forged, str(tmp_path), 100)
    assert first["refused"] > 50
    assert all(other == first for other in others)


class Alternating(torch.optim.Optimizer):
    """States that differ by parameter: matrices have a mean, others a count, the first one both."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, p in enumerate(p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if p.ndim > 1 or not number:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.mul_(0.5).add_(p.grad), alpha=0.1)
            if p.ndim < 2 or not number:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1


def incomplete(rank: int, folder: str) -> dict[str, str]:
    """What is said of checkpoints that lack one thing, with sums that are right, and of those of other optimizers; what is
    whole loads."""
    _, parallel, batch = prepare(rank, *TWO)
    frozen = list(parallel.parameters())[-1].requires_grad_(False)  # has no state in any of them
    said: dict[str, str] = {}

    def learned(make: Callable[[Any], torch.optim.Optimizer], name: str) -> torch.optim.Optimizer:
        optimizer = make(parallel.parameters())
        for _ in range(2):
            parallel(**batch)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        parallel.save(Path(folder) / name, optimizer)
        return optimizer

    makes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW, "amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True), "alternating": Alternating,
        "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), "factored": torch.optim.Adafactor,
        "plain": torch.optim.SGD, "sums": torch.optim.Adagrad, "nadam": torch.optim.NAdam, "average": torch.optim.ASGD,
    }
    optimizers = {name: learned(make, name) for name, make in makes.items()}
    optimizers["momentum"].state[frozen]["note"] = 1  # added by a user, of a parameter that has no gradient
    parallel.save(Path(folder) / "momentum", optimizers["momentum"])
    for name, optimizer in optimizers.items():
        parallel.load(Path(folder) / name, optimizer)
    assert optimizers["momentum"].state[frozen] == {"note": 1}
    index = json.loads((Path(folder) / "adamw" / storage.INDEX).read_text())
    first = next(name for name in index["tensors"] if name.endswith(".exp_avg")).removesuffix("exp_avg")
    assert json.loads((Path(folder) / "alternating" / storage.INDEX).read_text())["values"]["optimizer.groups"]

    def without(*names: str, told: bool = False) -> Callable[[Any], None]:
        def drop(data: Any) -> None:
            for part in ("values", "tensors"):
                data[part] = {key: value for key, value in data[part].items() if key not in names}
            if told:  # what was saved is altered alike
                text = json.dumps(data["values"]["optimizer.groups"])
                assert '"exp_avg", ' in text
                data["values"]["optimizer.groups"] = json.loads(text.replace('"exp_avg", ', ""))

        return drop

    def added(data: Any) -> None:
        data["values"][f"{first}more"] = 1

    forgeries = {
        "a moment": without(f"{first}exp_avg"), "a count": without(f"{first}step"), "counters": without("module.counters"),
        "all of one": without(*(f"{first}{name}" for name in ("step", "exp_avg", "exp_avg_sq"))), "one more": added,
        "told so": without(*(name for name in index["tensors"] if name.endswith(".exp_avg")), told=True),
    }
    for what, forgery in forgeries.items():
        bad = Path(folder) / "incomplete"
        if rank == 0:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(Path(folder) / "adamw", bad)
            data = json.loads((bad / storage.INDEX).read_text())
            data.pop("digest")
            forgery(data)
            (bad / storage.INDEX).write_text(json.dumps({**data, "digest": storage._digest(data)}))
        torch.distributed.barrier()
        with pytest.raises(CheckpointError) as caught:
            parallel.load(bad, optimizers["adamw"])
        said[what] = str(caught.value)
        torch.distributed.barrier()
    for have, other in (("momentum", "adamw"), ("adamw", "nadam"), ("amsgrad", "factored"), ("average", "adamw"),
                        ("plain", "sums")):
        with pytest.raises(CheckpointError) as caught:
            parallel.load(Path(folder) / have, optimizers[other])
        said[f"{have} for {other}"] = str(caught.value)
    for odd in ("a.b", 3):
        optimizers["adamw"].state[frozen] = {odd: 1.0}
        with pytest.raises(CheckpointError, match="without dots"):
            parallel.save(Path(folder) / "odd", optimizers["adamw"])
    optimizers["momentum"].state["everything"] = {"k": 3}  # type: ignore[index]
    with pytest.raises(CheckpointError, match="under 'everything'"):
        parallel.save(Path(folder) / "odd", optimizers["momentum"])
    return said


def test_a_checkpoint_that_lacks_a_state_is_refused(pool: Callable, tmp_path: Path) -> None:
    """By every rank, before anything changes, though its sums are right; states may differ by parameter."""
    first, second = pool(2).run(incomplete, str(tmp_path))
    assert first == second
    assert len(first) == 11
    assert "module.counters" in first.pop("counters")
    assert all("damaged" in said or "another optimizer" in said for said in first.values()), first


def one_sided(rank: int, folder: str) -> list[str]:
    """A checkpoint of which one rank alone lacks a file, or sees it cut short."""
    _, parallel, _ = prepare(rank, *TWO)
    good, said = Path(folder) / "good", []
    parallel.save(good)
    mine = Path(folder) / f"of-rank-{rank}"  # as on disks of their own
    shutil.copytree(good, mine)
    file = sorted(mine.glob("*.safetensors"))[-1]
    content = file.read_bytes()
    for damage in (file.unlink, lambda: file.write_bytes(content[:-1]), lambda: file.write_bytes(content[:-1] + b"\x7f"),
                   (mine / storage.INDEX).unlink):
        if rank == 1:
            damage()
        with pytest.raises(CheckpointError) as caught:
            parallel.load(mine)
        said.append(str(caught.value))
        file.write_bytes(content)
    return said


def test_what_one_rank_lacks_every_rank_raises(pool: Callable, tmp_path: Path) -> None:
    first, *others = pool(2).run(one_sided, str(tmp_path), timeout=60)  # none waits for one that raised
    assert all(other == first for other in others)
    assert ["missing" in first[0], "bytes" in first[1], "contents" in first[2], "no checkpoint" in first[3]] == [True] * 4
