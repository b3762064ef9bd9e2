"""Optimizers that people write themselves, for ``tests.idioms``: norms, roots and moments of each parameter, as in papers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer


class OneByOne(Optimizer):
    """Each parameter that has a gradient, by itself."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, group, self.state[p])

    def one(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Change one."""
        raise NotImplementedError


class Lion(OneByOne):
    """Signs of two momenta (Chen et al., 2023)."""

    def one(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Change one."""
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        p.data.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((state["exp_avg"] * 0.9 + p.grad * 0.1).sign_(), alpha=-group["lr"])
        state["exp_avg"].lerp_(p.grad, 0.01)


class Lamb(OneByOne):
    """Steps in proportion to the norm of each weight (You et al., 2019)."""

    def one(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Change one."""
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
        state["exp_avg_sq"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(1e-3) + group["weight_decay"] * p
        w, u = p.norm(), update.norm()
        ratio = torch.where(w > 0, torch.where(u > 0, w / u, 1.0), 1.0).clamp(max=10)
        p.add_(update * ratio, alpha=-group["lr"])


class Factored(OneByOne):
    """Second moments by rows and by columns, updates that are clipped by their mean square (Shazeer & Stern, 2018)."""

    def one(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Change one."""
        square = p.grad.square() + 1e-6
        if not state:
            state["row"], state["column"] = square.mean(-1), square.mean(0)
        if p.ndim == 2:
            state["row"].lerp_(square.mean(-1), 0.3)
            state["column"].lerp_(square.mean(-2), 0.3)
            scale = torch.outer(state["row"] / state["row"].mean(), state["column"])
        else:
            scale = square
        update = p.grad * scale.rsqrt()
        p.sub_(update / (update.square().mean().sqrt()).clamp(min=1.0), alpha=group["lr"])


class Preconditioned(OneByOne):
    """Roots of the gradients' covariances on both sides (Gupta et al., 2018)."""

    def one(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Change one."""
        update = p.grad
        if p.ndim == 2:
            for turned in (False, True):
                g = p.grad.t() if turned else p.grad
                values, vectors = torch.linalg.eigh(g @ g.t() + 0.1 * torch.eye(len(g)).to(g.dtype))
                root = vectors @ torch.diag(values.pow(-0.25)) @ vectors.t()
                update = update @ root if turned else root @ update
        p.add_(update, alpha=-group["lr"])


class Sharpened(Optimizer):
    """SAM as it is published, around another optimizer."""

    def __init__(self, params: Iterable[Any], base: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Up, a gradient there, down, a step. The norms are of each parameter, for a stage has some of them alone."""
        for p in chain(*(group["params"] for group in self.param_groups)):
            if p.grad is not None:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (0.05 / (p.grad.norm(p=2) + 1e-12)))
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for p in chain(*(group["params"] for group in self.param_groups)):
            if p.grad is not None:
                p.data.copy_(self.state[p]["old"])
        self.base.step()
        return loss
