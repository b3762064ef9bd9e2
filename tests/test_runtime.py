"""Hand-written programs of one small model on several processes, against the model on one."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.errors import InputError
from meshwright.ir.mesh import Mesh
from meshwright.runtime.module import ParallelModule, build
from meshwright.runtime.state.layout import local_of
from tests.programs import LiveBytes, Tiny, tiny_program

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
    warnings.filterwarnings("error", message="FSDP2-wrapped module")
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
    ({"dp": 2, "tp": 2}, {"data": ("dp",), "tp": "tp", "shard": ("dp",), "zero": 3, "vocab": 18, "inner": 6, "batch": 5}),
]


@pytest.mark.parametrize(("sizes", "options"), CASES, ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()))
def test_training_equals_the_single_process(pool: Callable, sizes: dict[str, int], options: dict[str, Any]) -> None:
    pool(world=Mesh.of(**sizes).world).run(train, sizes, options)


SHARDED = ({"dp": 2, "tp": 2}, {"data": ("dp",), "tp": "tp", "shard": ("dp",), "zero": 3})
PLAIN = ({"dp": 2}, {"data": ("dp",)})


def gradients(module: torch.nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else whole(p.grad).clone() for name, p in module.named_parameters()}


def ways_of_backward(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Accumulation over calls, two forwards and one backward, a scaled loss, autograd.grad, zero_grad to zero."""
    model, parallel, batch = prepare(rank, sizes, options)
    other = batch_of(8, 12, seed=1)

    def accumulate(module: Any, order: str) -> dict[str, Tensor | None]:
        module.zero_grad()
        if order == "in turn":
            for one in (batch, other):
                module(**one)[0].backward()
        elif order == "together":
            (module(**batch)[0] * 0.5 + 2 * module(**other)[0]).backward()
        else:
            module(**batch)[0].backward()
            module.zero_grad(set_to_none=False)
            module(**other)[0].backward()
        return gradients(module)

    for order in ("in turn", "together", "zeroed"):
        have, want = accumulate(parallel, order), accumulate(model, order)
        for name in want:
            compare(have[name], want[name], f"{name}, {order}")
    if options.get("microbatches", 1) > 1:
        parallel.zero_grad()
        names = [n for n, p in parallel.named_parameters() if p.requires_grad and n != "spare"]
        held = dict(parallel.named_parameters())
        found = torch.autograd.grad(parallel(**batch)[0], [held[n] for n in names])
        model.zero_grad()
        model(**batch)[0].backward()
        for name, grad in zip(names, found, strict=True):
            compare(whole(grad), gradients(model)[name], f"autograd.grad of {name}")
        assert all(p.grad is None for p in parallel.parameters())
        loss = parallel(**batch)[0]
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="already handed out"):
            loss.backward()


@pytest.mark.parametrize(("sizes", "options"), [PLAIN, (SHARDED[0], {**SHARDED[1], "microbatches": 2})])
def test_gradients_as_autograd_gives_them(pool: Callable, sizes: dict[str, int], options: dict[str, Any]) -> None:
    pool(world=Mesh.of(**sizes).world).run(ways_of_backward, sizes, options)


