"""The notation of rules, and what ``place`` derives from a rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.compiler.rules.call import Call, Operand
from meshwright.errors import PlanError
from meshwright.ir.mesh import Mesh
from meshwright.ir.notation import Dim, Line, RuleError, Term, parse_line
from meshwright.ir.rule import OpRule, Traffic, place
from meshwright.ir.sharding import format_sharding, parse_sharding

UNITS = ("", ":2", "/groups", ":head_dim", "/16")
NAMES = st.sampled_from(["b", "k", "n", "heads", "v_1", "X"])


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Any line of the grammar: a name is either one dim or many throughout."""
    stars, whole = draw(st.sets(NAMES, max_size=2)), draw(st.sets(NAMES, max_size=2))

    def term() -> Term:
        dims = []
        for name in draw(st.lists(NAMES, unique=True, max_size=4)):
            if name not in stars:
                dims.append(Dim("name", name, name in whole, "" if name in whole else draw(st.sampled_from(UNITS))))
            elif not any(dim.many for dim in dims):
                dims.append(Dim("star", name, draw(st.booleans())))
        if not any(dim.many for dim in dims) and draw(st.booleans()):
            dims.insert(draw(st.integers(0, len(dims))), Dim("ellipsis", whole=draw(st.booleans())))
        dims += [Dim("dot")] * draw(st.integers(0, 2))
        return Term(tuple(dims))

    operands = [Term(term().dims, draw(st.booleans())) for _ in range(draw(st.integers(0, 3)))]
    results = [term() for _ in range(draw(st.integers(1, 2)))]
    groups = st.sets(st.integers(0, len(operands) - 1), min_size=1) if operands else st.nothing()
    linear = draw(st.lists(groups, max_size=2)) if operands else []
    return Line(tuple(operands), tuple(results), tuple(frozenset(group) for group in linear))


@given(lines())
def test_a_line_is_printed_as_it_is_read(line: Line) -> None:
    assert parse_line(str(line)) == line


@given(lines(), st.sampled_from(["", " ", "  "]))
def test_spaces_between_marks_do_not_matter(line: Line, space: str) -> None:
    text = str(line)
    for mark in (",", "->", ";", "+", "?", "!", ":", "/"):
        text = text.replace(mark, f"{space}{mark}{space}")
    assert parse_line(text) == line


@pytest.mark.parametrize(
    ("text", "column", "why"),
    [
        ("*b k, n k", 10, "expected '->'"),
        ("a, -> a", 4, "a term has no dims"),
        ("a ->", 5, "there is no result"),
        ("a -> a ; +1", 11, "position of one of 1 operands"),
        ("a -> a ;", 9, "expected a linear group"),
        ("*a *b -> *a", 7, "two dims of unknown number"),
        ("a a -> a", 1, "used twice"),
        ("a, *a -> a", 1, "both one dim and *a"),
        ("a $ -> a", 3, "unexpected '$'"),
        ("a -> b?", 1, "a result cannot be absent"),
        (".! -> a", 2, "'.' is whole as it is"),
        ("* -> a", 3, "expected a factor"),
        ("*dim3 -> a", 2, "belong to '...'"),
        ("a -> a b -> a", 10, "unexpected '->'"),
        ("a:0 -> a", 3, "a number of 1 or more"),
        ("a/ -> a", 4, "a number of 1 or more, or the name of an argument"),
        ("*a:2 -> *a", 3, "a unit belongs to one dim"),
        ("a:2! -> a", 4, "a whole dim has no unit"),
        ("a:2 -> a!", 1, "'a' is whole and has a unit"),
    ],
)
def test_errors_restate_the_line_and_point(text: str, column: int, why: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse_line(text)
    message = str(caught.value)
    assert why in message
    assert f"column {column}:" in message
    assert f"\n  {text}\n  {' ' * (column - 1)}^\n" in message


def call_of(operands: list[tuple[int, ...]], results: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Call:
    tensors = tuple(Operand(i, shape, dtype) for i, shape in enumerate(operands))
    return Call("test.op.default", {}, tensors, tuple(Operand(i, shape, dtype) for i, shape in enumerate(results)), tensors)


@pytest.mark.parametrize(
    ("line", "operands", "results", "bound"),
    [
        ("*b k, n k -> *b n", [(2, 3, 8), (4, 8)], [(2, 3, 4)], "b0 b1 k, n k -> b0 b1 n"),
        ("..., ... -> ... ; +0,1", [(2, 3, 8), (3, 1)], [(2, 3, 8)], "dim0 dim1 dim2, dim1 . -> dim0 dim1 dim2 ; +0,1"),
        ("... m k, ... k n -> ... m n", [(5, 3, 8), (8, 4)], [(5, 3, 4)], "dim0 m k, k n -> dim0 m n"),
        ("*b v! -> *b", [(2, 8)], [(2,)], "b0 v! -> b0"),
        ("*b . -> () ; +0", [(2, 8)], [()], "b0 . -> () ; +0"),
        ("-> ...", [], [(4, 8)], "-> dim0 dim1"),
        ("a b -> a b", [(0, 8)], [(0, 8)], ". b -> . b"),
    ],
)
def test_binding_gives_every_dim_its_factor(
    line: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]], bound: str
) -> None:
    rule = call_of(operands, results).line(line)
    assert str(rule) == bound
    assert str(parse_line(str(rule))) == bound


