"""The rules of a graph's operators, by those who may have read the graph from a file. Knows no solver: running needs none."""

from __future__ import annotations

from meshwright.compiler.rules import RuleBook, default_rules
from meshwright.errors import MeshwrightError, PlanError
from meshwright.ir.declared.registered import check_registered
from meshwright.ir.graph import Graph, Op
from meshwright.ir.operators import namespace
from meshwright.ir.plan import Plan
from meshwright.ir.rule import OpRule, Rules


def rules_of(graph: Graph, strict: bool = False) -> tuple[Rules, list[str]]:
    """(rule of every op by name, notes on operators without one). ``strict``: raise instead of replicating them."""
    book = default_rules()
    if graph.foreign:
        known = {"aten", "mw", *map(namespace, book.declarations)}
        strangers = [op for op in graph.ops if namespace(op.target) not in known]
        if strangers:
            raise PlanError(f"the plan's operator {strangers[0].target} (in {strangers[0].module or 'the model'}) is of a "
                            "library that is not known here; register a rule for it with meshwright.register_rule")
    rules = Rules({op.name: _rule(book, op, graph) for op in graph.ops}, book.operators)
    unknown: dict[str, list[str]] = {}
    for op in graph.ops:
        if not rules[op.name].known:
            unknown.setdefault(op.target, []).append(op.module or "the model")
    if unknown and strict:
        raise PlanError(
            f"no sharding rule for {', '.join(unknown)}; register one with meshwright.register_rule, or plan with strict=False "
            "to replicate them"
        )
    notes = [f"no rule for {target} (in {', '.join(dict.fromkeys(at))}): replicated" for target, at in unknown.items()]
    return rules, notes


def rules_of_plan(plan: Plan) -> Rules:
    """The rules of a plan's operators. Raises PlanError where they are not those that it was made with."""
    check_registered(plan.registered, plan.graph)
    return rules_of(plan.graph)[0]


def _rule(book: RuleBook, op: Op, graph: Graph) -> OpRule:
    """The rule of an operator. One of a file may have arguments that no call of it has, which rules do not expect."""
    try:
        return book.rule_for(op, graph)
    except MeshwrightError:
        raise
    except Exception as error:
        if not graph.foreign:
            raise
        raise PlanError(f"the plan is damaged: {op} is no call of {op.target} ({type(error).__name__}: {error})") from error
