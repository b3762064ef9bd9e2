"""torch's caching allocator on a device: what a sequence of allocations makes it reserve, beyond what is alive.

    sizes       rounded to 512 bytes; up to 1 MiB from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones
                from a segment of their own (rounded to 2 MiB)
    take        the smallest idle block that is large enough, cut where more than 1 MiB is left (512 bytes in small segments);
                else a new segment
    give        a block, joined with the idle ones beside it
    give_late   the same, of a block that another stream used (``record_stream``: that of collectives): the host cannot tell
                before the device has come to its end, which is as many kernels behind as its queue takes, at most

Where a new segment is more than there is room for, the host waits for the device, and the segments that are idle as a whole
then are given back first (idle blocks are not looked at again: only a segment is asked for); ``reserved`` is the
most that was held: more than the room if even so it did not fit. Gradients that the first backward leaves in the large blocks
of its loss, say, keep those from the losses to come. (Constants of c10/cuda/CUDACachingAllocator.cpp without
``expandable_segments``, under which nothing is lost so.)
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field

MIB = 2**20
ROUND = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MIDDLE, MIDDLE_SEGMENT = 10 * MIB, 20 * MIB
LARGE_ROUND = 2 * MIB
QUEUE = 1024
"""Launches that CUDA queues before the next one waits: the host is so many kernels ahead of a device that has much to do."""


@dataclass(eq=False)
class Stretch:
    """A piece of a segment: bytes, the blocks beside it, whether nothing lives in it."""

    bytes: int
    small: bool
    before: Stretch | None = None
    after: Stretch | None = None
    idle: bool = False
    number: int = field(default=0, compare=False)


class Arena:
    """The segments of a device. ``standing``: bytes that are there all the time, in segments of their own; ``room``: bytes
    that it may reserve before it gives any back."""

    def __init__(self, standing: float = 0.0, room: float = 0.0) -> None:
        self.held = self.reserved = float(standing)
        self.room = room
        self.idle: dict[bool, list[tuple[int, int, Stretch]]] = {True: [], False: []}
        self.late: deque[tuple[int, Stretch]] = deque()  # (launches by which it is idle, block)
        self.launches = self.count = 0

    def take(self, bytes_: float) -> Stretch | None:
        """A block for so many bytes; None for nothing."""
        if bytes_ < 1:
            return None
        self._come_back(self.launches)
        size = _up(int(bytes_), ROUND)
        small = size <= SMALL
        pool = self.idle[small]
        at = bisect.bisect_left(pool, (size, 0))
        block = pool.pop(at)[2] if at < len(pool) else self._segment(size, small)
        block.idle = False
        left = block.bytes - size
        if left >= ROUND if small else left > SMALL:
            rest = Stretch(left, small, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.bytes = rest, size
            self._lay(rest)
        return block

    def give_late(self, block: Stretch) -> None:
        """Nothing lives in the block any more, which collectives used."""
        self.late.append((self.launches + QUEUE, block))

    def wait(self) -> None:
        """The host waits for the device."""
        self._come_back(self.launches + QUEUE)

    def _come_back(self, launches: int) -> None:
        while self.late and self.late[0][0] <= launches:
            self.give(self.late.popleft()[1])

    def give(self, block: Stretch | None) -> None:
        """Nothing lives in the block any more."""
        if block is None:
            return
        for other in (block.after, block.before):
            if other is None or not other.idle:
                continue
            pool = self.idle[other.small]
            pool.pop(bisect.bisect_left(pool, (other.bytes, other.number)))
            first, second = (block, other) if other is block.after else (other, block)
            first.bytes += second.bytes
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        self._lay(block)

    def _lay(self, block: Stretch) -> None:
        self.count += 1
        block.idle, block.number = True, self.count
        bisect.insort(self.idle[block.small], (block.bytes, block.number, block))

    def _segment(self, size: int, small: bool) -> Stretch:
        """A new segment; where there is no room for it, after those that are idle as a whole were given back."""
        bytes_ = SMALL_SEGMENT if small else MIDDLE_SEGMENT if size < MIDDLE else _up(size, LARGE_ROUND)
        if self.held + bytes_ > self.room:
            self.wait()
        for kind, pool in self.idle.items() if self.held + bytes_ > self.room else ():
            whole = [entry for entry in pool if entry[2].before is None and entry[2].after is None]
            self.held -= sum(entry[0] for entry in whole)
            if whole:
                self.idle[kind] = [entry for entry in pool if entry[2].before is not None or entry[2].after is not None]
        self.held += bytes_
        self.reserved = max(self.reserved, self.held)
        return Stretch(bytes_, small)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
