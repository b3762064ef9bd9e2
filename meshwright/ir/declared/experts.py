"""A mixture of experts, as a value: what the experts do with the rows that are theirs.

The experts of a mixture are stacked: one parameter holds a matrix of each. A call is one operator of the captured graph,

    mw.experts(Experts, x, ids, weights, (operands...)) -> y

    x        [*t, h]     tokens
    ids      [*t, k]     the experts of every token, integers in [0, count)
    weights  [*t, k]     what every expert's answer counts (or None)
    operands             weights and biases stacked over experts [e, ...], and others that all experts share
    y        [*t, h']    the sum of the k answers

and what a model spells as sort, gather, histogram, grouped products, inverse permutation and sum. In between, a *row* is a
token for one of its experts; rows lie sorted by expert, and ``Experts.graph`` says what becomes of them, row by row::

    inputs    rows [n, h], ids [n], ends [count] (where the rows of each expert end), weights [n], then the operands
    output    rows [n, h']

``mw.grouped_linear(rows, weight, ends, transposed, parts)`` is the product in it: the rows of an expert times its matrix, in
``parts`` equal parts of the last dim, each a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from meshwright.errors import InputError
from meshwright.ir.declared.routing import Routing
from meshwright.ir.gradients.custom import content
from meshwright.ir.graph import Graph, Ref

EXPERTS = "mw.experts"
"""The target of a call."""
GROUPED = "mw.grouped_linear"
ROWS, IDS, ENDS, WEIGHTS = range(4)
"""Positions of the inputs of ``Experts.graph`` that are no operands."""
GIVEN = 4
IMBALANCE = 1.25
"""Rows of the rank that gets most over the mean, where experts are split: assumed, as a balanced router leaves them."""


@dataclass(frozen=True, eq=False)
class Experts:
    """Two are equal if they compute the same.

    ``graph``: see the head of this file, its shapes those of all rows of the global batch.
    ``count``: number of experts. ``chosen``: experts of a token.
    ``scaled``: the answers are multiplied by ``weights`` after all else, where the tokens are; otherwise the graph reads them.
    ``stacked``: for every operand whether its first dim is the experts.
    ``imbalance``: rows of the fullest rank over the mean where experts are split; what prices assume, not what is computed.
    ``limited``: (groups of experts, how many of them a token's are in); of this too only prices know.
    """

    graph: Graph
    count: int
    chosen: int
    scaled: bool
    stacked: tuple[bool, ...]
    imbalance: float = field(default=IMBALANCE, kw_only=True)
    limited: tuple[int, int] = field(default=(1, 1), kw_only=True)

    @property
    def operands(self) -> tuple[str, ...]:
        """The inputs of the graph that are operands of the call."""
        return self.graph.inputs[GIVEN:]

    @property
    def routing(self) -> Routing:
        """What a router chooses, as prices take it."""
        return Routing(self.count, self.chosen, *self.limited)

    @property
    def output(self) -> str:
        """What the graph makes."""
        found: Ref = self.graph.output_tree[0]
        return found.name

    @cached_property
    def _content(self) -> str:
        return repr((self.count, self.chosen, self.scaled, self.stacked, content(self.graph)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experts) and other._content == self._content

    def __hash__(self) -> int:
        return hash(self._content)

    def __repr__(self) -> str:
        return f"{self.count} experts"


def with_imbalance(graph: Graph, imbalance: float) -> Graph:
    """The graph whose mixtures are priced with this imbalance. Raises InputError for less than 1."""
    if isinstance(imbalance, bool) or not isinstance(imbalance, int | float) or not 1.0 <= imbalance < math.inf:
        raise InputError(f"expert_imbalance={imbalance!r} is not the rows of the fullest rank over the mean: give 1 (even "
                         "routing) or more, such as 1.25")
    ops = tuple(
        replace(op, args=(replace(op.args[0], imbalance=float(imbalance)), *op.args[1:])) if op.target == EXPERTS else op
        for op in graph.ops
    )
    return replace(graph, ops=ops)


def balanced(tree: Any) -> Any:
    """Arguments without what only prices read."""
    if isinstance(tree, tuple | list):
        return type(tree)(map(balanced, tree))
    return replace(tree, imbalance=IMBALANCE, limited=(1, 1)) if isinstance(tree, Experts) else tree


def arguments(args: tuple[Any, ...]) -> tuple[Experts, Ref, Ref, Ref | None, tuple[Ref, ...]]:
    """The arguments of a call: (experts, x, ids, weights, operands)."""
    experts, x, ids, weights, operands = args
    return experts, x, ids, weights, operands
