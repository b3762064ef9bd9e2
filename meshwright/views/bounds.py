"""What bounds a plan's step: where its seconds and its bytes go, the largest part first, and what would help (``whole``)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from meshwright.cost.cluster import ClusterError
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.quantities import bytes_text, seconds_text
from meshwright.views.facts import Facts
from meshwright.views.page.outline import Shown, shown
from meshwright.views.prices import Prices
from meshwright.views.words import memory_words, predicted_words, time_parts

WIDTH = 120
_LINES = 6
_FULL = 0.9
"""Part of the memory above which it is said to bind: recomputation and micro-batches are what it is bought with."""
_HOST = "waiting for the host, which starts kernels"
_WAITING = 0.1
"""Part of compute above which waiting for the host is said."""


def whole(facts: Facts, changed: bool = True) -> str:
    """What bounds the step, in words; ``changed``: and what would help."""
    plan = facts.plan
    predicted = plan.predicted
    if predicted is None:
        return "nothing is predicted of this plan: no search made it"
    parts = sorted(time_parts(predicted), key=lambda part: -part[1])
    lines = [f"predicted  {predicted_words(predicted)}"]
    for number, (name, seconds) in enumerate(parts):
        share = f"{seconds / predicted.step_seconds:.1%} of the step"
        lines.append(f"{'' if number else 'time':10s} {name} {seconds_text(seconds)}, {share}")
    lines.append(f"memory     {memory_words(predicted)}")
    try:
        prices = Prices(facts)
        compute, moved = _spent(facts, prices)
        waiting = prices.waiting()
        lines.append(f"bound by   {_verdict(plan, parts, waiting)}")
        lines += _most(plan, [*compute, (waiting, _HOST)], moved)
        lines += _helpful(plan) if changed else []
    except ClusterError:
        lines.append(f"bound by   {_verdict(plan, parts)}")
        lines.append(f"no prices: neither the catalogue nor the plan has the numbers of cluster {plan.cluster or '(unnamed)'}")
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
    return "\n".join(line if len(line) <= WIDTH else wrapper.fill(line) for line in lines)


def _verdict(plan: Plan, parts: list[tuple[str, float]], waiting: float = 0.0) -> str:
    """``waiting``: seconds of compute that are for the host, which starts kernels, summed over stages."""
    predicted = plan.predicted
    assert predicted is not None
    words = [parts[0][0] if parts else "nothing that is known"]
    spent = sum(seconds for part, seconds in parts if part in ("compute", "recomputation"))
    waiting /= 1 if plan.pipeline is None else plan.pipeline.degree
    if words[0] == "compute" and waiting > _WAITING * spent:
        words[0] += (f", {seconds_text(waiting)} of it waiting for the host, which starts kernels one after the other and more "
                     "slowly than they run: of larger micro-batches they take longer")
    recomputed = sum(seconds for part, seconds in parts if part == "recomputation")
    if predicted.bytes_per_rank > _FULL * predicted.capacity_bytes:
        more = f", which recomputation of {seconds_text(recomputed)} pays for" if recomputed else ""
        words.append(f"memory ({bytes_text(predicted.bytes_per_rank)} of {bytes_text(predicted.capacity_bytes)}){more}")
    return "; and ".join(words)


def _spent(facts: Facts, prices: Prices) -> tuple[list[tuple[float, str]], dict[str, float]]:
    """Seconds of the operators and of the collectives of a step, equal blocks together."""
    compute: list[tuple[float, str]] = []
    moved: dict[str, float] = {}
    for one in shown(facts.plan):
        work, times = prices.op(one.op), len(one.copies)
        compute.append((work.compute_seconds * times, _where(one)))
        pairs = [(str(move), move.seconds) for move in work.inside]
        pairs += [("weights gathered, beside compute", work.gather_seconds), ("gradients reduced, beside compute",
                                                                              work.reduce_seconds)]
        for words, seconds in pairs:
            moved[words] = moved.get(words, 0.0) + seconds * times
    for op in facts.plan.graph.ops:  # of equal blocks the first alone reads what comes before all of them
        for move in (move for edge in prices.edges(op) for move in edge.moves):
            moved[str(move)] = moved.get(str(move), 0.0) + move.seconds
    return compute, moved


def _most(plan: Plan, compute: list[tuple[float, str]], moved: dict[str, float]) -> Iterator[str]:
    """The operators and collectives that take most of a step."""
    total = sum(seconds for seconds, _ in compute) or 1.0
    stages = "" if plan.pipeline is None else ", summed over stages"
    yield f"operators  those that take most of a step{stages}:"
    for seconds, words in sorted(compute, key=lambda pair: -pair[0])[:_LINES]:
        if not seconds:
            continue
        yield f"{'':10s} {seconds_text(seconds):>8s}  {seconds / total:5.1%}  {words}"
    there = sorted(((seconds, words) for words, seconds in moved.items() if seconds > 0), reverse=True)
    if there:
        yield f"collectives, likewise{stages}:"
    for seconds, words in there[:_LINES]:
        yield f"{'':10s} {seconds_text(seconds):>8s}  {words}"


def _helpful(plan: Plan) -> Iterator[str]:
    """Changes of the cluster and the batch that gain something, those that gain most a device first."""
    from meshwright.views.changes import changes_and_refusals

    try:
        found, refused = changes_and_refusals(plan)
    except PlanError as error:
        yield f"changes    cannot be priced: {error}"
        return
    yield f"changes    {'that help, tokens per second:' if found else 'of cluster or batch that were planned: none helps'}"
    yield from (f"{'':10s} {change}" for change in [*found[:_LINES], *refused])


def _where(one: Shown) -> str:
    times = f", {len(one.copies)} equal blocks" if len(one.copies) > 1 else ""
    return f"{one.op.target.split('.')[1]} of {one.op.module or 'the model'}{times}"
