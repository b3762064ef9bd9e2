"""The book of operators: every declaration by target, and the rule of one call.

A ``Declaration`` is all that is said about an operator: its sharding rule (a line of the notation or a function of the
``Call``), a localizer that rewrites the call for one rank, and its ``Operator`` (cost, what autograd keeps, recomputation).
``RuleBook.rule_for`` instantiates the rule on an operator's shapes; instances are cached by target, shapes and literals, so
repeated layers cost one look-up. Users add theirs with ``register_rule``; the registered ones live in the current context
(``contextvars``), the built-in ones in the tables of this folder.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from meshwright.compiler.rules.call import Call, RuleFunction, bind, products_of
from meshwright.ir.declared.draws import Seeded, draws
from meshwright.ir.declared.operator import Cost, Linear, Operator, Operators, Saves
from meshwright.ir.declared.registered import content, digest_of, named, remember
from meshwright.ir.graph import Graph, Op, Ref
from meshwright.ir.notation import Line, parse_line
from meshwright.ir.rule import Localize, OpRule, RuleError, Rules

TABLES = (
    "pointwise", "matmul", "views", "joining", "normalization", "sequence.attention", "sequence.window", "indexing",
    "reductions", "loss", "mlp", "convolution", "factories", "random", "lowered", "custom.splits", "custom.experts",
)
"""Modules of this folder, each with a table ``RULES`` of target -> declaration."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """All that is said about an operator. ``rule`` None: it has no sharding rule, in a captured graph it would run whole.
    ``located``: its local call may depend on where a piece lies, so a rank's piece is in one (``OpRule.located``)."""

    rule: Line | RuleFunction | None
    localize: Localize | None = None
    operator: Operator = field(default_factory=Operator)
    located: bool = False

    def instance(self, call: Call) -> OpRule:
        """The rule of one call."""
        rule = self._instance(call)
        return replace(rule, located=frozenset(rule.sizes)) if self.located else rule

    def _instance(self, call: Call) -> OpRule:
        if self.rule is None:
            return call.whole(known=False)
        if isinstance(self.rule, Line):
            return call.line(self.rule, localize=self.localize)
        rule = self.rule(call)
        if not isinstance(rule, OpRule):
            raise RuleError(f"the rule function of {call.target} returned {rule!r}, not an OpRule")
        if self.localize is None or rule.localize is not None:
            return rule
        return replace(rule, localize=self.localize)


def declare(
    rule: str | RuleFunction | None, localize: Localize | None = None, *, cost: str | Cost = "copy", saves: str | Saves = "0",
    recompute: str = "allowed", runs: str = "", gradient: bool = True, elementwise: bool = False,
    saves_of: Callable[[tuple[Any, ...]], Saves] | None = None, linear: Callable[[Op], Linear | None] | None = None,
    updates: tuple[int, ...] = (), exchanges: bool = False, dense: bool = False,
) -> Declaration:
    """A declaration from a line's text or from a function; see ``ir.declared`` for the rest.

    ``cost``: a ``Cost`` or its kind. ``saves``: a ``Saves`` or its words. ``runs``: names of overloads in a row.
    The products of a "matmul" that is a line follow from it.
    """
    line = parse_line(rule) if isinstance(rule, str) else rule
    price = Cost(cost) if isinstance(cost, str) else cost
    if price.kind == "matmul" and price.products is None:
        if not isinstance(line, Line):
            raise RuleError('cost="matmul" needs the matrix products: declare the rule as a line, from which they follow, or '
                            'give cost=Cost("matmul", products=...)')
        price = replace(price, products=products_of(line))
    kept = Saves.parse(saves) if isinstance(saves, str) else saves
    overloads = tuple(runs.split())
    operator = Operator(price, kept, recompute, overloads, gradient, elementwise, saves_of, linear, updates, exchanges, dense)
    return Declaration(line, localize, operator)


@dataclass(frozen=True)
class RuleBook:
    """Declarations by target.

    >>> book = RuleBook({"aten.relu.default": declare("... -> ...")})
    >>> book.known("aten.relu.default"), book.known("aten.mystery.default")
    (True, False)
    """

    declarations: Mapping[str, Declaration]
    _instances: dict[Any, OpRule] = field(default_factory=dict, compare=False, repr=False)

    def known(self, target: str) -> bool:
        """Whether the book has a rule for an operator such as "aten.linear.default"."""
        return target in self.declarations and self.declarations[target].rule is not None

    @functools.cached_property
    def operators(self) -> Operators:
        """What is declared of every operator apart from its rule."""
        return Operators(MappingProxyType({target: found.operator for target, found in self.declarations.items()}))

    def adding(self, target: str, declaration: Declaration) -> RuleBook:
        """The book with one more declaration, which replaces an older one of the same operator."""
        return RuleBook(MappingProxyType({**self.declarations, target: declaration}))

    def rules_of(self, graph: Graph) -> Rules:
        """The rules of all operators of a graph."""
        return Rules({op.name: self.rule_for(op, graph) for op in graph.ops}, self.operators)

    def rule_for(self, op: Op, graph: Graph) -> OpRule:
        """The rule of one operator of a graph; an unknown operator is whole on every rank (``known=False``). One that draws
        random numbers draws them from the run's seed (``meshwright.ir.declared.draws``).

        Raises RuleError, naming the operator, when its rule does not fit its shapes.
        """
        key = (op.target, _key(op.args, graph), _key(op.kwargs, graph), tuple(_type(name, graph) for name in op.outputs))
        found = self._instances.get(key)
        if found is None:
            declaration = self.declarations.get(op.target)
            try:
                call = bind(op, graph)
                found = call.whole(known=False) if declaration is None else declaration.instance(call)
            except RuleError as error:
                raise RuleError(f"{error}\n  operator: {op}") from error
            if draws(op) and not isinstance(found.localize, Seeded):
                found = replace(found, localize=Seeded(found.localize))
            self._instances[key] = found
        return found