def modes(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """eval, no_grad and train; what the buffers become; parameters written after a forward without a backward."""
    model, parallel, batch = prepare(rank, sizes, options)
    reference = copy.deepcopy(model)

    def same() -> None:
        compare(parallel(**batch)[0], reference(**batch)[0], "loss")
        compare(whole(dict(parallel.named_buffers())["steps"]), reference.steps, "steps")

    with torch.no_grad():
        same()  # training mode: the buffer counts
    parallel(**batch)  # a training forward whose backward never comes
    reference(**batch)
    for module in (parallel, reference):
        module.eval()
    with torch.no_grad():
        same()
    assert reference.steps == 2
    changed = {name: t + 0.1 if t.is_floating_point() else t for name, t in parallel.state_dict().items()}
    parallel.load_state_dict(changed)
    reference.load_state_dict({n: t + 0.1 if t.is_floating_point() else t for n, t in reference.state_dict().items()})
    same()
    for module in (parallel, reference):
        module.train()
        module.zero_grad()
        module(**batch)[0].backward()
    for name, want in gradients(reference).items():
        compare(gradients(parallel)[name], want, name)


@pytest.mark.parametrize(("sizes", "options"), [PLAIN, (SHARDED[0], {**SHARDED[1], "zero": 2, "microbatches": 2})])
def test_modes(pool: Callable, sizes: dict[str, int], options: dict[str, Any]) -> None:
    pool(world=Mesh.of(**sizes).world).run(modes, sizes, options)


def half_precision(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """bf16 compute, fp32 at rest and in the gradients: near the fp32 single process, and reductions do not round."""
    model, parallel, batch = prepare(rank, sizes, {**options, "compute_dtype": torch.bfloat16})
    loss, logits = parallel(**batch)
    want, _ = model(**batch)
    assert (loss.dtype, logits.dtype) == (torch.float32, torch.bfloat16)
    compare(loss, want, "loss", rtol=0.02)
    loss.backward()
    want.backward()
    for (name, p), (_, q) in zip(parallel.named_parameters(), model.named_parameters(), strict=True):
        assert p.dtype == torch.float32
        if q.grad is not None:
            assert p.grad.dtype == torch.float32
            error = (whole(p.grad) - q.grad).norm() / q.grad.norm()
            assert error < 0.05, f"{name}: {error}"


@pytest.mark.parametrize(
    ("sizes", "options"), [({"dp": 2}, {"data": ("dp",), "shard": ("dp",), "zero": 2}), ({"tp": 2}, {"tp": "tp"}), SHARDED]
)
def test_bf16(pool: Callable, sizes: dict[str, int], options: dict[str, Any]) -> None:
    pool(world=Mesh.of(**sizes).world).run(half_precision, sizes, options)


def wrong_calls(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Errors say what is wrong and change nothing; DTensor inputs and the data rank are right."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model, parallel, batch = prepare(rank, sizes, options)
    bad = {
        r"'ids' is i64\[7, 5\]; the plan was made for i64\[8, 5\]": {**batch, "ids": batch["ids"][:7]},
        r"'labels' is i32": {**batch, "labels": batch["labels"].int()},
        r"takes \['ids', 'labels'\]": {"ids": batch["ids"]},
    }
    for message, call in bad.items():
        with pytest.raises(InputError, match=message):
            parallel(**call)
    stranger = DeviceMesh("cpu", torch.arange(4).flip(0), mesh_dim_names=("x",))
    with pytest.raises(InputError, match=r"make it on parallel\.device_mesh"):
        parallel(**{**batch, "ids": distribute_tensor(batch["ids"], stranger, [Replicate()])})
    assert whole(dict(parallel.named_buffers())["steps"]) == 0
    mesh = parallel.device_mesh
    assert (parallel.data_size, parallel.data_rank) == (2, Mesh.of(**sizes).coordinates(rank)["dp"])
    want, _ = copy.deepcopy(model)(**batch)  # a call of the model itself writes its buffer
    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(1)]):
        loss, _ = parallel(**{name: distribute_tensor(tensor, mesh, placements) for name, tensor in batch.items()})
        compare(loss, want, "loss of DTensors")
    with pytest.raises(RuntimeError, match="plan with another precision"):
        parallel.bfloat16()
    assert parallel.to("cpu") is parallel
    with pytest.raises(ValueError, match="assign=True"):
        parallel.load_state_dict(parallel.state_dict(), assign=True)
    with pytest.raises(ValueError, match="has 8 ranks"):
        build(tiny_program(Mesh.of(dp=8), 0, 8, LENGTH), model)


def test_errors_and_dtensor_inputs(pool: Callable) -> None:
    pool(world=4).run(wrong_calls, *SHARDED)


def test_one_process_without_a_process_group() -> None:
    """World 1: plain tensors, no communication, several micro-batches all the same."""
    for microbatches in (1, 2):
        mesh = Mesh.of(dp=1, tp=1)
        model = model_of()
        options = {"data": ("dp",), "tp": "tp", "shard": ("dp",), "zero": 3, "microbatches": microbatches}
        parallel = build(tiny_program(mesh, 0, 8, LENGTH, **options), model)
        batch = batch_of(8, 12)
        loss, logits = parallel(**batch)
        want_loss, want_logits = model(**batch)
        loss.backward()
        want_loss.backward()
        compare(loss, want_loss, "loss")
        compare(logits, want_logits, "logits")
        for name, want in gradients(model).items():
            compare(gradients(parallel)[name], want, name)
        compare(
            parallel.clip_grad_norm_(0.1, norm_type=float("inf")),
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")), "norm",
        )
        assert (parallel.data_size, parallel.data_rank) == (1, 0)


class Counted(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recompute", "products", "pointwise"), [("none", 2, 2), ("selective", 2, 4), ("full", 4, 4)])
def test_what_is_recomputed(recompute: str, products: int, pointwise: int) -> None:
    """Of the two blocks: full runs everything twice, selective keeps the products of matrices (those with a bias)."""
    parallel = build(tiny_program(Mesh.of(dp=1), 0, 8, LENGTH, recompute=recompute), model_of())
    loss, _ = parallel(**batch_of(8, 12))
    with Counted() as backward:
        loss.backward()
    with Counted() as forward:
        parallel(**batch_of(8, 12))
    assert backward.count["aten.addmm.default"] + forward.count["aten.addmm.default"] == products
    assert backward.count["aten.gelu.default"] + forward.count["aten.gelu.default"] == pointwise


def building(rank: int, sizes: dict[str, int], options: dict[str, Any], meta: bool) -> tuple[int, int, int]:
    """(bytes of this rank's share, most bytes alive while building, bytes of the whole model)."""
    inner = 2048
    with torch.device("meta" if meta else "cpu"):
        model = Tiny(12, inner)
    for name in ("gain", "spare", "shift"):  # what no initialization of the model would set
        setattr(model, name, nn.Parameter(torch.ones_like(getattr(model, name), device="cpu"), requires_grad=name != "shift"))
    for name in ("steps", "scale"):
        setattr(model, name, torch.zeros_like(getattr(model, name), device="cpu"))
    program = tiny_program(Mesh.of(**sizes), rank, 8, LENGTH, inner=inner, **options)
    with LiveBytes(model) as live:
        parallel = build(program, model)
    share = sum(local_of(tensor).nbytes for tensor in (*parallel.parameters(), *parallel.buffers()))
    return share, live.peak, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("meta", [False, True])
def test_no_rank_holds_the_whole_model(pool: Callable, meta: bool) -> None:
    up = 4 * 3 * 2048 * (8 + 1)  # the largest sub-module
    for share, peak, whole_ in pool(world=4).run(building, *SHARDED, meta):
        assert share < 0.3 * whole_
        assert share <= peak < 1.2 * share + (up if meta else 0)


def other_norms(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    model, parallel, batch = prepare(rank, sizes, options)
    for module in (parallel, model):
        module(**batch)[0].backward()
    for kind in (1.0, 3.0, float("inf")):
        want = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=kind)
        compare(parallel.clip_grad_norm_(1e9, norm_type=kind), want, f"norm {kind}")
    parallel.gain.grad.mul_(float("nan"))
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        parallel.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_norms_of_every_kind(pool: Callable) -> None:
    pool(world=4).run(other_norms, *SHARDED)


def move(rank: int, sizes: dict[str, int], options: dict[str, Any], folder: str, source: bool) -> dict[str, Tensor]:
    """Train two steps and save after the first; or, under another plan, load that and train the second step."""
    _, parallel, batch = prepare(rank, sizes, options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1, foreach=False)
    if not source:
        with torch.no_grad():
            for p in parallel.parameters():
                p.mul_(0)
        parallel.load(folder, optimizer)
    for step in range(2 if source else 1):
        parallel(**batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        if source and step == 0:
            parallel.save(folder, optimizer)
    if not source:
        with pytest.raises(FileNotFoundError, match="is no checkpoint"):
            parallel.load(folder + "-none")
    return parallel.full_state_dict()


def test_resume_under_another_plan(pool: Callable, tmp_path: Any) -> None:
    folder = tmp_path / "checkpoint"
    (first, *_) = pool(world=4).run(move, *SHARDED, str(folder), True)
    for target in ({"tp": 2}, {"tp": "tp"}), ({"dp": 4}, {"data": ("dp",), "shard": ("dp",), "zero": 1}), PLAIN:
        (second, *_) = pool(world=Mesh.of(**target[0]).world).run(move, *target, str(folder), False)
        assert list(first) == list(second)
        for name, tensor in first.items():
            compare(second[name], tensor, name)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
