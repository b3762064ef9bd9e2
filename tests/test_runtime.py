"""Hand-written programs of one small model on several processes, against the model on one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.mesh import Mesh
from meshwright.runtime.module import ParallelModule, build
from tests.programs import Tiny, tiny_program

LENGTH = 5


def batch_of(size: int, vocab: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (size, LENGTH), generator=generator)
    labels = torch.randint(0, vocab, (size, LENGTH), generator=generator)
    labels[0, :3] = -100
    labels[size // 2 :, ::2] = -100
    return {"ids": ids, "labels": labels}


def model_of(vocab: int = 12, inner: int = 4) -> Tiny:
    torch.manual_seed(7)
    model = Tiny(vocab, inner)
    with torch.no_grad():
        model.embed.weight.mul_(0.2)
    return model


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(have: Tensor | None, want: Tensor | None, what: str, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    assert (have is None) == (want is None), what
    if have is not None:
        torch.testing.assert_close(have, want, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def prepare(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> tuple[Tiny, ParallelModule, dict[str, Tensor]]:
    options = dict(options)
    size = options.pop("batch", 8)
    model = model_of(options.get("vocab", 12), options.get("inner", 4))
    program = tiny_program(Mesh.of(**sizes), rank, size, LENGTH, **options)
    return model, build(program, model), batch_of(size, options.get("vocab", 12))


def train(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Loss, outputs, every gradient, clipping, two AdamW steps, buffers and the full state dict equal the single process's."""
    model, parallel, batch = prepare(rank, sizes, options)
    reference = copy.deepcopy(model)
    assert list(parallel.state_dict()) == list(model.state_dict())
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in model.named_parameters()]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False) for m in (parallel, reference)]
    for step in range(2):
        loss, logits = parallel(**batch)
        want_loss, want_logits = reference(**batch)
        compare(loss, want_loss, f"loss of step {step}", rtol=1e-5)
        assert not isinstance(loss, DTensor)
        assert isinstance(logits, DTensor)
        compare(whole(logits), want_logits, "logits")
        loss.backward()
        want_loss.backward()
        for (name, p), (_, q) in zip(parallel.named_parameters(), reference.named_parameters(), strict=True):
            compare(whole(p.grad), q.grad, f"gradient of {name}")
        norms = parallel.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        compare(*norms, "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state, want = parallel.full_state_dict(), reference.state_dict()
    assert list(state) == (list(want) if rank == 0 else [])
    for name, tensor in state.items():
        compare(tensor, want[name], name)
    assert rank != 0 or state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    for name, tensor in parallel.state_dict().items():
        compare(whole(tensor), want[name], f"full_tensor of {name}")
    for name, tensor in model.state_dict().items():
        compare(tensor, model_of(options.get("vocab", 12), options.get("inner", 4)).state_dict()[name], "the source changed")


CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {"data": ("dp",)}),
    *(({"dp": 2}, {"data": ("dp",), "shard": ("dp",), "zero": zero, "microbatches": m}) for zero in (1, 2, 3) for m in (1, 2)),
    ({"dp": 2}, {"data": ("dp",), "batch": 5}),
    ({"dp": 2}, {"data": ("dp",), "shard": ("dp",), "zero": 3, "recompute": "full"}),
    ({"dp": 2}, {"data": ("dp",), "shard": ("dp",), "zero": 3, "recompute": "selective", "microbatches": 2}),
    ({"tp": 2}, {"tp": "tp"}),
    ({"tp": 2}, {"tp": "tp", "microbatches": 4, "recompute": "full"}),
    ({"tp": 2}, {"tp": "tp", "vocab": 13, "inner": 5}),
    ({"dp": 1, "tp": 2}, {"data": ("dp",), "shard": ("dp",), "zero": 3, "tp": "tp", "recompute": "selective"}),
    ({"dp": 4}, {"data": ("dp",), "shard": ("dp",), "zero": 3, "batch": 4}),
    ({"rep": 2, "shd": 2}, {"data": ("rep", "shd"), "shard": ("shd",), "zero": 3, "microbatches": 2}),
    ({"rep": 2, "shd": 2}, {"data": ("rep", "shd"), "shard": ("shd",), "zero": 2, "microbatches": 2}),
    ({"a": 2, "b": 2}, {"data": ("a", "b"), "shard": ("a", "b"), "zero": 1, "microbatches": 2}),
    ({"a": 2, "b": 2}, {"data": ("a", "b"), "microbatches": 2}),
    ({"dp": 2, "tp": 2}, {"data": ("dp",), "tp": "tp"}),
    ({"tp": 2, "dp": 2}, {"data": ("dp",), "tp": "tp", "shard": ("dp",), "zero": 2, "microbatches": 2}),
    ({"dp": 2, "tp": 2}, {"data": ("dp",), "tp": "tp", "shard": ("dp",), "zero": 3, "recompute": "full"}),
]


@pytest.mark.parametrize(("sizes", "options"), CASES, ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()))
def test_training_equals_the_single_process(pool: Callable, sizes: dict[str, int], options: dict[str, Any]) -> None:
    pool(world=Mesh.of(**sizes).world).run(train, sizes, options)
