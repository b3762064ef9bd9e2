"""``mw.mlp``: linears of one input, what is done to their results element by element, and a linear of that, in pieces.

    x [*b, k], weights [h, k] ..., biases [h] ..., weight [m, h] -> [*b, m]

The inner width h splits as in a column parallel linear and the row parallel one after it: the result is a term of a sum. Rows
split with the batch. The operator makes the inner values of ``rows`` rows at a time, forward and backward
(``compiler.structure.mlps``), so what it keeps are its operands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call
from meshwright.ir.declared.operator import MLP, Cost, Product, Saves, Work
from meshwright.ir.rule import OpRule


def _mlp(call: Call) -> OpRule:
    count = len(call["weights"])
    operands = ["*b k!", *["h k!"] * count, *["h?"] * count, "m! h"]
    return call.line(", ".join(operands) + " -> *b m!")


def _shapes(work: Work) -> tuple[int, int, int, int, int]:
    """(rows of this rank, rows at a time, k, h, m)."""
    tokens, (m, h) = math.prod(work.operands[0][:-1]), work.operands[-1]
    return tokens, min(int(work.literal(5, "rows", 1)), tokens), work.operands[0][-1], h, m


def _inside(work: Work) -> Sequence[Product]:
    tokens, _, k, h, _ = _shapes(work)
    return (Product(1, tokens, h, k),) * len(work.args[1])


def _products(work: Work) -> Sequence[Product]:
    tokens, _, _, h, m = _shapes(work)
    return (*_inside(work), Product(1, tokens, m, h))


def _space(work: Work) -> tuple[float, float]:
    """Of one piece the inner values; in the backward what autograd holds of them with their gradients, and where the weights
    are narrower than fp32 the sums of their gradients in fp32, with that of one piece. Gradients as they are handed on are
    counted beside this."""
    _, rows, k, h, m = _shapes(work)
    size, made = work.reads.itemsize, len(work.args[1]) + len(work.args[3])
    weights = [math.prod(shape) for shape in work.operands[1:]]
    summed = sum(weights) * (4 - size) + max(weights) * size if size < 4 else 0
    forward = rows * (made * h + m) * size
    backward = rows * ((made + len(work.args[1]) + 1) * h + 2 * k) * size
    return float(forward), float(backward + summed)


def _reads(work: Work) -> list[int]:
    """How many inner values every step reads."""
    return [sum(isinstance(arg, tuple) and arg[:1] == ("at",) for arg in (*args, *(value for _, value in kwargs)))
            for _, args, kwargs in _steps(work)]


def _steps(work: Work) -> Sequence[tuple[str, tuple[object, ...], tuple[tuple[str, object], ...]]]:
    """(target, arguments, keywords) of what is done element by element, in order."""
    steps: Sequence[tuple[str, tuple[object, ...], tuple[tuple[str, object], ...]]] = work.args[3]  # type: ignore[assignment]
    return steps


def _passes(work: Work) -> tuple[float, float]:
    """Bytes that pass through memory beside the products: every step reads what it needs and writes what it makes, forward,
    once more, and backward, where it reads a gradient, too, and writes one for all that it read; and for every piece the
    weights' gradients that are added to those before. The steps run one by one, on devices that fuse others as well."""
    tokens, rows, _, h, _ = _shapes(work)
    once, size, reads = tokens * h * work.reads.itemsize, work.reads.itemsize, _reads(work)
    pieces, weights = math.ceil(tokens / max(1, rows)), sum(math.prod(shape) for shape in work.operands[1:])
    summed = pieces * weights * (2.0 * max(4, size) + (size if size < 4 else 0))
    ahead = sum(count + 1 for count in reads)
    return float(once * ahead), once * (ahead + sum(2 * count + 1 for count in reads)) + summed


def _kernels(work: Work) -> tuple[int, int]:
    """Of every piece the products and steps; in the backward these but the last product again, two for a product and one for a
    step, and one that adds the gradient of every weight."""
    tokens, rows, *_ = _shapes(work)
    pieces, inner, steps = math.ceil(tokens / max(1, rows)), len(work.args[1]), len(work.args[3])
    return pieces * (inner + 1 + steps), pieces * ((inner + steps) + 2 * (inner + 1) + steps + (inner + 1))


def _saves(args: tuple[object, ...]) -> Saves:
    """The rows and the weights, and the biases, which the inner values are made of again."""
    weights, biases = args[1], args[2]
    assert isinstance(weights, tuple)
    assert isinstance(biases, tuple)
    count = 2 + len(weights) + sum(bias is not None for bias in biases)
    return Saves(tuple((at, ()) for at in range(count)))


RULES: Mapping[str, Declaration] = {
    MLP: declare(
        _mlp, saves_of=_saves,
        cost=Cost("matmul", products=_products, space=_space, moves=_passes, again=_inside, kernels=_kernels),
    ),
}
