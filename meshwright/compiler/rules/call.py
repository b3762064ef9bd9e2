"""One operator call with its arguments by name, and the two ways to give it a rule: a line, or factors dim by dim.

``bind`` lays ``Op.args``/``Op.kwargs`` over the operator's schema, defaults filled in; a tensor argument becomes an
``Operand`` (its position among ``Op.inputs``, shape and dtype). A rule function reads a ``Call`` and returns
``call.rule(...)`` or ``call.line("...")``; a localizer changes arguments by name with ``rewrite``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.ir.declared.operator import Product, Products, Shape, Work
from meshwright.ir.graph import Graph, GraphError, Op, Ref
from meshwright.ir.notation import Dim, Line, Term, parse_line
from meshwright.ir.operators import overload
from meshwright.ir.rule import Factor, Localize, OpRule, RuleError, SequenceAlgorithm, Traffic

Dims = Sequence[Factor | None]
RuleFunction = Callable[["Call"], OpRule]
Rewritten = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""What a localizer returns: target, args, kwargs."""

MW_SCHEMAS: Mapping[str, str] = {
    "mw.valid_count": "Tensor labels, ignore_index=-100",
    "mw.cross_entropy": "Tensor logits, Tensor labels, ignore_index=-100, label_smoothing=0.0, offset, vocab, axes",
    "mw.linear_cross_entropy": "Tensor x, Tensor weight, Tensor? bias, Tensor labels, ignore_index=-100, label_smoothing=0.0, "
    "rows=1, offset, vocab, axes",
    "mw.mlp": "Tensor x, Tensor weights, Tensor biases, steps, Tensor weight, rows=1",
    "mw.batch_norm": "Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, training, momentum, "
    "eps, count, axes",
    "mw.fused_linear": "Tensor x, Tensor weight, Tensor? bias, parts, transposed",
    "mw.window": "Tensor query, Tensor key, Tensor value, scale, before, after, keys",
}
"""Arguments of meshwright's own operators that a captured graph may hold."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an operator's schema."""

    name: str
    tensor: bool
    default: Any = None
    kwarg_only: bool = False


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument: its position among ``Op.inputs`` and what it is, GLOBALLY."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Call:
    """An operator call, arguments by schema name (tensors as ``Operand``), shapes GLOBAL."""

    target: str
    arguments: Mapping[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    slots: tuple[Operand | None, ...]

    def __getitem__(self, name: str) -> Any:
        try:
            return self.arguments[name]
        except KeyError:
            raise RuleError(f"{self.target} has no argument {name!r}; it has {', '.join(self.arguments)}") from None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.results[0].shape

    def rule(
        self,
        operands: Sequence[Dims],
        results: Sequence[Dims],
        *,
        units: Mapping[Factor, int] | None = None,
        whole: Sequence[Factor] = (),
        linear: Sequence[Sequence[int]] = (),
        internal: Mapping[Factor, tuple[Traffic, ...]] | None = None,
        localize: Localize | None = None,
        fused: Mapping[int, tuple[int, int]] | None = None,
        algorithms: Mapping[str, SequenceAlgorithm] | None = None,
        grouped: Mapping[str, SequenceAlgorithm] | None = None,
        inner: Sequence[Factor] = (),
        located: Sequence[Factor] = (),
        added: Sequence[int] = (),
    ) -> OpRule:
        """The rule with these factors, checked against the shapes.

        ``operands`` in the order of ``Op.inputs``. ``units``: factors that have fewer units than their dims have elements.
        Linear groups through which a pending sum cannot pass for their dtypes are dropped, and dims of size 0 are whole.
        """
        if len(operands) != len(self.operands) or len(results) != len(self.results):
            raise RuleError(
                f"the rule of {self.target} has {len(operands)} operands and {len(results)} results, "
                f"the call has {len(self.operands)} and {len(self.results)}"
            )
        sizes: dict[Factor, int] = dict(units or {})
        even: set[Factor] = set()

        def checked(dims: Dims, tensor: Operand) -> tuple[Factor | None, ...]:
            factors = [f for f in dims if f is not None]
            if len(dims) != tensor.ndim or len(set(factors)) != len(factors):
                raise RuleError(f"the rule of {self.target} gives factors {tuple(dims)} to a tensor of shape {tensor.shape}")
            for factor, size in zip(dims, tensor.shape, strict=True):
                if factor is None or size == 0:
                    continue
                count = sizes.setdefault(factor, size)
                if size % count or (size != count and factor not in (units or {})):
                    raise RuleError(f"factor {factor!r} of {self.target} is of size {count} and of size {size}")
                if size != count:
                    even.add(factor)
            return tuple(None if size == 0 else f for f, size in zip(dims, tensor.shape, strict=True))

        left = tuple(checked(dims, tensor) for dims, tensor in zip(operands, self.operands, strict=True))
        right = tuple(checked(dims, tensor) for dims, tensor in zip(results, self.results, strict=True))
        present = {f for dims in (*left, *right) for f in dims if f is not None}
        return OpRule(
            left,
            right,
            {f: size for f, size in sizes.items() if f in present},
            frozenset(whole) & present,
            tuple(frozenset(group) for group in linear if self._passes(group)),
            {f: traffic for f, traffic in (internal or {}).items() if f in present},
            localize,
            even=frozenset(even),
            fused=fused or {},
            algorithms=algorithms or {},
            grouped=grouped or {},
            inner=frozenset(inner),
            located=frozenset(located) & present,
            added=frozenset(added),
        )

    def _passes(self, group: Sequence[int]) -> bool:
        """Whether terms of a sum survive these operands' and the results' dtypes."""
        into = [self.operands[position].dtype for position in group]
        floating = any(dtype.is_floating_point or dtype.is_complex for dtype in into)
        return (
            bool(into)
            and torch.bool not in into
            and all(
                out.dtype is not torch.bool and (out.dtype.is_floating_point or out.dtype.is_complex or not floating)
                for out in self.results
            )
        )

    def line(self, text: str | Line, **extra: Any) -> OpRule:
        """The rule that a line of the notation means for these shapes."""
        return bind_line(_parsed(text) if isinstance(text, str) else text, self, **extra)

    def whole(self, known: bool = True) -> OpRule:
        """Every dim whole: the operator runs in full on every rank."""
        operands = tuple((None,) * operand.ndim for operand in self.operands)
        return OpRule(operands, tuple((None,) * result.ndim for result in self.results), {}, known=known)


_parsed = functools.lru_cache(maxsize=None)(parse_line)


def dims_of(tensor: Operand, *whole: int) -> list[Factor | None]:
    """Factors ``dim0 dim1 ..`` for a tensor, None at the dims that stay whole (negative ones count from the end)."""
    fixed = {dim % max(tensor.ndim, 1) for dim in whole}
    return [None if i in fixed else f"dim{i}" for i in range(tensor.ndim)]


def broadcast_dims(shape: Sequence[int], result: Sequence[int], factors: Dims) -> list[Factor | None]:
    """The factors of an operand that broadcasts to a result with ``factors``, aligned at the right; dims of size 1 are free."""
    shift = len(result) - len(shape)
    return [factors[i + shift] if size == result[i + shift] else None for i, size in enumerate(shape)]


def bind_line(line: Line, call: Call, **extra: Any) -> OpRule:
    """Give the dims of a call the factors of a line. RuleError if the shapes do not fit."""
    terms = _present(line, call)
    stars: dict[str, int] = {}
    ranks = []
    present = [(term, tensor) for term, tensor in terms if tensor is not None]
    for term, tensor in (*present, *zip(line.results, call.results, strict=True)):
        many = next((dim for dim in term.dims if dim.many), None)
        extent = tensor.ndim - sum(not dim.many for dim in term.dims)
        if extent < 0 or (many is None and extent):
            fixed = tensor.ndim - extent
            raise _misfit(line, call, f"{term} has {fixed} dims, the tensor {list(tensor.shape)} has {tensor.ndim}")
        if many is not None and many.kind == "star" and stars.setdefault(many.name, extent) != extent:
            raise _misfit(line, call, f"*{many.name} stands for {stars[many.name]} dims and for {extent}")
        if many is not None and many.kind == "ellipsis":
            ranks.append(tensor.shape[(start := term.dims.index(many)) : start + extent])
    broadcast = tuple(torch.broadcast_shapes(*ranks)) if ranks else ()
    whole: set[Factor] = set()

    def factors(term: Term, tensor: Operand) -> list[Factor | None]:
        result: list[Factor | None] = []
        extent = tensor.ndim - sum(not dim.many for dim in term.dims)
        for dim in term.dims:
            names = _names(dim, stars, broadcast, tensor.shape[len(result) : len(result) + extent])
            result.extend(names)
            if dim.whole:
                whole.update(name for name in names if name is not None)
        return result

    units: dict[Factor, int] = {}
    for term, tensor in (*present, *zip(line.results, call.results, strict=True)):
        for name, count in _units(line, call, term, tensor):
            if units.setdefault(name, count) != count:
                raise _misfit(line, call, f"{name} has {units[name]} units and {count}")
    operands: list[Dims] = [()] * len(call.operands)
    places: dict[int, int] = {}
    for slot, (term, operand) in enumerate(terms):
        if operand is not None:
            operands[operand.position] = factors(term, operand)
            places[slot] = operand.position
    linear = [[places[slot] for slot in sorted(group)] for group in line.linear if group <= places.keys()]
    results = [factors(term, tensor) for term, tensor in zip(line.results, call.results, strict=True)]
    try:
        return call.rule(operands, results, units=units, whole=tuple(whole), linear=extra.pop("linear", linear), **extra)
    except RuleError as error:
        raise _misfit(line, call, str(error)) from None


def _units(line: Line, call: Call, term: Term, tensor: Operand) -> Iterator[tuple[Factor, int]]:
    """(factor, number of units) of the dims of a term that have any."""
    at = 0
    for dim in term.dims:
        if dim.unit:
            mark, text = dim.unit[0], dim.unit[1:]
            number = int(text) if text.isdigit() else call[text]
            size = tensor.shape[at]
            if type(number) is not int or number < 1 or size % number:
                given = "" if text.isdigit() else f", {text} being {number!r}"
                raise _misfit(line, call, f"{dim} of a dim of {size}{given}")
            yield dim.name, max(size // number if mark == ":" else number, 1)
        at += tensor.ndim - len(term.dims) + 1 if dim.many else 1


def _present(line: Line, call: Call) -> list[tuple[Term, Operand | None]]:
    """Pair the terms with the call's tensor arguments, None where an optional one is absent."""
    if len(line.operands) != len(call.slots) or len(line.results) != len(call.results):
        raise _misfit(
            line, call, f"it has {len(line.operands)} operands and {len(line.results)} results, "
            f"the operator takes {len(call.slots)} and returns {len(call.results)}"
        )
    for term, operand in zip(line.operands, call.slots, strict=True):
        if operand is None and not term.optional:
            raise _misfit(line, call, f"operand {term} is absent")
    return list(zip(line.operands, call.slots, strict=True))


def _names(dim: Dim, stars: Mapping[str, int], broadcast: tuple[int, ...], sizes: tuple[int, ...]) -> list[Factor | None]:
    """The factors that one dim of a term stands for; ``sizes``: the dims that it covers, if it covers many."""
    if dim.kind == "star":
        return [f"{dim.name}{i}" for i in range(stars[dim.name])]
    if dim.kind == "ellipsis":
        every = [f"dim{i}" for i in range(len(broadcast))]
        return broadcast_dims(sizes, broadcast, every)
    return [None if dim.kind == "dot" else dim.name]


def _misfit(line: Line, call: Call, why: str) -> RuleError:
    shapes = ", ".join(str(list(operand.shape)) for operand in call.operands)
    results = ", ".join(str(list(result.shape)) for result in call.results)
    return RuleError(f"the rule of {call.target} does not fit: {why}\n  rule: {line}\n  call: {shapes} -> {results}")


def products_of(line: Line) -> Products:
    """The matrix product that a line means: of its first two operands, as in einsum.

    A factor of both operands and a result is its batch, one of both that no result has is contracted.

    >>> products_of(parse_line("*b k, n k, n? -> *b n"))(Work(((2, 3, 8), (4, 8)), ((2, 3, 4),)))
    (Product(batch=1, m=6, n=4, k=8),)
    """
    if len(line.operands) < 2:
        raise RuleError(f"a matrix product has two operands, the rule has {len(line.operands)}\n  rule: {line}")

    def products(work: Work) -> tuple[Product, ...]:
        left, right = (_sizes(term, shape) for term, shape in zip(line.operands[:2], work.operands[:2], strict=True))
        made: dict[str, int] = {}
        for term, shape in zip(line.results, work.results, strict=True):
            made.update(_sizes(term, shape))
        both = left.keys() & right.keys()
        return (
            Product(
                batch=math.prod(made[f] for f in both & made.keys()),
                m=math.prod(left[f] for f in left.keys() - both if f in made),
                n=math.prod(right[f] for f in right.keys() - both if f in made),
                k=math.prod(max(left[f], right[f]) for f in both - made.keys()),
            ),
        )

    return products


def _sizes(term: Term, shape: Shape) -> dict[str, int]:
    """The size of every named dim of a tensor; dims of an ellipsis go by their distance from its end, unless they are 1."""
    sizes: dict[str, int] = {}
    extent = len(shape) - sum(not dim.many for dim in term.dims)
    at = 0
    for dim in term.dims:
        count = extent if dim.many else 1
        for i, size in enumerate(shape[at : at + count]):
            if dim.kind == "ellipsis" and size != 1:
                sizes[f"...{count - i}"] = size
            elif dim.name:
                sizes[f"{dim.name}{i}" if dim.many else dim.name] = size
        at += count
    return sizes


def schema(target: str) -> tuple[Argument, ...] | None:
    """The arguments of an operator, or None when this process knows no such operator (yet: it may be registered later)."""
    try:
        return _known_schema(target)
    except GraphError:
        return None


@functools.cache
def _known_schema(target: str) -> tuple[Argument, ...]:
    if target in MW_SCHEMAS:
        return tuple(_mw_argument(text.strip()) for text in MW_SCHEMAS[target].split(","))
    return tuple(
        Argument(
            argument.name,
            "Tensor" in str(argument.type),
            argument.default_value if argument.has_default_value() else None,
            argument.kwarg_only,
        )
        for argument in overload(target)._schema.arguments
    )


def _mw_argument(text: str) -> Argument:
    words, _, default = text.partition("=")
    *kind, name = words.split()
    return Argument(name, bool(kind), float(default) if "." in default else int(default) if default else None)


def bind(op: Op, graph: Graph) -> Call:
    """The call's arguments by name. An operator without a schema names them by position."""
    position = -1

    def tensor(value: Any) -> Any:
        nonlocal position
        if isinstance(value, Ref):
            position += 1
            known = graph.values[value.name]
            return Operand(position, known.shape, known.dtype)
        return tuple(tensor(item) for item in value) if isinstance(value, tuple | list) else value

    formal = schema(op.target) or tuple(Argument(str(i), True) for i in range(len(op.args)))
    given = {formal[i].name if i < len(formal) else str(i): tensor(value) for i, value in enumerate(op.args)}
    given |= {name: tensor(value) for name, value in op.kwargs}
    arguments = {argument.name: given.get(argument.name, argument.default) for argument in formal} | given
    slots = tuple(slot for argument in formal if argument.tensor for slot in _slots(arguments[argument.name]))
    results = tuple(
        Operand(i, value.shape, value.dtype) for i, value in enumerate(graph.values[name] for name in op.outputs)
    )
    return Call(op.target, arguments, tuple(_operands(given.values())), results, slots)


def _slots(value: Any) -> tuple[Operand | None, ...]:
    """What a line's terms are paired with: one slot per tensor argument, one per item of a list of tensors."""
    if isinstance(value, tuple):
        return tuple(item if isinstance(item, Operand) else None for item in value)
    return (value if isinstance(value, Operand) else None,)


def _operands(values: Any) -> Iterator[Operand]:
    for value in values:
        if isinstance(value, Operand):
            yield value
        elif isinstance(value, tuple):
            yield from _operands(value)


def rewrite(op: Op, target: str | None = None, **changes: Any) -> Rewritten:
    """The call with some arguments replaced, by schema name."""
    names = [argument.name for argument in schema(op.target) or ()]
    args, kwargs = list(op.args), dict(op.kwargs)
    for name, value in changes.items():
        index = names.index(name)
        if index < len(args):
            args[index] = value
        else:
            kwargs[name] = value
    return target or op.target, tuple(args), tuple(kwargs.items())


def argument(op: Op, name: str) -> Any:
    """One argument of an op by schema name, tensors as ``Ref``; its default where it is not given."""
    for index, formal in enumerate(schema(op.target) or ()):
        if formal.name == name:
            return op.args[index] if index < len(op.args) else dict(op.kwargs).get(name, formal.default)
    raise RuleError(f"{op.target} has no argument {name!r}")


def words(text: str) -> tuple[str, ...]:
    """Names in a row, for the tables."""
    return tuple(text.split())


def numel(shape: Sequence[int]) -> int:
    """Number of elements."""
    return math.prod(shape)
