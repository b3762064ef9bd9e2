"""Exports of every kind of plan, run again by processes that cannot import the model: bit for bit what the exporting run did.

    python -m tests.exports [REGEX ...]

Each cell is a model, pins and a precision. Its parallel module goes forward and back, is exported and takes two AdamW steps;
so does what ``load`` makes of the folder, where neither ``transformers`` nor the file of the model nor the planner is imported.
Losses, gradients' norms and all weights and buffers of every rank must be equal to the last bit. A line for each cell: "equal",
"refused" with why, or what differs. The exit status is 1 where one is neither equal nor refused.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.ir.schedules.builtin import BUILTIN
from tests.trials import parser_of

HIDDEN = ("transformers", "tests.models", "tests.mixtures", "meshwright.planner", "ortools")
Cell = tuple[str, int, Mapping[str, Any], str]


def cells() -> Iterator[Cell]:
    """(model, processes, pins, precision)."""
    for schedule in (one.name for one in BUILTIN):
        pins = {"pp": 2, "tp": 1, "schedule": schedule, "microbatches": 4}
        yield "llama", 2, pins, "bf16" if schedule in ("zbv", "gpipe") else "fp32"
    yield "gpt2", 2, {"tp": 2, "sequence_parallel": True, "recompute": "full"}, "bf16"
    yield "gpt2", 4, {"pp": 2, "dp": 2, "zero": 3, "schedule": "interleaved1f1b", "microbatches": 2}, "fp32"
    for attention in ("ring", "ulysses", "all-gather"):
        yield "llama", 2, {"cp": 2, "tp": 1, "attention": attention, "zero": 3}, "bf16" if attention == "ring" else "fp32"
    yield "llama", 4, {"cp": 4, "tp": 1, "ulysses": 2}, "fp32"
    yield "llama", 4, {"cp": 2, "pp": 2, "tp": 1, "schedule": "1f1b", "microbatches": 2}, "bf16"
    for model in ("mixtral", "einsum"):
        yield model, 2, {"dp": 2, "ep": 2, "tp": 1, "zero": 1}, "fp32" if model == "einsum" else "bf16"
    yield "mixtral", 4, {"dp": 2, "ep": 2, "pp": 2, "tp": 1, "schedule": "1f1b", "microbatches": 2}, "fp32"
    yield "mixtral", 2, {"dp": 1, "ep": 2, "cp": 2, "tp": 1}, "fp32"
    yield "t5", 2, {"dp": 2, "zero": 2, "recompute": "selective"}, "bf16"
    yield "vit", 4, {"dp": 2, "shard": 1, "tp": 2}, "bf16"
    yield "convnet", 2, {"dp": 2}, "fp32"
    for attention in ("ring", "ulysses"):  # windows; weights read twice
        yield "Mistral", 2, {"cp": 2, "tp": 1, "attention": attention, "zero": 2}, "bf16"
    yield "Gemma2", 2, {"cp": 2, "tp": 1, "recompute": "full"}, "fp32"
    for schedule in ("zbv", "dualpipev"):
        yield "Gemma2", 2, {"pp": 2, "tp": 1, "schedule": schedule, "microbatches": 4}, "bf16"
    for schedule, zero in (("interleaved1f1b", 1), ("1f1b", 2), ("gpipe", 3)):
        yield "Gemma2", 4, {"pp": 2, "dp": 2, "tp": 1, "schedule": schedule, "microbatches": 2, "zero": zero}, "bf16"
    yield "tied_odd", 4, {"pp": 2, "tp": 2, "schedule": "1f1b", "microbatches": 2}, "fp32"
    pins = {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 3, "microbatches": 2, "recompute": "selective"}
    yield "Bloom", 4, pins, "bf16"
    yield "odd", 4, {"dp": 2, "tp": 2, "zero": 3}, "bf16"
    for zero in (1, 2, 3):
        yield "bert", 2, {"dp": 2, "zero": zero, "microbatches": 2}, "bf16"
        yield "towers", 2, {"dp": 2, "zero": zero}, "fp32"
    yield "adapted", 4, {"pp": 2, "dp": 2, "schedule": "1f1b", "microbatches": 2, "zero": 1}, "bf16"
    yield "adapted", 2, {"tp": 2}, "fp32"
    yield "skips", 2, {"pp": 2, "schedule": "gpipe", "microbatches": 2}, "fp32"
    yield "odd_head", 2, {"axes": {"x": 2}}, "bf16"
    yield "encoder", 2, {"tp": 2}, "bf16"
    yield "heads", 4, {"axes": {"x": 2, "y": 2}}, "fp32"
    yield "masked_mean", 2, {"dp": 2, "microbatches": 2}, "bf16"
    yield "bare", 4, {"pp": 2, "dp": 2, "schedule": "1f1b", "microbatches": 2}, "fp32"
    yield "deberta", 2, {"dp": 2, "zero": 3}, "fp32"
    for balanced in ("mixtral balanced", "qwen3 balanced"):
        yield balanced, 2, {"dp": 2, "ep": 2, "tp": 1, "microbatches": 2}, "bf16"
    yield "umt5", 2, {"dp": 2, "zero": 3, "recompute": "selective"}, "bf16"
    yield "umt5", 2, {"cp": 2, "tp": 1, "attention": "ring"}, "fp32"
    yield "umt5", 4, {"dp": 2, "tp": 2, "sequence_parallel": True, "microbatches": 2}, "bf16"
    yield "umt5", 4, {"pp": 2, "dp": 2, "schedule": "1f1b", "microbatches": 2, "zero": 1}, "fp32"
    yield "deepseek", 4, {"dp": 2, "ep": 2, "pp": 2, "tp": 1, "schedule": "zbv", "microbatches": 4, "zero": 1}, "bf16"
    yield "gpt_oss", 2, {"dp": 1, "ep": 2, "cp": 2, "tp": 1}, "bf16"


def made(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model and its batch; of one kind that are the same on every rank."""
    from tests import mixtures, models

    torch.manual_seed(3)
    return (mixtures if name in mixtures.MAKERS else models).make(name)


