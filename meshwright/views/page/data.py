"""What the page of a plan shows, as JSON-able values (``page_data``).

    title, facts      lines of the header
    time, memory      parts of the step, and bytes of every rank by kind; ``hot``: where most seconds go
    clock             the pipeline's schedule, action by action, in microseconds
    nodes, edges      the outline, and the ways of values between operators, each with a number into ``infos``
    infos             what a click shows; equal ones stand once, so that a model of many layers is small

A node is [parent, kind, label, name, info, times, stage]; an edge [source node, target node, info, times, whether it is the way
from one copy of a block to the next].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from meshwright.compiler.search.plans import simulation_of
from meshwright.cost.cluster import ClusterError, Device
from meshwright.footprint import footprints
from meshwright.ir.graph import Op
from meshwright.ir.quantities import bytes_text, count_text, seconds_text
from meshwright.ir.sharding import Sharding, format_sharding
from meshwright.ir.writing.paths import fold_paths
from meshwright.planner import cluster_of, state_bytes
from meshwright.views.facts import Facts
from meshwright.views.page.outline import OutlineEntry, Shown, keys, outline, shown
from meshwright.views.prices import Move, OpPrice, Prices
from meshwright.views.words import assignment_words, header, kept_words, not_told_apart, time_parts

HOT = 12
Alternatives = Callable[[Op], Sequence[Mapping[str, Any]]]


def page_data(facts: Facts, against: Facts | None = None, alternatives: Alternatives | None = None) -> dict[str, Any]:
    """Everything the page shows of a plan. ``against``: the plan that it is compared with; ``alternatives``: of an operator,
    best first."""
    return _Page(facts, against, alternatives).data()


class _Page:
    """The data of one plan while they are made."""

    def __init__(self, facts: Facts, against: Facts | None, alternatives: Alternatives | None) -> None:
        self.facts, self.plan, self.graph = facts, facts.plan, facts.plan.graph
        self.alternatives = alternatives
        try:
            self.prices: Prices | None = Prices(facts)
        except ClusterError:
            self.prices = None
        self.infos: list[Any] = []
        self._known: dict[str, int] = {}
        self.shown = shown(self.plan)
        self.nodes = outline(self.plan, self.shown)
        self.work: dict[str, OpPrice] = {}
        self.against = None if against is None else _Other(against)
        self._keys = keys(self.graph.ops) if against is not None else {}
        self._params = {param.value: param for param in self.graph.params}

    def data(self) -> dict[str, Any]:
        """The page's object."""
        if self.prices is not None:
            self.work = {one.op.name: self._mean(one, self.prices) for one in self.shown}
        nodes = [self._node(node) for node in self.nodes]
        inputs = {name: len(nodes) + number for number, name in enumerate(self.graph.inputs)}
        for name in inputs:
            info = self._info({"title": f"input {name}", "results": [self.facts.type_of(name)]})
            nodes.append([0, "input", name, name, info, 1, [-1, -1]])
        edges = self._edges(inputs)
        return {
            "title": f"{self.plan.mesh} on {self.plan.cluster or 'an unnamed cluster'}", "chips": self._chips(),
            "facts": [list(pair) for pair in header(self.facts)],
            "axes": {axis: self.plan.mesh.size(axis) for axis in self.plan.mesh.axes},
            "time": [[name, seconds] for name, seconds in time_parts(self.plan.predicted)],
            "step": None if self.plan.predicted is None else self.plan.predicted.step_seconds,
            "memory": self._memory(), "clock": self._clock(), "hot": self._hot(edges), "stages": self._stages(),
            "candidates": self._candidates(), "notes": list(self.plan.notes),
            "nodes": nodes, "edges": edges, "infos": self.infos,
        }

    def _info(self, info: Any) -> int:
        key = json.dumps(info, sort_keys=True)
        if key not in self._known:
            self._known[key] = len(self.infos)
            self.infos.append(info)
        return self._known[key]

    # the graph

    def _node(self, node: OutlineEntry) -> list[Any]:
        one = node.shown
        if one is not None:
            info = self._info(self._operator(one))
            return [node.parent, "op", node.label, one.op.name, info, len(one.copies), list(one.stages)]
        words: dict[str, Any] = {"title": node.path or "the model"}
        if node.kind == "run":
            words["title"] += f" and {count_text(node.times - 1, 'equal block')} after it" if node.times > 1 else ""
            kept: dict[str, list[str]] = {}
            for group in self.plan.groups[node.run : node.run + node.times]:
                kept.setdefault(kept_words(group), []).append(group.path)
            words["kept"] = [["kept" if len(kept) == 1 else fold_paths(paths), text] for text, paths in kept.items()]
        return [node.parent, node.kind, node.label, node.path, self._info(words), node.times, [-1, -1]]

    def _mean(self, one: Shown, prices: Prices) -> OpPrice:
        """The price of an operator, the mean over its copies where they are not kept alike."""
        counts: dict[Any, list[Any]] = {}
        for copy in one.copies:
            group = replace(prices.group(copy), path="", stage=0)
            counts.setdefault(group, [copy, 0])[1] += 1
        each = [(prices.op(copy), count / len(one.copies)) for copy, count in counts.values()]
        numbers = {f.name: sum(getattr(price, f.name) * share for price, share in each)
                   for f in fields(OpPrice) if f.name.endswith("seconds")}
        return each[0][0] if len(each) == 1 else replace(each[0][0], **numbers)

    def _operator(self, one: Shown) -> dict[str, Any]:
        op, facts = one.op, self.facts
        rule = facts.rules[op.name]
        block = self.graph.blocks[one.run].path if one.run >= 0 else ""
        info: dict[str, Any] = {
            "title": op.target, "module": _below(op.module, block), "source": op.source,
            "rule": str(rule) if rule.known else "none: it runs whole on every rank",
            "choice": assignment_words(self.plan.assignments.get(op.name, {})),
            "operands": [self._operand(name, need, block)
                         for name, need in zip(op.inputs, facts.placed[op.name].operands, strict=True)],
            "results": [facts.type_of(name) for name in op.outputs],
        }
        price = self.work.get(op.name)
        if price is not None:
            info["seconds"] = _rounded([price.forward_seconds, price.backward_seconds, price.recompute_seconds])
            info["flops"], info["bytes"] = _digits(price.flops), _digits(price.bytes_)
            if price.inside:
                info["inside"] = [_move(move) for move in price.inside]
            if price.gather_seconds or price.reduce_seconds:
                info["parameters"] = _rounded([price.gather_seconds, price.reduce_seconds])
            if price.optimizer_seconds:
                info["optimizer"] = _digits(price.optimizer_seconds)
        if self.alternatives is not None and (others := self.alternatives(op)):
            info["alternatives"] = [{key: _digits(value) if isinstance(value, float) else value for key, value in one.items()}
                                    for one in others]
        if self.against is not None:
            info["other"] = self.against.of([self._keys[copy.name] for copy in one.copies])
            info["mine"] = _signature(self.facts, op)
            info["changed"] = info["other"] != [info["mine"]]
        return info

    def _operand(self, name: str, need: Sharding, block: str) -> list[str]:
        value = self.graph.values[name]
        have, want = self.facts.type_of(name), format_sharding(need, value.shape, value.dtype)
        param = self._params.get(name)
        what = "value" if param is None else "buffer" if param.buffer else "parameter"
        label = "" if param is None else param.fqn.removeprefix(f"{block}.") if block else param.fqn
        return [what, label, have, want if want != have else ""]

    def _edges(self, inputs: Mapping[str, int]) -> list[list[int]]:
        """Between shown operators, as often as their copies have them. The last number is 1 where it is the way from one copy
        to the next, which lies within the run."""
        at = {copy.name: number for number, node in enumerate(self.nodes) if node.shown is not None
              for copy in node.shown.copies}
        within = {copy.name: (one.run, number) for one in self.shown if one.run >= 0 for number, copy in enumerate(one.copies)}
        found: dict[tuple[int, int, int, int], int] = {}
        for one in self.shown:
            first, *others = one.copies
            nexts = self._edges_into(others[0]) if others else []
            for number, (name, source, info) in enumerate(self._edges_into(first)):
                count = len(one.copies)
                place = within.get(source)
                if others and (place is None or place[0] != one.run) and others[0].inputs[number] != name:
                    count = 1  # the first of the run reads what came before it, each other the one before
                    _, theirs, kind = nexts[number]
                    if theirs in at:
                        found[at[theirs], at[first.name], kind, 1] = len(others)
                start = inputs.get(source, at.get(source, -1))
                if start >= 0:
                    key = (start, at[first.name], info, 0)
                    found[key] = found.get(key, 0) + count
        return [[*key[:3], times, key[3]] for key, times in found.items()]

    def _edges_into(self, op: Op) -> list[tuple[str, str, int]]:
        """(value, where it comes from, info) of every operand."""
        if self.prices is not None:
            return [(edge.value, edge.source, self._edge_info(edge.value, edge.have, edge.need, edge.moves))
                    for edge in self.prices.edges(op)]
        needs = zip(op.inputs, self.facts.placed[op.name].operands, strict=True)
        return [(name, self._source(name), self._edge_info(name, need, need, ())) for name, need in needs]

    def _source(self, name: str) -> str:
        maker = self.graph.producers.get(name)
        return name if maker is None else self.graph.ops[maker].name

    def _edge_info(self, name: str, have: Sharding, need: Sharding, moves: Sequence[Move]) -> int:
        value = self.graph.values[name]
        texts = [format_sharding(sharding, value.shape, value.dtype) for sharding in (have, need)]
        return self._info({"have": texts[0], "need": texts[1], "moves": [_move(move) for move in moves]})

    # numbers

    def _chips(self) -> list[list[str]]:
        """[number, what it is] of the head."""
        predicted, mesh = self.plan.predicted, self.plan.mesh
        if predicted is None:
            return [[str(mesh.world), "devices"]]
        found = [[seconds_text(predicted.step_seconds), "step, predicted"],
                 [bytes_text(predicted.bytes_per_rank), f"of {bytes_text(predicted.capacity_bytes)} on the fullest device"]]
        found += [[f"{predicted.mfu:.1%}", "MFU"]] if predicted.mfu is not None else []
        found += [[f"{predicted.tokens_per_second:,.0f}", "tokens/s"]] if predicted.tokens_per_second is not None else []
        counts = (mesh.world, "device"), (self.plan.schedule.microbatches, "micro-batch")
        return [*found, *(count_text(number, what).split(" ", 1) for number, what in counts)]

    def _memory(self) -> dict[str, Any] | None:
        predicted = self.plan.predicted
        if predicted is None:
            return None
        ranks: list[Any] = [["every rank" if self.plan.pipeline is None else "the fullest rank", dict(predicted.bytes_by_kind)]]
        if self.plan.pipeline is not None:
            peaks = footprints(self.plan, self.facts.rules, state_bytes(self.plan), device=self._device())
            ranks = [[f"pipeline rank {rank}", dict(peak.kinds)] for rank, peak in sorted(peaks.items())]
        if not any(kinds for _, kinds in ranks):
            ranks = [["the fullest rank", {"all": predicted.bytes_per_rank}]]
        return {"capacity": predicted.capacity_bytes, "ranks": ranks}

    def _device(self) -> Device | None:
        """The plan's, whose software may hold more or less; None where its numbers are not to be had."""
        try:
            return cluster_of(self.plan).device
        except ClusterError:
            return None

    def _clock(self) -> dict[str, Any] | None:
        pipeline, predicted = self.plan.pipeline, self.plan.predicted
        if pipeline is None or predicted is None or predicted.stages is None:
            return None
        run = simulation_of(self.plan)
        rows: list[list[tuple[str, int, int, float, float]]] = [[] for _ in range(pipeline.degree)]
        for rank, action, start, end in run.spans():
            rows[rank].append((action.kind, action.stage, action.microbatch, start * 1e6, (end - start) * 1e6))
        return {"schedule": pipeline.schedule, "end": round(run.makespan * 1e6, 1), "bubble": run.bubble_fraction,
                "rows": [_lane(row) for row in rows]}

    def _stages(self) -> int:
        return 1 if self.plan.pipeline is None else self.plan.pipeline.stages

    def _hot(self, edges: Sequence[Sequence[int]]) -> list[list[Any]]:
        """[what, node, seconds of all its copies], most first."""
        found: list[tuple[float, str, int]] = []
        for number, node in enumerate(self.nodes):
            price = None if node.shown is None else self.work.get(node.shown.op.name)
            if price is not None and node.shown is not None:
                times = len(node.shown.copies)
                where = f"{node.label} in {node.path or 'the model'}" + (f"  ×{times}" if times > 1 else "")
                found.append((times * price.compute_seconds, where, number))
                moved = price.gather_seconds + price.reduce_seconds
                found.append((times * moved, f"parameters of {where}: gathered and reduced", number))
                found += [(times * move.seconds, f"{move} inside {where}", number) for move in price.inside]
        for _, target, info, times, _ in edges:
            for words, *_, forward, backward in self.infos[info]["moves"]:
                found.append((times * (forward + backward), f"{words} before {self.nodes[target].label}", target))
        found.sort(key=lambda item: -item[0])
        return [[words, number, _digits(seconds)] for seconds, words, number in found[:HOT] if seconds > 0]

    def _candidates(self) -> dict[str, Any] | None:
        proof = self.plan.certificate
        if proof is None:
            return None
        return {
            "runner_up": proof.runner_up, "gap": proof.gap, "bound": proof.bound_seconds, "status": proof.status,
            "considered": proof.considered, "pruned": proof.pruned, "infeasible": proof.infeasible, "solved": proof.solved,
            "seen": [asdict(one) | {"alike": alike}
                     for one, alike in zip(proof.candidates, not_told_apart(proof.candidates), strict=True)],
        }


