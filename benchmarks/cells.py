"""Cells of context parallelism: a model x a length x a precision x pins, trained in parallel and on one process, compared.

    python benchmarks/cells.py [--processes 4] [--count 50] [--seed 0] [--models REGEX] [--pins REGEX] [--open] [--log FILE]
                               [--list] [--device cuda]

Cells are drawn so that every value of every part (schedule, ZeRO, recomputation, form of attention, layout, length, ...) comes
equally often (Latin hypercube: McKay, Beckman and Conover 1979), in an order that a seed decides; of those known to be refused
(``_legal``) nine in ten are changed to the nearest that is not. With ``--open`` a pin is left to the search with probability
one half: what it proposes must run. Each is one line:

    equal     fp32: losses and parameters after two AdamW steps within 1e-4 (``tests.equality``).
              bf16: losses and the first gradients no further from those of fp32 than three times what one process in bf16 is.
              dropout (what is dropped differs by layout): the same again under the seed; ``eval()`` is one process's; the loss
              falls along the gradient as the gradient says, within 3%, which a backward that drops otherwise would not do.
    rounding  bf16, and further than that, but no further than the worst of eight processes alone whose parameters are others by
              half of what bf16 tells apart: a router's choice turns with the last bit
    refused   the same MeshwrightError on every rank, with its words
    UNEQUAL   what differs
    RAW       any other error, or ranks that do not agree or do not end

With ``--device cuda`` all processes and the one alone compute on this machine's first GPU, with its kernels; what is exchanged
goes by way of the host (``tests.staged``).

The last line counts them. The exit status is 1 where a cell is UNEQUAL or RAW. With ``--log`` every cell is written to a file
of JSON lines, and those that stand there are not run again.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script: find tests/

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.api import autoparallel
from meshwright.errors import MeshwrightError
from meshwright.ir.schedules.builtin import BUILTIN
from tests.equality import RELATIVE, captured_once, compare, kept, loss_of, train
from tests.pool import Pool, WorkerError
from tests.sequences import DROPS, MODELS, make
from tests.staged import BACKEND

LAYOUTS: Mapping[int, Sequence[Mapping[str, Any]]] = {
    2: [{"cp": 2}],
    4: [
        {"cp": 4}, {"cp": 4, "ulysses": 2}, {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2},
        {"cp": 2, "tp": 2, "sequence_parallel": True}, *[{"pp": 2, "cp": 2}] * 5,
    ],
    8: [
        {"cp": 8}, {"cp": 4, "ulysses": 2, "dp": 2}, {"cp": 4, "ulysses": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2},
        {"pp": 2, "cp": 4}, {"pp": 2, "cp": 4, "ulysses": 2}, {"pp": 2, "cp": 2, "tp": 2}, {"pp": 2, "dp": 2, "cp": 2},
        {"pp": 2, "cp": 2, "tp": 2, "sequence_parallel": True}, {"pp": 4, "cp": 2},
    ],
}
SCHEDULES = tuple(schedule.name for schedule in BUILTIN)
FORMS = ("all-gather", "ulysses", "ring", None)
LENGTHS = (16, 8, 12, 13, 11)
"""Of which 13 and 11 are multiples of no degree, and 12 of cp = 4 but not of twice that."""
SPLIT = tuple(schedule.name for schedule in BUILTIN if schedule.split)
STEP = 0.005
"""By which the loss is to rise and fall along its gradient: by 0.02 OPT's, alone, is 4% off already, by curvature."""
TIMEOUT = 150.0
PLACE = ["cpu"]
"""Where this process computes."""


@dataclass(frozen=True)
class Cell:
    """What is trained: a model of ``tests.sequences``, tokens of a sequence, "fp32" or "bf16", probability of dropout, pins;
    ``processes``: how many, where the pins do not say."""

    model: str
    length: int
    precision: str
    drop: float
    pins: Mapping[str, Any]
    processes: int = 0

    @property
    def world(self) -> int:
        """Processes that it takes."""
        if self.processes:
            return self.processes
        product = 1
        for axis in ("dp", "cp", "tp", "pp"):
            product *= self.pins.get(axis, 1)
        return product

    def __str__(self) -> str:
        dropped = f" dropout {self.drop}" if self.drop else ""
        pins = [*([f"{self.processes} processes"] if self.processes else ()), *(f"{k}={v}" for k, v in self.pins.items())]
        return f"{self.model} x {self.length} {self.precision}{dropped} {'; '.join(pins)}"


