"""What a plan is predicted to cost (``ir.prediction``), and the error when nothing fits.

Model FLOPs are those of the matrix products and the attention of the captured graph, three times where a gradient flows
(forward, and two backward), once elsewhere; recomputation counts for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from meshwright.compiler.placement.costs import MEMORY, SECONDS, TRANSIENT
from meshwright.compiler.placement.problem import totals
from meshwright.compiler.solver.chain import Chain, Solution
from meshwright.cost import compute, overlap
from meshwright.cost.cluster import Cluster
from meshwright.ir.declared.operator import Operators, Work
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import PlanError
from meshwright.ir.prediction import Prediction
from meshwright.ir.quantities import bytes_text
from meshwright.ir.sharding import ceil_div

_MARGIN = 0.95
"""A batch that is said to fit leaves this much to the difference between the solver's sum over blocks and the replay."""


def bytes_by_kind(chain: Chain, solution: Solution) -> dict[str, float]:
    """Bytes per rank by kind."""
    resources = totals(chain, solution)
    kinds = {name: float(resources[:, index].sum()) for name, index in MEMORY.items()}
    return {**kinds, "inputs": chain.fixed_bytes, "transient": float(resources[:, TRANSIENT].max())}


def predicted(
    graph: Graph, operators: Operators, cluster: Cluster, chain: Chain, solution: Solution, precision: str, microbatches: int
) -> Prediction:
    """What a solution of the blocks' chain takes; recomputation and optimizer are not told apart from compute."""
    forward, backward, send, back, gather, reduce_, first, last, *host = totals(chain, solution)[:, :SECONDS].T
    forward, backward = np.maximum(forward, host[0]), np.maximum(backward, host[1])
    contention, one = cluster.device.contention, 1.0 / microbatches  # of what happens once a step, behind one micro-batch
    exposed = overlap.exposed(forward, gather, contention) + overlap.exposed(one * forward, first, contention)
    exposed += overlap.exposed(backward, reduce_, contention) + overlap.exposed(one * backward, last, contention)
    found = Prediction(
        step_seconds=solution.time,
        bytes_per_rank=solution.bytes_ + solution.transient,
        capacity_bytes=capacity(cluster),
        compute_seconds=float((forward + backward).sum()),
        communication_seconds=float((send + back + gather + reduce_ + first + last).sum()),
        exposed_communication_seconds=float((send + back + exposed).sum()),
        bytes_by_kind=bytes_by_kind(chain, solution),
    )
    return with_throughput(found, graph, step_flops(graph, operators), cluster, precision)


def with_throughput(found: Prediction, graph: Graph, flops: float, cluster: Cluster, precision: str) -> Prediction:
    """The prediction with tokens per second, FLOP/s and MFU, as far as the model has tokens and FLOPs."""
    seconds, tokens, devices = found.step_seconds, tokens_of(graph), cluster.world
    if tokens and seconds:
        found = replace(found, tokens_per_second=tokens / seconds)
    if flops and seconds:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        mfu = compute.mfu(flops, seconds, devices, cluster.device, dtype)
        found = replace(found, tflops_per_device=flops / seconds / devices / 1e12, mfu=mfu)
    return found


def capacity(cluster: Cluster) -> float:
    """Bytes of a device that a plan may use."""
    return float(cluster.memory_bytes - cluster.device.reserve_bytes)


def step_flops(graph: Graph, operators: Operators) -> float:
    """Model FLOPs of one training step over the whole batch."""
    total = 0.0
    for op in graph.ops:
        passes = 3 if any(graph.values[name].differentiable for name in op.outputs) else 1
        total += passes * compute.flops(operators[op.target], Work.of(op, graph))
    return total


def tokens_of(graph: Graph) -> int:
    """Tokens of a step: elements of the first integer input of two dims (batch, sequence); 0 if there is none."""
    for name in graph.inputs:
        value = graph.values[name]
        if len(value.shape) == 2 and not value.dtype.is_floating_point and value.dtype != torch.bool:
            return value.numel
    return 0


class OutOfMemoryError(PlanError):
    """No plan fits the device memory; says what binds and what would fit. Bytes per device: ``least`` of all plans found,
    ``capacity`` there is, ``bytes_`` of the plan that needs least by kind."""

    def __init__(self, message: str, least: float, capacity: float, bytes_: Mapping[str, float]) -> None:
        super().__init__(message)
        self.least, self.capacity, self.bytes_ = least, capacity, dict(bytes_)

    @classmethod
    def of(
        cls, least: float, bytes_: Mapping[str, float] | None, mesh: Mesh, microbatches: int, cluster: Cluster
    ) -> OutOfMemoryError:
        """Of one layout that does not fit."""
        kinds = sorted((bytes_ or {}).items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {bytes_text(value)}" for name, value in kinds if value)
        binding = f"; {kinds[0][0]} bind: {parts}" if kinds else ""
        there = capacity(cluster)
        return cls(
            f"nothing fits {cluster}: the least memory any plan needs on mesh {mesh} with microbatches={microbatches} is "
            f"{bytes_text(least)} per device, {bytes_text(there)} are there{binding}", least, there, bytes_ or {},
        )

    def with_remedy(self, remedy: str) -> OutOfMemoryError:
        """The same error, saying what would fit."""
        return OutOfMemoryError(f"{self}. Nearest change: {remedy}", self.least, self.capacity, self.bytes_)

    def smaller(self, batch: int, world: int) -> str:
        """What would fit when no pin stands in the way: a smaller batch, or else more or larger devices.

        Inputs and activations grow with the batch, inputs stay whole on every device, the rest is what devices share.
        """
        inputs = self.bytes_.get("inputs", 0.0)
        growing = inputs + self.bytes_.get("activations", 0.0) + self.bytes_.get("transient", 0.0)
        free = self.capacity - (self.least - growing)
        if batch > 1 and growing > 0 and free >= growing / batch:
            fitting = next(n for n in range(max(1, int(_MARGIN * batch * free / growing)), 0, -1) if batch % n == 0)
            return f"a batch of about {fitting} instead of {batch} would fit"
        larger = f"devices of {bytes_text(self.least)}"
        if self.capacity <= inputs:
            return f"{larger} would fit"
        many = max(world + 1, ceil_div(int(world * (self.least - inputs)), int(self.capacity - inputs)))
        return f"about {many} devices of this kind instead of {world}, or {larger}, would fit"
