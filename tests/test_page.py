"""The page of a plan: the file that ``show`` writes, and what it does in a real browser where there is one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cost.cluster import Cluster
from meshwright.errors import InputError
from meshwright.ir.plan import Pipeline, Plan
from meshwright.ir.prediction import StageSeconds
from meshwright.planner import described
from meshwright.views.facts import facts_of
from meshwright.views.page.data import page_data
from meshwright.views.page.outline import outline, shown
from meshwright.views.report import show
from tests.browser import Browser, binary
from tests.handmade import handmade_plan

HOSTILE = "</script><img src=x onerror=window['hurt']=1>"


def same_blocks() -> Plan:
    """The handmade plan with an input that takes a gradient, so that its two blocks are equal."""
    plan = handmade_plan()
    values = {**plan.graph.values, "x": replace(plan.graph.values["x"], differentiable=True)}
    return replace(plan, graph=replace(plan.graph, values=values))


def other() -> Plan:
    """Its first block's activation runs whole on every tp rank."""
    plan = same_blocks()
    return replace(plan, assignments={**plan.assignments, "relu0": {"dp": plan.assignments["relu0"]["dp"]}})


def piped() -> Plan:
    """Its blocks on two stages."""
    plan = same_blocks()
    from meshwright.ir.mesh import Mesh

    stages = StageSeconds((1e-3, 1e-3), (1e-3, 1e-3), (1e-3, 1e-3), (1e-4,))
    assert plan.predicted is not None
    groups = (plan.groups[0], replace(plan.groups[1], stage=1), plan.groups[2])
    return replace(
        plan, mesh=Mesh.of(pp=2, dp=2, tp=2), pipeline=Pipeline("1f1b", (0, 4, 10), (0, 1)), groups=groups, cluster="cpu:1x8",
        schedule=replace(plan.schedule, microbatches=2), predicted=replace(plan.predicted, stages=stages),
    )


def hostile(name: str = HOSTILE) -> Plan:
    """A module and an input named so that they would end an element and run a script."""
    plan = same_blocks()
    ops = tuple(replace(op, module=op.module.replace("blocks", name), source=name) for op in plan.graph.ops)
    blocks = tuple(replace(block, path=block.path.replace("blocks", name)) for block in plan.graph.blocks)
    groups = tuple(replace(group, path=group.path.replace("blocks", name)) for group in plan.groups)
    return replace(plan, graph=replace(plan.graph, ops=ops, blocks=blocks), groups=groups, notes=(HOSTILE,))


def test_equal_blocks_are_one_run() -> None:
    plan = same_blocks()
    found = shown(plan)
    assert [(one.op.name, len(one.copies)) for one in found] == [
        ("up0", 2), ("relu0", 2), ("down0", 2), ("add0", 2), ("square", 1), ("loss", 1)]
    nodes = outline(plan, found)
    assert [(node.kind, node.label, node.times) for node in nodes if node.kind != "op"] == [
        ("module", "the model", 1), ("module", "blocks", 1), ("run", "0..1", 2)]
    # a module that holds one operator is that operator
    assert [node.label for node in nodes if node.kind == "op"][:2] == ["up · linear", "relu"]
    assert [len(one.copies) for one in shown(other())][:4] == [1, 1, 1, 1]
    assert [one.stages for one in shown(piped())] == [(0, 0)] * 4 + [(1, 1)] * 6


def test_edges_carry_their_reshards() -> None:
    page = page_data(facts_of(same_blocks()))
    names = {number: node[3] for number, node in enumerate(page["nodes"])}
    edges = {(names[a], names[b], loop): (page["infos"][info], times) for a, b, info, times, loop in page["edges"]}
    info, times = edges["down0", "add0", 0]
    assert (info["have"], times) == ("f32[8@dp, 16] +tp", 2)
    assert [move[0] for move in info["moves"]] == ["fwd all-reduce@tp"]
    # what one block hands to the next lies within the run
    assert edges["add0", "up0", 1][1] == edges["add0", "add0", 1][1] == 1
    assert ("x", "up0", 0) in edges
    assert ("add0", "square", 0) in edges


