"""The grid of planning times: models x numbers of devices x kinds of devices, everything searched.

A point is left out where the state of its parameters cannot lie on all devices together. Twelve devices are two nodes of six;
from 16 on a node has eight, and 96 are twelve nodes. The slow network is 10 Gb/s of Ethernet a node.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.models import MIXTURES, MODELS, OTHERS
from meshwright.cost.cluster import Cluster

GIB = 2**30
DEVICES = (1, 2, 4, 6, 8, 12, 16, 64, 96, 256, 1024, 16384)
KINDS: Mapping[str, str] = {"a100-40": "a100-40g", "a100-80": "a100", "h100": "h100"}
SLOW = "v100-10gbe", str(Path(__file__).with_name("data") / "ethernet.toml")
"""64 devices on a slow network."""
STATE = 16.0
"""Bytes of a parameter in bf16 training with AdamW: weights, gradients and states in fp32."""
BUDGET, LARGE, SMALL = 20.0, 60.0, 5.0
"""Seconds that a point may take, capture aside: any, the 405B, and a small model on up to 8 devices."""
STRANGE: Mapping[str, tuple[int, ...]] = {
    "v100-32g": (4, 8), "a100-40g": (4, 5, 8), "a100": (4, 8), "h100": (3, 7, 8), "h100-pcie-80g": (4, 8), "h200": (8,),
    "h800": (8,), "b200": (4, 8), "gb200": (36, 64), "a10g": (2, 4, 8), "l40s": (4, 8), "mi300x": (8,), "tpu-v5p": (16, 64),
}
"""Devices of points that are drawn, and how many a node may have."""
Point = tuple[str, int, str, float, int | None]
"""Model, batch, cluster, budget, and the length if it is not the model's own."""


def points(only: str = "") -> dict[str, Point]:
    """The points whose name matches, by name."""
    found: dict[str, Point] = {}
    for model, size in MODELS.items():
        if model == "gpt-1t":
            continue
        places = [(kind, f"{device}:{_nodes(count)}", count) for count in DEVICES for kind, device in KINDS.items()]
        for kind, cluster, count in [*places, (*SLOW, 64)]:
            room = cluster_of(cluster).capacity_bytes * count
            batch = min(8 * count, 3072) if count < 1024 else 4 * 1024 if count == 1024 else 16384
            name = f"{model}/{count}/{kind}"
            if size.parameters * STATE <= room and re.search(only, name):
                small = size.parameters < 2e9 and count <= 8
                found[name] = model, batch, cluster, LARGE if size.parameters > 4e11 else SMALL if small else BUDGET, None
    return found


def drawn(count: int, seed: int, only: str = "") -> dict[str, Point]:
    """``count`` points that are not on the grid, less those whose name does not match: any model but the trillion, other
    numbers and kinds of devices, 1 to 32 samples a device on average, half or twice the length in one of four (not of images
    and learned positions). The state may lie on all devices together, which says nothing of whether anything fits."""
    dice = random.Random(seed)
    models = {**MODELS, **MIXTURES, **OTHERS}
    found: dict[str, Point] = {}
    while len(found) < count:
        model, kind = dice.choice([name for name in models if name != "gpt-1t"]), dice.choice(list(STRANGE))
        size, width = models[model], dice.choice(STRANGE[kind])
        nodes = dice.choice((1, 1, 2, 3, 4, 5, 6, 10, 16, 24, 48, 64, 120, 256, 512))
        devices = nodes * width
        batch = max(1, round(devices * dice.choice((0.5, 1, 2, 4, 8, 12, 32))))
        stretch = dice.choice((1, 1, 1, 0.5, 2)) if "num_key_value_heads" in size.config else 1
        cluster = f"{kind}:{nodes}x{width}"
        name = f"{model}/{nodes}x{width}/{kind}/{batch}" + (f"/{int(size.sequence * stretch)}" if stretch != 1 else "")
        budget = LARGE if size.parameters > 4e11 else SMALL if size.parameters < 2e9 and devices <= 8 else BUDGET
        if size.parameters * STATE <= cluster_of(cluster).capacity_bytes * devices:
            found[name] = model, batch, cluster, budget, int(size.sequence * stretch) if stretch != 1 else None
    return {name: point for name, point in found.items() if re.search(only, name)}


def cluster_of(text: str) -> Cluster:
    """A cluster by its words, or of a file."""
    return Cluster.from_toml(text) if text.endswith(".toml") else Cluster.parse(text)


def _nodes(count: int) -> str:
    if count <= 8:
        return f"1x{count}"
    return f"{count // 8}x8" if count % 8 == 0 else f"2x{count // 2}"


def show(cases: Mapping[str, Any], run: Callable[[str, Any], dict[str, Any]], log: Path | None) -> None:
    """Print a line a point; of those that stand in the log, what stands there."""
    known: dict[str, dict[str, Any]] = {}
    if log is not None and log.exists():
        known = {row["point"]: row for row in map(json.loads, log.read_text(encoding="utf-8").splitlines())}
    heads = ("capture", 7), ("search", 7), ("budget", 5), ("GiB", 5), ("gap", 7), ("step", 10)
    print(f"{'point':38s}", *(f"{head:>{width}s}" for head, width in heads), " layout", flush=True)
    for name, case in cases.items():
        found = known.get(name)
        if found is None:
            found = {"point": name, **run(name, case)}
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
        print(line(name, case.budget, found), flush=True)


def line(name: str, budget: float, found: Mapping[str, Any]) -> str:
    """A point in words; seconds are those of the processor, which other programs change least."""
    if "error" in found:
        return f"{name:38s} {found['error'][:110]}"
    capture = found["phases"].get("capture", 0.0) * found["cpu_seconds"] / found["seconds"]
    search = found["cpu_seconds"] - capture
    gap = found["certificate"]["gap"]
    layout = f"{found['mesh']}, {found['schedule'] or 'no pipeline'}, {found['microbatches']} micro-batches"
    over = "*" if search > budget else " "
    return (f"{name:38s} {capture:7.1f} {search:6.1f}{over} {budget:6.0f} {found['peak_bytes'] / GIB:5.2f} {gap:7.2%} "
            f"{found['step_seconds'] * 1e3:7.4g} ms  {layout}")
