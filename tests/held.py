"""What is promised of a plan that somebody holds: random models, meshes, pins and schedules, each planned and asked everything.

    python -m tests.held [--count 40] [--seed 0] [--models REGEX] [--only REGEX] [--log FILE] [--list]

Of every plan

    pins          planning with ``to_pins()`` gives that plan: the same decisions, the same prediction, nothing searched
    rows          the rows of weights of the printed tables, pasted as pins, give the same shardings
    file          read again it is the same plan and the same bytes, under any names of the trace; it conforms to the schema
    network       GraphML and node-link JSON give the same graph back
    parts         what operators take, and what is waited for the host, is the step's compute and recomputation; in a
                  pipeline without what is made of inputs alone, before its schedule
    alternatives  every choice that ``explain`` prints, pinned in the plan's place and planned: what a step of the mean
                  rank takes is what was printed
    changes       every change that ``explain`` prints, planned from a model that is captured anew where the batch or the
                  length is another
    width         tables, answers and differences keep to 120 columns
    page          the page is written, and is small (not unless asked for: of every operator it prices what else there was)

are tried. A line for each plan; what does not hold stands under it. With ``--log`` every case is written to a file of JSON
lines as it is done, and those that stand there are printed from it. The exit status is 1 where something did not hold.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import torch

from meshwright import Pins, Plan
from meshwright.cost.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.ir.graph import Graph
from meshwright.ir.schedules.builtin import BUILTIN
from meshwright.ir.serialize import plan_hash
from meshwright.ir.writing.names import choice_text, names_of
from meshwright.ir.writing.plans import plan_text
from meshwright.planner import capture_model, make_plan, reprice
from meshwright.views.alternatives import SHOWN, Alternatives
from meshwright.views.changes import Change, changes
from meshwright.views.difference import diff
from meshwright.views.explain import explain
from meshwright.views.facts import facts_of
from meshwright.views.network import to_networkx
from meshwright.views.page.write import write
from meshwright.views.prices import Prices
from meshwright.views.report import render
from tests import mixtures, models
from tests.trials import parser_of

MODELS = (*models.MODELS, "mixtral", "qwen2", "deepseek", "gpt_oss", "einsum", "mixtral of four layers")
CLUSTERS = ("cpu:1x4", "h100:1x4", "a100:2x2", "h100:2x4", "v100:1x8")
WIDTH = 120
PER_STEP = 0.005
"""Of a step, by which what is printed of an alternative may be off."""
BYTES = 1_000_000
FEW = 2
"""Operators of a plan whose alternatives are tried."""


@dataclass(frozen=True)
class Case:
    """What is planned."""

    model: str
    cluster: str
    precision: str
    pins: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster} {self.precision} {dict(self.pins)}"


def drawn(count: int, seed: int, pattern: str = ".") -> Iterator[Case]:
    """Cases by a seed."""
    dice = random.Random(seed)
    names = [name for name in MODELS if re.search(pattern, name)]
    for _ in range(count):
        cluster = dice.choice(CLUSTERS)
        yield Case(dice.choice(names), cluster, dice.choice(("fp32", "bf16")), _pins(dice, Cluster.parse(cluster).world))


def _pins(dice: random.Random, world: int) -> dict[str, Any]:
    """Some of the degrees and other decisions; the rest is searched."""
    kind = dice.choice(("free", "axes", "degrees", "degrees", "pipeline", "pipeline"))
    pins: dict[str, Any] = {}
    if kind == "axes":
        parts = dice.choice([(world,), (2, world // 2)])
        pins["axes"] = dict(zip("xy", parts, strict=False))
    if kind == "degrees":
        pins |= {"pp": 1, "tp": dice.choice((1, 2, 4)), "cp": dice.choice((1, 1, 2))}
        if pins["cp"] * pins["tp"] > world:
            pins["cp"] = 1
    if kind == "pipeline":
        pins |= {"pp": 2, "tp": dice.choice((1, 2)), "schedule": dice.choice([one.name for one in BUILTIN]),
                 "microbatches": 4}
    if dice.random() < 0.5:
        pins["zero"] = dice.choice((0, 1, 2, 3))
    if dice.random() < 0.5:
        pins["recompute"] = dice.choice(("none", "selective", "full"))
    if "microbatches" not in pins and dice.random() < 0.4:
        pins["microbatches"] = dice.choice((1, 2))
    return pins


@cache
def captured(model: str, precision: str, batch: Fraction = Fraction(1), length: Fraction = Fraction(1)) -> Graph:
    """A model of ``tests.models`` or ``tests.mixtures``, at twice its batch and other multiples."""
    torch.manual_seed(0)
    made, example = (models if model in models.MODELS else mixtures).make(model)

    def resized(x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x] * int(2 * batch))
        return x if length == 1 else torch.cat([x, x], 1)[:, : int(x.shape[1] * length)]

    return capture_model(made, (), {name: resized(x) for name, x in example.items()}, (), None, precision)


def as_dict(pins: Pins) -> dict[str, Any]:
    """As a person may write them."""
    return {f.name: getattr(pins, f.name) for f in fields(pins) if getattr(pins, f.name) not in (None, {})}


def close(a: float | None, b: float | None, relative: float) -> bool:
    """Whether two numbers are the same within a share of them."""
    return abs((a or 0.0) - (b or 0.0)) <= relative * max(abs(a or 0.0), abs(b or 0.0))


# --- what is tried: each yields what does not hold --------------------------------------------------------------------------


def from_its_pins(case: Case, plan: Plan, _: random.Random) -> Iterator[str]:
    """Planning with ``to_pins()``."""
    pins = as_dict(plan.to_pins())
    again = make_plan(captured(case.model, case.precision), Cluster.parse(case.cluster), Pins.of(pins),
                      precision=case.precision)
    if plan_hash(again) != plan_hash(plan):
        yield f"another plan: {diff(plan, again).splitlines()[:4]}"
    if again.to_pins() != plan.to_pins():
        yield "other pins"
    if again.certificate is None or again.certificate.considered != 1:
        yield "it was searched"
    if again.predicted is None or plan.predicted is None:
        yield "no prediction"
        return
    for name in ("step_seconds", "compute_seconds", "exposed_communication_seconds", "optimizer_seconds", "bytes_per_rank"):
        one, other = getattr(plan.predicted, name), getattr(again.predicted, name)
        if not close(one, other, 1e-9):
            yield f"{name} {one} and {other}"


def from_its_rows(case: Case, plan: Plan, _: random.Random) -> Iterator[str]:
    """Rows of weights, pasted beside the mesh."""
    lines = render(plan).splitlines()
    titles = {at - 2 for at, line in enumerate(lines) if line.strip().startswith("module ")}
    dtype = "f32|bf16|f16"
    rows = [line for at, line in enumerate(lines) if at in titles or re.match(rf"  +(\S+ +)?\S+ (?:{dtype})\[.*\]( |$)", line)]
    pasted = as_dict(Pins.of("\n".join([lines[0], *rows])))
    facts, read = facts_of(plan), {name for op in plan.graph.ops for name in op.inputs}
    wanted = {param.fqn: facts.type_of(param.value) for param in plan.graph.params if param.trainable and param.value in read}
    have = {param.fqn: {pasted.get("tensors", {}).get(name) for name in param.fqns} - {None} for param in plan.graph.params}
    for name, text in wanted.items():
        if have[name] != {text}:
            yield f"{name} is {text}, the rows say {sorted(map(str, have[name]))}"
    more = {name: value for name, value in as_dict(plan.to_pins()).items() if name in ("microbatches", "schedule")}
    if plan.pipeline is not None:
        more["stage_cuts"] = plan.to_pins().stage_cuts
    again = facts_of(make_plan(captured(case.model, case.precision), Cluster.parse(case.cluster), Pins.of({**pasted, **more}),
                               precision=case.precision))
    found = {param.fqn: again.type_of(param.value) for param in again.plan.graph.params}
    for name, text in wanted.items():
        if found[name] != text:
            yield f"{name} pasted as {text} is {found[name]}"


def through_its_file(case: Case, plan: Plan, dice: random.Random) -> Iterator[str]:
    """Bytes, names, the schema."""
    from tests.test_plan_format import SCHEMA, conforms, renamed

    text = plan_text(plan)
    if not conforms(json.loads(text), json.loads(SCHEMA.read_text())):
        yield "not as the schema says"
    read = Plan.from_dict(json.loads(text))
    if plan_text(read) != text or plan_hash(read) != plan_hash(plan):
        yield "read again it is another file"
    if plan_text(renamed(plan, dice.randrange(1 << 30))) != text:
        yield "under other names of the trace it is another file"
    if read.predicted != plan.predicted:
        yield "its predictions are others when read"


def through_networkx(case: Case, plan: Plan, _: random.Random) -> Iterator[str]:
    """GraphML and node-link JSON."""
    import networkx as nx

    found = to_networkx(plan)
    with tempfile.TemporaryDirectory() as folder:
        nx.write_graphml(found, Path(folder) / "plan.graphml")
        read = nx.read_graphml(Path(folder) / "plan.graphml", force_multigraph=True, edge_key_type=int)
    again = nx.node_link_graph(json.loads(json.dumps(nx.node_link_data(found, edges="edges"))), edges="edges")
    for how, other in (("GraphML", read), ("node-link", again)):
        if {name: dict(data) for name, data in other.nodes(data=True)} != dict(found.nodes(data=True)):
            yield f"{how} gives other nodes"
        edges = {(a, b, k): {name: text for name, text in data.items() if name != "id"}
                 for a, b, k, data in other.edges(keys=True, data=True)}
        if edges != {(a, b, k): data for a, b, k, data in found.edges(keys=True, data=True)}:
            yield f"{how} gives other edges"


def its_parts(case: Case, plan: Plan, _: random.Random) -> Iterator[str]:
    """Operators and the wait for the host beside the step's compute."""
    prices, predicted = Prices(facts_of(plan)), plan.predicted
    assert predicted is not None
    stages = 1 if plan.pipeline is None else plan.pipeline.degree
    apart = plan.schedule.prologue if plan.pipeline is not None else ()
    work = [(prices.op(op), prices.edges(op)) for op in plan.graph.ops if op.name not in apart]
    parts = sum(one.compute_seconds for one, _ in work) + prices.waiting()
    parts += sum(move.again_seconds for one, edges in work for move in one.inside)
    parts += sum(move.again_seconds for _, edges in work for edge in edges for move in edge.moves)
    parts /= stages
    whole = (predicted.compute_seconds or 0.0) + (predicted.recomputation_seconds or 0.0)
    if not close(parts, whole, PER_STEP):
        yield f"operators take {parts * 1e3:.4f} ms of {whole * 1e3:.4f} ms ({parts / whole - 1:+.2%})"


