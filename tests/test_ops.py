"""The mw.* operators on several processes against the whole tensor on one: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.ir.mesh import Mesh
from meshwright.ir.sharding import piece
from meshwright.runtime.collectives import Group
from meshwright.runtime.ops import OPS

WORLDS = (2, 4)


def group_of_all() -> Group:
    return Group(dist.group.WORLD.group_name, dist.get_rank(), dist.get_world_size())


def cut(x: Tensor, dim: int, rank: int, world: int) -> Tensor:
    return x.narrow(dim, *piece(x.shape[dim], Mesh.of(a=world), ("a",), {"a": rank}))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run_local(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dy: Tensor) -> tuple[Tensor, Tensor]:
    x = args[0].clone().requires_grad_()
    y = OPS[name](x, *args[1:], **kwargs)
    y.backward(dy)
    return y.detach(), x.grad


def communicate(rank: int, shape: tuple[int, ...], dim: int, to_dim: int, dtype: torch.dtype) -> None:
    """Every communication operator: forward and backward are the table's kinds, for one dim of one shape."""
    world, group, size = dist.get_world_size(), group_of_all(), shape[dim]
    whole, grad = draw(*shape, dtype=dtype), draw(*shape, seed=1, dtype=dtype)
    terms = [draw(*shape, seed=10 + r, dtype=dtype) for r in range(world)]
    grads = [draw(*shape, seed=20 + r, dtype=dtype) for r in range(world)]

    def mine(x: Tensor, d: int = dim) -> Tensor:
        return cut(x, d, rank, world)

    cases = {  # name: (local x, arguments, local dy, expected y, expected dx)
        "mw.slice": (whole, (dim,), {"size": size}, mine(grad), mine(whole), grad),
        "mw.vary": (whole, (), {}, grads[rank], whole, sum(grads)),
        "mw.unvary": (whole, (), {}, grad, whole, grad if rank == 0 else 0 * grad),
        "mw.term": (whole, (), {}, grad, whole if rank == 0 else 0 * whole, grad),
        "mw.all_gather": (mine(whole), (dim,), {"size": size}, grad, whole, mine(grad)),
        "mw.gather_vary": (mine(whole), (dim,), {"size": size}, grads[rank], whole, mine(sum(grads))),
        "mw.reduce_scatter": (terms[rank], (dim,), {"size": size}, mine(grad), mine(sum(terms)), grad),
        "mw.all_reduce": (terms[rank], (), {}, grad, sum(terms), grad),
        "mw.all_to_all": (
            mine(whole), (dim, to_dim), {"size": size, "to_size": shape[to_dim]},
            mine(grad, to_dim), mine(whole, to_dim), mine(grad),
        ),
    }
    cases["mw.vary in fp32 at least"] = whole, (), {"reduce_dtype": torch.float32}, grads[rank], whole, sum(grads)
    for name, (x, args, kwargs, dy, expected, expected_dx) in cases.items():
        y, dx = run_local(name.split()[0], (x, *args), {**kwargs, "axis": group}, dy)
        torch.testing.assert_close(y, expected, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(dx, expected_dx, msg=lambda text, name=name: f"{name} backward: {text}")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("shape", "dim", "to_dim"), [((8, 4, 12), 0, 1), ((8, 4, 12), 2, 0), ((5, 3, 7), 1, 2), ((5, 3, 7), 0, 1), ((1, 9), 0, 1)]
)
def test_communication(pool: Callable, world: int, shape: tuple[int, ...], dim: int, to_dim: int) -> None:
    for dtype in (torch.float64, torch.complex128):
        pool(world=world).run(communicate, shape, dim, to_dim, dtype)


