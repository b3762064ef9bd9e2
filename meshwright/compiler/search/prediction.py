"""What a plan is predicted to cost (``ir.prediction``), from a solution of its blocks or from an evaluation of its stages.

Memory is what the search counts; ``Fits`` puts what the program holds in its place. Model FLOPs are those of the matrix
products and the attention of the captured graph, three times where a gradient flows (forward, and two backward), once
elsewhere; recomputation counts for nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from meshwright.compiler.placement.costs import (
    BACKWARD,
    FORWARD,
    HOST,
    HOST_BACK,
    MEMORY,
    OPTIMIZER,
    SECONDS,
    SEND,
    SEND_BACK,
    most_bytes,
    worst,
)
from meshwright.compiler.placement.problem import Problem, totals
from meshwright.compiler.search.evaluate import Evaluation
from meshwright.compiler.search.task import Task
from meshwright.compiler.solver.chain import Chain, Solution
from meshwright.cost import compute, overlap
from meshwright.ir.declared.operator import Operators, Work
from meshwright.ir.declared.precision import PRECISIONS
from meshwright.ir.graph import Graph
from meshwright.ir.prediction import Prediction


def of_blocks(task: Task, problem: Problem, chain: Chain, solution: Solution, microbatches: int) -> Prediction:
    """Of a solution of the blocks' chain. An optimizer without state is not told apart from compute."""
    resources, device = totals(chain, solution), task.cluster.device
    contention, once = device.contention, problem.without_recomputation(chain, solution)
    forward, backward, send, back, gather, reduce_, first, last, *host = resources[:, :SECONDS].T
    forward, backward = np.maximum(forward, host[0]), np.maximum(backward, host[1])
    again = float((forward - np.maximum(once[:, FORWARD], once[:, HOST])).sum())
    again += float((backward - np.maximum(once[:, BACKWARD], once[:, HOST_BACK])).sum())
    sent_again = float((resources - once)[:, [SEND, SEND_BACK]].sum())
    optimizer = None
    if task.state_bytes:
        elements = float(resources[:, OPTIMIZER].sum()) / task.state_bytes
        optimizer = problem.tables.costs.updated(elements)
    one = 1.0 / microbatches  # what happens once a step is behind one micro-batch
    exposed = overlap.exposed(forward, gather, contention) + overlap.exposed(one * forward, first, contention)
    exposed += overlap.exposed(backward, reduce_, contention) + overlap.exposed(one * backward, last, contention)
    held = {name: float(resources[:, index].sum()) for name, index in MEMORY.items()}
    transient = float(worst(resources).max())
    blocks = {number for number, position in enumerate(problem.positions) if position.block >= 0}
    if microbatches == 1:  # gradients or activations, by which is the worst moment
        backward_begins = held["activations"] + transient >= held["gradients"]
        held["gradients" if backward_begins else "activations"] = 0.0
        transient *= backward_begins
    work = float((forward + backward).sum())
    waits = min(float((send + back + exposed).sum()), max(0.0, solution.time - work))  # behind a host that is late it is hidden
    sent_again = min(sent_again, waits)
    found = Prediction(
        step_seconds=solution.time,
        bytes_per_rank=chain.fixed_bytes + most_bytes(resources, microbatches, blocks),
        capacity_bytes=task.cluster.capacity_bytes,
        free_bytes=task.cluster.memory_bytes - task.cluster.capacity_bytes,
        compute_seconds=min(work, solution.time) - again - (optimizer or 0.0),
        recomputation_seconds=again + sent_again,
        optimizer_seconds=optimizer,
        communication_seconds=float((send + back + gather + reduce_ + first + last).sum()),
        exposed_communication_seconds=waits - sent_again,
        bytes_by_kind={**held, "inputs": chain.fixed_bytes, "transient": transient},
    )
    return _with_throughput(found, task, step_flops(task.graph, task.rules.operators))


def of_stages(task: Task, best: Evaluation, flops: float) -> Prediction:
    """Of an evaluation, with a pipeline or without. ``flops``: of a step (``step_flops``)."""
    inputs, staged, parts = task.given_bytes, best.run is not None, best.parts
    found = Prediction(
        step_seconds=best.seconds,
        bytes_per_rank=max(best.memory) + inputs,
        capacity_bytes=task.cluster.capacity_bytes,
        free_bytes=task.cluster.memory_bytes - task.cluster.capacity_bytes,
        compute_seconds=parts["compute"],
        exposed_communication_seconds=parts["exposed communication"],
        recomputation_seconds=parts["recomputation"],
        optimizer_seconds=parts["optimizer"],
        pipeline_bubble_seconds=parts.get("pipeline bubble"),
        outside_schedule_seconds=parts.get("outside the schedule"),
        bubble_fraction=best.bubble if staged else None,
        bytes_by_kind={**best.kinds, "inputs": best.kinds["inputs"] + inputs},
        bytes_per_pipeline_rank=tuple(bytes_ + inputs for bytes_ in best.memory) if staged else (),
        stages=best.stages,
    )
    return _with_throughput(found, task, flops)


def _with_throughput(found: Prediction, task: Task, flops: float) -> Prediction:
    """The prediction with tokens per second, FLOP/s and MFU, as far as the model has tokens and FLOPs."""
    seconds, tokens, devices = found.step_seconds, tokens_of(task.graph), task.cluster.world
    if tokens and seconds:
        found = replace(found, tokens_per_second=tokens / seconds)
    if flops and seconds:
        dtype = PRECISIONS[task.precision].compute or torch.float32
        mfu = compute.mfu(flops, seconds, devices, task.cluster.device, dtype)
        found = replace(found, tflops_per_device=flops / seconds / devices / 1e12, mfu=mfu)
    return found


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