def _type(name: str, graph: Graph) -> Any:
    value = graph.values[name]
    return value.shape, value.dtype


def _key(argument: Any, graph: Graph) -> Any:
    """A hashable stand-in for an argument: tensors by shape and dtype, numbers with their type (1, 1.0 and True differ)."""
    if isinstance(argument, Ref):
        return _type(argument.name, graph)
    if isinstance(argument, tuple | list):
        return tuple(_key(item, graph) for item in argument)
    if isinstance(argument, Mapping):
        return tuple((name, _key(item, graph)) for name, item in argument.items())
    return type(argument), argument


@functools.lru_cache(maxsize=1)
def builtin_rules() -> RuleBook:
    """The declarations that come with meshwright."""
    declarations: dict[str, Declaration] = {}
    for name in TABLES:
        table: Mapping[str, Declaration] = importlib.import_module(f"meshwright.compiler.rules.{name}").RULES
        if repeated := declarations.keys() & table.keys():
            raise RuleError(f"two rules for {', '.join(sorted(repeated))}, the second in rules/{name}.py")
        declarations.update(table)
    return RuleBook(MappingProxyType(declarations))


_registered: ContextVar[RuleBook | None] = ContextVar("meshwright_rules", default=None)


def default_rules() -> RuleBook:
    """The built-in declarations and those registered in this context."""
    return _registered.get() or builtin_rules()


def _in_words(declaration: Declaration) -> str:
    """A declaration as text, which ends in a digest: a line as it is, a function by its name."""
    rule, operator = declaration.rule, declaration.operator
    text = [str(rule) if isinstance(rule, Line) or rule is None else named(rule)]
    text += [f"localize={named(declaration.localize)}"] if declaration.localize is not None else []
    text += [f"cost={operator.kind}", f"saves={operator.saves}", f"recompute={operator.recompute}"]
    functions = [one for one in (rule, declaration.localize) if callable(one)]
    return ", ".join(text) + f"; {digest_of(*text, *map(content, functions))}"


def register_rule(
    target: str | Any, rule: str | RuleFunction, *, localize: Localize | None = None, cost: str | Cost | None = None,
    saves: str | Saves | None = None, recompute: str | None = None,
) -> None:
    """Declare an operator, in the current context (threads started later begin without it).

    ``target``: "mylib.scale.default", an ``OpOverload``, or what ``torch.library.custom_op`` returned.
    ``rule``: how it splits: a line of the notation, or a function ``(call: Call) -> OpRule``.
    ``localize``: ``(op, local) -> (target, args, kwargs)``, where the call has literals that depend on the shapes.
    ``cost``: its kind of work ("pointwise", "reduce", "matmul", ...), or a ``Cost``; the products of a "matmul" follow from the
    line. Not given: it moves its data.
    ``saves``: what autograd keeps for the backward: "0:1 1:0" for a product, "r0" for its first result, or a ``Saves``. Not
    given: its first operand.
    ``recompute``: "allowed" in the backward, "costly" (selective recomputation keeps its results), or "forbidden" (a second run
    would make something else). Not given: allowed.

    Of an operator that is declared already, built in or by an earlier call, what is not given of the last three stays. Raises
    RuleError for what cannot be read.

    >>> register_rule("mylib.scale.default", "*b k, k! -> *b k", cost="pointwise", saves="0:1 1:0")
    >>> default_rules().known("mylib.scale.default")
    True
    """
    name, book = target_name(target), default_rules()
    before = book.operators[name]
    line = declare(rule, localize, cost=before.cost if cost is None else cost, saves=before.saves if saves is None else saves,
                   recompute=before.recompute if recompute is None else recompute)
    same = recompute in (None, before.recompute)
    operator = replace(line.operator, runs=before.runs if same else (), gradient=before.gradient,
                       elementwise=before.elementwise, linear=before.linear,
                       updates=before.updates, dense=before.dense)
    declaration = replace(line, operator=operator, located=localize is not None or callable(rule))
    _registered.set(book.adding(name, declaration))
    remember(name, _in_words(declaration))


def target_name(target: Any) -> str:
    """The name of an operator, given as one, as an ``OpOverload`` or as what ``torch.library.custom_op`` returned."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    overload = getattr(target, "_opoverload", None)
    if overload is not None:
        return str(overload)
    if isinstance(target, str) and target.count(".") in (1, 2):
        return target if target.count(".") == 2 or target.startswith("mw.") else f"{target}.default"
    raise RuleError(f'an operator is "namespace.name.overload" or one of torch.ops, not {target!r}')