@pytest.mark.parametrize(
    ("line", "operands", "results", "why"),
    [
        ("a b -> a", [(2, 3, 4)], [(2,)], "a b has 2 dims, the tensor [2, 3, 4] has 3"),
        ("a, a -> a", [(2,), (3,)], [(2,)], "factor 'a' of test.op.default is of size 2 and of size 3"),
        ("*b k, *b -> *b", [(2, 3, 4), (2,)], [(2, 3)], "*b stands for 2 dims and for 1"),
        ("a -> a", [(2,), (2,)], [(2,)], "it has 1 operands and 1 results, the operator takes 2 and returns 1"),
    ],
)
def test_a_line_that_does_not_fit_says_why(
    line: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]], why: str
) -> None:
    with pytest.raises(RuleError) as caught:
        call_of(operands, results).line(line)
    assert why in str(caught.value)
    assert f"rule: {line}" in str(caught.value)


LINEAR = OpRule((("b", "k"), ("n", "k")), (("b", "n"),), {"b": 4, "k": 8, "n": 6})
MESH = Mesh.of(dp=2, tp=2)


@pytest.mark.parametrize(
    ("assignment", "operands", "result"),
    [
        ({}, ["[_, _]", "[_, _]"], "[_, _]"),
        ({"dp": "b"}, ["[_@dp, _]", "[_, _] ~dp"], "[_@dp, _]"),
        ({"tp": "n"}, ["[_, _] ~tp", "[_@tp, _]"], "[_, _@tp]"),
        ({"tp": "k"}, ["[_, _@tp]", "[_, _@tp]"], "[_, _] +tp"),
        ({"dp": "b", "tp": "k"}, ["[_@dp, _@tp]", "[_, _@tp] ~dp"], "[_@dp, _] +tp"),
        ({"tp": "b", "dp": "b"}, ["[_@(dp,tp), _]", "[_, _] ~dp ~tp"], "[_@(dp,tp), _]"),
    ],
)
def test_place_derives_the_shardings(assignment: dict[str, str], operands: list[str], result: str) -> None:
    placed = place(LINEAR, assignment, MESH, [True, True])
    assert [format_sharding(sharding) for sharding in placed.operands] == operands
    assert format_sharding(placed.results[0]) == result


def test_what_takes_no_gradient_is_read_as_invariant() -> None:
    assert place(LINEAR, {"dp": "b"}, MESH, [True, False]).operands[1] == parse_sharding("[_, _]")


def test_a_pending_sum_passes_through_a_linear_group() -> None:
    rule = call_of([(4, 8), (8,)], [(4, 8)]).line("..., ... -> ... ; +0 +1")
    placed = place(rule, {"dp": "dim0", "tp": "+1"}, MESH, [True, True])
    assert [str(sharding) for sharding in (*placed.operands, *placed.results)] == [
        "[_@dp, _] ~tp", "[_] +tp ~dp", "[_@dp, _] +tp",
    ]


def test_results_without_an_internal_factor_are_complete() -> None:
    rule = OpRule((("b", "v"),), ((),), {"b": 4, "v": 8}, internal={"v": (Traffic("all_reduce", 4, 4),)})
    assert place(rule, {"dp": "b", "tp": "v"}, MESH, [True]).results[0] == parse_sharding("[] +dp")


def test_pending_sums_pass_only_between_dtypes_that_keep_them() -> None:
    half = call_of([(4,)], [(4,)], torch.bool)
    assert half.line("... -> ... ; +0").linear == ()
    floats = Operand(0, (4,), torch.float32)
    cast = Call("test.cast.default", {}, (floats,), (Operand(0, (4,), torch.int64),), (floats,))
    assert cast.line("... -> ... ; +0").linear == ()
    assert call_of([(4,)], [(4,)]).line("... -> ... ; +0").linear == (frozenset({0}),)


def test_legal_counts_units_and_pieces() -> None:
    rule = call_of([(4, 24)], [(4, 6, 4)]).rule([["b", "h"]], [["b", "h", None]], units={"h": 6}, linear=[[0]])
    assert rule.splittable == ("b", "h")
    three = Mesh.of(a=3, b=2, c=4)
    assert rule.legal({"a": "h"}, three)
    assert rule.legal({"a": "h", "b": "h"}, three)
    assert not rule.legal({"c": "h"}, three)
    assert not rule.legal({"c": "h"}, three, even=False)  # pieces of 24 in 4 are not whole heads
    assert rule.legal({"b": "b"}, three)
    assert not rule.legal({"a": "b"}, three, even=False)  # pieces 2, 2, 0
    assert rule.legal({"a": "+0"}, three)
    assert not rule.legal({"a": "+1"}, three)
    assert not rule.legal({"a": "missing"}, three)
    uneven = call_of([(8,)], [(8,)]).line("a -> a")
    assert uneven.legal({"a": "a"}, three, even=False)
    assert not uneven.legal({"a": "a"}, three)


@pytest.mark.parametrize("factor", ["+1", "+-1", "+x"])
def test_a_pending_sum_of_operands_that_the_rule_does_not_name_is_refused(factor: str) -> None:
    """As a plan file may say it."""
    rule = OpRule((("b",), ("b",)), (("b",),), {"b": 4}, linear=(frozenset({0}),))
    assert place(rule, {"x": "+0"}, Mesh.of(x=2), [True, True]).operands[0].partial == {"x"}
    with pytest.raises(PlanError, match="is no choice of the operator"):
        place(rule, {"x": factor}, Mesh.of(x=2), [True, True])
