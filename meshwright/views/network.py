"""A plan as a networkx graph, for whatever one wants to compute on it.

    nodes   operators, inputs, parameters and buffers, by the names of the plan's graph
    edges   one for each use of a value, numbered by the operand

Attributes are texts, numbers and truth values only, so the graph goes through GraphML and node-link JSON and comes back equal:

    networkx.write_graphml(graph, path);  networkx.read_graphml(path, force_multigraph=True, edge_key_type=int)
    networkx.node_link_data(graph);       networkx.node_link_graph(data)

Seconds and bytes are those of one step on one rank (``views.prices``); a plan whose cluster is not in the catalogue has none.
"""

from __future__ import annotations

from typing import Any

import networkx as nx

from meshwright.cost.cluster import ClusterError
from meshwright.ir.graph import Op
from meshwright.ir.plan import Plan
from meshwright.ir.sharding import DTYPE_NAMES, format_sharding
from meshwright.views.facts import Facts, facts_of
from meshwright.views.prices import Move, OpPrice, Prices


def to_networkx(plan: Plan) -> nx.MultiDiGraph:
    """Operators, inputs and parameters as nodes; one edge per use of a value.

    Node attributes
        kind              "op", "input", "parameter" or "buffer"
        sharding          of the results, in the notation; of several separated by "; "
        target, module, source, stage, block, assignment, times (in a step)           of operators
        flops, bytes (of the results), forward_seconds, backward_seconds, recompute_seconds, collectives, collective_seconds,
        parameter_seconds (gathered and reduced), optimizer_seconds                    of operators with prices
        fqns, trainable                                                                of parameters and buffers
    Edge attributes
        value, operand (position), shape, dtype, have and need (shardings in the notation), collectives (separated by "; "),
        bytes (of their buffers, each as often as it runs), seconds, forward_seconds, backward_seconds, recompute_seconds

    Raises PlanError if the plan does not fit the rules of its operators.
    """
    facts, graph = facts_of(plan), plan.graph
    try:
        prices: Prices | None = Prices(facts)
    except ClusterError:
        prices = None
    result = nx.MultiDiGraph(
        mesh=str(plan.mesh), cluster=plan.cluster, precision=plan.precision, microbatches=plan.schedule.microbatches,
        **({} if plan.predicted is None else {"step_seconds": float(plan.predicted.step_seconds)}),
    )
    for name in graph.inputs:
        result.add_node(name, kind="input", sharding=facts.type_of(name))
    for param in graph.params:
        result.add_node(
            param.value, kind="buffer" if param.buffer else "parameter", fqns=", ".join(param.fqns), trainable=param.trainable,
            sharding=facts.type_of(param.value),
        )
    for number, op in enumerate(graph.ops):
        result.add_node(op.name, **_operator(facts, number, op), **({} if prices is None else _priced(prices.op(op))))
    for op in graph.ops:
        moves = [one.moves for one in prices.edges(op)] if prices is not None else [()] * len(op.inputs)
        for position, (name, steps) in enumerate(zip(op.inputs, moves, strict=True)):
            maker = graph.producers.get(name)
            source = graph.ops[maker].name if maker is not None else name
            result.add_edge(source, op.name, key=position, **_use(facts, op, position, steps))
    return result


def _operator(facts: Facts, number: int, op: Op) -> dict[str, Any]:
    plan = facts.plan
    times = plan.schedule.times(op.name)
    return {
        "kind": "op", "target": op.target, "module": op.module, "source": op.source, "times": times,
        "stage": 0 if plan.pipeline is None else plan.pipeline.stage_of(number), "block": plan.group_of(number).path,
        "assignment": ", ".join(f"{axis}: {factor}" for axis, factor in plan.assignments.get(op.name, {}).items()),
        "sharding": "; ".join(map(facts.type_of, op.outputs)),
    }


def _priced(price: OpPrice) -> dict[str, Any]:
    return {
        "flops": float(price.flops), "bytes": float(price.bytes_), "forward_seconds": float(price.forward_seconds),
        "backward_seconds": float(price.backward_seconds), "recompute_seconds": float(price.recompute_seconds),
        "collectives": "; ".join(map(str, price.inside)), "collective_seconds": float(sum(m.seconds for m in price.inside)),
        "parameter_seconds": float(price.gather_seconds + price.reduce_seconds),
        "optimizer_seconds": float(price.optimizer_seconds),
    }


def _use(facts: Facts, op: Op, position: int, moves: tuple[Move, ...]) -> dict[str, Any]:
    name = op.inputs[position]
    value = facts.plan.graph.values[name]
    need = facts.placed[op.name].operands[position]
    return {
        "value": name, "operand": position, "shape": "x".join(map(str, value.shape)), "dtype": DTYPE_NAMES[value.dtype],
        "have": facts.type_of(name), "need": format_sharding(need, value.shape, value.dtype),
        "collectives": "; ".join(map(str, moves)),
        "bytes": float(sum(m.bytes_ * m.times * (bool(m.forward) + bool(m.backward)) for m in moves)),
        "seconds": float(sum(m.seconds for m in moves)),
        "forward_seconds": float(sum(m.forward_seconds for m in moves)),
        "backward_seconds": float(sum(m.backward_seconds for m in moves)),
        "recompute_seconds": float(sum(m.again_seconds for m in moves)),
    }