def drawn(count: int, seed: int, processes: int, models: str = "") -> Iterator[Cell]:
    """``count`` cells, every value of every part equally often; where a schedule has no pipeline it is left out."""
    dice = random.Random(seed)
    names = [name for name in MODELS if re.search(models, name)]

    def evenly(values: Sequence[Any]) -> list[Any]:
        order = dice.sample(values, len(values))  # which ones come once more, where they cannot come equally often
        column = [order[i % len(values)] for i in range(count)]
        dice.shuffle(column)
        return column

    columns = [evenly(values) for values in (
        names, LENGTHS, ("fp32", "fp32", "bf16"), (0.0, 0.1), LAYOUTS[processes], FORMS, SCHEDULES, (0, 1, 2, 3),
        ("none", "selective", "full"), (1, 2, 4),
    )]
    for model, length, precision, drop, layout, form, schedule, zero, recompute, pieces in zip(*columns, strict=True):
        pins: dict[str, Any] = {"dp": 1, "tp": 1, **layout, "zero": zero, "recompute": recompute}
        if form is not None:
            pins["attention"] = form
        if "pp" in pins:
            needed = 2 * pins["pp"] if schedule == "dualpipev" else pins["pp"]
            pins |= {"schedule": schedule, "microbatches": max(pieces, needed)}
        elif pieces > 1:
            pins["microbatches"] = pieces
        if dice.random() < 0.9:
            length = _legal(pins, length)
        drops = drop if model in DROPS and precision == "fp32" else 0.0
        yield Cell(model, length, precision, drops, pins)


def _legal(pins: dict[str, Any], length: int) -> int:
    """Change pins to what is not refused, and return the length that goes with them: a backward in halves keeps weights and
    gradients whole and recomputes nothing; two axes along a sequence cut it evenly."""
    if pins.get("schedule") in SPLIT:
        pins |= {"zero": pins["zero"] % 2, "recompute": "none"}
    return length if "ulysses" not in pins and "sequence_parallel" not in pins else 16 if length % 2 == 0 else 24


def opened(cells: Sequence[Cell], seed: int) -> list[Cell]:
    """The cells, each pin left to the search with probability one half."""
    dice = random.Random(seed)
    return [
        replace(cell, processes=cell.world, pins={name: pin for name, pin in cell.pins.items() if dice.random() < 0.5})
        for cell in cells
    ]


def ran(rank: int, cell: Cell, place: str) -> tuple[str, str]:
    """(what came of a cell on this rank, in words)."""
    torch.set_num_threads(1)
    PLACE[0] = place
    try:
        with captured_once(f"{cell.model}-{cell.length}-{cell.precision}-{cell.drop}"):
            return (_dropped if cell.drop else _halved if cell.precision == "bf16" else _plain)(cell)
    except MeshwrightError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "RAW", f"{type(error).__name__}: {error}"


def _made(cell: Cell) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return _placed(cell.model, cell.length, cell.drop)


