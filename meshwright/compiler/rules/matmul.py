"""Matrix products: the summed factor leaves a pending sum.

What is added to a product (a bias, ``addmm``'s first operand) must be added once although every rank holds a term of the
sum: one rank brings it (``OpRule.added``). Its gradient is that of the sum, which every rank has whole: nothing is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import (
    Call,
    RuleFunction,
    argument,
    broadcast_dims,
    dims_of,
    numel,
)
from meshwright.ir.declared.operator import Cost, Linear, Product, Work
from meshwright.ir.graph import Op
from meshwright.ir.notation import RuleError, parse_line
from meshwright.ir.rule import Factor, OpRule, Traffic


def _linear(call: Call) -> OpRule:
    """A product and its bias."""
    bias = call["bias"]
    return call.line("*b k, n k, n? -> *b n", added=[] if bias is None else [bias.position])


def _fused_linear(call: Call) -> OpRule:
    """``*b k, (parts n) k -> *b n`` for each part: n is split within every part.

    At rest the weight is cut like any other, so a rank exchanges rows to have its piece of each part
    (``runtime.state.layout``).
    """
    x, weight, bias, parts = call["x"], call["weight"], call["bias"], call["parts"]
    batch = [f"b{i}" for i in range(x.ndim - 1)]
    dim = 1 if call["transposed"] else 0
    fused = {operand.position: (at, parts) for operand, at in ((weight, dim), (bias, 0)) if operand is not None}
    operands: list[list[Factor | None]] = [[*batch, "k"], ["k", "n"] if dim else ["n", "k"], ["n"]]
    exchanged = tuple(
        Traffic("all_to_all", numel(operand.shape), operand.dtype.itemsize, backward, operand.position)
        for operand in (weight, bias) if operand is not None for backward in (False, True)
    )
    return call.rule(
        operands[: len(call.operands)], [[*batch, "n"]] * parts, units={"n": weight.shape[dim] // parts},
        internal={"n": exchanged}, fused=fused, added=[] if bias is None else [bias.position],
    )


def _product_plus(line: str) -> RuleFunction:
    """``beta * self + alpha * (x @ y)``: self broadcasts to the product."""
    product = parse_line(line)

    def rule(call: Call) -> OpRule:
        result: list[Factor | None] = [dim.name for dim in product.results[0].dims]
        factors = [[dim.name for dim in term.dims] for term in product.operands]
        return call.rule([broadcast_dims(call["self"].shape, call.shape, result), *factors], [result], added=[0])

    return rule


def _matmul(call: Call) -> OpRule:
    """``torch.matmul``: a vector on either side loses its matrix dim."""
    left, right = call["self"].ndim, call["other"].ndim
    if left == 1 or right == 1:
        line = {(1, 1): "k, k -> ()", (1, 2): "k, k n -> n", (2, 1): "m k, k -> m"}.get((left, right))
        return call.line(line or ("k, *b k n -> *b n" if left == 1 else "*b m k, k -> *b m"))
    return call.line("... m k, ... k n -> ... m n")


def _einsum(call: Call) -> OpRule:
    """Letters are factors; the dims of an ellipsis align at the right."""
    left, arrow, right = call["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = [letter for letter in left if letter.isalpha()]
        right = "..." * ("..." in left) + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    sizes: dict[str, int] = {}
    operands = [_letters(term, operand.shape, sizes) for term, operand in zip(terms, call.operands, strict=True)]
    if any(len(set(dims)) != len(dims) for dims in operands):
        return call.whole()  # a diagonal
    result = _letters(right, call.shape, sizes)
    free = [
        [None if size != sizes[letter] else letter for letter, size in zip(dims, operand.shape, strict=True)]
        for dims, operand in zip(operands, call.operands, strict=True)
    ]
    return call.rule(free, [list[Factor | None](result)])


def _letters(term: str, shape: tuple[int, ...], sizes: dict[str, int]) -> list[str]:
    """One factor per dim; notes each factor's size (a size of 1 broadcasts)."""
    before, dots, after = term.partition("...")
    extent = len(shape) - len(before) - len(after)
    if extent < 0 or (extent and not dots):
        raise RuleError(f"einsum term {term!r} does not fit a tensor of shape {list(shape)}")
    dims = [*before, *(f"e{extent - i}" for i in range(extent)), *after]
    for factor, size in zip(dims, shape, strict=True):
        sizes[factor] = max(size, sizes.get(factor, size))
    return dims


def _tensordot(call: Call) -> OpRule:
    """Contracted dims share a factor; the others follow each other."""
    x, y = call["self"], call["other"]
    left, right = dims_of(x), [f"n{i}" if f else f for i, f in enumerate(dims_of(y))]
    for i, (a, b) in enumerate(zip(call["dims_self"], call["dims_other"], strict=True)):
        left[a] = right[b] = f"k{i}"
    result = [f for f in (*left, *right) if not (f or "").startswith("k")]
    return call.rule([left, right], [result])


