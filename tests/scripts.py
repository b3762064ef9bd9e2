"""Whole training scripts, each with a model, batches and a loop of its own, and often with several models: on one process and
under every kind of plan. Equal, or refused by an error of our own on every rank; nothing else.

    python -m tests.scripts                 every script under the ways of WAYS, a line for each that is neither
    python -m tests.scripts -v pp ppo       a line for each trial: of one way, of the scripts whose names hold a word

A script is a function of ``prepare(model, **batch)``, which is the model itself on one process, and autoparallel of it on
several; it gives numbers, and the modules whose weights are compared. In double precision. ``test_brought`` runs some of them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.api import autoparallel
from meshwright.errors import StageWarning
from tests import script_loops as loops
from tests import script_numbers as numbers
from tests.habits import RUNS
from tests.strangers import FOUR, WAYS
from tests.trials import State, judged, report

USUAL = ("dp", "micro-batches", "tp", "pp", "cp")


@dataclass(frozen=True)
class Script:
    """``word``: of the refusal that must come; None: it must be equal; "": either. ``only``: of some ways."""

    run: Callable[[Any], tuple[Any, Sequence[nn.Module]]]
    word: str | None = None
    only: Mapping[str, str] = field(default_factory=dict)


PIPES = [way for way, pins in WAYS.items() if "pp" in pins]
CP = {"cp": "no sequence was found"}
PIPED = dict.fromkeys(PIPES, "")
SCRIPTS: Mapping[str, Script] = {
    **{name: Script(run, "") for name, run in loops.SCRIPTS.items()},
    "noise scale": Script(loops.noise_scale, only=dict.fromkeys(PIPES, "of these alone")),
    "longer by copies": Script(loops.longer_by_copies, only=dict.fromkeys(PIPES, "cuts them otherwise")),
    "asam": Script(loops.asam, "no attribute 'momentum'", {**PIPED, "micro-batches": "whole batch"}),
    "gan": Script(loops.gan, "requires a gradient", {**PIPED, **CP}),
    "alternating tasks": Script(loops.alternating_tasks, "fixed in its graph"),
    "vae": Script(loops.vae, "validate_args=False"),
    **{name: Script(run, only={**dict.fromkeys(PIPES, "counted its own"), **CP}) for name, run in numbers.NUMBERED.items()},
    **{name: Script(run, only={**dict.fromkeys(PIPES, "has one parameter"), **CP}) for name, run in numbers.LONELY.items()},
    **{name: Script(run, only=CP) for name, run in numbers.NAMED.items()},
}


def trials(rank: int, way: str, names: Sequence[str] = tuple(SCRIPTS)) -> list[tuple[str, bool, str]]:
    """(script, whether it came out as it must, what came out) under a way."""
    torch.set_num_threads(1)
    return [(name, *_tried(SCRIPTS[name], way)) for name in names]


def _tried(script: Script, way: str) -> tuple[bool, str]:
    word, kept = script.only.get(way, script.word), []

    def alone() -> Any:
        torch.manual_seed(0)
        said, modules = script.run(lambda model, *, loss_fn=None, **batch: model)
        kept.extend(modules)
        return said

    def together() -> tuple[Any, State]:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        models = []

        def prepare(model: nn.Module, *, loss_fn: Any = None, **batch: Any) -> Any:
            models.append(model)  # which the parallel module watches
            return autoparallel(model, mesh, ((), batch), pins=dict(WAYS[way]), loss_fn=loss_fn, progress=False)

        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error", StageWarning)
            said, modules = script.run(prepare)
        states = [module.full_state_dict() for module in modules]
        return said, {f"{i}.{name}": x for i, state in enumerate(states) for name, x in state.items()}

    def state() -> State:
        return {f"{i}.{name}": x for i, module in enumerate(kept) for name, x in module.state_dict().items()}

    return judged(alone, together, state, word, equal=not word, runs=word == RUNS)


def main(arguments: Sequence[str]) -> int:
    """Print what did not come out as it must."""
    from tests import scripts

    return report(__doc__, arguments, scripts.trials, SCRIPTS, WAYS, usual=USUAL, four=FOUR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
