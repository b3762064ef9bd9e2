"""The room that torch's allocator has on the devices of a published run: the device's memory without what is no tensor's."""

from __future__ import annotations

from rows import Row, cluster_of, pins_of, torch_of

CONTEXT = 400 * 2**20
"""Bytes of a context into which kernels are loaded when they are called for (pytorch/pytorch#109888: "around 400MB"; #86509:
287 MB for 667), as torch does since ``LAZY``; before, the catalogue's reserve."""
LAZY = (1, 13)
PAIR, GROUP = 544 * 2**20, 688 * 2**20
"""Bytes of a communicator of two devices, and of more: measured on A100 with NVLink (NVIDIA/nccl#964)."""


def room_of(row: Row) -> float:
    """Bytes that the allocator has on a device: without the context and the communicators, each with buffers of its own: of
    every way in which the devices are split, of all of them where there are several ways, and of a rank of a pipeline with each
    of its neighbours, two where there are more than two stages (before NCCL 2.22 all buffers are made with it)."""
    cluster = cluster_of(row)
    world, pins = cluster.world, pins_of(row, cluster.world)
    split = [size for size in (pins.dp, pins.tp, pins.pp, pins.cp) if size and size > 1]
    groups = [*split, *([world] if len(split) > 1 else []), *[2] * min(2, (pins.pp or 1) - 1)]
    device = cluster.device
    context = CONTEXT if torch_of(row) >= LAZY else device.reserve_bytes
    return float(device.memory_bytes - context - sum(PAIR if size == 2 else GROUP for size in groups))
