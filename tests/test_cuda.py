"""What only a GPU can show: its kernels against numbers in double precision, programs on it beside the plain model.

One GPU is enough. Programs of several ranks run on it together, and what they exchange goes by way of the host
(``tests.staged``); ``benchmarks/cells.py --device cuda`` and ``benchmarks/mixtures.py --device cuda`` draw more of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshwright as mw
from benchmarks.cells import Cell, ran
from meshwright.runtime.attention import kernels
from meshwright.runtime.attention.forms import Merged
from meshwright.runtime.attention.kernels import Setting
from meshwright.runtime.experts.grouped import grouped_linear
from tests.equality import compare, train
from tests.mixtures import make as mixture
from tests.sequences import make
from tests.staged import BACKEND

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: run this on a machine with one")

BOUNDS = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""By how much of its length a result may be off that of double precision."""


def off(have: Tensor, want: Tensor) -> float:
    """Of the length of what is wanted."""
    have, want = have.double().cpu(), want.double().cpu()
    return float((have - want).norm() / want.norm().clamp_min(1e-30))


def operands(
    dtype: torch.dtype, heads: int, groups: int, rows: int, keys: int, width: int, outer: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the result."""
    torch.manual_seed(heads + rows + width)
    shapes = (heads, rows, width), (groups, keys, width), (groups, keys, outer), (heads, rows, outer)
    q, k, v, dy = (torch.randn(2, *shape, device="cuda").to(dtype) for shape in shapes)
    return q, k, v, dy


def mask_of(kind: str, rows: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    """A mask of that kind, rows 3 and 4 of which see nothing where it is boolean."""
    if kind == "none":
        return None
    if kind == "added":
        return torch.randn(1, 1, rows, keys, device="cuda").to(dtype)
    mask = torch.rand(2, 1, rows, keys, device="cuda") < 0.7
    mask[:, :, 3:5] = False
    return mask


SHAPES = [(4, 4, 128, 128, 64, 64), (8, 2, 100, 100, 40, 40), (4, 1, 96, 96, 128, 128), (4, 4, 64, 64, 96, 64)]


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "causal"), [("none", False), ("none", True), ("boolean", False), ("added", False)])
def test_a_block_of_attention(dtype: torch.dtype, shape: tuple[int, ...], kind: str, causal: bool) -> None:
    """Forward, log-sum-exp and backward of whole rows, and of their two halves merged."""
    q, k, v, dy = operands(dtype, *shape)
    mask, how = mask_of(kind, q.shape[-2], k.shape[-2], dtype), Setting(1 / math.sqrt(q.shape[-1]))
    wide = [x.double().cpu() for x in (q, k, v, dy)]
    wide_mask = None if mask is None else (mask if mask.dtype == torch.bool else mask.double()).cpu()
    want, want_lse = kernels._written(*wide[:3], wide_mask, causal, 0, how)
    wants = kernels._written_backward(wide[3], *wide[:3], want, want_lse.masked_fill(want_lse.isinf(), 0.0), wide_mask, causal,
                                      0, how)
    out, lse = kernels.forward(q, k, v, mask, causal, 0, how)
    grads = kernels.backward(dy, q, k, v, out, lse, mask, causal, 0, how)
    assert torch.equal(lse.isinf().cpu(), want_lse.isinf())
    assert off(lse[lse.isfinite()], want_lse[want_lse.isfinite()]) < BOUNDS[dtype]
    for have, wanted in zip((out, *grads[:3]), (want, *wants[:3]), strict=True):
        assert have.shape == wanted.shape
        assert off(have, wanted) < BOUNDS[dtype]
    if causal:
        return
    merged, half = Merged(q, v), k.shape[-2] // 2
    parts = [(slice(0, half), 0), (slice(half, k.shape[-2]), 1)]
    for keys, number in parts:
        part = None if mask is None else mask[..., keys]
        merged.add(slice(None), *kernels.forward(q, k[..., keys, :], v[..., keys, :], part, False, number, how))
    joined, joined_lse = merged.result()
    assert off(joined, want) < BOUNDS[dtype]
    dq = torch.zeros_like(q, dtype=torch.float32)
    for keys, number in parts:
        part = None if mask is None else mask[..., keys]
        some = kernels.backward(dy, q, k[..., keys, :], v[..., keys, :], joined, joined_lse, part, False, number, how)
        dq += some[0]
        assert off(some[1], wants[1][..., keys, :]) < BOUNDS[dtype]
        assert off(some[2], wants[2][..., keys, :]) < BOUNDS[dtype]
    assert off(dq, wants[0]) < BOUNDS[dtype]


@pytest.mark.parametrize(("dtype", "masked"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)])
@pytest.mark.parametrize("form", ["whole", "block"])
def test_grouped_heads_form_no_scores(dtype: torch.dtype, masked: bool, form: str) -> None:
    """Scores of 4,096 rows in 16 heads would take 512 MiB in bf16; operands, results and gradients take some 20."""
    length = 4096
    q, k, v, dy = (x[:1].clone().requires_grad_() for x in operands(dtype, 16, 4, length, length, 64, 64))
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").tril() if masked else None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if form == "whole":
        kernels.attention(q, k, v, mask, 0.0, not masked, None, True).backward(dy.detach())
    else:
        how, given = Setting(0.125), [x.detach() for x in (q, k, v)]
        out, lse = kernels.forward(*given, mask, not masked, 0, how)
        kernels.backward(dy.detach(), *given, out, lse, mask, not masked, 0, how)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 300 * 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("counts", [(5, 0, 100, 23), (0, 0, 7, 0), (64, 64, 64, 64), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("transposed", [True, False])
def test_rows_by_expert(dtype: torch.dtype, counts: tuple[int, ...], transposed: bool) -> None:
    """Forward and both gradients, experts without rows too."""
    torch.manual_seed(sum(counts))
    shape = (4, 32, 48) if transposed else (4, 48, 32)
    rows = torch.randn(sum(counts), 32, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    up = torch.randn(sum(counts), 48, device="cuda").to(dtype)
    (grouped_linear(rows, weight, counts, transposed) * up).sum().backward()  # type: ignore[operator]
    exact_rows, exact = rows.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    pieces = [one @ (w if transposed else w.T) for one, w in zip(exact_rows.split(counts), exact, strict=True)]
    (torch.cat(pieces) * up.double()).sum().backward()
    for have, want in ((rows.grad, exact_rows.grad), (weight.grad, exact.grad)):
        assert have is not None
        assert want is not None
        assert have.shape == want.shape
        assert off(have, want) < BOUNDS[dtype]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One rank whose collectives are NCCL's."""
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def placed(made: tuple[Any, Mapping[str, Tensor]]) -> tuple[Any, dict[str, Tensor]]:
    """A model and its batch on the GPU."""
    model, batch = made
    return model.to("cuda").train(), {name: x.to("cuda") for name, x in batch.items()}


PLAIN: Mapping[str, Callable[[], Any]] = {
    "Llama": lambda: make("Llama", 16), "Llama right": lambda: make("Llama right", 16), "Mistral": lambda: make("Mistral", 13),
    "GPT2": lambda: make("GPT2", 16), "bert": lambda: make("bert", 16), "t5": lambda: make("t5", 16),
    "Bloom": lambda: make("Bloom", 16), "Gemma2": lambda: make("Gemma2", 16), "Mamba": lambda: make("Mamba", 16),
    "mixtral": lambda: mixture("mixtral"), "deepseek": lambda: mixture("deepseek"), "gpt_oss": lambda: mixture("gpt_oss"),
}
WAYS: Mapping[str, Mapping[str, Any]] = {"plain": {}, "pieces": {"microbatches": 2, "recompute": "full"}}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("way", WAYS)
def test_a_program_beside_the_plain_model(mesh: DeviceMesh, name: str, way: str) -> None:
    """Losses and parameters after two AdamW steps, in fp32."""
    model, batch = placed(PLAIN[name]())
    parallel: Any = mw.autoparallel(model, mesh, ((), batch), pins=dict(WAYS[way]), progress=False)
    assert next(parallel.parameters()).device.type == "cuda"
    single = copy.deepcopy(model)
    losses, found = train(single, batch), train(parallel, batch)
    assert found == pytest.approx(losses, rel=1e-4)
    assert not compare(parallel.full_state_dict(), {name: value.cpu() for name, value in single.state_dict().items()})


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_dropout_draws_the_same_again(mesh: DeviceMesh, recompute: str) -> None:
    """The gradient is that of the loss that was drawn: it says by how much the loss falls along it."""
    assert ran(0, Cell("GPT2", 16, "fp32", 0.2, {"recompute": recompute}), "cuda") == ("equal", "")


def test_an_export_runs_on_the_gpu(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Bit-equal to the program that wrote it."""
    model, batch = placed(make("Llama", 16))
    parallel: Any = mw.autoparallel(model, mesh, ((), batch), progress=False)
    parallel.export(tmp_path / "program", weights=True)
    again: Any = mw.load(tmp_path / "program", mesh)
    assert train(again, batch) == train(parallel, batch)


SEVERAL = (
    Cell("Llama", 16, "fp32", 0.0, {"dp": 1, "tp": 1, "cp": 2, "attention": "ring"}),
    Cell("Llama right", 16, "bf16", 0.0, {"dp": 1, "tp": 1, "cp": 2, "attention": "ring"}),
    Cell("GPT2", 16, "fp32", 0.1, {"dp": 2, "tp": 1, "zero": 3, "recompute": "full"}),
    Cell("Llama", 16, "fp32", 0.0, {"dp": 1, "tp": 2, "sequence_parallel": True}),
    Cell("Llama", 16, "fp32", 0.0, {"dp": 1, "tp": 1, "pp": 2, "schedule": "1f1b", "microbatches": 2}),
)


@pytest.mark.parametrize("cell", SEVERAL, ids=str)
def test_two_ranks_on_one_gpu(pool: Callable[[int], Any], cell: Cell) -> None:
    """The cells of ``benchmarks/cells.py``."""
    assert pool(2).run(ran, cell, "cuda", backend=BACKEND) == [("equal", "")] * 2
