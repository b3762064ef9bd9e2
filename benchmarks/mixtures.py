"""Mixtures of experts beside one process: which are equal, which are refused by name, which are unequal.

    python benchmarks/mixtures.py --families [--only REGEX] [--world 2 4]     every family of transformers, tiny
    python benchmarks/mixtures.py --zoo [--only REGEX] [--world 2 4 8]     the zoo's mixtures, two to four layers of them
    python benchmarks/mixtures.py [--device cuda] [--cells 24] [--seed 0] [--only REGEX] [--world 2 4]     cells drawn at random

``--families`` trains each family (``tests/families.py``) with experts split over two ranks and nothing else pinned, and with
nothing pinned at all. ``--zoo`` does so with the published mixtures (``zoo.toml``), a dense layer first where theirs have one,
under every layout of ep and with nothing pinned. A drawn cell is a mixture with even or skewed routing (one expert gets nearly
every token, another none) under a layout of ep with tp, cp or pp, a ZeRO level, micro-batches, recomputation and a precision.
The same seed draws the same cells.

Processes are the tests' (``tests/pool.py``) on the CPU, or with ``--device cuda`` all on this machine's first GPU, with its
kernels, while what they exchange goes by way of the host (``tests/staged.py``). Two steps of AdamW, gradients clipped; losses,
norms and the state are compared with those of the plain model, each by its largest element. A cell is

* ``equal`` within 1e-4;
* ``rounding``: not within 1e-4, but in float64 a step of plain SGD goes the way of the plain model's to 5e-6 of its length,
  where an error of the program would stay. (AdamW divides by gradients that may be small, and enlarges what was rounded; some
  layers of transformers compute in float32 whatever the parameters are, so nothing closer is to be had.)
* ``refused`` with a MeshwrightError, the same on every rank;
* ``unequal``: anything else; the program then ends with status 1.

In bf16 the reference computes with bf16 copies of the parameters, as the plan does; a step of plain SGD moves every tensor as
far as the reference, to 5 % of the length of its way (a gradient of wrong size or of other tokens is off by far more). Where it
does not, it is ``rounding`` if the reference itself is about as far from the same step in float32.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script: find tests/

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call
from transformers import AutoModelForCausalLM
from transformers.integrations import moe

from meshwright.api import autoparallel
from meshwright.errors import MeshwrightError
from meshwright.published.architectures import configuration
from meshwright.published.zoo import systems
from tests import families, mixtures
from tests.equality import EPS, RELATIVE, captured_once, kept, loss_of
from tests.pool import Pool, WorkerError
from tests.staged import BACKEND

EXACT, ROUGH = 5e-6, 0.05
"""By how much a step of SGD may miss that of the plain model, in parts of its length: in float64, and in bf16."""
ROUNDED = 1.5
"""Two computations in bf16 miss each other by at most so many times what one of them misses the step in float32 by."""
STEPS, CLIP = 2, 1.0
LAYOUTS: Mapping[int, tuple[Mapping[str, Any], ...]] = {
    2: ({"dp": 2, "ep": 2}, {"dp": 1, "cp": 2, "ep": 2}),
    4: (
        {"dp": 4, "ep": 4}, {"dp": 4, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2}, {"dp": 2, "ep": 2, "cp": 2},
        {"dp": 2, "ep": 4, "cp": 2}, {"dp": 4, "ep": 2, "shard": 2}, {"pp": 2, "dp": 2, "ep": 2, "schedule": "1f1b"},
        {"pp": 2, "dp": 2, "ep": 2, "schedule": "interleaved1f1b", "virtual_stages": 2},
        {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb"}, {"pp": 2, "dp": 1, "cp": 2, "ep": 2, "schedule": "1f1b"},
    ),
    8: (
        {"dp": 8, "ep": 4}, {"dp": 4, "ep": 4, "tp": 2}, {"dp": 2, "ep": 2, "cp": 2, "tp": 2},
        {"dp": 2, "ep": 4, "cp": 2, "tp": 2},
        {"pp": 2, "dp": 4, "ep": 4, "schedule": "1f1b"}, {"pp": 2, "dp": 2, "ep": 2, "tp": 2, "schedule": "zb"},
        {"pp": 2, "dp": 2, "cp": 2, "ep": 4, "schedule": "interleaved1f1b", "virtual_stages": 2},
    ),
}
MODELS = (
    "mixtral", "qwen2", "qwen3", "deepseek", "gpt_oss", "einsum", "mixtral balanced", "qwen2 balanced", "einsum balanced",
    "einsum of the batch", "matmul", "llama4",
)
DEEP = {"num_hidden_layers": 4}
"""Layers for two stages of two pieces each."""
NARROW: Mapping[str, int] = {
    "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "first_k_dense_replace": 1,
}
"""Of a published mixture, made small; what its heads are wide otherwise is divided by 16."""


@dataclass(frozen=True)
class Cell:
    """A model ("family NAME", or of ``tests/mixtures.py``), how its router is set, processes, pins and a precision."""

    model: str
    world: int
    pins: Mapping[str, Any] = field(default_factory=dict)
    routing: str = "even"
    precision: str = "fp32"

    def __str__(self) -> str:
        pins = " ".join(f"{name}={value}" for name, value in self.pins.items()) or "unpinned"
        return f"{self.model}, {self.routing}, {self.precision}, {self.world} processes: {pins}"


def family_cells(worlds: list[int]) -> Iterator[Cell]:
    """Every family, with two ranks of experts and with nothing pinned."""
    for name in families.families():
        for world in worlds:
            yield Cell(f"family {name}", world, {"ep": 2})
            yield Cell(f"family {name}", world)


def zoo_cells(worlds: list[int]) -> Iterator[Cell]:
    """Every published mixture under every layout of ep, ZeRO-1 as they were run, and with nothing pinned."""
    for system in systems():
        if system.model is None or not system.model.experts:
            continue
        for world in worlds:
            yield from (Cell(f"zoo {system.name}", world, {"tp": 1, "cp": 1, "pp": 1, "zero": 1, "microbatches": 2, **layout})
                        for layout in LAYOUTS[world])
            yield Cell(f"zoo {system.name}", world)


def published(name: str, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """A published mixture, narrow and of a few layers, and a batch."""
    (system,) = (one for one in systems() if one.name == name)
    assert system.model is not None
    a = system.model
    extra = {key: min(value, NARROW[key]) if key in NARROW else value // 16 if key.endswith("head_dim") else value
             for key, value in a.extra.items()}
    kv_heads = 4 if a.kv_heads == a.heads else 2
    small = replace(a, layers=layers, hidden=32, heads=4, kv_heads=kv_heads, head_dim=a.head_dim // 16, ffn=32,
                    vocab=mixtures.VOCAB, experts=16, top_k=min(a.top_k, 4), extra=extra)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration(small, 16))
    ids = torch.randint(1, mixtures.VOCAB, (mixtures.BATCH, mixtures.LENGTH))
    return model.train(), {"input_ids": ids, "labels": ids.clone()}


def drawn_cells(seed: int, number: int, worlds: list[int]) -> list[Cell]:
    """Cells at random, those of a model behind each other: it is captured once."""
    draw = random.Random(seed)
    cells = []
    for _ in range(number):
        world = draw.choice(worlds)
        layout = draw.choice(LAYOUTS[world])
        most = mixtures.BATCH // layout["dp"]
        pins = {**layout, "zero": draw.randrange(4), "recompute": draw.choice(("none", "none", "selective", "full")),
                "microbatches": draw.choice([n for n in (1, 2, 4) if n <= most and (n > 1 or "pp" not in layout)] or [2])}
        if layout.get("schedule") == "zb":  # it splits the backward
            pins |= {"recompute": "none", "zero": pins["zero"] % 2}
        pins = {"tp": 1, "cp": 1, "pp": 1, **pins}
        routing, precision = draw.choice(("even", "skewed")), draw.choice(("fp32", "fp32", "bf16"))
        cells.append(Cell(draw.choice(MODELS), world, pins, routing, precision))
    return sorted(cells, key=lambda cell: (cell.model, cell.routing, cell.precision, cell.world))


def built(cell: Cell, double: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The cell's model and batch."""
    if cell.model.startswith("family "):
        model, batch = families.tiny(cell.model.removeprefix("family "))
    elif cell.model.startswith("zoo "):
        layers = DEEP["num_hidden_layers"] if cell.pins.get("pp", 1) > 1 else 2
        model, batch = published(cell.model.removeprefix("zoo "), layers)
    else:
        model, batch = mixtures.make(cell.model, **(DEEP if cell.pins.get("pp", 1) > 1 else {}))
    model = mixtures.skewed(model) if cell.routing == "skewed" else model
    return (model.double() if double else model), batch