def _without_choices(plan: Plan) -> dict[str, Any]:
    """All that is decided but what operators choose."""
    held = {name: value for name, value in as_dict(plan.to_pins()).items() if name not in ("operators", "values")}
    if plan.pipeline is not None:  # a search with stages keeps all blocks alike, and takes their level by its name
        block = plan.groups[0]
        held = {name: value for name, value in held.items() if name != "blocks"} | {"zero": block.zero}
        held |= {"recompute": block.recompute} if block.path else {}
    return held


def its_alternatives(case: Case, plan: Plan, dice: random.Random) -> Iterator[str]:
    """Each choice of some operators, pinned and planned."""
    known = Alternatives(facts_of(plan))
    names = names_of(plan.graph)
    held = _without_choices(plan)
    several = (op for op in dice.sample(plan.graph.ops, len(plan.graph.ops)) if len(known.of(op) or ()) > 1)
    for op in itertools.islice(several, FEW):
        kind, *_ = known.places[op.name]
        alike = [name for name, place in known.places.items() if place[0] == kind and place[2] == known.places[op.name][2]
                 and plan.assignments.get(name) == plan.assignments.get(op.name)]
        found = known.of(op) or []
        base = next((one for one in found if one.chosen), None)
        for one in [] if base is None else found[:SHOWN]:
            pins = {**held, "operators": {names.ops[name]: choice_text(one.assignment) for name in alike}}
            told = f"{names.ops[op.name]} as {choice_text(one.assignment)!r}"
            try:
                again = make_plan(plan.graph, Cluster.parse(case.cluster), Pins.of(pins), precision=case.precision)
            except MeshwrightError as error:
                yield f"{told} is refused: {str(error)[:200]}"
                continue
            chosen = Alternatives(facts_of(again)).of(again.graph.ops[plan.graph.ops.index(op)]) or []
            other = next((two for two in chosen if two.chosen), None)
            if other is None or other.assignment != one.assignment:
                yield f"{told} was planned otherwise"
            elif not one.least * (1 - PER_STEP) <= other.seconds <= one.seconds * (1 + PER_STEP):
                printed = f"{one.least * 1e3:.4f} to {one.seconds * 1e3:.4f} ms"
                yield f"{told} was printed as {printed}, planned it takes {other.seconds * 1e3:.4f} ms"
            elif plan.pipeline is None and plan.predicted is not None and again.predicted is not None:
                least, most = one.least - base.seconds, one.seconds - base.least
                step = plan.predicted.step_seconds
                planned, off = again.predicted.step_seconds - step, PER_STEP * step
                if not least - off <= planned <= most + off:
                    printed = f"{least * 1e3:+.4f} to {most * 1e3:+.4f} ms"
                    yield f"{told} was printed as {printed}, the step takes {planned * 1e3:+.4f} ms"


