"""Optimizers and modes of the model that was parallelized: the parallel module has parameters and modes of its own.

``optimizer = AdamW(model.parameters())`` before ``autoparallel(model, ...)`` is right around DistributedDataParallel, which
trains the model's own parameters. Here it would leave every weight as it is and say nothing. Such a step is known by this:
none of the optimizer's parameters has a gradient, and one of them is the model's. Torch calls ``watch_optimizers``'s hook after
every step of an optimizer, as long as the parallel module is there. A model that is trained by itself has gradients.

``model.eval()`` before an evaluation of the parallel module would leave that in training. It is known by this: the model's mode
is another than it was, and the parallel module's was never set. Who uses both has set both.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.errors import RunError
from meshwright.runtime.checks.tensors import Original


def watch_optimizers(parallel: torch.nn.Module, before: Sequence[Original], at_work: list[str]) -> None:
    """Raise RunError after a step of an optimizer that updated nothing because it is of ``before``, the model's parameters.
    Of one that had gradients, the name of such a parameter is added to ``at_work``."""
    known = {id(parameter): one for one in before if (parameter := one.parameter()) is not None}

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = [one for parameter in held if (one := known.get(id(parameter))) is not None and one.parameter() is parameter]
        if any(parameter.grad is not None for parameter in held):
            at_work.extend([one.fqn for one in own[:1] if not at_work])
        elif own:
            raise RunError(f"an optimizer made a step without any gradient, and holds parameter {own[0].fqn!r} of the model "
                           f"that was parallelized; the parallel module has parameters of its own, so nothing is trained. Make "
                           f"the optimizer after autoparallel, of parallel.parameters()")

    if known:
        weakref.finalize(parallel, register_optimizer_step_post_hook(check).remove)


def check_whose_mode(model: torch.nn.Module | None, before: bool | None) -> None:
    """Raise RunError if ``model`` is in another mode than ``before``; None: the parallel module's own mode was set since."""
    if model is not None and before is not None and model.training != before:
        done, now = ("train", "eval") if before else ("eval", "train")
        raise RunError(f"{now}() was called on the model that was parallelized, and the parallel module has a mode of its own: "
                       f"it is in {done}(), as it was built. Call parallel.{now}() (or parallel.{done}(), if the model's own "
                       f"mode is for a use of the model itself)")
