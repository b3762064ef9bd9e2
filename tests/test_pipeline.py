"""Training loops on pipelines equal the single process: every schedule, alone and with data and tensor parallelism and ZeRO.

Every combination is either shown equal here or refused with its reason.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.api import autoparallel
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.schedules import illegal_combination, schedule_of
from meshwright.ir.serialize import plan_to_dict
from tests.equality import compare
from tests.pipelines import (
    as_dicts,
    at_blocks,
    bf16_gradients,
    bf16_losses,
    bf16_plan,
    check,
    check_outputs,
    check_refused,
    check_resumed,
    cut,
    dropout_plan,
    end_in_a_step,
    inner_plan,
    largest_walk,
    losses_with_dropout,
    most_received,
    pipelined,
)
from tests.schedules import SCHEDULES, SPLIT_BACKWARD

VIRTUAL = {"gpipe": 1, "1f1b": 1, "interleaved1f1b": 2, "zb": 2, "zbv": 2, "dualpipev": 2}
SEQUENCE = {"tp": 2, "sequence_parallel": True}
TWO_STAGES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama": (("gpipe", "zbv"), ("zb",)), "gpt2": (("interleaved1f1b", "dualpipev"), ("1f1b",)),
    "t5": (("1f1b", "zb"), ("zbv",)), "bert": (("gpipe", "zbv"), ("zb",)), "vit": (("interleaved1f1b", "dualpipev"), ("1f1b",)),
}
"""{model: schedules that cut it between blocks, schedules that cut it at even distances}."""
FOUR_RANKS: Mapping[str, tuple[str, ...]] = {
    "llama": ("gpipe", "interleaved1f1b", "zb"), "gpt2": ("1f1b", "zbv"), "t5": ("interleaved1f1b", "zbv"),
    "bert": ("gpipe", "zb"),
}
"""{model: schedules}."""


def differences(pool: Callable[[int], Any], world: int, name: str, plans: Mapping[str, Plan], *how: Any) -> list[str]:
    """What ``check`` finds, on all ranks."""
    return [line for lines in pool(world).run(check, name, as_dicts(plans), *how) for line in lines]


def of(name: str, pp: int = 2, schedules: tuple[str, ...] = SCHEDULES, **how: Any) -> dict[str, Plan]:
    """The model under several schedules."""
    return {f"{s} {how}": pipelined(name, s, pp, VIRTUAL[s], **how) for s in schedules}


@pytest.mark.parametrize("name", TWO_STAGES)
def test_two_stages_or_four(pool: Callable[[int], Any], name: str) -> None:
    """Every schedule under two models and more (of Llama: ``test_data_parallel``, ``test_tensor_parallel``), cut between blocks
    and wherever even distances fall, on two ranks. GPT-2's and T5's tied weights lie on both; T5, of which no two blocks are
    alike, is cut inside the encoder and the decoder."""
    between, even = TWO_STAGES[name]
    assert differences(pool, 2, name, of(name, schedules=between) | of(name, schedules=even, even=True)) == []


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(pool: Callable[[int], Any], name: str) -> None:
    """Four ranks, of one stage or two each, every schedule under some model; T5's position biases cross several."""
    assert differences(pool, 4, name, of(name, 4, FOUR_RANKS[name], even=name == "t5")) == []


