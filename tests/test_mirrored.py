"""A split in two chunks a rank: its notation, the steps to and from it, and what the collectives make of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.ir.mesh import Mesh
from meshwright.ir.reshard import reshard
from meshwright.ir.sharding import ShardingError, format_sharding, parse_sharding, parse_type
from meshwright.passes.communication import COMMUNICATION
from meshwright.runtime import communication as comm
from meshwright.runtime.collectives import Group

MESH = Mesh(("dp", "cp", "tp"), (2, 2, 2), frozenset({"cp"}))
SPLITS = [
    "[_, _, _]", "[_, _@cp*, _]", "[_, _@cp, _]", "[_, _@(cp*,tp), _]", "[_@dp, _, _@cp]", "[_@dp, _@cp*, _@tp]",
    "[_, _@(cp,tp), _]",
]


@pytest.mark.parametrize("text", ["f32[8@dp, 4096@cp*] +tp", "[_@(cp*,tp), _]", "bf16[4@(dp,cp*), 2] ~tp"])
def test_the_notation_round_trips(text: str) -> None:
    dtype, shape, sharding = parse_type(text)
    assert format_sharding(sharding, shape, dtype) == text
    assert sharding.mirrored == {"cp"}
    assert sharding.gradient().mirrored == {"cp"}


def test_what_splits_nothing_is_not_mirrored() -> None:
    with pytest.raises(ShardingError, match="cannot be mirrored: cp"):
        type(parse_sharding("[_]"))(((),), mirrored=frozenset({"cp"}))
    assert str(MESH) == "dp=2 x cp*=2 x tp=2"


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(SPLITS, 2)))
def test_steps_lead_from_any_to_any(source: str, target: str) -> None:
    """The steps end at the target, and what the verifier makes of each is what the planner says of it."""
    now, wanted = parse_sharding(source), parse_sharding(target)
    for step in reshard(now, wanted):
        dims = tuple(dim for dim in (step.dim, step.to_dim) if dim >= 0)
        before, after = (step.axis in side.mirrored for side in (step.before, step.after))
        flag = before if step.kind in ("all_gather", "gather_vary", "all_to_all") else after
        flags = {"mirrored": flag, **({"to_mirrored": after} if step.kind == "all_to_all" else {})}
        if step.kind in ("vary", "unvary", "all_reduce"):
            flags = {}
        now = COMMUNICATION[f"mw.{step.kind}"](now, step.axis, *dims, **flags)
        assert now == step.after
    assert now == wanted


def test_a_piece_of_a_mirrored_piece_is_never_gathered() -> None:
    """Logits that come back in the caller's order are as large as ever, however their sequence is split; what has no other dim
    is gathered."""
    steps = reshard(parse_sharding("[_, _@(cp*,tp), _]"), parse_sharding("[_, _@(cp,tp), _]"))
    assert [str(step) for step in steps] == ["all_to_all(dim 1 -> 2)@tp", "mirror(dim 1)@cp", "all_to_all(dim 2 -> 1)@tp"]
    assert {step.scale(MESH) for step in steps} == {1 / 4}
    steps = reshard(parse_sharding("[_@(cp*,tp)]"), parse_sharding("[_@(cp,tp)]"))
    assert [step.kind for step in steps] == ["all_gather", "mirror", "slice"]


def _mine(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    chunks = x.chunk(2 * size, 1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 1)


def _collectives(rank: int) -> bool:
    import torch.distributed as dist

    size = dist.get_world_size()
    group = Group(dist.group.WORLD.group_name, rank, size)  # type: ignore[union-attr]
    torch.manual_seed(0)
    x = torch.randn(3, 4 * size, 2 * size, dtype=torch.float64)
    mine, plain, heads = _mine(x, rank, size), x.chunk(size, 1)[rank], x.chunk(size, 2)[rank]
    cases: list[tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = [
        (x, mine, lambda t: comm.slice(t, 1, axis=group, size=4 * size, mirrored=True)),
        (mine, x, lambda t: comm.all_gather(t, 1, axis=group, size=4 * size, mirrored=True)),
        (mine, x, lambda t: comm.gather_vary(t, 1, axis=group, size=4 * size, mirrored=True)),
        (x / size, mine, lambda t: comm.reduce_scatter(t, 1, axis=group, size=4 * size, mirrored=True)),
        (mine, heads, lambda t: comm.all_to_all(t, 1, 2, axis=group, size=4 * size, to_size=2 * size, mirrored=True)),
        (heads, mine, lambda t: comm.all_to_all(t, 2, 1, axis=group, size=2 * size, to_size=4 * size, to_mirrored=True)),
        (plain, mine, lambda t: comm.mirror(t, 1, axis=group, mirrored=True)),
        (mine, plain, lambda t: comm.mirror(t, 1, axis=group)),
    ]
    for before, after, function in cases:
        before = before.detach().clone().requires_grad_()
        torch.testing.assert_close(function(before), after)
        there = function(before)
        weights = torch.randn(there.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        (there * weights).sum().backward()
        total = (before.grad * before.detach()).sum() if before.grad is not None else torch.zeros(())
        value = (there.detach() * weights).sum()
        both = torch.stack([total, value])
        dist.all_reduce(both)
        whole = function is cases[0][2] or function is cases[1][2]
        assert whole or torch.allclose(both[0], both[1]), "the backward is the transpose of the forward"
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_collectives(pool: Callable[[int], Any], world: int) -> None:
    """Each operator against pieces cut by hand, and its backward against its forward."""
    assert all(pool(world).run(_collectives))