def plain(model: nn.Module, batch: Mapping[str, Any], low: bool, once: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and norms of a loop on the model, and its state after it; ``low``: computed in bf16; ``once``: a step of SGD."""
    made = _loop(model, lambda: _in_bf16(model, batch) if low else loss_of(model(**batch)), once)
    return made, kept(model.state_dict())


def _in_bf16(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    low = {name: value.bfloat16() for name, value in model.named_parameters() if value.is_floating_point()}
    return loss_of(functional_call(model, low, (), dict(batch)))


def _loop(model: nn.Module, loss: Any, once: bool) -> list[float]:
    rate = 1e-2
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=rate) if once else torch.optim.AdamW(model.parameters(), lr=rate, eps=EPS)
    )
    found = []
    for _ in range(1 if once else STEPS):
        value = loss()
        value.backward()
        clip = getattr(model, "clip_grad_norm_", lambda most: nn.utils.clip_grad_norm_(model.parameters(), most))
        norm = float(clip(CLIP))
        optimizer.step()
        optimizer.zero_grad()
        found += [value.item(), norm]
    return found


def work(rank: int, cell: Cell, double: bool, place: str) -> tuple[str, float, str]:
    """On every rank: what came of the cell, by how much it was off (a part of the bound), and words."""
    torch.set_num_threads(1)
    low = cell.precision == "bf16"
    once = low or double
    model, batch = built(cell, double)
    model, batch = model.to(place), {name: x.to(place) for name, x in batch.items()}
    before = kept(model.state_dict())
    without = mock.patch.object(moe, "_can_use_grouped_mm", return_value=False)  # a kernel that takes no float64
    with without if double else nullcontext():
        numbers, wanted = plain(copy.deepcopy(model), batch, low, once)
    try:
        with captured_once(f"{cell.model} {cell.routing} {cell.pins.get('pp', 1) > 1}", double):
            parallel = autoparallel(
                model, init_device_mesh(place, (cell.world,)), ((), batch), pins=dict(cell.pins), precision=cell.precision,
                progress=False,
            )
        mine = _loop(parallel, lambda: loss_of(parallel(**batch)), once)
        state = parallel.full_state_dict()
    except MeshwrightError as error:
        return "refused", 0.0, f"{type(error).__name__}: {error}"
    layout = f"{parallel.plan.mesh}"
    bound = ROUGH if low else EXACT if double else RELATIVE
    off = {f"number {at}": abs(a - b) / abs(b) for at, (a, b) in enumerate(zip(mine, numbers, strict=True))}
    if rank == 0:
        if list(state) != list(wanted):
            return "unequal", float("inf"), f"{layout}; keys differ: {sorted(set(state) ^ set(wanted)) or 'in order'}"
        off |= {name: _off(state[name], want, before[name], once) for name, want in wanted.items()}
    where = max(off, key=lambda name: off[name] if off[name] == off[name] else float("inf"))
    worst = off[where]
    if worst <= bound or not low:
        return ("equal" if worst <= bound else "unequal"), worst, f"{layout}; worst at {where}"
    numbers32, wanted32 = plain(copy.deepcopy(model), batch, False, True)
    far = {f"number {at}": abs(a - b) / abs(b) for at, (a, b) in enumerate(zip(numbers, numbers32, strict=True))}
    far |= {name: _off(wanted[name], want, before[name], True) for name, want in wanted32.items()}
    rounded = all(off[name] <= max(bound, ROUNDED * far[name]) for name in off)
    return ("rounding" if rounded else "unequal"), worst, (
        f"{layout}; worst at {where}, of which the plain model's step in bf16 misses its step in float32 by {far[where]:.1e}")


def _off(have: torch.Tensor, want: torch.Tensor, before: torch.Tensor, once: bool) -> float:
    if have.shape != want.shape or have.dtype != want.dtype:
        return float("inf")
    if not want.numel():
        return 0.0
    have, want, before = have.double(), want.double(), before.double()
    if once:
        way = (want - before).norm().item()
        return (have - want).norm().item() / max(way, 1e-9)
    return (have - want).abs().max().item() / max(want.abs().max().item(), 1e-3)


def result(pool: Pool, cell: Cell, place: str) -> dict[str, Any]:
    """What came of a cell, in float64 too where it is not equal in float32."""
    found = _run(pool, cell, False, place)
    if found["what"] == "unequal" and cell.precision == "fp32":
        exact = _run(pool, cell, True, place)
        words = f"{found['words']}; in float64 off by {exact['off']:.1e} ({exact['words']})"
        found |= {"words": words, "what": "rounding" if exact["what"] == "equal" else "unequal"}
    return found


def _run(pool: Pool, cell: Cell, double: bool, place: str) -> dict[str, Any]:
    try:
        backend = "gloo" if place == "cpu" else BACKEND
        answers = pool.run(cell.world, work, cell, double, place, timeout=600.0, backend=backend)
    except WorkerError as error:
        return {"what": "unequal", "off": float("inf"), "words": f"error: {str(error)[-300:]}"}
    kinds = {what for what, _, _ in answers}
    if kinds == {"refused"}:
        return {"what": "refused", "off": 0.0, "words": answers[0][2]}
    if "refused" in kinds:
        return {"what": "unequal", "off": float("inf"), "words": f"refused on some ranks only: {answers}"}
    what = next((one for one in ("unequal", "refused", "rounding") if one in kinds), "equal")
    worst = max(answers, key=lambda answer: (answer[0] == what, answer[1]))
    return {"what": what, "off": worst[1], "words": worst[2]}


def main() -> int:
    """Run the cells that are asked for; 1 if one is unequal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--cells", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], choices=sorted(LAYOUTS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where all processes compute")
    parser.add_argument("--only", default="", help="a regular expression that names of cells match")
    parser.add_argument("--log", type=Path, help="JSON lines: what stands there is not run again")
    asked = parser.parse_args()
    cells = [*family_cells(asked.world)] if asked.families else [*zoo_cells(asked.world)] if asked.zoo else drawn_cells(
        asked.seed, asked.cells, asked.world)
    log = asked.log.read_text(encoding="utf-8").splitlines() if asked.log and asked.log.exists() else []
    known = {row["cell"]: row for row in map(json.loads, log)}
    pool, counts = Pool(), Counter[str]()
    for cell in (cell for cell in cells if re.search(asked.only, str(cell))):
        start = time.monotonic()
        row = known.get(str(cell)) or {"cell": str(cell), **asdict(cell), **result(pool, cell, asked.device)}
        if asked.log and str(cell) not in known:
            with asked.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        counts[row["what"]] += 1
        print(f"{row['what']:8s} {row['off']:7.1e} {time.monotonic() - start:5.1f} s  {cell}; {row['words'][:260]}", flush=True)
    pool.close()
    print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    return int(counts["unequal"] > 0)


if __name__ == "__main__":
    sys.exit(main())
