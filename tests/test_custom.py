"""Backwards that are not the forward's derivative: kept, and split as what they are made of; hooks and the rest: refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh

from meshwright.api import autoparallel
from meshwright.compiler.capture.capture import capture
from meshwright.compiler.rules import default_rules
from meshwright.errors import CaptureError
from meshwright.ir.gradients.custom import CUSTOM
from meshwright.ir.gradients.hooks import HookGuard
from meshwright.ir.graph import Op
from meshwright.ir.mesh import Mesh
from meshwright.ir.reading.graphs import graph_from_dict
from meshwright.ir.serialize import graph_to_dict
from meshwright.runtime.interpret import run
from meshwright.testing import assignments, check, whole_run
from tests.backwards import CASES, Model, make
from tests.equality import differences


def calls(name: str) -> list[Op]:
    """The custom functions of a case, in doubles."""
    model, batch = make(name)
    graph = capture(model.double(), (), {key: value.double() for key, value in batch.items()})
    return [op for op in graph.ops if op.target == CUSTOM]


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_the_graph_has_the_gradients_of_the_model(name: str) -> None:
    """Also after the graph was written and read."""
    model, batch = make(name)
    graph = graph_from_dict(graph_to_dict(capture(model, (), batch)))
    held = dict(model.named_parameters())
    found = run(graph, {**{param.value: held[param.fqn] for param in graph.params}, **batch})[graph.loss or ""]
    wanted = model(**batch)["loss"]
    torch.testing.assert_close(found, wanted)
    have, want = gradients(model, found), gradients(model, wanted)
    for key, one, other in zip(held, have, want, strict=True):
        assert (one is None) == (other is None), key
        if one is not None:
            torch.testing.assert_close(one, other, msg=lambda text, key=key: f"{key}: {text}")


RULES = {
    "activations rounded": "f0 f1 -> f0 f1", "reversed": "f0 f1 -> f0 f1", "one step": "f0 f1, () -> f0 f1",
    "steps": "f0 f1, f1 -> f0 f1", "linear": "f0 ., f1 ., f1 -> f0 f1", "two results": "f0 f1, f0 f1 -> f0 f1, f0 f1",
    "scores": "f0 . -> f0 .", "loss": "f0 f1, f0 f1 -> ()", "in place": "f0 . -> f0 .",
}


@pytest.mark.parametrize("name", RULES)
def test_what_may_be_split(name: str) -> None:
    """The rule that follows from the operators inside; every split of it equals the whole."""
    call = calls(name)[0]
    function = call.args[0]
    operands = [torch.randn(function.forward.values[n].shape, dtype=torch.float64) for n in function.forward.inputs]
    fixed = [i for i, ref in enumerate(function.gradients) if ref is None]
    whole = whole_run(CUSTOM, (function, tuple(operands)), {}, fixed)
    rule = default_rules().rule_for(whole.op, whole.graph)
    assert str(rule) == RULES[name]
    for mesh, even in ((Mesh.of(a=2), True), (Mesh.of(a=2, b=2), True), (Mesh.of(a=3), False)):
        for assignment in assignments(rule, mesh, even):
            check(whole, rule, assignment, mesh)


def test_equal_calls_are_equal() -> None:
    """So that repeated layers are one block."""
    first, second = calls("two results")
    other = calls("reversed")[0]
    assert first.args[0] == second.args[0] != other.args[0]
    assert hash(first.args[0]) == hash(second.args[0])


def trained(rank: int, names: list[str], all_pins: list[dict[str, Any]]) -> list[str]:
    problems = []
    for name in names:
        model, batch = make(name)
        for pins in all_pins:
            build = {f"{name} {pins}": lambda model=model, batch=batch, pins=pins: autoparallel(
                model, init_device_mesh("cpu", (2,)), ((), batch), pins=pins, progress=False)}
            problems += differences(rank, model, batch, build)
    return problems


def test_training(pool: Callable[[int], Any]) -> None:
    """Two steps equal the single process's, split over the batch, over the tensors, and over micro-batches."""
    names = ["activations rounded", "weights rounded", "steps", "loss"]
    pins: list[dict[str, Any]] = [{"dp": 2, "zero": 3, "microbatches": 2}, {"tp": 2}]
    assert pool(2).run(trained, names, pins) == [[]] * 2


# refusals


class Random(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Untraceable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (2 if grad.sum().item() > 0 else 1)


class Asserts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        torch._assert_async((x.abs() < 100).all())
        most = x.argmax(-1)
        ctx.mark_non_differentiable(most)
        return x * 2, most

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return grad * 2


class Outside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.module.weight, None


class Unmade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, two: Tensor | None) -> Tensor:
        return (0 if one is None else one * 7) + (100.0 if two is None else two * 11)  # type: ignore[return-value]


def hooked(m: Any, x: Tensor, t: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda grad: grad * 0)
    return m.b(h).sum()


