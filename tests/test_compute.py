"""Roofline: FLOPs against torch's counter, efficiency by shape, fusion by data flow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.compiler.rules import builtin_rules
from meshwright.compiler.search.prediction import step_flops
from meshwright.cost import compute
from meshwright.cost.cluster import Cluster
from meshwright.cost.compute import (
    Fused,
    fusion,
    matmul_efficiency,
    memory_speed,
    mfu,
)
from meshwright.ir.declared.operator import Work
from meshwright.ir.graph import Graph, Op, Param, Ref, Value
from meshwright.planner import capture_model
from tests.models import make

H100 = Cluster.parse("h100:1x8").with_kernels(fused=True).device
A100 = Cluster.parse("a100:1x8").with_kernels(fused=True).device
BF16 = torch.bfloat16
LINEAR = "aten.linear.default"
ATTENTION = "aten.scaled_dot_product_attention.default"


OPERATORS = builtin_rules().operators


def work(shapes, results, dtype=BF16, **literals) -> Work:
    """A call on these local shapes."""
    kwargs = tuple(literals.pop("kwargs", {}).items())
    return Work(tuple(shapes), tuple(results), dtype, dtype, kwargs=kwargs, **literals)


def seconds(target, shapes, results, dtype, device, fused=None, **literals) -> tuple[float, float]:
    return compute.seconds(OPERATORS[target], work(shapes, results, dtype, **literals), device, fused)


def started(target, shapes, results, dtype, device, fused=None) -> tuple[float, float]:
    return compute.started(OPERATORS[target], work(shapes, results, dtype), device, fused)


def attention_flops(shapes, **literals) -> float:
    return compute.attention_flops(work(shapes, shapes[:1], **literals))


def counted(call, *operands: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    with FlopCounterMode(display=False) as counter:
        result = call(*operands)
    return float(counter.get_total_flops()), tuple(result.shape)


def unfused_attention(*operands: torch.Tensor) -> torch.Tensor:
    """Attention as the products that torch's counter sees."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*operands)


@pytest.mark.parametrize(
    ("target", "call", "shapes"),
    [
        (LINEAR, F.linear, [(2, 3, 4), (5, 4), (5,)]),
        ("aten.mm.default", torch.mm, [(3, 4), (4, 5)]),
        ("aten.bmm.default", torch.bmm, [(2, 3, 4), (2, 4, 5)]),
        ("aten.matmul.default", torch.matmul, [(2, 7, 3, 4), (2, 7, 4, 5)]),
        ("aten.matmul.default", torch.matmul, [(2, 7, 3, 4), (4, 5)]),
        ("aten.addmm.default", torch.addmm, [(5,), (3, 4), (4, 5)]),
        ("aten.conv2d.default", F.conv2d, [(2, 3, 8, 8), (6, 3, 3, 3)]),
        ("aten.conv2d.default", lambda x, w: F.conv2d(x, w, stride=2, padding=1), [(2, 3, 8, 8), (6, 3, 3, 3)]),
        (ATTENTION, unfused_attention, [(2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8)]),
    ],
)
def test_flops_are_torchs(target, call, shapes):
    want, result = counted(call, *(torch.randn(shape) for shape in shapes))
    assert compute.flops(OPERATORS[target], work(shapes, [result])) == want


def test_causal_attention_counts_half():
    shapes = [(2, 4, 16, 8)] * 3
    full = attention_flops(shapes)
    assert attention_flops(shapes, kwargs={"is_causal": True}) == full / 2
    assert attention_flops(shapes, args=(None,) * 5 + (True,)) == full / 2


def test_backward_of_a_product_is_two_products():
    forward, backward = seconds(LINEAR, [(4096, 4096), (4096, 4096)], [(4096, 4096)], BF16, H100)
    assert backward == pytest.approx(2 * forward)
    only_weight = seconds(LINEAR, [(4096, 4096), (4096, 4096)], [(4096, 4096)], BF16, H100, needs=(False, True))
    assert only_weight[1] == pytest.approx(forward)
    assert seconds(LINEAR, [(64, 64), (64, 64)], [(64, 64)], BF16, H100, needs=(False, False))[1] == 0.0


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 9000))
def test_no_product_beats_the_peak_or_the_memory(m, n, k):
    forward, _ = seconds(LINEAR, [(m, k), (n, k)], [(m, n)], BF16, A100)
    assert forward >= 2.0 * m * n * k / A100.flops(BF16)
    assert forward >= (m * k + n * k + m * n) * 2 / A100.memory_bandwidth
    assert 0 < matmul_efficiency(1, m, n, k, A100) <= A100.matmul_efficiency


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([128, 256, 512, 1024, 4096]), st.sampled_from([128, 512, 4096]), st.sampled_from([64, 512, 4096]))
def test_twice_the_rows_cost_at_most_twice_and_no_less(m, n, k):
    once, _ = seconds(LINEAR, [(m, k), (n, k)], [(m, n)], BF16, H100)
    twice, _ = seconds(LINEAR, [(2 * m, k), (n, k)], [(2 * m, n)], BF16, H100)
    assert once <= twice * 1.0001
    assert twice <= 2 * once * 1.0001


