"""Every operator's rule: what it says, and that running the pieces equals running the whole.

``test_every_sharding_equals_the_whole`` is the mechanical test: for each sample call and every legal assignment that the rule
derives (``meshwright.testing.check_rule``). The others state what the rules of the operators that
matter most must allow, so that a rule that splits nothing does not pass for a right one.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.compiler.rules import (
    Call,
    Operand,
    RuleBook,
    argument,
    builtin_rules,
    declare,
    default_rules,
    register_rule,
    rewrite,
)
from meshwright.compiler.rules.call import schema
from meshwright.ir.declared.draws import Seeded, draws
from meshwright.ir.declared.experts import EXPERTS
from meshwright.ir.declared.operator import Work
from meshwright.ir.gradients.custom import CUSTOM
from meshwright.ir.graph import Graph, Op, Ref, Value
from meshwright.ir.mesh import Mesh
from meshwright.ir.notation import RuleError
from meshwright.ir.program import DRAW, SEED
from meshwright.ir.rule import Local, OpRule, place
from meshwright.runtime.ops import OPS
from meshwright.testing import Sample, assignments, check, check_rule, one_rank, whole_run
from tests.rule_samples import SAMPLES


@pytest.mark.parametrize("target", sorted(SAMPLES))
def test_every_sharding_equals_the_whole(target: str) -> None:
    torch.manual_seed(0)
    for sample in SAMPLES[target]():
        check_rule(target, sample, most=3, book=builtin_rules())


@pytest.mark.parametrize(
    ("target", "args", "line", "assignment"),
    [
        ("aten.relu.default", (torch.randn(4, 8),), "a b -> a b ; +0", {"a": "+0"}),
        ("aten.softmax.int", (torch.randn(4, 8), 1), "a b -> a b", {"a": "b"}),
        ("aten.amax.default", (torch.randn(4, 8), (1,)), "a b -> a", {"a": "b"}),
        ("aten.mean.dim", (torch.randn(4, 8), (1,)), "a b -> a", {"a": "b"}),
        ("aten.transpose.int", (torch.randn(4, 4), 0, 1), "a b -> a b", {"a": "a"}),
        ("aten.cumsum.default", (torch.randn(4, 8), 1), "a b -> a b", {"a": "b"}),
        ("aten.addmm.default", (torch.randn(4), torch.randn(2, 8), torch.randn(8, 4)), "n, m k, k n -> m n", {"a": "k"}),
        ("aten.layer_norm.default", (torch.randn(4, 8), (8,), torch.randn(8)), "a b, b -> a b", {"a": "b"}),
    ],
)
def test_a_wrong_rule_is_caught(target: str, args: tuple[Any, ...], line: str, assignment: dict[str, str]) -> None:
    run = whole_run(target, args, {})
    operands = [Operand(i, tuple(x.shape), x.dtype) for i, x in enumerate(run.operands)]
    results = [Operand(i, tuple(y.shape), y.dtype) for i, y in enumerate(run.results)]
    rule = Call(target, {}, tuple(operands), tuple(results), tuple(operands)).line(line)
    with pytest.raises((AssertionError, RuntimeError)):
        check(run, rule, assignment, Mesh.of(a=2))


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes with the same number of elements, cut at random places, with dims of size 1 here and there."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3]), min_size=1, max_size=5))

    def shape() -> list[int]:
        dims = [1]
        for prime in primes:
            if draw(st.booleans()):
                dims.append(1)
            dims[-1] *= prime
        return dims + [1] * draw(st.integers(0, 1))

    return shape(), shape()


@settings(max_examples=25, deadline=None)
@given(reshapes())
def test_any_reshape_in_pieces_equals_the_whole(shapes: tuple[list[int], list[int]]) -> None:
    before, after = shapes
    run = whole_run("aten.reshape.default", (torch.randn(before, dtype=torch.float64), tuple(after)), {})
    rule = builtin_rules().rule_for(run.op, run.graph)
    for mesh in (Mesh.of(a=3), Mesh.of(a=2, b=2)):
        for assignment in assignments(rule, mesh, even=False):
            check(run, rule, assignment, mesh)


def test_every_rule_has_a_sample_and_every_operator_exists() -> None:
    book = builtin_rules()
    known = {target for target in book.declarations if book.known(target)}
    assert set(SAMPLES) == known - {CUSTOM, EXPERTS}  # rules that follow from graphs: tests/test_custom.py, test_experts.py
    assert [target for target in SAMPLES if schema(target) is None] == []


EXPECTED = {
    "aten.linear.default": "b0 b1 k, n k -> b0 b1 n",
    "mw.fused_linear": "b0 b1 k, n/4 k -> b0 b1 n/4, b0 b1 n/4, b0 b1 n/4",
    "aten.matmul.default": "dim0 dim1 m k, dim1 k n -> dim0 dim1 m n",
    "aten.add.Tensor": "dim0 dim1, dim0 dim1 -> dim0 dim1 ; +0,1",
    "aten.mul.Tensor": "dim0 dim1, dim0 dim1 -> dim0 dim1 ; +0 +1",
    "aten.pow.Tensor_Scalar": "dim0 dim1 -> dim0 dim1",
    "aten.relu.default": "dim0 dim1 -> dim0 dim1",
    "aten.reshape.default": "dim0 dim1 dim2/4 -> dim0 dim1 dim2/4 . ; +0",
    "aten.transpose.int": "dim0 dim1 dim2 -> dim0 dim2 dim1 ; +0",
    "aten.expand.default": "dim0 . dim2 -> dim0 dim1 dim2 ; +0",
    "aten.cat.default": "dim0 ., dim0 . -> dim0 . ; +0,1",
    "aten.slice.Tensor": "dim0 . -> dim0 . ; +0",
    "aten.softmax.int": "dim0 dim1 . -> dim0 dim1 .",
    "aten.layer_norm.default": "dim0 dim1 ., ., . -> dim0 dim1 .",
    "aten.scaled_dot_product_attention.default": "b0 h . ., b0 h . ., b0 h . . -> b0 h . .",
    "aten.embedding.default": "v d, b0 b1 -> b0 b1 d",
    "aten.index.Tensor": ". dim1 dim2, i0 -> i0 dim1 dim2 ; +0",
    "aten.gather.default": "dim0 ., dim0 i -> dim0 i ; +0",
    "aten.topk.default": "dim0 . -> dim0 ., dim0 .",
    "aten.mean.dim": "dim0 dim1 dim2 -> dim1 ; +0",
    "aten.var.correction": ". dim1 . -> dim1",
    "aten.conv2d.default": "n i . ., o i . . -> n o . .",
    "aten.max_pool2d.default": "b0 b1 . . -> b0 b1 . .",
    "aten.arange.default": "-> dim0",
    "aten.dropout.default": "dim0 dim1 -> dim0 dim1 ; +0",
    "mw.cross_entropy": "b0 b1 v, b0 b1 -> (), ()",
    "mw.linear_cross_entropy": "b0 b1 k!, v k!, b0 b1 -> (), ()",
    "mw.batch_norm": "n c ., c, c, c, c -> n c ., c, c",
}


@pytest.mark.parametrize("target", sorted(EXPECTED))
def test_what_a_rule_says(target: str) -> None:
    sample = SAMPLES[target]()[0]
    run = whole_run(target, sample.args, sample.kwargs, sample.fixed)
    assert str(builtin_rules().rule_for(run.op, run.graph)) == EXPECTED[target]


def rule_of(target: str, *args: Any, **kwargs: Any) -> OpRule:
    run = whole_run(target, args, kwargs, fixed=range(len(args) + len(kwargs)))
    return default_rules().rule_for(run.op, run.graph)


def test_hidden_dims_split_in_heads() -> None:
    rule = rule_of("aten.reshape.default", torch.zeros(2, 3, 32), (2, 3, 8, 4))
    assert rule.sizes["dim2"] == 8
    assert rule.even == {"dim2"}
    merged = rule_of("aten.reshape.default", torch.zeros(2, 3, 32), (6, 32))
    assert str(merged) == "dim0/2 . dim2 -> dim0/2 dim2 ; +0"
    assert merged.sizes["dim0"] == 2


def test_grouped_queries_split_in_key_heads() -> None:
    q, k = torch.zeros(2, 8, 3, 4), torch.zeros(2, 2, 3, 4)
    grouped = rule_of("aten.scaled_dot_product_attention.default", q, k, k, enable_gqa=True)
    assert grouped.sizes["h"] == 2
    assert str(grouped) == "b0 h/2 . ., b0 h/2 . ., b0 h/2 . . -> b0 h/2 . ."
    single = rule_of("aten.scaled_dot_product_attention.default", q, k[:, :1], k[:, :1], enable_gqa=True)
    assert str(single) == "b0 h . ., b0 . . ., b0 . . . -> b0 h . ."
    assert single.sizes["h"] == 8


def test_vocabulary_split_costs_traffic_and_loses_no_result() -> None:
    rule = rule_of("mw.cross_entropy", torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64), -100, 0.0)
    assert [(t.kind, t.elements, t.itemsize) for t in rule.internal["v"]] == [("all_reduce", 4, 4), ("all_reduce", 8, 4)]


def test_an_affine_operator_is_not_linear() -> None:
    x = torch.zeros(4)
    assert rule_of("aten.add.Tensor", x, 1.0).linear == ()
    assert rule_of("aten.masked_fill.Scalar", x, x > 0, -1.0).linear == ()
    assert rule_of("aten.masked_fill.Scalar", x, x > 0, 0).linear == (frozenset({0}),)
    assert rule_of("aten.mul.Tensor", x, x > 0).linear == (frozenset({0}),)
    assert rule_of("aten._to_copy.default", x, dtype=torch.int64).linear == ()


def test_a_number_may_come_first() -> None:
    """Of sums, products and quotients torch keeps ``torch.add(2.0, x)`` as it was called."""
    x = torch.ones(4)
    linear = {name: rule_of(f"aten.{name}.Tensor", 2.0, x).linear for name in ("add", "sub", "mul", "div")}
    assert linear == {"add": (), "sub": (), "mul": (frozenset({0}),), "div": ()}
    saved = {name: str(builtin_rules().operators[f"aten.{name}.Tensor"].saved((2.0, Ref("x")))) for name in ("mul", "div")}
    assert saved == {"mul": "0:1 1:0", "div": "0"}  # of a product by a number nothing: there is no operand 1
    passes = builtin_rules().operators["aten.sub.Tensor"].cost.passes
    assert passes is not None
    assert [list(passes(Work(((4,),), ((4,),), args=args))) for args in ((Ref("x"), 2.0), (2.0, Ref("x")))] == [[0], []]


def test_an_operand_used_twice_is_two_operands() -> None:
    values = {"x": Value("x", (4, 8), torch.float32), "y": Value("y", (4, 8), torch.float32)}
    op = Op("square", "aten.mul.Tensor", (Ref("x"), Ref("x")), (), ("y",))
    rule = default_rules().rule_for(op, Graph(values, ("x",), (), (op,), None))
    placed = place(rule, {"a": "+0"}, Mesh.of(a=2), [True, True])
    assert [str(sharding) for sharding in placed.operands] == ["[_, _] +a", "[_, _] ~a"]


def test_tensor_keywords_are_operands_in_order_of_appearance() -> None:
    q, mask = torch.zeros(2, 4, 3, 4), torch.zeros(2, 1, 3, 3)
    rule = rule_of("aten.scaled_dot_product_attention.default", q, q, q, dropout_p=0.0, attn_mask=mask)
    assert str(rule) == "b0 h . ., b0 h . ., b0 h . ., b0 . . . -> b0 h . ."
    rule = rule_of("aten.scaled_dot_product_attention.default", q[0], q[0], q[0], dropout_p=0.0, attn_mask=mask[0, 0, 0])
    assert str(rule) == "h . ., h . ., h . ., . -> h . ."


def test_an_unknown_operator_is_whole() -> None:
    rule = rule_of("aten.linalg_inv.default", torch.eye(4)) if not default_rules().known("aten.linalg_inv.default") else None
    assert rule is not None
    assert not rule.known
    assert str(rule) == ". . -> . ."
    assert rule.splittable == ()


# the calls of one rank


def local_call(target: str, assignment: dict[str, str], mesh: Mesh, rank: int, *args: Any, **kwargs: Any) -> Any:
    run = whole_run(target, args, kwargs, fixed=range(len(args) + len(kwargs)))
    rule = default_rules().rule_for(run.op, run.graph)
    assert rule.localize is not None
    assert rule.legal(assignment, mesh)
    local = Local(
        mesh, mesh.coordinates(rank), assignment, place(rule, assignment, mesh, run.differentiable),
        tuple(tuple(x.shape) for x in run.operands), tuple(tuple(y.shape) for y in run.results),
    )
    return rule.localize(run.op, local)


def _salts(make: Callable[[int], Any]) -> list[int]:
    calls = [make(rank) for rank in range(4)]
    found = [dict(kwargs)[DRAW] for _, _, kwargs in calls]
    assert all(seed == Ref(SEED) for seed, _, _ in found)
    return [salt for _, salt, _ in found]


def test_dropout_differs_between_pieces_and_agrees_between_replicas() -> None:
    mesh, x = Mesh.of(a=2, b=2), torch.zeros(4, 8)
    salts = _salts(lambda rank: local_call("aten.dropout.default", {"a": "dim0"}, mesh, rank, x, 0.5, True))
    assert salts[0] == salts[1] != salts[2] == salts[3]
    both = {"a": "dim0", "b": "dim1"}
    assert len(set(_salts(lambda rank: local_call("aten.dropout.default", both, mesh, rank, x, 0.5, True)))) == 4
    target, args, _ = local_call("aten.dropout.default", {}, mesh, 0, x, 0.5, True)
    assert (target, args[:2]) == ("mw.dropout", (Ref("x0"), 0.5))
    q = torch.zeros(2, 4, 3, 4)
    attention = "aten.scaled_dot_product_attention.default"
    salts = _salts(lambda rank: local_call(attention, {"b": "h"}, mesh, rank, q, q, q, dropout_p=0.5))
    assert salts[0] == salts[2] != salts[1] == salts[3]





def op_of(target: str, sample: Sample) -> Op:
    """The call of a sample, its tensors as references."""
    def named(value: Any) -> Any:
        return tuple(map(named, value)) if isinstance(value, tuple | list) else Ref("x") if torch.is_tensor(value) else value

    return Op("op", target, named(sample.args), tuple((key, named(value)) for key, value in sample.kwargs.items()), ("y",))


DRAWING = sorted(target for target, make in SAMPLES.items() if any(not x.values and draws(op_of(target, x)) for x in make()))


@pytest.mark.parametrize("target", DRAWING)
def test_replicas_draw_alike_and_pieces_apart(target: str) -> None:
    """On two axes, one splitting the result and one not: and nothing of what the process would draw itself is used up."""
    mesh, state = Mesh.of(a=2, b=2), torch.get_rng_state()
    for sample in SAMPLES[target]():
        run = whole_run(target, sample.args, sample.kwargs, sample.fixed)
        if sample.values or not draws(run.op):
            continue
        alike = tuple(torch.full_like(x, x.flatten()[0]) for x in run.operands)  # so that only the draws tell pieces apart
        run = replace(run, operands=alike)
        rule = builtin_rules().rule_for(run.op, run.graph)
        for factor in (None, *rule.splittable):
            assignment = {} if factor is None else {"a": factor}
            placed = place(rule, assignment, mesh, run.differentiable)
            torch.set_rng_state(state)
            first, again = (
                [one_rank(run, rule, assignment, mesh, placed, rank)[0] for rank in range(4)] for _ in range(2)
            )
            assert torch.equal(torch.get_rng_state(), state)
            for i in range(len(run.results)):
                assert all(torch.equal(x[i], y[i]) for x, y in zip(first, again, strict=True))
                assert torch.equal(first[0][i], first[1][i])
                assert torch.equal(first[2][i], first[3][i])
            shared = factor is None or (factor == "dim2" and "feature" in target)
            assert torch.equal(first[0][0], first[2][0]) == shared, f"{rule} under {assignment}"


def test_what_draws_is_known_by_its_tag() -> None:
    """Every operator that torch tags, those without a rule too; not where its arguments switch drawing off."""
    x = torch.zeros(4, 8)
    unknown = rule_of("aten.cauchy_.default", x) if not default_rules().known("aten.cauchy_.default") else None
    assert unknown is not None
    assert isinstance(unknown.localize, Seeded)
    weights = [torch.zeros(8, 8), torch.zeros(8, 2), torch.zeros(8), torch.zeros(8), torch.zeros(8, 2), torch.zeros(8, 2)]
    lstm = (x.reshape(1, 4, 8), [torch.zeros(2, 1, 2)] * 2, weights, True, 2)
    for dropout, train in ((0.0, True), (0.5, False), (0.5, True)):
        assert draws(op_of("aten.lstm.input", Sample((*lstm, dropout, train, False, True), {}))) == (dropout > 0 and train)
    assert not draws(op_of("aten.rrelu.default", Sample((x,), {})))
    assert not draws(op_of("aten.relu.default", Sample((x,), {})))


def test_literals_become_those_of_the_piece() -> None:
    mesh = Mesh.of(a=2)
    assert local_call("aten.arange.start_step", {"a": "dim0"}, mesh, 1, 1, 13, 3)[1] == (7, 13, 3)
    assert local_call("aten.full.default", {"a": "dim1"}, mesh, 1, (4, 8), 2.0)[1] == ((4, 4), 2.0)
    assert local_call("aten.tril.default", {"a": "dim0"}, mesh, 1, torch.zeros(4, 8))[2] == (("diagonal", 2),)
    table, ids = torch.zeros(8, 4), torch.zeros(2, dtype=torch.int64)
    assert local_call("aten.embedding.default", {"a": "v"}, mesh, 1, table, ids, 3) == (
        "mw.embedding", (Ref("x0"), Ref("x1"), 4, 4, 3, False, False), (),
    )
    mean = local_call("aten.mean.dim", {"a": "dim0"}, mesh, 1, table, (0,))
    assert mean == ("mw.mean", (Ref("x0"), (0,), False, 8, None), ())
    assert local_call("aten.mean.dim", {"a": "dim1"}, mesh, 1, table, (0,))[0] == "aten.mean.dim"


LOCAL_FORMS = (
    "mw.fused_linear", "mw.embedding", "mw.mean", "mw.dropout", "mw.sdpa", "mw.cross_entropy", "mw.batch_norm",
    "mw.linear_cross_entropy",
)


@pytest.mark.parametrize("name", LOCAL_FORMS)
def test_what_localizers_call_exists(name: str) -> None:
    assert name in OPS


# users' operators and the book


def test_users_register_lines_and_functions() -> None:
    @torch.library.custom_op("meshwright_test::shift", mutates_args=())
    def shift(x: torch.Tensor, by: float) -> torch.Tensor:
        return x + by

    def function(call: Call) -> OpRule:
        assert call["by"] == 2.0
        return call.line("*b . -> *b .")

    def scenario() -> None:
        x = torch.zeros(4, 8)
        assert not rule_of("meshwright_test.shift.default", x, 2.0).known
        register_rule(shift, "*b k! -> *b k")
        assert str(rule_of("meshwright_test.shift.default", x, 2.0)) == "b0 k! -> b0 k!"
        register_rule("meshwright_test.shift", function, localize=lambda op, local: rewrite(op, by=argument(op, "by") * 2))
        assert str(rule_of("meshwright_test.shift.default", x, 2.0)) == "b0 . -> b0 ."
        assert local_call("meshwright_test.shift.default", {}, Mesh.of(a=2), 0, x, 2.0)[1] == (Ref("x0"), 4.0)
        register_rule("aten.relu.default", "a! b -> a b")
        assert str(rule_of("aten.relu.default", x)) == "a! b -> a! b"

    contextvars.copy_context().run(scenario)
    assert not default_rules().known("meshwright_test.shift.default")
    assert str(rule_of("aten.relu.default", torch.zeros(4, 8))) == "dim0 dim1 -> dim0 dim1"


def test_bad_registrations_are_refused() -> None:
    with pytest.raises(RuleError, match=r"column 6:.*"):
        register_rule("mylib.op.default", "a -> $")
    with pytest.raises(RuleError, match=r"namespace\.name\.overload"):
        register_rule("op", "a -> a")


def test_a_rule_that_does_not_fit_names_the_operator() -> None:
    def scenario() -> None:
        register_rule("aten.relu.default", "a -> a")
        with pytest.raises(RuleError, match=r"(?s)a has 1 dims, the tensor \[4, 8\] has 2.*operator: %y0 = aten.relu.default"):
            rule_of("aten.relu.default", torch.zeros(4, 8))

    contextvars.copy_context().run(scenario)


def test_equal_calls_share_one_instance_and_unequal_ones_do_not() -> None:
    x = torch.zeros(4, 8)
    assert rule_of("aten.softmax.int", x, 1) is rule_of("aten.softmax.int", x, 1)
    assert rule_of("aten.softmax.int", x, 1) is not rule_of("aten.softmax.int", x, 0)
    assert rule_of("aten.add.Tensor", x, 1) is not rule_of("aten.add.Tensor", x, True)


def test_ten_thousand_operators_of_repeated_layers_are_bound_once_each() -> None:
    values = {f"v{i}": Value(f"v{i}", (4, 8 + i % 7), torch.float32) for i in range(10_001)}
    kinds = ("aten.relu.default", "aten.neg.default", "aten.silu.default")
    ops = [Op(f"o{i}", kinds[i % 3], (Ref(f"v{i - i % 50}"),), (), (f"v{i - i % 50}",)) for i in range(10_000)]
    graph = Graph(values, ("v0",), (), (), None)
    bound: list[str] = []

    def counted(call: Call) -> OpRule:
        bound.append(call.target)
        return call.line("... -> ...")

    book = RuleBook({kind: declare(counted) for kind in kinds})
    for op in ops:
        book.rule_for(op, graph)
    assert len(bound) == 3 * len({graph.values[f"v{i}"].shape for i in range(0, 10_000, 50)})


# checking a rule of one's own


def test_more_ranks_than_key_heads_share_them() -> None:
    """Queries by heads, of which each rank's read one key head of those that it has whole."""
    def n(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64)

    q, k, v, grouped = n(2, 8, 3, 4), n(2, 2, 3, 4), n(2, 2, 3, 6), {"enable_gqa": True}
    target = "aten.scaled_dot_product_attention.default"
    others = (), (n(3, 3),), (n(2, 1, 3, 3),), (n(8, 3, 3),), (None, 0.0, True)
    rule = rule_of(target, q, k, v, enable_gqa=True)
    assert [count for count in range(2, 9) if rule.legal({"x": "shared"}, Mesh.of(x=count))] == [4, 8]
    for more in others:
        check_rule(target, Sample((q, k, v, *more), grouped), most=4)
    assert rule_of("mw.window", q, k, k, None, 1, 0, 3).legal({"x": "shared"}, Mesh.of(x=4))
    check_rule("mw.window", Sample((q, k, k, None, 1, 0, 3)), most=4)