class _Other:
    """What another plan decides for the same operators."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._at = {key: name for name, key in keys(facts.plan.graph.ops).items()}
        self._ops = {op.name: op for op in facts.plan.graph.ops}

    def of(self, wanted: Sequence[tuple[str, str, int]]) -> list[str]:
        """Its decisions for some operators, equal ones once; none for what it does not have."""
        names = [self._at[key] for key in wanted if key in self._at]
        return list(dict.fromkeys(_signature(self.facts, self._ops[name]) for name in names))


def _signature(facts: Facts, op: Op) -> str:
    """What is decided about an operator: what it reads and makes, its block's parameters, its stage."""
    return "\n".join(_lines(facts, op))


def _lines(facts: Facts, op: Op) -> Iterator[str]:
    graph, plan = facts.plan.graph, facts.plan
    number = graph.producers[op.outputs[0]] if op.outputs else 0
    params = {param.value for param in graph.params}
    for name, need in zip(op.inputs, facts.placed[op.name].operands, strict=True):
        if name in params:
            yield f"weight {format_sharding(need.at_rest(), graph.values[name].shape, graph.values[name].dtype)}"
    for name in op.outputs:
        yield f"result {facts.type_of(name)}"
    if any(name in params for name in op.inputs):
        yield kept_words(plan.group_of(number))
    if plan.pipeline is not None:
        yield f"stage {plan.pipeline.stage_of(number)}"