def test_small_and_skinny_products_are_less_efficient():
    large = matmul_efficiency(1, 8192, 8192, 8192, H100)
    assert large > 0.9 * H100.matmul_efficiency
    assert matmul_efficiency(1, 256, 256, 8192, H100) < 0.5 * large
    assert matmul_efficiency(1, 8192, 8192, 64, H100) < 0.5 * large
    assert matmul_efficiency(1, 8192, 8, 8192, H100) < 0.5 * large


def test_splitting_a_product_over_ranks_saves_less_than_its_share():
    """Tensor parallelism makes products narrower, never more efficient."""
    whole, _ = seconds(LINEAR, [(4096, 4096), (16384, 4096)], [(4096, 16384)], BF16, H100)
    eighth, _ = seconds(LINEAR, [(4096, 4096), (2048, 4096)], [(4096, 2048)], BF16, H100)
    assert eighth >= whole / 8


@pytest.mark.parametrize("target", ["aten.view.default", "aten.transpose.int", "aten.reshape.default"])
def test_views_are_free(target):
    assert seconds(target, [(1024, 1024)], [(1024, 1024)], BF16, H100) == (0.0, 0.0)


def test_pointwise_is_bytes_over_bandwidth():
    size = (8192, 8192)
    bytes_ = 8192 * 8192 * 2
    forward, backward = seconds("aten.mul.Tensor", [size, size], [size], BF16, H100)
    assert forward == pytest.approx(3 * bytes_ / memory_speed(H100))
    assert backward == pytest.approx(5 * bytes_ / memory_speed(H100))  # dy, x, y in; dx, dy out
    assert seconds("aten.add.Tensor", [size, size], [size], BF16, H100)[1] == 0.0  # the gradient passes through


def test_unknown_operators_move_their_data():
    forward, _ = seconds("aten.something_new.default", [(8192, 8192)], [(8192, 8192)], BF16, H100)
    assert forward == pytest.approx(2 * 8192 * 8192 * 2 / memory_speed(H100))


@pytest.mark.parametrize(
    ("target", "operands", "kernels"),
    [("aten.mul.Tensor", [(8, 8)] * 2, (1, 1)), (LINEAR, [(8, 8)] * 2, (1, 2)), ("aten.view.default", [(8, 8)], (0, 0))],
)
def test_the_host_starts_kernels_one_after_the_other(target, operands, kernels):
    found = started(target, operands, [(8, 8)], BF16, H100)
    assert found == pytest.approx(tuple(n * H100.kernel_seconds for n in kernels))
    assert started(target, [(4, 8), *operands[1:]], [(4, 8)], BF16, H100) == pytest.approx(found)
    assert seconds(target, operands, [(8, 8)], BF16, H100) < found or not any(kernels)


def test_an_mlp_in_pieces_runs_its_first_product_once_more_in_the_backward():
    tokens, width, inner = 8192, 4096, 16384
    operator, shapes = OPERATORS["mw.mlp"], ((tokens, width), (inner, width), (width, inner))
    one = Work(shapes, ((tokens, width),), BF16, BF16, args=(None, (None,), (None,), (), None, 1024))
    never = replace(operator, cost=replace(operator.cost, again=None))
    more = compute.seconds(operator, one, H100)[1] - compute.seconds(never, one, H100)[1]
    assert more == pytest.approx(seconds(LINEAR, shapes[:2], [(tokens, inner)], BF16, H100)[0], rel=0.01)