def test_check_rule_finds_what_is_wrong_and_names_the_factor() -> None:
    @torch.library.custom_op("meshwright_test::rotate", mutates_args=())
    def rotate(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Pairs of neighbours turned, then scaled by what the row's sum says."""
        pairs = x.unflatten(-1, (-1, 2))
        return torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2) * scale

    rotate.register_autograd(
        lambda ctx, dy: (-rotate(dy * ctx.saved_tensors[0], torch.ones_like(ctx.saved_tensors[0])), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )
    x, scale = torch.randn(4, 12, dtype=torch.float64), torch.rand((), dtype=torch.float64)

    def checked(rule: Any, **options: Any) -> tuple[str, ...]:
        def scenario() -> tuple[str, ...]:
            register_rule(rotate, rule)
            return check_rule(rotate, Sample((x, scale), fixed=(1,)), **options)

        return contextvars.copy_context().run(scenario)

    good = checked("*b d:2, () -> *b d ; +0 +1")
    singles = {split for split in good if "," not in split}
    assert singles == {"b0 over 2", "b0 over 4", "d over 2", "d over 3"} | {f"+{k} over {n}" for k in (0, 1) for n in (2, 3, 4)}
    assert {"b0 over 2, d over 3", "+0 over 2, d over 3", "d over 2, d over 3"} <= set(good)
    assert checked("*b! d:2, () -> *b d:2", most=2) == ("d over 2", "d over 2, d over 3")
    for wrong, named in (
        ("*b d, () -> *b d", r"wrong where d over 4"), ("*b! d!, () -> *b d ; +0,1", r"wrong where \+0 over 2"),
        ("*b d:2, () -> *b d:4", "d has 6 units and 3"), ("b d:2, () -> . d", r"wrong where b over 2"),
        ("*b d:5, () -> *b d", "d:5 of a dim of 12"), ("*b d/by, () -> *b d", "no argument 'by'; it has x, scale"),
    ):
        with pytest.raises(RuleError, match=named):
            checked(wrong)
    with pytest.raises(RuleError, match=r"meshwright_test\.rotate\.default has no rule.*register_rule"):
        check_rule(rotate, (x, scale))
