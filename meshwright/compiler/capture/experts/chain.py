"""The chain that stacked experts are exported as, found by its data flow and made one operator, ``mw.experts``.

    ids [*t, k]  ->  reshape [n]  ->  sort  ->  sorted ids, perm             (or argsort -> perm, and ids[perm])
    x[perm // k], weights[perm]          rows, sorted by expert              (or x[tokens[perm]], x[tokens][perm], where tokens
                                                                              is 0 .. t - 1, each k times)
    cumsum(histc(sorted ids))            where the rows of each expert end
    grouped product(rows, stacked weights, ends), biases[sorted ids], and anything that works row by row
    rows[inverse of perm]  ->  reshape [*t, k, h]  ->  sum over k

Sorting and counting need every token of the batch; what they are for does not. Every value is *known* as one of these things
or as a row; what is not, or what escapes from the chain, leaves it as it is. Nothing is asked of names: an operator works row
by row if its rule says that dim 0 passes through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.compiler.capture.experts.router import limited
from meshwright.compiler.capture.rewrite import eliminate_dead_code
from meshwright.compiler.rules import argument, default_rules
from meshwright.ir.declared.draws import draws
from meshwright.ir.declared.experts import EXPERTS, GROUPED, Experts
from meshwright.ir.graph import Graph, Op, Ref, Value, map_refs
from meshwright.ir.notation import RuleError

SORTS = frozenset({"aten.sort.default", "aten.sort.stable"})
ARGSORTS = frozenset({"aten.argsort.default", "aten.argsort.stable"})
FLOORS = frozenset({"aten.floor_divide.default", "aten.div.Tensor_mode"})
PRODUCTS: Mapping[str, tuple[str, str, str]] = {  # grouped product -> its arguments: rows, stacked weights, ends
    "aten._grouped_mm.default": ("self", "mat2", "offs"),
    "transformers.grouped_mm_fallback.default": ("input", "weight", "offs"),
}
CHUNK, SPLIT = "aten.chunk.default", "aten.split.Tensor"
CAST, INDEX, RESHAPE, EXPAND = "aten._to_copy.default", "aten.index.Tensor", "aten.reshape.default", "aten.expand.default"


def gather_experts(graph: Graph) -> Graph:
    """Chains of stacked experts as ``mw.experts``."""
    found: dict[str, list[Op]] = {}
    values = dict(graph.values)
    for op in graph.ops:
        if op.target in SORTS | ARGSORTS and (chain := _Chain(graph, op).found()) is not None:
            found[chain.end.name] = list(_call(chain, graph, values))
    if not found:
        return graph
    ops = [placed for op in graph.ops for placed in found.get(op.name, [op])]
    return eliminate_dead_code(replace(graph, ops=tuple(ops), values=values))


class _NoChainError(Exception):
    """What was sorted is no chain of experts."""


@dataclass
class _Chain:
    """The walk from one sort. ``roles``: what every value of the chain is, apart from rows."""

    graph: Graph
    sort: Op
    roles: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)  # value -> its name in the body
    body: list[Op] = field(default_factory=list)
    operands: dict[str, str] = field(default_factory=dict)  # value -> its name in the body
    stacked: set[str] = field(default_factory=set)
    tokens: str = ""
    weights: str = ""
    count: int = 0
    end: Any = None
    output: str = ""

    def found(self) -> _Chain | None:
        """The whole chain, or None."""
        try:
            self._walk()
        except _NoChainError:
            return None
        return self if self.end is not None and self.count else None

    @property
    def slots(self) -> int:
        """Rows of the global batch."""
        return self.graph.values[self.sort.outputs[0]].numel

    def _walk(self) -> None:
        values = self.graph.values
        source = self.sort.inputs[0]
        ids = values[source]
        if len(ids.shape) != 1 or ids.dtype.is_floating_point or argument(self.sort, "descending"):
            raise _NoChainError
        self.roles.update(zip(self.sort.outputs, ("ids", "perm") if self.sort.target in SORTS else ("perm",), strict=True))
        self.chosen = 1
        start = self.graph.producers[self.sort.outputs[0]] + 1
        for op in self.graph.ops[start:]:
            touched = [name for name in op.inputs if name in self.roles or name in self.rows]
            if touched:
                self._op(op)
            if self.end is not None:
                break
        self._closed()

    def _op(self, op: Op) -> None:
        """What one reader of the chain makes."""
        role = self._role(op)
        if role:
            self.roles[op.outputs[0]] = role
        elif self._ends(op):
            self.end = op
        elif op.target == INDEX and len(op.args[1]) == 1 and op.args[1][0] is not None:
            self._index(op, op.args[0].name, op.args[1][0].name)
        elif op.target in PRODUCTS:
            self._product(op)
        else:
            self._row_by_row(op)

    def _role(self, op: Op) -> str | None:
        """What the op makes of sorted ids, the permutation or answers; None if it is something else."""
        kinds = [self.roles.get(name, "") for name in op.inputs]
        target, values = op.target, self.graph.values
        if target in FLOORS and kinds == ["perm"] and self._floors(op):
            self.chosen = op.args[1]
            return "token"
        if target == CAST and kinds in (["ids"], ["counts"], ["cast"]):
            return "cast" if kinds != ["counts"] else "counts"
        if target == "aten.histc.default" and kinds[0] in ("ids", "cast"):
            bins, low, high = (argument(op, name) for name in ("bins", "min", "max"))
            self.count = bins
            return "counts" if (low, high) == (0, bins - 1) else None
        if target == "aten.cumsum.default" and kinds == ["counts"]:
            return "ends"
        if target == "aten.index_put.default" and kinds[1:2] == ["perm"] and len(op.args[1]) == 1:
            written = self._maker(op.args[2])
            counts_up = written is not None and written.target == "aten.arange.default" and written.args == (self.slots,)
            return "inverse" if counts_up and not argument(op, "accumulate") else None
        if target in SORTS | ARGSORTS and kinds == ["perm"] and argument(op, "descending"):
            return None
        if target in SORTS and kinds == ["perm"] and len(values[op.inputs[0]].shape) == 1:
            self.roles[op.outputs[1]] = "inverse"
            return "order"
        if target in ARGSORTS and kinds == ["perm"]:
            return "inverse"
        if target == INDEX and kinds == ["", "perm"] and len(op.args[1]) == 1:
            if op.inputs[0] == self.sort.inputs[0]:
                return "ids"
            repeated = self._repeated(op.args[0])
            self.chosen = repeated or self.chosen
            return "token" if repeated else None
        if target == RESHAPE and kinds[0] in ("answers", "by token"):
            before, out = values[op.inputs[0]].shape, values[op.outputs[0]].shape
            return "by token" if out[-1:] == before[-1:] and out[-2:-1] == (self.chosen,) else None
        if "" not in kinds and not {"answers", "by token"}.intersection(kinds):
            return "other"  # expert counts and the like: made beside the chain, of all tokens
        return None

    def _floors(self, op: Op) -> bool:
        whole = op.target == "aten.floor_divide.default" or argument(op, "rounding_mode") in ("floor", "trunc")
        return whole and isinstance(op.args[1], int) and op.args[1] > 0 and self.slots % op.args[1] == 0

    def _repeated(self, ref: Any) -> int:
        """How often every token is in this table of the tokens of all slots, in their order; 0 if it is something else."""
        sizes: list[int] = []
        made = self._maker(ref)
        while made is not None and made.target in (RESHAPE, EXPAND, "aten.unsqueeze.default"):
            before, after = (self.graph.values[name].shape for name in (made.inputs[0], made.outputs[0]))
            if made.target == EXPAND and (before[1:] != (1,) or after[:1] != before[:1] or len(after) != 2):
                return 0
            sizes += [after[1]] if made.target == EXPAND else []
            made = self._maker(made.args[0])
        counted = made is not None and made.target == "aten.arange.default" and len(made.args) == 1
        times = math.prod(sizes)
        return times if counted and len(sizes) < 2 and made is not None and made.args[0] * times == self.slots else 0

    def _maker(self, ref: Any) -> Op | None:
        at = self.graph.producers.get(ref.name) if isinstance(ref, Ref) else None
        return None if at is None else self.graph.ops[at]

    def _index(self, op: Op, table: str, by: str) -> None:
        """Something looked up for every row."""
        role, value, out = self.roles.get(by, ""), self.graph.values[table], op.outputs[0]
        maker = self._maker(op.args[0])
        if role == "perm" and maker is not None and maker.target == INDEX and len(maker.args[1]) == 1:
            repeated = self._repeated(maker.args[1][0])
            if repeated:  # the tokens of all slots, looked up before they are sorted
                self.chosen, role, table = repeated, "token", maker.inputs[0]
                value = self.graph.values[table]
        if table in self.rows and role == "inverse" and self.weights_or_rows(table):
            self.roles[out], self.output = "answers", table
        elif table in self.rows or table in self.roles:
            raise _NoChainError
        elif role == "perm" and value.shape == (self.slots, 1) and self.weights in ("", table):
            self.weights = table
            self.body.append(Op(op.name, "aten.unsqueeze.default", (Ref("weights"), 1), (), op.outputs))
            self.rows[out] = out
        elif role == "token" or (role == "perm" and len(value.shape) == 2 and not self.tokens and self.chosen == 1):
            if self.tokens not in ("", table) or value.shape[0] * self.chosen != self.slots or len(value.shape) != 2:
                raise _NoChainError
            self.tokens = table
            self.rows[out] = "rows"
        elif role == "perm":
            if self.weights not in ("", table) or value.shape != (self.slots,):
                raise _NoChainError
            self.weights = table
            self.rows[out] = "weights"
        elif role == "ids":
            self.body.append(replace(op, args=(Ref(self._operand(table, True)), (Ref("ids"),)), kwargs=()))
            self.rows[out] = out
        else:
            raise _NoChainError

    def weights_or_rows(self, table: str) -> bool:
        """Whether a row value is an answer (not the tokens or weights as they came)."""
        return self.rows[table] not in ("rows", "weights", "ids")

    def _product(self, op: Op) -> None:
        names = PRODUCTS[op.target]
        try:
            rows, weight, ends = (argument(op, name) for name in names)
            rest = [value for name, value in op.kwargs if name not in names] + list(op.args[len(names) :])
        except RuleError:
            raise _NoChainError from None
        turned = self._maker(weight)
        transposed = True
        if turned is not None and turned.target == "aten.transpose.int" and sorted(turned.args[1:]) == [1, 2]:
            weight, transposed = turned.args[0], False
        shape = self.graph.values[weight.name].shape
        if any(value is not None for value in rest) or self.roles.get(ends.name) != "ends" or len(shape) != 3:
            raise _NoChainError
        if rows.name not in self.rows:
            raise _NoChainError
        if shape[0] != self.count or weight.name in self.rows or weight.name in self.roles:
            raise _NoChainError
        args = (Ref(self.rows[rows.name]), Ref(self._operand(weight.name, True)), Ref("ends"), transposed, 1)
        self.body.append(Op(op.name, GROUPED, args, (), op.outputs))
        self.rows[op.outputs[0]] = op.outputs[0]

    def _operand(self, name: str, stacked: bool) -> str:
        known = self.operands.setdefault(name, f"operand{len(self.operands)}")
        if stacked:
            if self.graph.values[name].shape[:1] != (self.count,) and self.count:
                raise _NoChainError
            self.stacked.add(name)
        return known

    def _row_by_row(self, op: Op) -> None:
        """An operator that works on every row alone."""
        if any(name in self.roles for name in op.inputs) or draws(op):
            raise _NoChainError
        try:
            rule = default_rules().rule_for(op, self.graph)
        except RuleError:
            raise _NoChainError from None
        mine = [name in self.rows for name in op.inputs]
        factors = {dims[0] if dims else None for dims, own in zip(rule.operands, mine, strict=True) if own}
        factor = next(iter(factors))
        fits = (
            rule.known and len(factors) == 1 and factor is not None and factor not in rule.whole
            and factor not in rule.internal and rule.sizes[factor] == self.slots
            and all(factor not in dims[own:] for dims, own in zip(rule.operands, mine, strict=True))
            and all(dims[:1] == (factor,) and factor not in dims[1:] for dims in rule.results)
        )
        if not fits:
            raise _NoChainError
        args = op.args
        if op.target in (RESHAPE, EXPAND):
            args = (op.args[0], (-1, *op.args[1][1:]))
        elif rule.localize is not None and any(arg == self.slots for arg in _numbers((op.args, op.kwargs))):
            raise _NoChainError
        if op.target == CHUNK:
            op, args = replace(op, target=SPLIT, kwargs=()), self._as_split(op)
        args, kwargs = map_refs((args, op.kwargs), self._inside)
        self.body.append(replace(op, args=args, kwargs=kwargs))
        self.rows.update({name: name for name in op.outputs})

    def _as_split(self, op: Op) -> tuple[Any, ...]:
        """A chunk as a split: exports spell it in either way, and bodies in one."""
        x, count, dim = (argument(op, name) for name in ("self", "chunks", "dim"))
        return x, -(-self.graph.values[x.name].shape[dim] // count), dim

    def _inside(self, ref: Ref) -> Ref:
        return Ref(self.rows[ref.name] if ref.name in self.rows else self._operand(ref.name, False))

    def _ends(self, op: Op) -> bool:
        """Whether it is the sum of every token's answers."""
        if self.roles.get(op.inputs[0]) != "by token" or op.target != "aten.sum.dim_IntList" or op.kwargs:
            return False
        dims = len(self.graph.values[op.inputs[0]].shape)
        return tuple(op.args[1]) == (dims - 2,) and op.args[2:] in ((), (False,))

    def _closed(self) -> None:
        """Raise unless everything that the chain makes is read by it alone, but for ids and counts."""
        if self.end is None or not self.tokens or not self.output:
            raise _NoChainError
        shapes = self.graph.values
        if shapes[self.tokens].shape[0] * self.chosen != self.slots:
            raise _NoChainError
        if any(shapes[name].shape[:1] != (self.count,) for name in self.stacked):
            raise _NoChainError
        last = self.graph.producers[self.end.outputs[0]]
        mine = {*self.rows, *(name for name, role in self.roles.items() if role in ("answers", "by token"))}
        outside = [name for op in self.graph.ops[last + 1 :] for name in op.inputs]
        if mine.intersection(outside) or mine.intersection(self.graph.outputs):
            raise _NoChainError