def test_the_loss_moves_the_logits_as_often_as_its_kernels_do():
    tokens, vocab = 8192, 32000
    eager = Cluster.parse("h100:1x8").with_kernels(fused=False).device
    operands, results = [(tokens, vocab), (tokens,)], [(), ()]
    call = Work(tuple(operands), tuple(results), BF16, torch.float32)
    one = tokens * vocab * 4 / memory_speed(eager)
    assert compute.seconds(OPERATORS["mw.cross_entropy"], call, eager) == pytest.approx((7.5 * one, 11.5 * one))
    wide = Work(tuple(operands), tuple(results), torch.float32, torch.float32)
    assert compute.seconds(OPERATORS["mw.cross_entropy"], wide, eager) == pytest.approx((6 * one, 10 * one))
    assert compute.seconds(OPERATORS["mw.cross_entropy"], call, H100) == pytest.approx((2 * one, 3 * one))
    merged = Cluster.parse("h100:1x8").with_kernels(fused=False, merged_loss=True).device
    assert compute.seconds(OPERATORS["mw.cross_entropy"], call, merged) == pytest.approx((0.5 * one, one))
    sharded = Cluster.parse("h100:1x8").with_kernels(fused=False, sharded_loss=True).device
    assert compute.seconds(OPERATORS["mw.cross_entropy"], call, sharded) == pytest.approx((9.5 * one, 3.5 * one))
    compiled = replace(sharded, fused=True)
    assert compute.seconds(OPERATORS["mw.cross_entropy"], call, compiled) == pytest.approx((2 * one, 3 * one))


def test_embedding_reads_the_rows_it_picks():
    picked, _ = seconds("aten.embedding.default", [(128256, 4096), (1, 8192)], [(1, 8192, 4096)], BF16, H100)
    table, _ = seconds("aten.clone.default", [(128256, 4096)], [(128256, 4096)], BF16, H100)
    assert picked < table / 5


def test_attention_kernels_and_long_sequences():
    shapes = [(1, 32, 8192, 128)] * 3
    cluster = Cluster.parse("h100:1x8")
    second = seconds(ATTENTION, shapes, shapes[:1], BF16, cluster.device, kwargs={"is_causal": True})
    third = seconds(ATTENTION, shapes, shapes[:1], BF16, cluster.with_kernels("flash3").device, kwargs={"is_causal": True})
    assert third[0] < second[0]
    work = attention_flops(shapes, kwargs={"is_causal": True})
    assert work / second[0] == pytest.approx(H100.attention_forward * H100.flops(BF16), rel=0.1)
    assert 2.5 * work / second[1] == pytest.approx(H100.attention_backward * H100.flops(BF16), rel=0.1)
    speeds = []
    for keys in (512, 2048, 8192, 32768):
        shorter = [(1, 256, keys, 128)] * 3
        once, _ = seconds(ATTENTION, shorter, shorter[:1], BF16, cluster.device, kwargs={"is_causal": True})
        speeds.append(attention_flops(shorter, kwargs={"is_causal": True}) / once)
    assert speeds == sorted(speeds)


def test_fp32_is_slower_than_bf16():
    shapes = ([(2048, 2048), (2048, 2048)], [(2048, 2048)])
    assert seconds(LINEAR, *shapes, torch.float32, H100)[0] > 5 * seconds(LINEAR, *shapes, BF16, H100)[0]


def test_products_in_another_format_are_faster_by_their_peak_less_the_casts():
    shapes = ([(8192, 8192), (8192, 8192)], [(8192, 8192)])
    cluster = Cluster.parse("h100:1x8")
    tf32 = seconds(LINEAR, *shapes, torch.float32, cluster.with_products("tf32").device)[0]
    assert seconds(LINEAR, *shapes, torch.float32, H100)[0] / tf32 == pytest.approx(494 / 67)
    fp8 = seconds(LINEAR, *shapes, BF16, cluster.with_products("f8e4m3").device)[0]
    bf16 = seconds(LINEAR, *shapes, BF16, H100)[0]
    assert 1.2 < bf16 / fp8 < 1979 / 989
    attention = [(1, 32, 8192, 128)] * 3
    both = [seconds(ATTENTION, attention, attention[:1], BF16, device)[0]
            for device in (H100, cluster.with_products("f8e4m3").device)]
    assert both[0] == both[1]


def swiglu() -> Graph:
    """x -> linear -> silu -> (* linear) -> linear, with a residual."""
    wide, narrow = (64, 256), (64, 128)
    shapes = {"x": narrow, "g": wide, "s": wide, "u": wide, "m": wide, "d": narrow, "y": narrow, "z": narrow}
    values = {name: Value(name, shape, BF16, True) for name, shape in shapes.items()}
    weights = {"wg": (256, 128), "wu": (256, 128), "wd": (128, 256)}
    values |= {name: Value(name, shape, BF16, True) for name, shape in weights.items()}
    ops = (
        Op("g", LINEAR, (Ref("x"), Ref("wg")), (), ("g",)),
        Op("s", "aten.silu.default", (Ref("g"),), (), ("s",)),
        Op("u", LINEAR, (Ref("x"), Ref("wu")), (), ("u",)),
        Op("m", "aten.mul.Tensor", (Ref("s"), Ref("u")), (), ("m",)),
        Op("d", LINEAR, (Ref("m"), Ref("wd")), (), ("d",)),
        Op("y", "aten.add.Tensor", (Ref("x"), Ref("d")), (), ("y",)),
        Op("z", "aten.relu.default", (Ref("y"),), (), ("z",)),
    )
    return Graph(values, ("x",), tuple(Param(w, (w,), True) for w in weights), ops, Ref("z"))


