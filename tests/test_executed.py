"""Collectives that one rank really runs in a training step: as many as are known to be needed, and those that the plan lists.

A rank is built for real (captured, planned, lowered, FSDP2) in a fake process group of four, whose collectives return at once:
what it calls is counted where torch dispatches it. Numbers are compared elsewhere (``test_equality``); here only calls are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.api import autoparallel
from meshwright.ir.plan import Plan
from meshwright.passes import rank_program
from meshwright.runtime.assemble import home_of
from meshwright.runtime.engine import Casts, Slot, read
from meshwright.views.facts import LATE, facts_of
from tests.equality import captured_once, loss_of
from tests.models import make

WORLD = 4
KINDS = {
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}


@pytest.fixture(scope="module", autouse=True)
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


class Calls(TorchDispatchMode):
    """Counts the collectives that are dispatched: those of the program by the pass of the step, and FSDP2's apart."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.program: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter(), "step": Counter()}
        self.fsdp: Counter[str] = Counter()
        self.sizes: list[int] = []  # elements of the all-reduces that are not the program's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace in ("_c10d_functional", "c10d") and name in KINDS:
            given = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            if given.is_floating_point():  # ranks agree on a call by whole numbers
                counts = self.program[self.phase] if func.namespace == "_c10d_functional" else self.fsdp
                counts[KINDS[name]] += 1
                self.sizes += [given.numel()] * (name == "allreduce_")
        return func(*args, **(kwargs or {}))


class Mlp(nn.Module):
    """Six linears with biases."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 32, 16, 32, 16, 32, 16]
        layers = [layer for i in range(6) for layer in (nn.Linear(widths[i], widths[i + 1]), nn.ReLU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.layers(x) - y) ** 2).mean()}


def mlp() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Mlp(), {"x": torch.randn(8, 16), "y": torch.randn(8, 16)}


COLUMN_ROW = {f"layers.{at}.weight": "[_@tp, _]" if at % 4 == 0 else "[_, _@tp]" for at in range(0, 12, 2)}


def executed(case: Callable[[], tuple[nn.Module, Mapping[str, Any]]], pins: Mapping[str, Any]) -> tuple[Any, Calls]:
    """The plan, and what a training step of rank 0 calls."""
    torch.manual_seed(0)
    model, batch = case()
    parallel = autoparallel(model.train(), init_device_mesh("cpu", (WORLD,)), ((), batch), pins=dict(pins), progress=False)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    calls = Calls()
    with calls:
        calls.phase = "forward"
        loss = loss_of(parallel(**batch))
        calls.phase = "backward"
        loss.backward()
        calls.phase = "step"
        optimizer.step()
    return parallel.plan, calls


def listed(plan: Plan) -> dict[str, Counter[str]]:
    """What the plan says of a step of one micro-batch, without what FSDP2 does."""
    facts = facts_of(plan)
    program = rank_program(plan, facts.rules, 0)
    found = {"forward": Counter[str](), "backward": Counter[str](), "step": Counter[str]()}
    for step in facts.collectives:
        found["forward"][step.forward] += 1
        found["backward"][step.backward] += step.kind != LATE
    homes = home_of(program)
    found["backward"]["all_reduce"] += len({(homes[item.value], item.late_axes) for item in program.stored if item.late_axes})
    again = [op for segment in program.segments for op in segment.graph.ops if op.target == "mw.gather_linear"]
    found["backward"]["all_gather"] += len(again)  # its linears' weight gradients need the activation once more
    return {when: +Counter({kind: n for kind, n in counts.items() if kind}) for when, counts in found.items()}


def counts(text: str) -> dict[str, int]:
    """"3 all_reduce, 1 all_gather" as a dict."""
    return {kind: int(count) for count, kind in (item.split() for item in text.split(", ") if item)}


PLAIN, SEQUENCE = {"tp": 4, "sequence_parallel": False}, {"tp": 4, "sequence_parallel": True}
DATA, BOTH = {"dp": 4}, {"dp": 2, "tp": 2, "sequence_parallel": False}
TABLE: list[tuple[str, dict[str, Any], str, str, str]] = [
    # model, pins, forward, backward, FSDP2. Over tp attention and MLP of a layer sum once forward and once backward.
    ("mlp", {"tp": 4, "tensors": COLUMN_ROW}, "3 all_reduce", "2 all_reduce", ""),  # the first of three pairs sends none back
    ("mlp", DATA, "1 all_reduce", "", "6 all_reduce"),  # the loss, and the gradients of every layer
    ("mlp", {"dp": 2, "tp": 2, "tensors": COLUMN_ROW}, "4 all_reduce", "2 all_reduce", "6 all_reduce"),
    # Two layers: 4 and 4. Embedding and head share a weight split along its words: what is looked up is a pending sum, to which
    # what every rank looks up elsewhere is added as a term; the two linears of the head are split, and gathered after.
    ("bert", PLAIN, "5 all_reduce, 2 all_gather", "6 all_reduce", ""),
    # The same sums as reduce-scatters and gathers; a gather runs once more in the backward, for the weights' gradients. Norms:
    # one sum a block, one of the root. All-to-alls: from a split hidden dim to a split sequence, behind embedding and head.
    ("bert", SEQUENCE, "5 reduce_scatter, 7 all_gather, 2 all_to_all, 1 all_reduce",
     "6 reduce_scatter, 11 all_gather, 2 all_to_all, 3 all_reduce", ""),
    ("bert", DATA, "1 all_reduce", "", "3 all_reduce"),  # the loss; two blocks and the root
    ("bert", BOTH, "6 all_reduce, 2 all_gather", "6 all_reduce", "3 all_reduce"),
    # All-to-alls: q, k and v lie in one weight and one bias, of which ranks exchange rows, in each of two layers.
    ("gpt2", PLAIN, "5 all_reduce, 1 all_gather, 4 all_to_all", "5 all_reduce, 4 all_to_all", ""),
    # With a sequence split, a gather (its gradient scattered, and gathered for a weight's) stands for one of the sums forward.
    ("gpt2", SEQUENCE, "5 reduce_scatter, 5 all_gather, 5 all_to_all, 1 all_reduce",
     "5 reduce_scatter, 10 all_gather, 5 all_to_all, 3 all_reduce", ""),
    ("gpt2", DATA, "1 all_reduce", "", "3 all_reduce"),
    ("gpt2", BOTH, "6 all_reduce, 1 all_gather, 4 all_to_all", "5 all_reduce, 4 all_to_all", "3 all_reduce"),
    # Two key heads cannot be split over four ranks: attention gathers what it reads. Two ranks have one each.
    ("llama", PLAIN, "5 all_reduce, 7 all_gather", "5 all_reduce, 2 all_gather", ""),
    ("llama", DATA, "1 all_reduce", "", "3 all_reduce"),
    # The state of both blocks is split (ZeRO-1): their sums come in halves.
    ("llama", BOTH, "6 all_reduce, 1 all_gather", "5 all_reduce", "1 all_reduce, 2 reduce_scatter, 2 all_gather"),
    # Attention and MLP side by side: their sums meet, so one a layer each way (and the embedding; loss). All query heads share
    # one key head, which lies in a weight with theirs: what it makes is gathered.
    ("Falcon", PLAIN, "3 all_reduce, 3 all_gather", "3 all_reduce, 2 all_gather", ""),
    # Scores by a product to which a bias is added, batch and heads in one dim: the heads are split, as everywhere.
    ("Bloom", PLAIN, "5 all_reduce, 1 all_gather", "5 all_reduce", ""),
]


@pytest.mark.parametrize(("name", "pins", "forward", "backward", "parameters"), TABLE)
def test_table(name: str, pins: dict[str, Any], forward: str, backward: str, parameters: str) -> None:
    """What runs is what the plan lists, and no more than is known to be needed."""
    with captured_once(name):
        plan, calls = executed(mlp if name == "mlp" else partial(make, name), pins)
    assert calls.program == listed(plan)
    assert calls.program["forward"] == counts(forward)
    assert calls.program["backward"] == counts(backward)
    assert calls.fsdp == counts(parameters)
    assert not calls.program["step"]


def deeper() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A Llama of five layers, wider than the table's, with as many key heads as query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4, vocab_size=64,
        max_position_embeddings=32, use_cache=False,
    )
    ids = torch.randint(1, 64, (4, 8))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize(("pins", "forward", "backward", "parameters"), [
    (PLAIN, "11 all_reduce, 1 all_gather", "11 all_reduce", ""), (DATA, "1 all_reduce", "", "6 all_reduce"),
])
def test_deeper_models_add_two_sums_a_layer_each_way(
    pins: dict[str, Any], forward: str, backward: str, parameters: str
) -> None:
    """2 L + 1: attention and MLP of every layer, embedding and loss; over dp a sum for each block and one for the root."""
    plan, calls = executed(deeper, pins)
    assert calls.program == listed(plan)
    assert calls.program["forward"] == counts(forward)
    assert calls.program["backward"] == counts(backward)
    assert calls.fsdp == counts(parameters)


def test_norms_are_summed_once_a_step() -> None:
    """Under sequence parallelism with two micro-batches: one sum of all norms' gradients, whatever the ZeRO level."""
    pins = {"dp": 2, "tp": 2, "sequence_parallel": True, "microbatches": 2}
    for zero in (0, 3):
        with captured_once("llama"):
            plan, calls = executed(partial(make, "llama"), {**pins, "zero": zero})
        steps = facts_of(plan).collectives
        each = sum("all_reduce" in (step.forward, step.backward) for step in steps if step.kind != LATE)
        assert sum(step.kind == LATE for step in steps) == 5
        assert calls.program["forward"]["all_reduce"] == 2 * each + 1  # the backwards of micro-batches run in the call