@contextmanager
def without(*modules: str) -> Iterator[None]:
    """No import of these."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(dict.fromkeys(modules, None))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            sys.modules.update({name: module} if module is not None else {})


def trained(parallel: Any, batch: Mapping[str, torch.Tensor]) -> list[str]:
    """What two steps did on this rank: losses, norms, digests of all tensors."""
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    said = []
    for _ in range(2):
        loss = parallel(**batch)["loss"]
        loss.backward()
        norm = parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        said.append(f"loss {loss.item()!r}, norm {float(norm)!r}")
    for name, tensor in parallel.state_dict().items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        data = local.detach().cpu().contiguous().flatten().view(torch.uint8)
        said.append(f"{name} {hashlib.sha256(bytes(data.tolist())).hexdigest()[:16]}")
    return said


def exporting(rank: int, cell: Cell, folder: str) -> str:
    """"equal", "refused: ..." or what differs."""
    name, world, pins, precision = cell
    model, batch = made(name)
    mesh = init_device_mesh("cpu", (world,))
    try:
        parallel = mw.autoparallel(model, mesh, ((), batch), pins=dict(pins), precision=precision, progress=False)
    except MeshwrightError as error:
        return f"refused: {error}"
    parallel(**batch)["loss"].backward()  # the place in the random numbers is not the first
    for parameter in parallel.parameters():
        parameter.grad = None
    parallel.export(folder)
    wanted = trained(parallel, batch)
    del model, parallel
    with without(*HIDDEN):
        found = trained(mw.load(folder, mesh), batch)
    return compared(wanted, found)


def compared(wanted: Sequence[str], found: Sequence[str]) -> str:
    """"equal", or the first that is not."""
    return next((f"{a} is then {b}" for a, b in zip(wanted, found, strict=True) if a != b), "equal")


def outcome(pool: Any, cell: Cell, folder: Path) -> str:
    """What all ranks say of a cell, or the first that says another thing."""
    said: list[str] = pool.run(cell[1], exporting, cell, str(folder))
    return next((one for one in said if one != "equal"), "equal")


def main(arguments: Sequence[str]) -> int:
    """The cells whose lines match."""
    from tests.pool import Pool, WorkerError

    patterns = parser_of(__doc__, "regular expressions, of which a cell's line matches one").parse_args(arguments).words
    pool, faults = Pool(), 0
    for cell in cells():
        name, world, pins, precision = cell
        line = f"{name} x {world} {precision} {dict(pins)}"
        if patterns and not any(re.search(pattern, line) for pattern in patterns):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = outcome(pool, cell, Path(folder) / "export")
            except WorkerError as error:
                said = f"RAW: {str(error).strip().splitlines()[-1]}"
        faults += said != "equal" and not said.startswith("refused: ")
        print(f"{line:100s} {said[:200]}", flush=True)
    pool.close()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