def test_fusion_reads_and_writes_only_at_the_borders():
    found = dict(zip("gsumdyz", fusion(swiglu(), OPERATORS), strict=True))
    assert found["g"] is None
    assert found["u"] is None
    assert found["d"] is None
    assert found["s"] == Fused((True,), (False,))  # its result stays inside the kernel
    assert found["m"] == Fused((False, True), (True,))
    assert found["y"] == Fused((True, True), (False,))
    assert found["z"] == Fused((False,), (True,))


@pytest.mark.parametrize(("target", "read", "written"), [
    ("aten.where.self", (Ref("x"), Ref("f"), Ref("x")), False),
    ("aten.slice_scatter.default", (Ref("f"), Ref("x"), 1, 0, 64, 1), True),
])
def test_what_is_made_from_literals_is_written_for_readers_that_do_not_fuse(target, read, written):
    values = {name: Value(name, (64, 64), BF16, False) for name in "xfy"}
    ops = (
        Op("f", "aten.full.default", ((64, 64), 0.0), (), ("f",)),
        Op("y", target, read, (), ("y",)),
    )
    fused = fusion(Graph(values, ("x",), (), ops, Ref("y")), OPERATORS)
    assert fused[0] == Fused((), (written,))


def test_fused_chain_costs_the_traffic_of_its_borders():
    graph = swiglu()
    total = host = 0.0
    for op, fused in zip(graph.ops, fusion(graph, OPERATORS), strict=True):
        if fused is not None:
            shapes = [graph.values[name].shape for name in op.inputs], [graph.values[name].shape for name in op.outputs]
            total += seconds(op.target, *shapes, BF16, H100, fused=fused)[0]
            host += started(op.target, *shapes, BF16, H100, fused=fused)[0]
    bytes_ = 2 * (3 * 64 * 256 + 3 * 64 * 128)
    assert 0 < total <= bytes_ / memory_speed(H100)
    assert host == pytest.approx(2 * H100.kernel_seconds)


def test_eager_devices_do_not_fuse():
    eager = Cluster.parse("h100:1x8").with_kernels(fused=False).device
    border = Fused((True,), (False,))
    alone = seconds("aten.silu.default", [(4096, 4096)], [(4096, 4096)], BF16, eager, fused=border)
    assert alone == seconds("aten.silu.default", [(4096, 4096)], [(4096, 4096)], BF16, H100)
    assert seconds("aten.silu.default", [(4096, 4096)], [(4096, 4096)], BF16, H100, fused=border)[0] < alone[0]


def test_a_value_read_twice_by_one_kernel_is_read_once():
    values = {name: Value(name, (64, 64), BF16, True) for name in "xabc"}
    ops = (
        Op("a", "aten.exp.default", (Ref("x"),), (), ("a",)),
        Op("b", "aten.mul.Tensor", (Ref("x"), Ref("a")), (), ("b",)),
        Op("c", "aten.add.Tensor", (Ref("b"), Ref("x")), (), ("c",)),
    )
    reads = [fused.reads for fused in fusion(Graph(values, ("x",), (), ops, Ref("c")), OPERATORS) if fused]
    assert reads == [(True,), (False, False), (False, False)]


def test_model_flops_and_mfu():
    """6 N + 12 L h s / 2 per token: of a GPT-2 whose head is a matrix product of the embedding."""
    model, batch = make("gpt2")
    graph = capture_model(model.train(), (), batch, (), None, "fp32")
    config, seq = model.config, batch["input_ids"].shape[1]
    weights = 12 * config.n_layer * config.n_embd**2 + config.vocab_size * config.n_embd
    per_token = 6 * weights + 12 * config.n_layer * config.n_embd * seq / 2
    assert step_flops(graph, OPERATORS) == pytest.approx(batch["input_ids"].numel() * per_token)
    assert mfu(H100.flops(BF16) * 8 * 0.5, 1.0, 8, H100, BF16) == pytest.approx(0.5)