def _numbers(tree: Any) -> Iterator[Any]:
    if isinstance(tree, tuple | list):
        for item in tree:
            yield from _numbers(item)
    elif isinstance(tree, int):
        yield tree


# --------------------------------------------------------------------------------------------------------------- the call
def _call(chain: _Chain, graph: Graph, values: dict[str, Value]) -> Iterator[Op]:
    """The operators that stand for the chain, at the place of its last."""
    end, known = chain.end, graph.values
    ids = chain.sort.inputs[0]
    maker = graph.ops[graph.producers[ids]] if ids in graph.producers else None
    if maker is not None and maker.target == RESHAPE and known[maker.inputs[0]].shape[-1:] == (chain.chosen,):
        ids = maker.inputs[0]
    tokens = known[ids].shape[:-1] if len(known[ids].shape) > 1 else (chain.slots // chain.chosen,)

    def shaped(name: str, shape: tuple[int, ...]) -> Iterator[Op | str]:
        """The value in this shape: itself, what it is a reshape of, or reshaped."""
        before = graph.ops[graph.producers[name]] if name in graph.producers else None
        if known[name].shape == shape:
            yield name
        elif before is not None and before.target == RESHAPE and known[before.inputs[0]].shape == shape:
            yield before.inputs[0]
        else:
            fresh = _fresh(values, f"{name}_by_token")
            values[fresh] = replace(known[name], name=fresh, shape=shape)
            yield Op(fresh, RESHAPE, (Ref(name), shape), (), (fresh,), end.module, end.source)
            yield fresh

    given: list[Ref | None] = []
    for name, last in ((chain.tokens, None), (ids, chain.chosen), (chain.weights, chain.chosen)):
        if not name:
            given.append(None)
            continue
        for item in shaped(name, (*tokens, known[name].shape[-1] if last is None else last)):
            if isinstance(item, Op):
                yield item
            else:
                given.append(Ref(item))
    experts = _body(chain, graph)
    operands = tuple(Ref(name) for name in chain.operands)
    out = known[end.outputs[0]]
    shape = (*tokens, out.shape[-1])
    made = end.outputs[0] if shape == out.shape else _fresh(values, f"{end.outputs[0]}_by_token")
    values[made] = replace(out, name=made, shape=shape)
    yield Op(made, EXPERTS, (experts, *given, operands), (), (made,), end.module, end.source)
    if made != end.outputs[0]:
        yield Op(end.name, RESHAPE, (Ref(made), out.shape), (), end.outputs, end.module, end.source)


def _fresh(values: Mapping[str, Value], base: str) -> str:
    name, count = base, 0
    while name in values:
        count += 1
        name = f"{base}_{count}"
    return name


def _body(chain: _Chain, graph: Graph) -> Experts:
    """What happens to a row. A last multiplication by the weights is left to the place where the tokens are."""
    slots, body, output = chain.slots, list(chain.body), chain.rows[chain.output]
    scaled = False
    last = body[-1]
    if chain.weights and last.outputs == (output,) and last.target == "aten.mul.Tensor" and not last.kwargs:
        factors = [ref.name for ref in last.args if isinstance(ref, Ref)]
        columns = [op for op in body if op.target in ("aten.unsqueeze.default", RESHAPE) and op.inputs == ("weights",)]
        column = {op.outputs[0]: op for op in columns if graph.values[op.outputs[0]].shape == (slots, 1)}
        scales = [name for name in factors if name in column]
        readers = [op for op in body if "weights" in op.inputs or (scales and scales[0] in op.inputs)]
        if len(factors) == 2 and len(scales) == 1 and readers == [column[scales[0]], last]:
            scaled, output = True, next(name for name in factors if name not in scales)
            body = [op for op in body if op is not last and op is not column[scales[0]]]
    weight = graph.values[chain.weights] if chain.weights else None
    given = {
        "rows": replace(graph.values[chain.tokens], name="rows", shape=(slots, graph.values[chain.tokens].shape[-1])),
        "ids": Value("ids", (slots,), torch.int64), "ends": Value("ends", (chain.count,), torch.int64),
        "weights": Value("weights", (slots,), weight.dtype if weight else torch.float32, bool(weight)),
    }
    values = {**given, **{inside: replace(graph.values[name], name=inside) for name, inside in chain.operands.items()}}
    values |= {name: graph.values[name] for op in body for name in op.outputs}
    made = _numbered(Graph(values, (*given, *chain.operands.values()), (), tuple(body), (Ref(output),)))
    stacked = tuple(name in chain.stacked for name in chain.operands)
    groups = limited(graph, chain.sort.inputs[0], chain.count, chain.chosen)
    return Experts(made, chain.count, chain.chosen, scaled or not chain.weights, stacked, limited=groups)


def _numbered(body: Graph) -> Graph:
    """The body with its values by number: layers have the same."""
    names = {name: name for name in body.inputs}
    for op in body.ops:
        names.update({name: f"v{len(names) - len(body.inputs) + i}" for i, name in enumerate(op.outputs)})

    def renamed(tree: Any) -> Any:
        return map_refs(tree, lambda ref: Ref(names[ref.name]))

    ops = tuple(
        Op(names[op.outputs[0]], op.target, renamed(op.args), renamed(op.kwargs), tuple(names[name] for name in op.outputs))
        for op in body.ops
    )
    values = {names[name]: replace(value, name=names[name]) for name, value in body.values.items() if name in names}
    return replace(body, values=values, ops=ops, output_tree=renamed(body.output_tree))
