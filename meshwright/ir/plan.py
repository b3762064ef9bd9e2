"""The plan: every decision about one model on one mesh, as a value that prints itself briefly, saves and loads itself.

A plan holds the captured graph and, for each operator, the factor that every mesh axis splits; for values with several
readers the sharding these share; for each block its ZeRO level, the axes its gradients are summed over, the axes its
parameters are split over at rest, and what is recomputed; the micro-batches; and what all that is predicted to cost
(``meshwright.ir.decisions``). Nothing else is needed to run it, and nothing in it refers to the solver. A ``Pipeline`` cuts the
operators into stages along the mesh axis ``PP``, which no sharding names.
"""

from __future__ import annotations

import os
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.errors import PlanError as PlanError
from meshwright.ir.decisions import TIME as TIME
from meshwright.ir.decisions import Decisions
from meshwright.ir.decisions import GroupChoice as GroupChoice
from meshwright.ir.decisions import Pipeline as Pipeline
from meshwright.ir.decisions import Schedule as Schedule
from meshwright.ir.declared.operator import MLP, PIECES
from meshwright.ir.pins import Pins
from meshwright.ir.prediction import Prediction
from meshwright.ir.quantities import bytes_text, count_text, seconds_text
from meshwright.ir.reading.fields import load_json
from meshwright.ir.reading.plans import read_plan
from meshwright.ir.writing.pins import pins_of
from meshwright.ir.writing.plans import plan_text
from meshwright.ir.writing.versions import prices


@dataclass(frozen=True)
class Plan(Decisions):
    """Everything decided; see ``Decisions`` for the fields."""

    def __str__(self) -> str:
        """The decisions in a few lines; ``meshwright.show`` has the tables.

        Header, predicted step and memory, then one line for each distinct way in which blocks keep their parameters.
        """
        lines = [
            f"plan       {self.mesh} on {self.cluster or 'an unnamed cluster'}, {self.mesh.world} devices, {self.precision}, "
            f"{self.optimizer}",
            f"step       {_step(self)}",
        ]
        if self.predicted is not None:
            held, room = bytes_text(self.predicted.bytes_per_rank), bytes_text(self.predicted.capacity_bytes)
            lines.append(f"memory     {held} of {room} on the fullest device")
        if self.certificate is not None:
            lines.append(f"gap        {self.certificate.gap:.2%} above the lower bound")
        kept: dict[GroupChoice, list[int]] = {}
        for group in self.groups[:-1]:
            kept.setdefault(replace(group, path="", stage=0), []).append(group.stage)
        lines += [count_text(len(stages), "block").ljust(11) + _kept(group) + _of_stages(stages)
                  for group, stages in kept.items()]
        lines += ["the rest".ljust(11) + _kept(group) for group in self.groups[-1:]]
        lines += [f"the loss   in pieces of {op.args[6]} tokens, made again in the backward" for op in self.graph.ops
                  if op.target == PIECES]
        rows = dict.fromkeys(op.args[5] for op in self.graph.ops if op.target == MLP)
        lines += [f"the MLPs   in pieces of {count} tokens, made again in the backward" for count in rows]
        lines += [f"note       {note}" for note in self.notes]
        wrapper = textwrap.TextWrapper(120, subsequent_indent=" " * 11, break_on_hyphens=False)
        return "\n".join("\n".join(wrapper.wrap(line)) for line in lines)

    def __repr__(self) -> str:
        return f"<Plan {self.mesh}, {len(self.graph.ops)} operators, {len(self.graph.blocks)} blocks>"

    @property
    def stale(self) -> bool:
        """Whether its predictions were made with other prices than this version's or of other decisions, or were altered in a
        file: ``meshwright.reprice`` makes new ones, ``meshwright.load_plan`` does so by itself."""
        return self.predicted is not None and self.predicted.prices != prices()

    def to_pins(self) -> Pins:
        """Every decision as pins: planning the same model with them gives this plan; with some of them dropped, these are
        searched again."""
        return pins_of(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file is complete or not there. The same plan gives the same bytes: how long the search
        took is left out."""
        path = Path(path)
        text = plan_text(self)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(draft, 0o644)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan that ``save`` wrote, with the predictions of the file (``stale``; ``meshwright.load_plan`` prices it again
        where that is needed). Executes nothing. Raises PlanError if the file is none, or cannot be read, and as
        ``from_dict`` does."""
        try:
            data = load_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise PlanError(f"{path} is not a plan file (no JSON: {error}); write one with plan.save(path)") from error
        except OSError as error:
            raise PlanError(f"the plan {path} cannot be read: {error.strerror or error}; give a file that plan.save(path) or "
                            "meshwright plan --out wrote") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The plan that ``plan_to_dict`` or ``plan_to_file`` wrote. Raises PlanError with the path of the field if it is none,
        or of another version, and with the operator's name for a registered rule that is missing here or is another one."""
        return read_plan(data, cls)


def _step(plan: Plan) -> str:
    """Micro-batches, stages and the predicted seconds, as far as the plan has them."""
    words = [count_text(plan.schedule.microbatches, "micro-batch")]
    if plan.pipeline is not None:
        words.append(f"{plan.pipeline.stages} stages on {plan.pipeline.degree} ranks under {plan.pipeline.schedule}")
    if plan.predicted is not None:
        stale = " by other prices than this version's (mw.reprice makes new ones)" if plan.stale else ""
        words.append(f"{seconds_text(plan.predicted.step_seconds)} predicted{_interval(plan.predicted)}{stale}")
    return ", ".join(words)


def _interval(predicted: Prediction) -> str:
    """Between what most such runs came out."""
    if predicted.low_seconds is None or predicted.high_seconds is None:
        return ""
    return f" ({seconds_text(predicted.low_seconds)} to {seconds_text(predicted.high_seconds)})"


def _kept(group: GroupChoice) -> str:
    """How a block keeps its parameters, in words."""
    words = [f"ZeRO {group.zero}", f"recompute {group.recompute}"]
    words += [f"gradients summed over {', '.join(group.data_axes)}"] if group.data_axes else []
    words += [f"state split over {', '.join(group.shard_axes)}"] if group.zero and group.shard_axes else []
    return ", ".join(words)


def _of_stages(numbers: Sequence[int]) -> str:
    """The stages that blocks are in; nothing of the first alone, which is all there is without a pipeline."""
    found = sorted(set(numbers))
    if found == [0]:
        return ""
    parts = [found[at : end] for at, end in pairwise([0, *(n for n in range(1, len(found)) if found[n] > found[n - 1] + 1),
                                                      len(found)])]
    texts = (f"{part[0]}..{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
    return f", stage{'s' if len(found) > 1 else ''} {', '.join(texts)}"