def gathered_linear(rank: int, size: int, dim: int, dtype: torch.dtype) -> int:
    world, group = dist.get_world_size(), group_of_all()
    shape = [2, 3, 4]
    shape[dim] = size
    whole = draw(*shape, dtype=dtype)
    weights = [[draw(n, 4, seed=10 * r + n, dtype=dtype) for r in range(world)] for n in (5, 2)]
    bias = [draw(5, seed=10 * r + 3, dtype=dtype) for r in range(world)]
    dys = [[draw(*shape[:-1], n, seed=10 * r + 4 + n, dtype=dtype) for r in range(world)] for n in (5, 2)]

    x = cut(whole, dim, rank, world).clone().requires_grad_()
    locals_ = [w[rank].clone().requires_grad_() for w in (*weights, bias)]
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        ys = OPS["mw.gather_linear"](x, tuple(locals_[:2]), (locals_[2], None), dim, axis=group, size=size)
    torch.autograd.backward(ys, [dys[0][rank], dys[1][rank]])

    whole_x = whole.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for r in range(world):  # what every rank computes, on the one tensor that all of them read
        w1, w2, b = (t[r].clone().requires_grad_() for t in (*weights, bias))
        out1, out2 = F.linear(whole_x, w1, b), F.linear(whole_x, w2)
        total = total + sum((out * dy[r].conj()).real.sum() for out, dy in zip((out1, out2), dys, strict=True))
        if r == rank:
            mine, expected = (w1, w2, b), (out1, out2)
    total.backward()
    tolerance = {"rtol": 2e-2, "atol": 2e-1} if dtype == torch.bfloat16 else {}
    for y, y_expected in zip(ys, expected, strict=True):
        torch.testing.assert_close(y, y_expected, **tolerance)
    for have, want in zip(locals_, mine, strict=True):
        torch.testing.assert_close(have.grad, want.grad, **tolerance)
    torch.testing.assert_close(x.grad, cut(whole_x.grad, dim, rank, world), **tolerance)
    return max(saved) - max(x.numel(), 20)  # the largest tensor saved is the shard (or a weight, 20 numbers)


@pytest.mark.parametrize(("size", "dim", "dtype"), [
    (64, 1, torch.float64), (7, 0, torch.float64), (64, 1, torch.bfloat16), (7, 0, torch.complex128),
])
@pytest.mark.parametrize("world", WORLDS)
def test_gather_linear(pool: Callable, world: int, size: int, dim: int, dtype: torch.dtype) -> None:
    assert max(pool(world=world).run(gathered_linear, size, dim, dtype)) <= 0


def gathered_linear_frozen(rank: int) -> None:
    x = draw(2, 4).requires_grad_()
    weight = draw(5, 4)
    (y,) = OPS["mw.gather_linear"](x, (weight,), (None,), 0, axis=group_of_all(), size=4)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (2 * weight.sum(0)).expand(2, 4))
    assert weight.grad is None
    frozen = weight.clone().requires_grad_()
    OPS["mw.gather_linear"](x.detach(), (frozen,), (None,), 0, axis=group_of_all(), size=4)[0].sum().backward()
    torch.testing.assert_close(frozen.grad, (2 * x.detach().sum(0)).expand(5, 4))


def test_gather_linear_computes_only_the_gradients_asked_for(pool: Callable) -> None:
    pool(world=2).run(gathered_linear_frozen)


def split_vocabulary(rank: int, vocab: int, padding_idx: int, by_frequency: bool) -> None:
    world, group = dist.get_world_size(), group_of_all()
    weight, ids, dy = draw(vocab, 6), torch.randint(0, vocab, (3, 5), generator=torch.Generator().manual_seed(3)), draw(3, 5, 6)
    offset, rows = piece(vocab, Mesh.of(a=world), ("a",), {"a": rank})
    mine = weight[offset : offset + rows].clone().requires_grad_()
    y = OPS["mw.embedding"](mine, ids, offset, rows, padding_idx, by_frequency, False)
    OPS["mw.all_reduce"](y, axis=group).backward(dy)
    expected = weight.clone().requires_grad_()
    want = torch.embedding(expected, ids, padding_idx, by_frequency, False)
    want.backward(dy)
    torch.testing.assert_close(OPS["mw.all_reduce"](y, axis=group), want)
    torch.testing.assert_close(mine.grad, expected.grad[offset : offset + rows])


@pytest.mark.parametrize(("vocab", "padding_idx", "by_frequency"), [(12, -1, False), (9, 4, False), (5, -1, True)])
@pytest.mark.parametrize("world", WORLDS)
def test_embedding(pool: Callable, world: int, vocab: int, padding_idx: int, by_frequency: bool) -> None:
    pool(world=world).run(split_vocabulary, vocab, padding_idx, by_frequency)


