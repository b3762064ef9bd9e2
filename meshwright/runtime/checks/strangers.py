"""Optimizers of the model that was parallelized: the parallel module has parameters of its own, so they would update nothing.

``optimizer = AdamW(model.parameters())`` before ``autoparallel(model, ...)`` is right around DistributedDataParallel, which
trains the model's own parameters. Here it would leave every weight as it is and say nothing. Such a step is known by this:
none of the optimizer's parameters has a gradient, and one of them is the model's. Torch calls ``watch_optimizers``'s hook after
every step of an optimizer, as long as the parallel module is there. A model that is trained by itself has gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.errors import RunError
from meshwright.runtime.checks.tensors import Original


def watch_optimizers(parallel: torch.nn.Module, before: Sequence[Original]) -> None:
    """Raise RunError after a step of an optimizer that updated nothing because it is of ``before``, the model's parameters."""
    known = {id(parameter): one for one in before if (parameter := one.parameter()) is not None}

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(parameter.grad is not None for parameter in held):
            return
        for parameter in held:
            one = known.get(id(parameter))
            if one is not None and one.parameter() is parameter:
                raise RunError(f"an optimizer made a step without any gradient, and holds parameter {one.fqn!r} of the model "
                               f"that was parallelized; the parallel module has parameters of its own, so nothing is trained. "
                               f"Make the optimizer after autoparallel, of parallel.parameters()")

    if known:
        weakref.finalize(parallel, register_optimizer_step_post_hook(check).remove)