def test_what_is_received_is_let_go_of(pool: Callable[[int], Any]) -> None:
    """Buffers are as many as the search counts, not as many as there are micro-batches, under every schedule."""
    plans = {s: pipelined("llama", s, 2, VIRTUAL[s], microbatches=8, double=True) for s in SCHEDULES}
    for found in pool(2).run(most_received, "llama", as_dicts(plans)):
        for schedule, (most, left) in found.items():
            assert 1 <= most <= schedule_of(schedule).waiting(2, VIRTUAL[schedule], 8), schedule
            assert left == 0, schedule


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallel(pool: Callable[[int], Any], zero: int) -> None:
    """Every ZeRO level on two ranks a stage: what is not refused is equal. At level 3 also kept over the micro-batches, with
    recomputation, and cut inside a block."""
    how = {"world": 4, "dp": 2, "zero": zero, "double": True}
    plans = of("llama", schedules=tuple(s for s in SCHEDULES if illegal_combination(s, zero=zero) is None), **how)
    if zero == 3:
        plans |= of("llama", schedules=("1f1b",), keep=True, **how) | of("llama", schedules=("1f1b",), even=True, **how)
    recomputed = {1: {"1f1b": "selective", "interleaved1f1b": "full"}, 3: {"1f1b": "full", "interleaved1f1b": "selective"}}
    for schedule, kind in recomputed.get(zero, {}).items():
        plans |= of("llama", schedules=(schedule,), recompute=kind, **how)
    assert len(plans) >= 3
    assert differences(pool, 4, "llama", plans, None, True) == []


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        ("convnet", {"updated buffers": {"schedule": "gpipe", "microbatches": 1}}),
        ("masked_mean", {"an unused weight": {"schedule": "1f1b"}, "split": {"schedule": "zb"}}),
        ("odd", {"uneven": {"schedule": "1f1b"}}),
        ("llama", {"one stage a rank": {"schedule": "interleaved1f1b"}, "three": {"schedule": "interleaved1f1b", "virtual": 3},
                   "two micro-batches": {"schedule": "gpipe", "microbatches": 2}}),
    ],
)
def test_other_cases(pool: Callable[[int], Any], name: str, plans: dict[str, dict[str, Any]]) -> None:
    """Batch statistics in one micro-batch, weights that nothing reads, uneven shapes, other numbers of stages."""
    assert differences(pool, 2, name, {what: pipelined(name, pp=2, **how) for what, how in plans.items()}) == []


def test_tensor_parallel(pool: Callable[[int], Any]) -> None:
    """Every schedule over two ranks a stage that split the tensors, half of them (of each kind one) the sequence too;
    recomputed too."""
    plans = of("llama", schedules=("gpipe", "interleaved1f1b", "dualpipev"), world=4, tp=2)
    plans |= of("llama", schedules=("1f1b", "zb", "zbv"), world=4, **SEQUENCE)
    plans |= of("llama", schedules=("1f1b",), world=4, recompute="full", **SEQUENCE)
    assert differences(pool, 4, "llama", plans) == []