def split_cross_entropy(rank: int, vocab: int, smoothing: float, dtype: torch.dtype) -> None:
    world, group = dist.get_world_size(), group_of_all()
    logits = (draw(2, 7, vocab) * 5).to(dtype)
    labels = torch.randint(0, vocab, (2, 7), generator=torch.Generator().manual_seed(1))
    labels[0, 2:5] = -100
    whole = logits.clone().requires_grad_()
    wide = whole.flatten(0, 1).to(torch.promote_types(dtype, torch.float32))
    expected = F.cross_entropy(wide, labels.flatten(), reduction="sum", label_smoothing=smoothing)
    (expected * 0.25).backward()
    offset, columns = piece(vocab, Mesh.of(a=world), ("a",), {"a": rank})
    mine = logits[..., offset : offset + columns].clone().requires_grad_()
    total, count = OPS["mw.cross_entropy"](mine, labels, -100, smoothing, offset=offset, vocab=vocab, axes=group)
    (total * 0.25).backward()
    whole_again = logits.clone().requires_grad_()
    alone, _ = OPS["mw.cross_entropy"](whole_again, labels, -100, smoothing)
    (alone * 0.25).backward()
    assert count == 11
    assert not count.requires_grad
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(alone, expected)
    torch.testing.assert_close(mine.grad, whole.grad[..., offset : offset + columns])
    torch.testing.assert_close(whole_again.grad, whole.grad)


@pytest.mark.parametrize(
    ("vocab", "smoothing", "dtype"),
    [(16, 0.0, torch.float32), (9, 0.1, torch.float64), (5, 0.0, torch.float64), (16, 0.0, torch.bfloat16)],
)
@pytest.mark.parametrize("world", WORLDS)
def test_cross_entropy(pool: Callable, world: int, vocab: int, smoothing: float, dtype: torch.dtype) -> None:
    pool(world=world).run(split_cross_entropy, vocab, smoothing, dtype)


def test_cross_entropy_without_valid_labels() -> None:
    logits = draw(3, 5).requires_grad_()
    total, count = OPS["mw.cross_entropy"](logits, torch.full((3,), -100))
    total.backward()
    assert (total.item(), count.item(), logits.grad.abs().sum().item()) == (0, 0, 0)


def split_batch_norm(rank: int, batch: int, affine: bool) -> None:
    world, group = dist.get_world_size(), group_of_all()
    x, dy = draw(batch, 3, 4, 2), draw(batch, 3, 4, 2, seed=1)
    weight, bias = (draw(3, seed=2), draw(3, seed=3)) if affine else (None, None)
    running = draw(3, seed=4), draw(3, seed=5).abs()
    results = []
    for split in (True, False):
        given = cut(x, 0, rank, world) if split else x
        leaves = [None if t is None else t.clone().requires_grad_() for t in (given, weight, bias)]
        if split:
            out, mean, var = OPS["mw.batch_norm"](*leaves, *running, True, 0.1, 1e-5, count=batch * 8, axes=group)
        else:
            mean, var = running[0].clone(), running[1].clone()
            out = F.batch_norm(leaves[0], mean, var, *leaves[1:], True, 0.1, 1e-5)
            alone = OPS["mw.batch_norm"](x, weight, bias, *running, True, 0.1, 1e-5)
            torch.testing.assert_close(alone, (out.detach(), mean, var))
        out.backward(cut(dy, 0, rank, world) if split else dy)
        results.append((out.detach(), mean, var, *(None if t is None else t.grad for t in leaves)))
    (out, mean, var, dx, *dparams), (want, want_mean, want_var, want_dx, *want_dparams) = results
    torch.testing.assert_close(out, cut(want, 0, rank, world))
    torch.testing.assert_close((mean, var), (want_mean, want_var))
    torch.testing.assert_close(dx, cut(want_dx, 0, rank, world))
    for term, want_whole in zip(dparams, want_dparams, strict=True):
        assert (term is None) == (want_whole is None)
        if term is not None:
            dist.all_reduce(term)
            torch.testing.assert_close(term, want_whole)


@pytest.mark.parametrize(("batch", "affine"), [(8, True), (5, True), (8, False)])
@pytest.mark.parametrize("world", WORLDS)
def test_batch_norm(pool: Callable, world: int, batch: int, affine: bool) -> None:
    pool(world=world).run(split_batch_norm, batch, affine)


