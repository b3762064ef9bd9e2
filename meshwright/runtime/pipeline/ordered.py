"""The order of a rank's actions, run by torch's own pipeline runtime.

Torch's schedule classes make orders of their own; its runtime under them runs any. It is given the very table that was priced
and replayed, with the sends and receives that follow from it (``Table.steps``), and makes nothing of it anew. ::

    Table.steps -> torch's actions -> _PipelineScheduleRuntime -> Stage: forward, backward, send, receive

Two things are otherwise than in torch's classes. A micro-batch's loss is found by its number: torch takes the loss that was
made at that place, so a last stage that runs micro-batches in another order than theirs would go back from another one's
loss. And a stage is not told to gather and free its weights: its units do that themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from meshwright.ir.schedules import Action, Table
from meshwright.runtime.pipeline.stage import Stage


class Ordered(_PipelineScheduleRuntime):
    """The stages of a rank, run in the order of a table."""

    def __init__(self, stages: Sequence[Stage], table: Table) -> None:
        super().__init__(list(stages), table.microbatches, loss_fn=_given, scale_grads=False)
        self.stages = tuple(stages)
        orders: dict[int, list[_Action | None]] = {r: list(_of_torch(steps, table)) for r, steps in enumerate(table.steps)}
        self._prepare_schedule_with_comms(orders, format="compute_comms")

    def run(self) -> None:
        """Every micro-batch through this rank's stages and back."""
        self.step(target=torch.zeros(self._n_microbatches), return_outputs=False)
        for stage in self.stages:
            stage.end()

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        loss: Tensor | None = stage.losses.pop(mb_index, None)
        return loss


def _given(output: tuple[Tensor, ...], _: Tensor) -> Tensor:
    """The loss of a micro-batch is what the last stage returns."""
    return output[0]


def _of_torch(steps: Iterable[Action], table: Table) -> Iterable[_Action]:
    """A rank's actions in torch's form. Where a backward is split, a stage's gradients are reduced after the last of them."""
    done: Counter[int] = Counter()
    for step in steps:
        yield _Action.from_str(str(step))
        done[step.stage] += step.kind in ("B", "W")
        if table.split and step.kind in ("B", "W") and done[step.stage] == table.microbatches:
            yield _Action.from_str(f"{step.stage}REDUCE_GRAD")