def test_weights_are_walked_apart(pool: Callable[[int], Any]) -> None:
    """A split backward computes the gradients of a weight without those of the inputs once more, DTensor or not."""
    for world in (2, 4):
        plan = pipelined("llama", "zb", 2, 2, world=world, tp=world // 2)
        assert pool(world).run(largest_walk, "llama", plan_to_dict(plan)) == [1] * world


def test_tied_weights(pool: Callable[[int], Any]) -> None:
    """A weight of the first and the last stage, on two ranks or (V-shaped) on one, split at rest or over tp, or alike on data
    ranks, which share the sum out: one parameter, its gradients summed; counted once by the clipping; two backwards a step."""
    plans = of("gpt2", schedules=("interleaved1f1b", "zb", "zbv"), world=4, dp=2, zero=1, microbatches=2)
    for zero in (0, 3):
        plans |= of("gpt2", schedules=("1f1b",), world=4, dp=2, zero=zero, microbatches=2)
    plans |= of("gpt2", schedules=("1f1b", "zbv"), world=4, tp=2)
    assert differences(pool, 4, "gpt2", plans, 0.1, False, 2) == []


def test_a_weight_alone_between_stages(pool: Callable[[int], Any]) -> None:
    """What leaves a stage may depend on its weights alone: T5 cut behind each embedding, once between encoder and decoder."""
    graph = inner_plan("t5", False, 1, (("dp", 1), ("microbatches", 4), ("tp", 1))).graph
    embeddings = [i for i, op in enumerate(graph.ops) if op.target == "aten.embedding.default"]
    assert len(embeddings) == 4  # tokens and position biases, of the encoder and of the decoder
    cuts = (0, *(place + 1 for place in embeddings[1:]), len(graph.ops))
    plans = {s: pipelined("t5", s, 2, 2, cuts=cuts) for s in ("interleaved1f1b", "zb", "zbv")}
    assert differences(pool, 2, "t5", plans) == []


@pytest.mark.parametrize(("name", "schedule"), [("llama", "gpipe"), ("t5", "interleaved1f1b"), ("bert", "zbv")])
def test_outputs(pool: Callable[[int], Any], name: str, schedule: str) -> None:
    """``eval()`` and ``no_grad`` give every output on every rank, training the loss on all and the rest where it is made."""
    pool(2).run(check_outputs, name, [plan_to_dict(pipelined(name, schedule, 2, VIRTUAL[schedule]))])


def test_outputs_in_pieces(pool: Callable[[int], Any]) -> None:
    """Outputs of a stage of two ranks are DTensors on its ranks."""
    plans = [pipelined("llama", "1f1b", 2, world=4, **how) for how in (SEQUENCE, {"dp": 2, "zero": 3, "microbatches": 2})]
    pool(4).run(check_outputs, "llama", [plan_to_dict(plan) for plan in plans])


def test_resumed(pool: Callable[[int], Any], tmp_path: Path) -> None:
    """A checkpoint of one pipeline is read by others, and without one; the optimizer's state with it."""
    plans = {
        "first": pipelined("gpt2", "1f1b", 2, world=4, dp=2, zero=3, microbatches=2),
        "v": pipelined("gpt2", "zbv", 2, 2, world=4, tp=2),
        "deep": pipelined("gpt2", "gpipe", 4),
        "none": inner_plan("gpt2", False, 4, (("dp", 2), ("microbatches", 1), ("tp", 2), ("zero", 1))),
    }
    pool(4).run(check_resumed, "gpt2", str(tmp_path / "checkpoint"), as_dicts(plans))


def test_bf16(pool: Callable[[int], Any]) -> None:
    """bf16 compute with fp32 master weights follows the fp32 run to bf16's precision, split backwards too."""
    plans = as_dicts({s: bf16_plan(s, VIRTUAL[s], zero) for s, zero in (("1f1b", 3), ("zb", 1), ("zbv", 1))})
    assert max(max(off) for off in pool(4).run(bf16_losses, plans)) < 2.0**-6


def test_bf16_gradients_are_summed_in_fp32(pool: Callable[[int], Any]) -> None:
    """Split backwards too: what 1F1B sums of as many micro-batches, but for the order in which fp32 adds."""
    plans = as_dicts({s: bf16_plan(s, VIRTUAL[s], 1) for s in ("1f1b", "zb", "zbv")})
    assert max(max(off) for off in pool(4).run(bf16_gradients, plans)) < 1e-6


def test_dropout(pool: Callable[[int], Any]) -> None:
    """Masks depend on the seed and the micro-batch, not on the stage: the losses are those of one rank, call by call."""
    (alone,) = pool(1).run(losses_with_dropout, as_dicts({"alone": dropout_plan(None)}))
    first, second = alone["alone"]
    assert first != second
    plans = {s: dropout_plan(s, 2, VIRTUAL[s]) for s in ("1f1b", "zbv")}
    for losses in pool(2).run(losses_with_dropout, as_dicts(plans)):
        for found in losses.values():
            torch.testing.assert_close(torch.tensor(found), torch.tensor([first, second]), rtol=1e-6, atol=0)


class Weighed(torch.autograd.Function):
    """Its backward has no gradient for the weight, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class Beside(nn.Module):
    """A layer that nothing reads, the smallest, two whose results nobody differentiates, weights that are counted only, and
    weights whose gradient a function of the model's leaves out, beside three that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out, self.judge, self.idle = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(2, 1)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.weight, self.counted = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = Weighed.apply(self.inside(x), self.weight)
        judged = self.judge(self.second(h))
        y = self.out(self.first(h)) + torch.histc(self.counted, 8)
        return {"loss": (y * (judged > 0)).square().mean() + 0 * judged.detach().mean()}


def decayed(rank: int, cases: list[dict[str, Any]]) -> list[str]:
    torch.set_num_threads(1)
    problems = []
    for pins in cases:
        torch.manual_seed(0)
        single, x = Beside(), torch.randn(8, 4, 8)
        parallel: Any = autoparallel(single, init_device_mesh("cpu", (2,)), ((x,), {}), pins=pins, progress=False)
        for model in (single, parallel):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=1.0, eps=1e-3)
            for _ in range(2):
                model(x)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
        state = parallel.full_state_dict()
        problems += [f"{pins}: {line}" for line in (compare(state, single.state_dict()) if rank == 0 else [])]
    return problems