def _grouped_mm(call: Call) -> OpRule:
    """Rows in groups, a matrix per group: the rows and the groups stay whole. The kernel wants strides of 16 bytes."""
    x, weight = call["self"], call["mat2"]
    if x.ndim != 2 or weight.ndim != 3:
        return call.whole()
    operands: list[list[Factor | None]] = [[None, "k"], [None, "k", "n"]]
    operands += [[None] * operand.ndim for operand in call.operands[2:]]
    units = {f: max(1, size * x.dtype.itemsize // 16) for f, size in zip("kn", weight.shape[1:], strict=True)}
    aligned = all(size % units[f] == 0 for f, size in zip("kn", weight.shape[1:], strict=True))
    whole = [] if aligned and call["bias"] is None else ["k", "n"]
    return call.rule(operands, [[None, "n"]], units=units if aligned else None, whole=whole)


def _rows_by_weight(work: Work) -> Sequence[Product]:
    """A linear, whose weight may hold several parts or be turned."""
    left, right = work.operands[:2]
    return (Product(1, math.prod(left[:-1]), math.prod(right) // max(left[-1], 1), left[-1]),)


def _groups(work: Work) -> Sequence[Product]:
    left, right = work.operands[:2]
    groups = right[0] if len(right) == 3 else 1
    return (Product(groups, -(-left[0] // max(groups, 1)), right[-1], left[-1]),)


def _matrices(work: Work, at: int = 0) -> Sequence[Product]:
    """Matrices or vectors, with batch dims in front; of one operand (an einsum that only sums) a row times ones."""
    if len(work.operands) < at + 2:
        made = max(math.prod(work.results[0]), 1)
        return (Product(1, made, 1, max(math.prod(work.operands[at]) // made, 1)),)
    left, right = work.operands[at : at + 2]
    if len(left) <= 1 or len(right) <= 1:
        return (Product(1, math.prod(left[:-1]), 1 if len(right) <= 1 else right[-1], left[-1] if left else 1),)
    if len(right) == 2:
        return (Product(1, math.prod(left[:-1]), right[-1], left[-1]),)
    return (Product(math.prod(work.results[0][:-2]), left[-2], right[-1], left[-1]),)


def _contracted(work: Work) -> Sequence[Product]:
    """``tensordot``: what is left of either operand is rows or columns."""
    k = math.prod(work.operands[0][int(dim)] for dim in work.literal(2, "dims_self", ()))
    return (Product(1, math.prod(work.operands[0]) // max(k, 1), math.prod(work.operands[1]) // max(k, 1), k),)


def _plain_linear(op: Op) -> Linear:
    x, weight, bias = (argument(op, name) for name in ("input", "weight", "bias"))
    return Linear(x, weight, bias)


def _linear_of_parts(op: Op) -> Linear:
    return Linear(*op.args[:5])


LINEAR = Cost("matmul", products=_rows_by_weight)
SECOND = Cost("matmul", products=partial(_matrices, at=1), left=1)
MM = "aten.mm.default aten.addmm.default"
"""What the dispatcher runs in the place of a linear."""
product = partial(declare, cost=Cost("matmul", products=_matrices), saves="0:1 1:0")
weighted = partial(product, cost=LINEAR, recompute="costly", runs=MM)
added = partial(declare, cost=SECOND, saves="1:2 2:1")

RULES: Mapping[str, Declaration] = {
    "aten.linear.default": weighted(_linear, linear=_plain_linear),
    "mw.fused_linear": weighted(_fused_linear, linear=_linear_of_parts),
    "aten.mm.default": product("m k, k n -> m n", recompute="costly"),
    "aten.bmm.default": product("b m k, b k n -> b m n"),
    "aten.bilinear.default": declare("*b i!, *b j!, n i! j!, n? -> *b n"),
    "aten.cdist.default": declare("... m k!, ... n k! -> ... m n"),
    "aten.mv.default": product("m k, k -> m"),
    "aten.dot.default": product("k, k -> ()"),
    "aten.vdot.default": declare("k, k -> ()"),
    "aten.outer.default": declare("m, n -> m n"),
    "aten.addmm.default": added(_product_plus("m k, k n -> m n"), recompute="costly"),
    "aten.baddbmm.default": added(_product_plus("b m k, b k n -> b m n")),
    "aten.addmv.default": declare(_product_plus("m k, k -> m")),
    "aten.matmul.default": product(_matmul),
    "aten.einsum.default": product(_einsum),
    "aten.tensordot.default": product(_tensordot, cost=Cost("matmul", products=_contracted)),
    "aten._grouped_mm.default": product(_grouped_mm, cost=Cost("matmul", products=_groups), recompute="costly"),
}