def its_changes(case: Case, plan: Plan, _: random.Random) -> Iterator[str]:
    """Each change, planned by itself."""
    now = reprice(plan).predicted
    assert now is not None
    for change in changes(plan):
        made = _changed(case, plan, change)
        if made is None:
            continue
        then, work = made
        assert then.predicted is not None
        gain = work * now.step_seconds / then.predicted.step_seconds - 1
        same = close(then.predicted.step_seconds, change.step_seconds, PER_STEP)
        if not same or not close(1 + gain, 1 + change.gain, PER_STEP):
            yield f"{change}: by itself {then.predicted.step_seconds * 1e3:.4f} ms, {gain:+.2%}"
        if not then.predicted.fits:
            yield f"{change}: it does not fit"


def _changed(case: Case, plan: Plan, change: Change) -> tuple[Plan, float] | None:
    """(the plan under a change, the work of its step as a factor), planned by itself; None for one that is priced only."""
    from meshwright.views.changes import _held

    where, what = Cluster.parse(case.cluster), change.what
    half, many = Fraction(1, 2), ", as many of them"
    scales = {"twice the batch": (2, 1), "half the batch": (half, 1), f"sequences twice as long{many}": (1, 2),
              f"sequences half as long{many}": (1, half)}
    if what in scales:
        batch, length = map(Fraction, scales[what])
        graph = captured(case.model, case.precision, batch, length)
        return make_plan(graph, where, _held(plan), precision=case.precision), float(batch * length)
    if what.startswith("as many "):
        return reprice(plan, f"{what.split()[-1]}:{case.cluster.split(':')[1]}"), 1.0
    if what.startswith("twice the devices"):
        (island,) = where.islands
        twice = Cluster((replace(island, nodes=2 * island.nodes),))
        sizes = dict(part.rstrip("*").split("=") for part in change.how.removeprefix("mesh ").replace("*=", "=").split(" x "))
        named = re.findall(r"(\w+)(\*?)=(\d+)", change.how)
        assert sizes
        assert named
        pins = Pins(axes={name + star: int(size) for name, star, size in named})
        return make_plan(plan.graph, twice, pins, precision=case.precision), 1.0
    return None


