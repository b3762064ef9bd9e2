"""torch's caching allocator: what it reserves for a sequence of allocations."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.memory.allocator import MIB, QUEUE, Arena, Stretch
from meshwright.cost.memory.replay import Heap, comes_late


def segment(block: Stretch) -> Stretch:
    while block.before is not None:
        block = block.before
    return block


def segment_bytes(block: Stretch | None) -> int:
    return 0 if block is None else block.bytes + segment_bytes(block.after)


def test_blocks_of_one_size_are_used_again() -> None:
    arena = Arena()
    for _ in range(5):
        two = [arena.take(40 * MIB) for _ in range(2)]
        for block in two:
            arena.give(block)
    assert arena.reserved == 80 * MIB


def test_what_stays_in_a_large_block_keeps_it_from_the_next_large_one() -> None:
    """A loss's block; gradients that stay are laid into it; the next loss needs one more."""
    arena = Arena()
    loss = arena.take(100 * MIB)
    arena.give(loss)
    kept = arena.take(30 * MIB)
    assert arena.reserved == 100 * MIB
    again = arena.take(100 * MIB)
    assert arena.reserved == 200 * MIB
    arena.give(again)
    arena.give(kept)
    arena.take(150 * MIB)  # what is idle as a whole is given back before more is asked for
    assert (arena.reserved, arena.held) == (200 * MIB, 150 * MIB)


def test_segments_are_given_back_only_where_there_is_no_room() -> None:
    """So what stays may be laid into one that is idle, and another that is needed whole comes on top."""
    reserved = {}
    for room in (0, 400 * MIB):
        arena = Arena(room=room)
        arena.give(arena.take(100 * MIB))
        arena.take(300 * MIB)
        held = arena.held
        arena.take(20 * MIB)
        arena.take(100 * MIB)
        reserved[room] = held, arena.reserved
    assert reserved == {0: (300 * MIB, 420 * MIB), 400 * MIB: (400 * MIB, 500 * MIB)}


def test_what_collectives_used_comes_back_when_the_host_can_tell() -> None:
    """As many launches later as are queued, where the host waits, or where there is no room for another segment."""
    def again(launches: int, waits: bool, room: float) -> float:
        heap = Heap({}, room)
        one = heap.new(100.0 * MIB, "transient")
        comes_late(one)
        heap.drop(one)
        heap.launch(launches, waits)
        heap.new(100.0 * MIB, "transient")
        assert heap.arena is not None
        return heap.arena.reserved / MIB

    found = [again(*way) for way in ((0, False, 1e12), (QUEUE - 1, False, 1e12), (QUEUE, False, 1e12), (1, True, 1e12))]
    assert found == [200, 200, 100, 100]
    assert again(0, False, 150.0 * MIB) == 100  # given back, then asked for anew


def test_optimizer_state_is_laid_into_what_a_first_step_left() -> None:
    """Counted from the beginning, but its memory comes late: into the block that the next step's loss needs whole."""
    heap = Heap({"parameters": 10.0 * MIB, "optimizer": 40.0 * MIB}, room=0.0, late=40.0 * MIB)
    for step in range(2):
        heap.drop(heap.new(100.0 * MIB, "transient"))
        heap.new(20.0 * MIB, "gradients")
        assert heap.peak == 150 * MIB
        assert heap.arena is not None
        assert heap.arena.reserved == (110 if step == 0 else 210) * MIB
        if step == 0:
            heap.restart([20.0 * MIB, 20.0 * MIB])


def test_small_sizes_share_segments() -> None:
    arena = Arena(7 * MIB)
    for _ in range(4):
        arena.take(MIB // 2)
    assert arena.reserved == 9 * MIB
    arena.take(2 * MIB)
    assert arena.reserved == 29 * MIB
    assert (arena.take(0), arena.reserved) == (None, 29 * MIB)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60 * MIB), st.integers(0, 7)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_nothing_overlaps_and_all_that_lives_is_reserved(steps: list[tuple[bool, int, int]]) -> None:
    arena, alive = Arena(), list[tuple[int, Stretch]]()
    for takes, size, which in steps:
        if takes or not alive:
            block = arena.take(size)
            assert block is not None
            assert (block.idle, size <= block.bytes) == (False, True)
            alive.append((size, block))
        else:
            arena.give(alive.pop(which % len(alive))[1])
        segments = {id(segment(block)): segment(block) for _, block in alive}
        assert len({id(block) for _, block in alive}) == len(alive)
        for one in segments.values():  # blocks of a segment are chained both ways, and no two idle ones touch
            while one.after is not None:
                assert one.after.before is one
                assert not (one.idle and one.after.idle)
                one = one.after
        held = sum(segment_bytes(one) for one in segments.values())
        assert sum(block.bytes for _, block in alive) <= held <= arena.held <= arena.reserved