def _lane(row: Sequence[tuple[str, int, int, float, float]]) -> list[Any]:
    """What a rank does, from (kind, stage, micro-batch, start, microseconds) in order, as [[kind, stage, microseconds], ...]
    and a text: each action is the letters of its number among those, its micro-batch where that is not the next one of
    them, and "+" with the microseconds that the rank has waited before it."""
    kinds: dict[tuple[str, int, float], int] = {}
    following, words, now = list[int](), list[str](), 0.0
    for kind, stage, micro, start, long in row:
        what = kind, stage, round(long, 1)
        if what not in kinds:
            kinds[what] = len(kinds)
            following.append(0)
        number, waited = kinds[what], max(0, round(start - now))
        micro_text = str(micro) if micro != following[number] else ""
        words.append(f"{number:o}".translate(_LETTERS).capitalize() + micro_text + (f"+{waited}" if waited else ""))
        now += waited + what[2]
        following[number] = micro + 1
    return [[list(what) for what in kinds], "".join(words)]


_LETTERS = str.maketrans("01234567", "abcdefgh")
"""Digits of base 8 as letters."""


def _move(move: Move) -> list[Any]:
    behind = move.backward_seconds + move.again_seconds
    return [str(move), bytes_text(move.bytes_), *_rounded([move.times, move.forward_seconds, behind])]


def _below(module: str, block: str) -> str:
    """A module's path; below a block without the block's number, so that equal blocks say the same."""
    if not block or not module.startswith(block):
        return module
    inside = module.removeprefix(block).lstrip(".")
    return f"{inside} of the block" if inside else "the block"


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [_digits(number) for number in numbers]


def _digits(number: float) -> float:
    """Four digits: enough to look at."""
    return float(f"{number:.4g}")