def its_width(case: Case, plan: Plan, dice: random.Random) -> Iterator[str]:
    """Tables, answers, differences."""
    op = dice.choice(plan.graph.ops)
    other = make_plan(captured(case.model, case.precision), Cluster.parse(case.cluster), Pins(pp=1, tp=1),
                      precision=case.precision)
    texts = {"the table": render(plan), "explain": explain(plan, changes=False), "an operator": explain(plan, op.name),
             "diff": diff(plan, other), "diff to itself": diff(plan, plan), "print": str(plan)}
    for what, text in texts.items():
        wide = max(map(len, text.splitlines()), default=0)
        if wide > WIDTH:
            yield f"{what} is {wide} columns wide"


def its_page(case: Case, plan: Plan, _: random.Random) -> Iterator[str]:
    """The page of it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.html"
        write(plan, file)
        if file.stat().st_size > BYTES:
            yield f"{file.stat().st_size} bytes"


TRIED: Mapping[str, Callable[[Case, Plan, random.Random], Iterator[str]]] = {
    "pins": from_its_pins, "rows": from_its_rows, "file": through_its_file, "network": through_networkx, "parts": its_parts,
    "alternatives": its_alternatives, "changes": its_changes, "width": its_width, "page": its_page,
}


def faults(case: Case, plan: Plan, only: str = ".", seed: int = 0) -> Iterator[str]:
    """What does not hold of a plan."""
    for name, tried in TRIED.items():
        if re.search(only, name):
            try:
                yield from (f"{name}: {one}" for one in tried(case, plan, random.Random(seed)))
            except MeshwrightError as error:
                yield f"{name}: refused: {str(error)[:300]}"
            except Exception as error:  # none may come up
                yield f"{name}: RAW {type(error).__name__}: {str(error)[:300]}"


def judged(case: Case, only: str, seed: int) -> dict[str, Any]:
    """What one case comes to (holds, FAULT, refused), and what does not hold or why it is refused."""
    try:
        plan = make_plan(captured(case.model, case.precision), Cluster.parse(case.cluster), Pins.of(dict(case.pins)),
                         precision=case.precision)
    except MeshwrightError as error:
        return {"what": "refused", "found": [], "words": str(error)[:160]}
    found = list(faults(case, plan, only, seed))
    return {"what": "FAULT" if found else "holds", "found": found, "words": ""}


def main() -> int:
    """The cases of a seed."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default=".", help="models whose names match")
    parser.add_argument("--only", default="^(?!page)", help="what is tried, by its name")
    parser.add_argument("--log", type=Path, help="a file of JSON lines; what stands there is not tried again")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    lines = options.log.read_text(encoding="utf-8").splitlines() if options.log and options.log.exists() else []
    known = {row["case"]: row for row in map(json.loads, lines)}
    for case in drawn(options.count, options.seed, options.models):
        if options.list:
            print(case)
            continue
        row = known.get(str(case)) or {"case": str(case), **judged(case, options.only, options.seed)}
        if options.log and str(case) not in known:
            with options.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        total += Counter({"cases": 1, "refused": row["what"] == "refused", "faults": len(row["found"])})
        print(f"{row['what']:8s} {case} {row['words']}".rstrip(), *row["found"], sep="\n    ", flush=True)
    print(", ".join(f"{name} {total[name]}" for name in ("cases", "refused", "faults")))
    return int(total["faults"] > 0)


if __name__ == "__main__":
    sys.exit(main())