def test_weights_that_the_loss_does_not_reach_have_no_gradient(pool: Callable[[int], Any]) -> None:
    """As in one process, where an optimizer leaves them alone: with zeros a weight decay would shrink them."""
    cases: list[dict[str, Any]] = [{"pp": 2, "dp": 1, "tp": 1, "microbatches": 2, "schedule": s} for s in ("1f1b", "zbv")]
    assert pool(2).run(decayed, [*cases, SEQUENCE]) == [[]] * 2


@pytest.mark.parametrize("dying", range(2))
def test_a_rank_that_ends_ends_all(dying: int) -> None:
    """Its peers raise when its process ends, not after gloo's time-out (here 100 seconds); rank 0's holds the store."""
    context = mp.get_context("forkserver")  # processes of its own, forked as those of the pool are
    context.set_forkserver_preload(["tests.warm"])
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    data = plan_to_dict(pipelined("gpt2", "1f1b", 2))
    processes = [context.Process(target=end_in_a_step, args=(rank, dying, "gpt2", data, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        seconds, message = results.get(timeout=200)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert seconds < 50
    assert message.startswith("RunError: the connection to another rank was lost in the middle of a step")



# refusals


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_combination_is_equal_or_refused(schedule: str) -> None:
    """Whole backwards go with everything (the tests above); of the split ones only what they show is not refused."""
    for zero in range(4):
        for keep in (False, True):
            for recompute in ("none", "selective", "full"):
                reason = illegal_combination(schedule, zero=zero, keep=keep, recompute=recompute)
                if schedule in SPLIT_BACKWARD and (zero >= 2 or recompute != "none"):
                    assert reason is not None
                    assert schedule in reason
                    assert "nearest legal" in reason
                else:
                    assert reason is None
    assert (illegal_combination(schedule, compiled=True) is None) == (schedule not in SPLIT_BACKWARD)


def test_refused_before_anything_runs(pool: Callable[[int], Any]) -> None:
    """What a loaded plan asks is judged too, on every rank, before a stage is made."""
    fine = pipelined("llama", "1f1b", 2)
    split = cut(fine_inner(), "zb", 2, 2)
    cases = [
        (replace(split, groups=tuple(replace(g, recompute="full") for g in split.groups)), "recompute the forward"),
        (cut(fine_inner(microbatches=1), "1f1b", 2, 1), "at least pp = 2 micro-batches"),
        (pipelined("llama", "dualpipev", 2, 2, microbatches=2), "2 pp = 4"),
        (replace(fine, pipeline=replace(fine.pipeline, stage_rank=(1, 0))), r"it runs them on \(0, 1\)"),
    ]
    pool(2).run(check_refused, "llama", [(plan_to_dict(plan), message) for plan, message in cases])


def test_a_pipeline_that_cannot_be() -> None:
    """Cuts and meshes that contradict each other are no plan."""
    plan = fine_inner()
    ops = len(plan.graph.ops)
    for cuts, stages, message in (
        ((0, 9, 9, ops), 3, "increasing positions"), ((0, ops), 2, "one more than there are stages"), ((0, 5, 9), 2, "ends at"),
    ):
        with pytest.raises(PlanError, match=message):
            cut(plan, "1f1b", stages, 1, cuts)
    with pytest.raises(PlanError, match="pp=2 as the outermost axis"):
        replace(plan, pipeline=cut(plan, "1f1b", 2, 1, at_blocks(plan.graph, 2)).pipeline)


def fine_inner(microbatches: int = 4) -> Plan:
    """Llama for the one rank of a stage."""
    return inner_plan("llama", False, 1, (("dp", 1), ("microbatches", microbatches), ("tp", 1)))