def test_memory_is_what_the_software_of_the_plan_holds() -> None:
    """DDP's buckets are held all the time, beside what programs of this package hold."""
    own, plan = Cluster.parse("cpu:1x8"), piped()
    plan = replace(plan, groups=tuple(replace(group, zero=1) for group in plan.groups))
    both = [replace(plan, cluster=str(one), devices=described(one)) for one in (own, own.with_kernels(buckets=True))]
    held = [[sum(kinds.values()) for _, kinds in page_data(facts_of(one))["memory"]["ranks"]] for one in both]
    assert all(more > less for less, more in zip(*held, strict=True))


def test_memory_time_and_clock() -> None:
    page = page_data(facts_of(piped()))
    assert [name for name, _ in page["memory"]["ranks"]] == ["pipeline rank 0", "pipeline rank 1"]
    assert all(sum(kinds.values()) > 0 for _, kinds in page["memory"]["ranks"])
    forward, backward = ["F", 0, 1000.0], ["B", 0, 2000.0]
    assert page["clock"]["rows"][0] == [[forward, backward], "AAB+2200B+1000"]  # two of each, told as they follow each other
    assert page["clock"]["rows"][1][1] == "A+1100BAB"
    assert page["clock"]["end"] == pytest.approx(9e3, rel=0.05)  # (M + P - 1) x 3 ms, and two transfers
    assert page["step"] == 0.0125
    assert page_data(facts_of(same_blocks()))["clock"] is None


def test_a_page_says_what_differs() -> None:
    page = page_data(facts_of(same_blocks()), facts_of(other()))
    changed = {node[3] for node in page["nodes"] if node[1] == "op" and page["infos"][node[4]]["changed"]}
    assert changed == {"relu0"}
    info = next(page["infos"][node[4]] for node in page["nodes"] if node[3] == "relu0")
    assert sorted(info["other"]) == ["result f32[8@dp, 32@tp]", "result f32[8@dp, 32]"]


def test_the_file_stands_alone(tmp_path: Path) -> None:
    show(hostile(), tmp_path / "plan.html", against=other())
    text = (tmp_path / "plan.html").read_text()
    assert HOSTILE not in text
    elements = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    assert len(elements) == 6  # two plans, their names, two libraries, the page's own
    assert HOSTILE in json.dumps(json.loads(elements[1]))
    assert not re.search(r"<(link|iframe|img|object|embed)\b", re.sub(r"<script[^>]*>.*?</script>", "", text, flags=re.DOTALL))
    assert " src=" not in re.sub(r"<script[^>]*>.*?</script>", "", text, flags=re.DOTALL)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert "http" not in policy[1]
    assert len(text) < 600_000
    first = text
    show(hostile(), tmp_path / "plan.html", against=other())
    assert (tmp_path / "plan.html").read_text() == first
    with pytest.raises(InputError, match="path"):
        show(other(), against=hostile())


def test_a_plan_without_prices_or_predictions_has_a_page(tmp_path: Path) -> None:
    show(replace(handmade_plan(), cluster="", predicted=None, certificate=None), tmp_path / "plan.html")
    assert (tmp_path / "plan.html").stat().st_size > 400_000


# ------------------------------------------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if binary() is None:
        pytest.skip("no Chromium or Chrome on this machine: the page is not tried in a browser")
    with Browser.start(tmp_path_factory.mktemp("browser")) as found:
        yield found


def _opened(browser: Browser, plan: Plan, path: Path, against: Plan | None = None) -> None:
    show(plan, path, against=against)
    browser.messages.clear()
    browser.size(1280, 900)
    browser.open(path)
    assert browser.run("document.body.dataset.ready") == "yes", browser.messages


def _at(browser: Browser, label: str) -> list[float]:
    """Where a node is on the screen."""
    return list(browser.run(f"""(() => {{
        const node = meshwright.cy().nodes().filter((n) => n.data("label").startsWith({json.dumps(label)}))[0];
        const at = node.renderedPosition(), box = document.getElementById("graph").getBoundingClientRect();
        return [at.x + box.x, at.y + box.y]; }})()"""))