def test_batch_norm_in_eval_leaves_the_statistics() -> None:
    x, running = draw(4, 3), (draw(3, seed=4), draw(3, seed=5).abs())
    out, mean, var = OPS["mw.batch_norm"](x, None, None, *running, False, 0.1, 1e-5)
    torch.testing.assert_close(out, F.batch_norm(x, *running, training=False))
    torch.testing.assert_close((mean, var), running)


def test_mean_is_a_sum_by_the_global_count() -> None:
    x = draw(4, 6)
    halves = [OPS["mw.mean"](x[:, part], [1], True, 6) for part in (slice(0, 4), slice(4, 6))]
    torch.testing.assert_close(halves[0] + halves[1], x.mean(1, keepdim=True))
    assert OPS["mw.mean"](x, None, False, 24, torch.float32).dtype == torch.float32


def test_dropout_depends_on_seed_and_salt_alone() -> None:
    x, seed = torch.ones(1000), torch.tensor([5, 6])
    torch.manual_seed(0)
    first = OPS["mw.dropout"](x, 0.25, draw=(seed, 7, False))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(first, OPS["mw.dropout"](x, 0.25, draw=(seed, 7, False)))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, OPS["mw.dropout"](x, 0.25, draw=(seed, 8, False)))
    assert not torch.equal(first, OPS["mw.dropout"](x, 0.25, draw=(seed, 7, True)))
    torch.testing.assert_close(first.unique(), torch.tensor([0, 4 / 3]))
    assert 0.7 < (first > 0).float().mean() < 0.8
    assert torch.equal(OPS["mw.dropout"](x, 0.0, draw=(seed, 7, False)), x)
    assert OPS["mw.dropout"](x, 1.0, draw=(seed, 7, False)).sum() == 0


def test_attention_dropout_depends_on_seed_and_salt_alone() -> None:
    q, k, v = (draw(1, 2, 6, 4, seed=s) for s in range(3))
    options, seed = (None, 0.5, True, None, False), torch.tensor([5, 6])
    state = torch.get_rng_state()
    first = OPS["mw.sdpa"](q, k, v, *options, draw=(seed, 7, False))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, OPS["mw.sdpa"](q, k, v, *options, draw=(seed, 7, False)))
    assert not torch.equal(first, OPS["mw.sdpa"](q, k, v, *options, draw=(seed, 8, False)))
    many = torch.stack([OPS["mw.sdpa"](q, k, v, *options, draw=(seed, salt, False)) for salt in range(2000)]).mean(0)
    torch.testing.assert_close(many, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=0.2, atol=0.1)


def integers_and_halves(rank: int) -> None:
    world, group = dist.get_world_size(), group_of_all()
    for dtype in (torch.bool, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bfloat16, torch.float16):
        x = (torch.arange(6).reshape(3, 2) % 3).to(dtype)
        assert torch.equal(OPS["mw.all_gather"](cut(x, 0, rank, world), 0, axis=group, size=3), x)
        mine = cut(x, 1, rank, world)
        assert torch.equal(OPS["mw.all_to_all"](cut(x, 0, rank, world), 0, 1, axis=group, size=3, to_size=2), mine)
        if dtype not in (torch.bool, torch.int16):
            assert torch.equal(OPS["mw.reduce_scatter"](x, 0, axis=group, size=3), cut(world * x, 0, rank, world))


@pytest.mark.parametrize("world", WORLDS)
def test_other_dtypes(pool: Callable, world: int) -> None:
    pool(world=world).run(integers_and_halves)


def test_a_group_of_one_needs_no_processes() -> None:
    x, one = draw(3, 4), Group("", 0, 1)
    for name in ("mw.vary", "mw.all_reduce"):
        assert OPS[name](x, axis=one) is x
    for name in ("mw.slice", "mw.all_gather", "mw.gather_vary", "mw.reduce_scatter"):
        assert OPS[name](x, 0, axis=one, size=3) is x
    (y,) = OPS["mw.gather_linear"](x, (draw(2, 4),), (None,), 0, axis=one, size=3)
    torch.testing.assert_close(y, F.linear(x, draw(2, 4)))