def _placed(name: str, length: int, drop: float = 0.0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model, batch = make(name, length, drop)
    return model.to(PLACE[0]), {key: x.to(PLACE[0]) for key, x in batch.items()}


def _parallel(cell: Cell, model: nn.Module, batch: Mapping[str, Any], **options: Any) -> nn.Module:
    torch.manual_seed(7)
    mesh = init_device_mesh(PLACE[0], (cell.world,))
    given = options or {"pins": dict(cell.pins), "precision": cell.precision}
    return autoparallel(model, mesh, ((), batch), progress=False, **given)


@cache
def _alone(name: str, length: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, parameters) of one process in fp32, after two steps of AdamW."""
    model, batch = _placed(name, length)
    losses = train(model, batch)
    return losses, kept(model.state_dict())


def _plain(cell: Cell) -> tuple[str, str]:
    losses, wanted = _alone(cell.model, cell.length)
    model, batch = _made(cell)
    parallel = _parallel(cell, model, batch)
    found = train(parallel, batch)
    problems = [f"loss {a} instead of {b}" for a, b in zip(found, losses, strict=True) if not abs(a - b) <= RELATIVE * abs(b)]
    state: Any = parallel.full_state_dict()
    return _verdict(problems + (compare(state, wanted) if dist.get_rank() == 0 else []))


def _verdict(problems: Sequence[str], rounded: bool = False) -> tuple[str, str]:
    return ("rounding" if rounded else "UNEQUAL", "; ".join(problems)) if problems else ("equal", "")


def _moved(model: Any, batch: Mapping[str, Any], forward: Callable[[], torch.Tensor]) -> tuple[list[float], Any]:
    """(two losses, what a step of plain descent at a rate of one changed): the gradient, wherever its pieces lie."""
    before = kept(_state(model))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for step in range(2):
        loss = forward()
        losses.append(loss.item())
        if not step:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses, {key: before[key] - value for key, value in kept(_state(model)).items() if value.is_floating_point()}


def _state(model: Any) -> Mapping[str, torch.Tensor]:
    found: Mapping[str, torch.Tensor] = getattr(model, "full_state_dict", model.state_dict)()
    return found


@cache
def _alone_descending(name: str, length: int, halved: bool, nudge: int = 0) -> tuple[list[float], Any]:
    """(two losses, the gradient) of one process; ``nudge``: a seed by which its parameters are others by a thousandth at most,
    half of what bf16 tells apart."""
    model, batch = _placed(name, length)
    if nudge:
        dice = torch.Generator().manual_seed(nudge)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2e-3 * (torch.rand(parameter.shape, generator=dice).to(parameter.device) - 0.5))

    def forward() -> torch.Tensor:
        if not halved:
            return loss_of(model(**batch))
        narrow = {key: value.bfloat16() for key, value in model.named_parameters()}
        given = {key: x.bfloat16() if x.is_floating_point() else x for key, x in batch.items()}
        return loss_of(torch.func.functional_call(model, narrow, (), given)).float()

    return _moved(model, batch, forward)


def _halved(cell: Cell) -> tuple[str, str]:
    wanted, gradients = _alone_descending(cell.model, cell.length, False)
    model, batch = _made(cell)
    parallel = _parallel(cell, model, batch)
    found, moved = _moved(parallel, batch, lambda: loss_of(parallel(**batch)))
    scale = max(float(gradient.norm()) for gradient in gradients.values())

    def problems(nudges: Sequence[int], factor: float) -> list[str]:
        """What is further from fp32 than so many times the furthest of some processes alone in bf16."""
        alone, told = [_alone_descending(cell.model, cell.length, True, nudge) for nudge in nudges], []
        for at, (have, want) in enumerate(zip(found, wanted, strict=True)):
            other = max((losses[at] for losses, _ in alone), key=lambda loss: abs(loss - want))
            if not abs(have - want) <= factor * abs(other - want) + 0.01 * abs(want):
                told.append(f"loss {have} instead of {want} (one process in bf16: {other})")
        for key, have in moved.items():  # none but on rank 0
            size, away = (float(x.norm()) for x in (gradients[key], have - gradients[key]))
            one = max(float((coarse[key] - gradients[key]).norm()) for _, coarse in alone)
            if not away <= factor * one + 0.02 * size + 1e-4 * scale:
                told.append(f"{key}: gradient off by {away:.1e} of {size:.1e} (one in bf16: {one:.1e})")
        return told

    first = problems([0], 3.0)
    return _verdict(first, bool(first) and not problems(range(1, 9), 1.0))


def _dropped(cell: Cell) -> tuple[str, str]:
    model, batch = _made(cell)
    parallel: Any = _parallel(cell, model, batch)
    start = kept(model.state_dict())
    losses, moved = _moved(parallel, batch, lambda: loss_of(parallel(**batch)))
    message = [moved if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(message, src=0)
    gradients: Any = message[0]
    length = sum(float(gradient.double().square().sum()) for gradient in _once(model, gradients)) ** 0.5
    ends = []
    for way in (0.0, STEP / length**2, -STEP / length**2):
        with torch.no_grad():
            model.load_state_dict({key: x + way * gradients[key] if key in gradients else x for key, x in start.items()})
        again: Any = _parallel(cell, model, batch, plan=parallel.plan)
        ends.append(loss_of(again(**batch)).item())
    model.load_state_dict(start)
    problems = [] if ends[0] == losses[0] else [f"loss {ends[0]} where it was {losses[0]} under the same seed"]
    slope = (ends[1] - ends[2]) / (2 * STEP)
    if not abs(slope - 1.0) <= 0.03:
        problems.append(f"the loss falls {slope:.3f} times as fast as its gradient says")
    quiet = loss_of(copy.deepcopy(model).eval()(**batch)).item()
    still: Any = _parallel(cell, model, batch, plan=parallel.plan).eval()
    found = loss_of(still(**batch)).item()
    if not abs(found - quiet) <= RELATIVE * abs(quiet):
        problems.append(f"in eval loss {found} instead of {quiet}")
    return _verdict(problems)


def _once(model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of tensors with several names, one."""
    return [gradients[name] for name, _ in model.named_parameters() if name in gradients]


def outcome(pool: Pool, cell: Cell, place: str) -> tuple[str, str]:
    """A cell on processes of its own."""
    try:
        answers = pool.run(cell.world, ran, cell, place, timeout=TIMEOUT, backend="gloo" if place == "cpu" else BACKEND)
    except WorkerError as error:
        return "RAW", str(error)
    if len({verdict for verdict, _ in answers}) > 1 and not any(verdict in ("UNEQUAL", "rounding") for verdict, _ in answers):
        return "RAW", f"ranks do not agree: {[f'{verdict} {words[:300]}' for verdict, words in answers]}"
    if answers[0][0] == "refused" and len(set(answers)) > 1:
        return "RAW", f"ranks are refused differently: {[words for _, words in answers]}"
    return max(answers, key=lambda answer: ("equal", "rounding", "refused", "UNEQUAL", "RAW").index(answer[0]))


def main() -> None:
    """Run the cells that are asked for."""
    parser = argparse.ArgumentParser(description="Train cells of context parallelism in parallel and on one process.")
    parser.add_argument("--processes", type=int, default=4, choices=LAYOUTS)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default="", help="those whose name matches this regular expression")
    parser.add_argument("--pins", default="", help="cells whose line matches this regular expression")
    parser.add_argument("--open", action="store_true", help="leave half of the pins to the search")
    parser.add_argument("--cell", help="one cell, as JSON of a line of the log")
    parser.add_argument("--log", type=Path, help="a file of JSON lines; what stands there is not run again")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where all processes compute")
    parser.add_argument("--list", action="store_true", help="the cells, nothing else")
    options = parser.parse_args()
    cells = list(drawn(options.count, options.seed, options.processes, options.models))
    cells = opened(cells, options.seed) if options.open else cells
    cells = [cell for cell in cells if re.search(options.pins, str(cell))]
    if options.cell:
        cells = [Cell(**json.loads(options.cell))]
    done: dict[str, Any] = {}
    if options.log is not None and options.log.exists():
        done = {row["line"]: row for row in map(json.loads, options.log.read_text(encoding="utf-8").splitlines())}
    pool, counts = Pool(), Counter[str]()
    for cell in cells:
        if options.list:
            print(cell)
            continue
        start = time.monotonic()
        verdict, words = (row["verdict"], row["words"]) if (row := done.get(str(cell))) else outcome(pool, cell, options.device)
        counts[verdict] += 1
        short = words if verdict in ("UNEQUAL", "RAW") else words[:300]
        print(f"{verdict:8s}{time.monotonic() - start:6.1f} s  {cell}{'  | ' if words else ''}{short}", flush=True)
        if options.log is not None and row is None:
            with options.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"line": str(cell), "verdict": verdict, "words": words, "cell": asdict(cell)}) + "\n")
    pool.close()
    if not options.list:
        print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())), f"of {len(cells)} cells")
    sys.exit(bool(counts["UNEQUAL"] + counts["RAW"]))


if __name__ == "__main__":
    main()