def swallowed(m: Any, x: Tensor, t: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        m.a(x).register_hook(lambda grad: grad * 0)
    return m.b(m.a(x)).sum()


def node_hooked(m: Any, x: Tensor, t: Tensor) -> Tensor:
    h = m.a(x)
    h.grad_fn.register_prehook(lambda grads: (grads[0] * 0,))
    return m.b(h).sum()


def penalized(m: Any, x: Tensor, t: Tensor) -> Tensor:
    h = m.a(x)
    y = m.b(h).square().sum()
    return y + torch.autograd.grad(y, h, create_graph=True)[0].square().sum()


def transformed(m: Any, x: Tensor, t: Tensor) -> Tensor:
    return torch.func.grad(lambda h: m.b(h).square().sum())(m.a(x)).sum()


def retained(m: Any, x: Tensor, t: Tensor) -> Tensor:
    h = m.a(x)
    h.retain_grad()
    return m.b(h).sum()


def frozen(m: Any, x: Tensor, t: Tensor) -> Tensor:
    m.a.weight.requires_grad_(False)
    return m.b(m.a(x)).sum()


def packed(m: Any, x: Tensor, t: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y * 0, lambda y: y):
        return m.b(m.a(x)).square().sum()


def stranger(m: Any, x: Tensor, t: Tensor) -> Tensor:
    return (m.b(m.a(x)) * STRANGER).sum()


STRANGER = nn.Parameter(torch.ones(8))

FORWARDS = {
    "tensor.register_hook": hooked, "register_hook": swallowed, "hook on grad_fn": node_hooked,
    "torch.autograd.grad": penalized, "differentiates by torch.func": transformed, "retain_grad": retained,
    "requires_grad=False": frozen,
    "asks whether inference mode is on": lambda m, x, t: m.a(x).sum() * (2 if torch.is_inference_mode_enabled() else 1),
    "saved_tensors_hooks": packed, r"shape \[8\] that takes gradients": stranger,
    r"Random draws random numbers \(aten.rand_like": lambda m, x, t: Random.apply(m.a(x)).sum(),
    "the backward of autograd.Function .*Untraceable cannot be traced": lambda m, x, t: Untraceable.apply(m.a(x)).sum(),
    r"Unmade sets set_materialize_grads\(False\) and has several": lambda m, x, t: Unmade.apply(m.a(x))[0].sum(),
    r"converts a module \(Module.to\)": lambda m, x, t: (m.a.to(torch.float64)(x.double()) * t).sum(),
    r"converts a module \(Module.half\)": lambda m, x, t: (m.half() and m.a(x) * t).sum(),
    "Asserts calls aten._assert_async.default, which makes no": lambda m, x, t: Asserts.apply(m.a(x))[0].sum(),
    "Outside reads a tensor of the model": lambda m, x, t: Outside.apply(m.a(x), m.b).sum(),
}


@pytest.mark.parametrize("words", FORWARDS)
def test_what_a_graph_would_lose_is_refused(words: str) -> None:
    """With its name, its line, and what to do."""
    example = {"x": torch.randn(4, 8), "t": torch.randn(4, 8)}
    with pytest.raises(CaptureError, match=f"{words}.* What to do: ") as caught:
        capture(Model(FORWARDS[words]), (), example)
    assert caught.value.source.startswith("test_custom.py:") or "backwards.py" in caught.value.source


def test_a_loss_function_is_watched_too() -> None:
    def loss_of(output: dict[str, Tensor]) -> Tensor:
        output["loss"].register_hook(lambda grad: grad * 0)
        return output["loss"]

    model, batch = make("detached")
    with pytest.raises(CaptureError, match=r"tensor\.register_hook"):
        capture(model, (), batch, loss_fn=loss_of)


@contextlib.contextmanager
def every_module() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        yield
    finally:
        handle.remove()


def _hook(*_: Any) -> None:
    """Does nothing."""


def test_hooks() -> None:
    """Those of modules and parameters that act on gradients, those on every module; a plain attribute that learns."""
    example = {"x": torch.randn(4, 8), "t": torch.randn(4, 8)}
    for words, add in {
        "module 'a' .Linear. has a full-backward hook .*_hook": lambda m: m.a.register_full_backward_hook(_hook),
        "module 'b' .Linear. has a full-backward pre-hook": lambda m: m.b.register_full_backward_pre_hook(_hook),
        "parameter 'a.weight' has a hook": lambda m: m.a.weight.register_hook(_hook),
        "parameter 'b.bias' has a post-accumulate hook": lambda m: m.b.bias.register_post_accumulate_grad_hook(_hook),
    }.items():
        model = Model(CASES["detached"])
        handle = add(model)
        with pytest.raises(CaptureError, match=f"{words}.* What to do: remove it"):
            capture(model, (), example)
        handle.remove()
        capture(model, (), example)
    with every_module(), pytest.raises(CaptureError, match="every module has a forward hook"):
        capture(Model(CASES["detached"]), (), example)
    model = Model(lambda m, x, t: (m.a(x) * m.plain).sum())
    model.plain = torch.ones(8, requires_grad=True)
    with pytest.raises(CaptureError, match="attribute 'plain', a tensor that takes gradients"):
        capture(model, (), example)


def test_forward_hooks_are_part_of_the_graph() -> None:
    model, batch = make("detached")
    model.a.register_forward_hook(lambda module, args, output: output * 2)
    model.b.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    graph = capture(copy.deepcopy(model), (), batch)
    held = dict(model.named_parameters())
    found = run(graph, {**{param.value: held[param.fqn] for param in graph.params}, **batch})[graph.loss or ""]
    torch.testing.assert_close(found, model(**batch)["loss"])


def test_hooks_that_come_later_are_noticed() -> None:
    model, _ = make("detached")
    model.a.register_forward_hook(_hook)
    guard = HookGuard(model)
    assert guard.changed() is None
    for words, add in {
        "module 'b'": lambda: model.b.register_forward_hook(_hook),
        "module 'a'": lambda: model.a.register_full_backward_hook(_hook),
        "parameter 'step'": lambda: model.step.register_hook(_hook),
    }.items():
        handle = add()
        assert words in (guard.changed() or "")
        handle.remove()
        assert guard.changed() is None