def _labels(browser: Browser) -> list[str]:
    return list(browser.run("meshwright.cy().nodes().map((n) => n.data('label').split('\\n')[0])"))


def _panel(browser: Browser, text: str) -> None:
    """Wait until the panel says so."""
    browser.until(f"document.getElementById('panel').textContent.includes({json.dumps(text)})")


def _shows(browser: Browser, label: str, there: bool = True) -> None:
    """Wait until a node of this label is drawn, or is not."""
    browser.until(f"""meshwright.cy().nodes().some((n) => n.data("label").split("\\n")[0] === {json.dumps(label)})
                  === {json.dumps(there)}""")


def test_the_page_is_opened_searched_and_compared(browser: Browser, tmp_path: Path) -> None:
    _opened(browser, same_blocks(), tmp_path / "plan.html", other())
    _shows(browser, "0..1  ×2")
    _shows(browser, "relu", False)
    browser.tap(*_at(browser, "0..1"), count=2)
    for label in ("up · linear", "relu", "down · linear", "add"):
        _shows(browser, label)
    _panel(browser, "and 1 equal block after it")
    browser.tap(*_at(browser, "down"))
    for text in ("aten.linear.default", "f32[16, 32@tp]", "model.py:1"):
        _panel(browser, text)
    browser.click("#search")
    browser.type(":mul")
    browser.until("document.querySelectorAll('#found button').length === 1")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    _panel(browser, "aten.mul.Tensor")
    browser.click("#switch button:last-child")
    _panel(browser, "1 of those shown")
    assert browser.run("meshwright.cy().nodes('.differs').length") >= 1
    browser.click("#switch button:nth-child(2)")
    _shows(browser, "0..1  ×2", False)
    assert browser.messages == []


def test_a_pipeline_has_a_clock_and_fits_a_narrow_screen(browser: Browser, tmp_path: Path) -> None:
    _opened(browser, piped(), tmp_path / "plan.html")
    assert browser.run("document.querySelectorAll('#clock canvas').length") == 1
    assert browser.run("document.querySelectorAll('#memory .rows .row').length") == 2
    assert browser.run("new Set(meshwright.cy().nodes().map((n) => n.data('colour'))).size") >= 2
    for x, told in ((60, "rank 0, stage 0: forward of micro-batch 0, from 0 for 1 ms"), (480, "bubble")):
        at = browser.run("(() => { const c = document.querySelector('#clock canvas'); c.scrollIntoView({block: 'center'}); "
                         "const r = c.getBoundingClientRect(); return [r.x, r.y]; })()")
        browser.tap(at[0] + x, at[1] + 5)
        browser.until(f"document.getElementById('clock-tip').textContent === {json.dumps(told)}")
    for width in (1280, 390):
        browser.size(width, 844)
        browser.until(f"document.documentElement.clientWidth === {width}")
        assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.messages == []


def test_numbers_beside_long_names_are_seen_on_a_narrow_screen(browser: Browser, tmp_path: Path) -> None:
    _opened(browser, hostile("a_long_name" * 9), tmp_path / "plan.html")
    browser.size(390, 844)
    browser.until("document.documentElement.clientWidth === 390")
    assert browser.run("document.querySelectorAll('.scroll table').length") >= 1
    assert browser.run("[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).length") == 0
    assert browser.messages == []


def test_names_of_a_model_are_text(browser: Browser, tmp_path: Path) -> None:
    _opened(browser, hostile(), tmp_path / "plan.html")
    browser.click("#search")
    browser.type("img")
    browser.until(f"document.getElementById('found').textContent.includes({json.dumps(HOSTILE)})")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("window.hurt === undefined")
    assert browser.messages == []
    # the policy holds: a script that is not the file's own does not run
    browser.run("(() => { const s = document.createElement('script'); s.textContent = 'window.hurt = 1'; "
                "document.body.appendChild(s); })()")
    assert browser.run("window.hurt === undefined")