def sizes_between_stages(rank: int, levels: Sequence[int]) -> list[list[int]]:
    """Elements of what FSDP2 and the stages all-reduce, on a real rank."""
    with captured_once("gpt2"):
        pins = {"pp": 2, "dp": 2, "tp": 1, "microbatches": 2}
        return [executed(partial(make, "gpt2"), {**pins, "zero": zero})[1].sizes for zero in levels]


def test_a_tied_weight_is_summed_in_pieces_between_stages(pool: Callable[[int], Any]) -> None:
    """64 x 32 elements on two data ranks: what a rank has at rest, or of what both have alike a half each."""
    for sizes in pool(WORLD).run(sizes_between_stages, (0, 1)):
        assert all(found.count(64 * 32 // 2) == 1 and 64 * 32 not in found for found in sizes)


def test_micro_batches_of_a_step_share_copies_in_the_compute_dtype() -> None:
    master, casts = nn.Parameter(torch.randn(4, 3)), Casts()
    slot = Slot(None, "", master, torch.bfloat16, None, None, casts=casts)
    with casts.shared():
        one, two = (read([slot])[0] for _ in range(2))
        assert one.data_ptr() == two.data_ptr()
        (one.float().sum() + 2 * two.float().sum()).backward()
    assert master.grad is not None
    torch.testing.assert_close(master.grad, torch.full((4, 3), 3.0))
    with torch.no_grad():
        master.mul_(2)
    assert read([slot])[0].data_ptr() != read([slot])[0].data_ptr()
    with casts.shared():  # the next step finds what the optimizer wrote
        torch.testing.assert_close(read([slot])[0], master.bfloat16())
