/* The page of a plan. Data stand in the JSON elements "plan-0", "plan-1"; text goes in as text only, never as markup. */
(function () {
  "use strict";
  const plans = [];
  for (let k = 0; document.getElementById("plan-" + k); k++) plans.push(JSON.parse(document.getElementById("plan-" + k).textContent));
  const names = JSON.parse(document.getElementById("plan-names").textContent);
  const STAGES = ["#a8c8f0", "#f6cf8f", "#a9dcb4", "#eab0c4", "#c9b8ec", "#9edbd8", "#f2e394", "#d2c2ae", "#f3b59b", "#b8d98a"];
  const PARTS = { "compute": "#4e79c4", "exposed communication": "#e0763a", "recomputation": "#9a7bc8", "optimizer": "#59a16b",
    "pipeline bubble": "#b9c0c9", "outside the schedule": "#8f9aa8", "the rest": "#d8c26a" };
  const KINDS = { parameters: "#4e79c4", gradients: "#e0763a", optimizer: "#59a16b", activations: "#c75d8c", gathered: "#9a7bc8",
    transient: "#d8a24a", inputs: "#7e8a97", all: "#4e79c4" };
  const VISIBLE = 26;
  let data = plans[0], diff = false, expanded = new Set(), cy = null, selected = -1, tree = null;

  const $ = (id) => document.getElementById(id);
  function el(tag, text, cls, more) {
    const e = document.createElement(tag);
    if (text !== undefined && text !== null && text !== "") e.textContent = text;
    if (cls) e.className = cls;
    for (const child of more || []) e.appendChild(child);
    return e;
  }
  function clear(e) { while (e.firstChild) e.removeChild(e.firstChild); return e; }
  function three(x) { return x >= 999.5 ? x.toFixed(0) : String(Number(x.toPrecision(3))); }
  function seconds(s) {
    if (!isFinite(s)) return "impossible";
    if (s === 0) return "0";
    const [unit, size] = Math.abs(s) >= 1 ? ["s", 1] : Math.abs(s) >= 1e-3 ? ["ms", 1e-3] : ["us", 1e-6];
    return three(s / size) + " " + unit;
  }
  function bytes(b) {
    for (const [unit, power] of [["TiB", 40], ["GiB", 30], ["MiB", 20], ["KiB", 10]]) {
      if (b >= 2 ** power) return three(b / 2 ** power) + " " + unit;
    }
    return three(b) + " B";
  }
  function signed(x, text) { return Math.abs(x) < 1e-12 ? "0" : (x > 0 ? "+" : "−") + text(Math.abs(x)); }
  function flops(f) {
    for (const [unit, power] of [["PFLOP", 15], ["TFLOP", 12], ["GFLOP", 9], ["MFLOP", 6]]) {
      if (f >= 10 ** power) return three(f / 10 ** power) + " " + unit;
    }
    return three(f) + " FLOP";
  }
  function colour(stage) {
    if (stage < 0) return "#eceff3";
    if (stage < STAGES.length) return STAGES[stage];
    const hue = (stage * 137.5) % 360, light = (76 + (stage % 3) * 5) / 100, strength = 0.55 * Math.min(light, 1 - light);
    const part = (n) => { /* one channel of that hue, as two hexadecimal digits */
      const k = (n + hue / 30) % 12;
      return Math.round(255 * (light - strength * Math.max(-1, Math.min(k - 3, 9 - k, 1)))).toString(16).padStart(2, "0");
    };
    return "#" + part(0) + part(8) + part(4);
  }

  /* ------------------------------------------------------------------------------------------------------ the outline */
  function grow(plan) {
    if (plan.tree) return plan.tree;
    const t = { kids: plan.nodes.map(() => []), cost: plan.nodes.map(() => 0), moved: plan.nodes.map(() => 0),
      changed: plan.nodes.map(() => false), lo: plan.nodes.map(() => Infinity), hi: plan.nodes.map(() => -1) };
    plan.nodes.forEach((n, i) => { if (i) t.kids[n[0]].push(i); });
    plan.nodes.forEach((n, i) => {
      const info = plan.infos[n[4]];
      if (n[1] === "op") {
        const cost = info.seconds ? n[5] * (info.seconds[0] + info.seconds[1] + info.seconds[2]) : 0;
        for (let at = i; at >= 0; at = at ? plan.nodes[at][0] : -1) {
          t.cost[at] += cost;
          t.changed[at] = t.changed[at] || !!info.changed;
          t.lo[at] = Math.min(t.lo[at], n[6][0]);
          t.hi[at] = Math.max(t.hi[at], n[6][1]);
        }
      }
    });
    for (const [, target, info, times] of plan.edges) {
      const total = plan.infos[info].moves.reduce((sum, m) => sum + m[3] + m[4], 0) * times;
      for (let at = target; at >= 0; at = at ? plan.nodes[at][0] : -1) t.moved[at] += total;
    }
    plan.tree = t;
    return t;
  }
  const ruler = document.createElement("canvas").getContext("2d");
  function sized(label, bold) { /* width and height of a label as it is drawn */
    ruler.font = (bold ? "600 " : "") + "12px system-ui, sans-serif";
    const lines = label.split("\n");
    return [Math.ceil(Math.max(...lines.map((l) => ruler.measureText(l).width))) + 4, 15 * lines.length];
  }
  const isBox = (i) => data.nodes[i][1] === "module" || data.nodes[i][1] === "run";

  function unfold() {
    const leads = data.nodes.map((n) => n[1] === "run"); /* to a repeated block */
    for (let i = data.nodes.length - 1; i > 0; i--) if (leads[i]) leads[data.nodes[i][0]] = true;
    expanded = new Set([0]);
    let front = tree.kids[0].filter(isBox), count = tree.kids[0].length;
    while (front.length) {
      const next = [];
      for (const box of front) {
        if (data.nodes[box][1] === "run" || data.nodes[box][2] === "masks and positions") continue;
        if (leads[0] && !leads[box] || count + tree.kids[box].length - 1 > VISIBLE) continue;
        expanded.add(box);
        count += tree.kids[box].length - 1;
        next.push(...tree.kids[box].filter(isBox));
      }
      front = next;
    }
  }

  function home(i) { /* the outermost folded box that holds a node, or itself */
    let seen = i;
    for (let at = i; at > 0; at = data.nodes[at][0]) if (isBox(at) && !expanded.has(at)) seen = at;
    return seen;
  }

  function elements() {
    const out = [], shown = new Set();
    const total = tree.cost[0] || 1;
    (function walk(i) {
      for (const kid of tree.kids[i]) {
        const n = data.nodes[kid], info = data.infos[n[4]], box = isBox(kid), open = box && expanded.has(kid);
        let label = n[2] + (n[5] > 1 && n[1] === "run" ? "  ×" + n[5] : "");
        if (!box && info.results && info.results.length) label += "\n" + info.results[0];
        else if (box && !open && tree.cost[kid]) label += "\n" + seconds(tree.cost[kid]) + " compute";
        const lo = tree.lo[kid], hi = tree.hi[kid], input = n[1] === "input";
        const node = { data: { id: "n" + kid, label, heat: Math.round(100 * tree.cost[kid] / total) },
          classes: [open ? "open" : box ? "box" : "op", input ? "input" : "", diff && tree.changed[kid] ? "differs" : ""].join(" ") };
        const cut = label.split("\n").map((l) => l.length > 60 ? l.slice(0, 59) + "…" : l).join("\n");
        node.data.label = cut;
        [node.data.wide, node.data.high] = sized(cut, box);
        node.data.colour = input || data.stages < 2 && hi < 0 ? "#eceff3" : colour(lo === Infinity ? -1 : lo);
        node.data.colours = lo === hi || lo === Infinity ? node.data.colour + " " + node.data.colour
          : [0, 1, 2, 3].map((k) => colour(Math.round(lo + (hi - lo) * k / 3))).join(" ");
        if (i) node.data.parent = "n" + i;
        out.push(node);
        shown.add(kid);
        if (open) walk(kid);
      }
    })(0);
    const joined = new Map();
    for (const [from, to, info, times, loop] of data.edges) {
      const a = home(from), b = home(to);
      if (loop || a === b) continue;
      const key = a + ">" + b;
      if (!joined.has(key)) joined.set(key, { a, b, cost: 0, list: [] });
      const edge = joined.get(key);
      edge.cost += times * data.infos[info].moves.reduce((sum, m) => sum + m[3] + m[4], 0);
      edge.list.push([from, to, info, times]);
    }
    const most = Math.max(1e-12, ...[...joined.values()].map((e) => e.cost));
    joined.forEach((e, key) => {
      const words = new Set();
      for (const [, , info] of e.list) for (const m of data.infos[info].moves) if (m[3] + m[4] > 0) words.add(m[0]);
      const list = [...words];
      const label = e.cost > 0 ? list.slice(0, 2).join("\n") + (list.length > 2 ? "\n…" : "") + "\n" + seconds(e.cost) : "";
      const share = e.cost > 0 ? 0.25 + 0.75 * Math.max(0, 1 + Math.log10(e.cost / most) / 3) : 0;
      out.push({ data: { id: "e" + key, source: "n" + e.a, target: "n" + e.b, label, width: 1.2 + 5 * share, list: e.list },
        classes: e.cost > 0 ? "paid" : "" });
    });
    return out;
  }

  const STYLE = [
    { selector: "node", style: { "label": "data(label)", "text-wrap": "wrap", "text-valign": "center", "text-halign": "center",
      "font-size": 12, "font-family": "system-ui, sans-serif", "color": "#1c2430", "shape": "round-rectangle", "width": "data(wide)",
      "height": "data(high)", "padding": "8px", "border-width": 1, "border-color": "#8f9aa8", "background-color": "data(colour)",
      "text-max-width": 600 } },
    { selector: "node.box", style: { "border-width": 2, "border-color": "#4c5866", "border-style": "double",
      "background-fill": "linear-gradient", "background-gradient-stop-colors": "data(colours)",
      "background-gradient-direction": "to-right", "font-weight": 600 } },
    { selector: "node.open", style: { "text-valign": "top", "text-halign": "center", "background-color": "#ffffff",
      "background-opacity": 0.55, "border-color": "#aab4c0", "border-style": "dashed", "font-weight": 600, "color": "#4c5866",
      "padding": "14px", "text-margin-y": -3 } },
    { selector: "node.input", style: { "shape": "ellipse", "border-style": "dashed" } },
    { selector: "node.differs", style: { "border-color": "#b3261e", "border-width": 4, "border-style": "solid" } },
    { selector: "edge", style: { "curve-style": "bezier", "target-arrow-shape": "triangle", "arrow-scale": 0.9, "width": "data(width)",
      "line-color": "#b5bec9", "target-arrow-color": "#b5bec9" } },
    { selector: "edge.paid", style: { "line-color": "#e0763a", "target-arrow-color": "#e0763a", "label": "data(label)",
      "text-wrap": "wrap", "font-size": 11, "color": "#9c4514", "text-background-color": "#ffffff", "text-background-opacity": 0.85,
      "text-background-padding": "2px" } },
    { selector: "node.open.differs", style: { "border-width": 2, "border-style": "dashed" } },
    { selector: ":selected", style: { "border-color": "#1f5fbf", "border-width": 4, "border-style": "solid" } },
    { selector: "edge:selected", style: { "line-color": "#1f5fbf", "target-arrow-color": "#1f5fbf" } },
  ];

  function draw(keep) {
    const pan = cy ? { ...cy.pan() } : null, zoom = cy ? cy.zoom() : 1;
    const anchor = keep !== undefined && cy && cy.getElementById("n" + keep).nonempty()
      ? { ...cy.getElementById("n" + keep).renderedPosition() } : null;
    if (cy) cy.destroy();
    cy = cytoscape({ container: $("graph"), elements: elements(), style: STYLE, minZoom: 0.05, maxZoom: 3,
      layout: { name: "dagre", rankDir: "TB", nodeSep: 26, rankSep: 34, edgeSep: 10, animate: false, fit: false,
        minLen: (edge) => edge.data("label") ? 2 : 1 } });
    words();
    cy.on("tap", "node", (event) => tapped(Number(event.target.id().slice(1))));
    cy.on("dbltap", "node", (event) => toggle(Number(event.target.id().slice(1))));
    cy.on("tap", "edge", (event) => edgePanel(event.target.data("list")));
    cy.on("tap", (event) => { if (event.target === cy) overview(); });
    const now = anchor && cy.getElementById("n" + keep);
    if (now && now.nonempty()) {
      cy.viewport({ zoom, pan });
      const at = now.renderedPosition();
      const box = now.isParent() ? now.renderedBoundingBox() : null;
      cy.panBy({ x: anchor.x - at.x, y: box ? Math.min(anchor.y, 60) - box.y1 : anchor.y - at.y });
    } else fit();
    if (selected >= 0) cy.getElementById("n" + selected).select();
    legend();
  }
  function words() { /* the words of an edge go to where they lie on no node and on no other words, as near its middle as can be */
    const taken = cy.nodes().filter((n) => !n.isParent()).map((n) => n.boundingBox({ includeLabels: false }));
    cy.edges(".paid").forEach((edge) => {
      const from = edge.sourceEndpoint(), to = edge.targetEndpoint(), mid = edge.midpoint(), [wide, high] = sized(edge.data("label"));
      const room = (t, side) => {
        const x = from.x + t * (to.x - from.x) + side * wide / 2, y = from.y + t * (to.y - from.y);
        return { x, y, x1: x - wide / 2, x2: x + wide / 2, y1: y - high / 2, y2: y + high / 2 };
      };
      const hidden = (b) => taken.reduce((sum, o) => sum + Math.max(0, Math.min(b.x2, o.x2) - Math.max(b.x1, o.x1))
        * Math.max(0, Math.min(b.y2, o.y2) - Math.max(b.y1, o.y1)), 0);
      const tried = [0, 1, -1, 2, -2].flatMap((side) => [0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9].map((t) => room(t, side)));
      const least = Math.min(...tried.map(hidden)), found = tried.find((b) => hidden(b) <= least);
      edge.style({ "text-margin-x": found.x - mid.x, "text-margin-y": found.y - mid.y });
      taken.push(found);
    });
  }
  function fit() {
    const all = cy.elements(), width = cy.width(), height = cy.height(), box = all.boundingBox();
    const zoom = Math.min(1.15, Math.max(Math.min((width - 30) / box.w, (height - 40) / box.h), Math.min(0.62, (width - 20) / box.w)));
    cy.zoom(zoom);
    cy.pan({ x: width / 2 - zoom * (box.x1 + box.w / 2), y: box.h * zoom > height - 40 ? 14 - zoom * box.y1
      : height / 2 - zoom * (box.y1 + box.h / 2) });
  }
  function toggle(i) {
    if (!isBox(i)) return;
    if (expanded.has(i)) expanded.delete(i); else expanded.add(i);
    draw(i);
    if (selected === i) panel(i);
  }
  function tapped(i) { selected = i; panel(i); }

  function legend() {
    const box = clear($("legend"));
    const stages = Math.min(data.stages, 8);
    if (data.stages > 1) for (let s = 0; s < stages; s++) box.appendChild(keyOf(colour(s), "stage " + s));
    if (data.stages > stages) box.appendChild(keyOf(colour(data.stages - 1), "… stage " + (data.stages - 1)));
    box.appendChild(keyOf("#e0763a", "collectives, by time"));
    box.appendChild(el("span", "a double border opens on a double click"));
  }
  function keyOf(hue, text) {
    const key = el("i", "", "key");
    key.style.background = hue;
    return el("span", "", "", [key, document.createTextNode(text)]);
  }

  /* -------------------------------------------------------------------------------------------------------- the panel */
  function list(pairs) {
    const dl = el("dl");
    for (const [what, text] of pairs) { dl.appendChild(el("dt", what)); dl.appendChild(el("dd", text)); }
    return dl;
  }
  function table(heads, rows) {
    const t = el("table"), head = el("tr");
    for (const h of heads) head.appendChild(el("th", h.replace(/^#/, ""), h[0] === "#" ? "num" : ""));
    t.appendChild(el("thead", "", "", [head]));
    const body = el("tbody");
    for (const row of rows) {
      const tr = el("tr", "", row.cls || "");
      row.cells.forEach((cell, k) => tr.appendChild(cell instanceof Node ? el("td", "", "", [cell])
        : el("td", cell, heads[k][0] === "#" ? "num" : "")));
      body.appendChild(tr);
    }
    t.appendChild(body);
    return el("div", "", "scroll", [t]);
  }
  function moves(list_, times) {
    return table(["collective", "#bytes", "#times", "#forward", "#backward"], list_.map((m) =>
      ({ cells: [m[0], m[1], three(m[2] * times), seconds(m[3] * times), seconds(m[4] * times)] })));
  }
  function panel(i) {
    const n = data.nodes[i], info = data.infos[n[4]], p = clear($("panel"));
    p.appendChild(el("h2", isBox(i) || n[1] === "input" ? info.title : n[2]));
    if (isBox(i)) return boxPanel(i, n, info, p);
    if (n[1] === "input") { p.appendChild(el("code", info.results[0])); return; }
    const rows = [["operator", info.title], ["name", n[3]], ["module", info.module || "the model"], ["source", info.source || "unknown"]];
    if (n[5] > 1) rows.push(["stands for", n[5] + " equal operators"]);
    if (data.stages > 1) rows.push(["stage", n[6][0] === n[6][1] ? String(n[6][0]) : n[6][0] + " to " + n[6][1]]);
    rows.push(["choice", info.choice], ["rule", info.rule]);
    p.appendChild(list(rows));
    p.appendChild(el("h3", "Sharding"));
    const lines = info.operands.map((o) => ({ cells: [o[0] + (o[1] ? " " + o[1] : ""), o[2] + (o[3] ? " → read as " + o[3] : "")] }));
    for (const r of info.results) lines.push({ cells: ["result", r], cls: "chosen" });
    const t = table(["", "in the notation"], lines);
    t.classList.add("code");
    p.appendChild(t);
    if (info.seconds) {
      p.appendChild(el("h3", "One step on one rank" + (n[5] > 1 ? ", each of them" : "")));
      const cost = [["forward", seconds(info.seconds[0])], ["backward", seconds(info.seconds[1])]];
      if (info.seconds[2]) cost.push(["recomputed", seconds(info.seconds[2])]);
      if (info.parameters) cost.push(["weights gathered", seconds(info.parameters[0])], ["gradients reduced", seconds(info.parameters[1])]);
      if (info.optimizer) cost.push(["optimizer", seconds(info.optimizer)]);
      cost.push(["work", flops(info.flops)], ["results", bytes(info.bytes)]);
      p.appendChild(list(cost));
    }
    if (info.inside) { p.appendChild(el("h3", "Collectives inside")); p.appendChild(moves(info.inside, 1)); }
    const own = data.edges.filter((e) => e[1] === i && data.infos[e[2]].moves.length);
    if (own.length) {
      p.appendChild(el("h3", "Before it"));
      for (const e of own) {
        p.appendChild(el("div", data.infos[e[2]].have + " → " + data.infos[e[2]].need + (e[4] ? " (from the copy before)" : ""), "code"));
        p.appendChild(moves(data.infos[e[2]].moves, 1));
      }
    }
    if (info.alternatives) {
      p.appendChild(el("h3", "Alternatives, everything else at its best for them"));
      p.appendChild(table(["choice", "#step", "#memory", "what decides"], info.alternatives.map((a) => ({ cells: [a.choice,
        a.chosen ? "as planned" : more(a), a.chosen ? "" : signed(a.bytes, bytes), a.why], cls: a.chosen ? "chosen" : "" }))));
    }
    if (info.mine !== undefined && diff) changes(p, info);
  }
  function more(a) {
    const most = signed(a.more, seconds);
    if (a.least === undefined) return most;
    return a.least === "unknown" ? "at most " + most : signed(a.least, seconds) + " to " + most;
  }
  function changes(p, info) {
    p.appendChild(el("h3", "Against " + names[1]));
    if (!info.changed) { p.appendChild(el("div", "decided the same", "soft")); return; }
    p.appendChild(el("span", names[0] + "\n" + info.mine, "new code"));
    if (!info.other.length) p.appendChild(el("span", names[1] + " has no such operator", "old"));
    for (const other of info.other) p.appendChild(el("span", names[1] + "\n" + other, "old code"));
  }
  function boxPanel(i, n, info, p) {
    const open = el("button", expanded.has(i) ? "Fold" : "Open");
    open.id = "open-box";
    open.addEventListener("click", () => { selected = i; toggle(i); });
    p.appendChild(open);
    const rows = [];
    if (n[5] > 1) rows.push(["blocks", n[5] + ", the first shown for all"]);
    if (data.stages > 1 && tree.hi[i] >= 0) rows.push(["stages", tree.lo[i] === tree.hi[i] ? String(tree.lo[i]) : tree.lo[i] + " to " + tree.hi[i]]);
    for (const words of info.kept || []) rows.push([words[0], words[1]]);
    rows.push(["compute", seconds(tree.cost[i]) + " of a step, recomputation included"], ["collectives", seconds(tree.moved[i]) + " on edges"]);
    p.appendChild(list(rows));
    const inside = [];
    (function walk(k) { for (const kid of tree.kids[k]) { if (isBox(kid)) walk(kid); else inside.push(kid); } })(i);
    const weights = inside.flatMap((k) => data.infos[data.nodes[k][4]].operands
      ? data.infos[data.nodes[k][4]].operands.filter((o) => o[0] === "parameter").map((o) => [k, o]) : []);
    if (weights.length) {
      p.appendChild(el("h3", "Weights"));
      p.appendChild(table(["", "at rest in a block"], weights.slice(0, 60).map(([k, o]) => ({ cells: [link(o[1], k), o[2]] }))));
    }
    const loops = data.edges.filter((e) => e[4] && inside.includes(e[1]));
    if (loops.length) {
      p.appendChild(el("h3", "From one block to the next"));
      for (const e of loops) {
        p.appendChild(el("div", data.infos[e[2]].have + " → " + data.infos[e[2]].need, "code"));
        if (data.infos[e[2]].moves.length) p.appendChild(moves(data.infos[e[2]].moves, 1));
      }
    }
  }
  function edgePanel(edges) {
    const p = clear($("panel"));
    p.appendChild(el("h2", edges.length + " value" + (edges.length > 1 ? "s" : "") + " on this edge"));
    for (const [from, to, info, times] of edges.slice(0, 40)) {
      const i = data.infos[info];
      p.appendChild(el("h3", "", "", [link(data.nodes[from][2], from), document.createTextNode(" → "), link(data.nodes[to][2], to),
        document.createTextNode(times > 1 ? "  ×" + times : "")]));
      p.appendChild(el("div", i.have + (i.need !== i.have ? " → " + i.need : ""), "code"));
      if (i.moves.length) p.appendChild(moves(i.moves, times));
    }
  }
  function link(text, i) {
    const b = el("button", text, "link");
    b.addEventListener("click", () => jump(i));
    return b;
  }
  function jump(i) {
    for (let at = data.nodes[i][0]; at > 0; at = data.nodes[at][0]) expanded.add(at);
    selected = i;
    draw();
    const node = cy.getElementById("n" + i);
    cy.elements().unselect();
    node.select();
    cy.zoom(Math.max(0.9, Math.min(1.2, cy.zoom())));
    cy.center(node);
    panel(i);
  }
  function overview() {
    selected = -1;
    const p = clear($("panel"));
    p.appendChild(el("h2", "The plan"));
    p.appendChild(list(data.facts));
    if (diff) {
      p.appendChild(el("h3", "Changed operators"));
      const ops = data.nodes.map((n, i) => i).filter((i) => data.nodes[i][1] === "op" && data.infos[data.nodes[i][4]].changed);
      p.appendChild(el("div", ops.length ? ops.length + " of those shown" : "none", "soft"));
      for (const i of ops.slice(0, 80)) p.appendChild(el("div", "", "", [link(data.nodes[i][2] + " in " + (data.infos[data.nodes[i][4]].module || "the model"), i)]));
    }
    p.appendChild(el("p", "Click an operator, an edge or a module; a double click opens or folds a module.", "soft"));
  }

  /* ------------------------------------------------------------------------------------------------------------ search */
  function search(text) {
    const box = clear($("found")), words = text.toLowerCase().split(/\s+/).filter(Boolean);
    box.hidden = !words.length;
    if (!words.length) return;
    let count = 0;
    for (let i = 1; i < data.nodes.length && count < 30; i++) {
      const n = data.nodes[i], info = data.infos[n[4]];
      const text_ = [n[2], n[3], info.title, info.module || "", pathOf(i)].join(" ").toLowerCase();
      if (!words.every((w) => text_.includes(w))) continue;
      const b = el("button", pathOf(i));
      b.addEventListener("click", () => { box.hidden = true; jump(i); });
      box.appendChild(el("li", "", "", [b]));
      count++;
    }
    if (!count) box.appendChild(el("li", "nothing of that name", "soft"));
  }
  function pathOf(i) {
    const parts = [];
    for (let at = i; at > 0; at = data.nodes[at][0]) parts.unshift(data.nodes[at][2]);
    return parts.join(" › ");
  }

  /* ---------------------------------------------------------------------------------------------------------- numbers */
  function stack(parts, total, hues, cap) {
    const bar = el("div", "", "stack");
    for (const [name, value] of parts) {
      if (!value) continue;
      const i = el("i");
      i.style.width = 100 * value / total + "%";
      i.style.background = hues[name] || "#7e8a97";
      i.title = name;
      bar.appendChild(i);
    }
    if (cap !== undefined) { const line = el("div", "", "cap"); line.style.left = "calc(" + 100 * cap / total + "% - 2px)"; bar.appendChild(line); }
    return bar;
  }
  function keys(parts, hues, format) {
    return el("div", "", "keys", parts.map(([name, value]) => keyOf(hues[name] || "#7e8a97", name + (format ? " " + format(value) : ""))));
  }
  function time() {
    const box = clear($("time"));
    box.appendChild(el("h2", "Where the step's time goes"));
    if (!data.time.length) { box.appendChild(el("div", "not predicted", "soft")); return; }
    box.appendChild(stack(data.time, data.step, PARTS));
    box.appendChild(keys(data.time, PARTS, (v) => seconds(v) + " (" + (100 * v / data.step).toFixed(1) + "%)"));
    if (diff) {
      box.appendChild(el("h3", names[1]));
      box.appendChild(stack(plans[1].time, Math.max(data.step, plans[1].step), PARTS));
      box.appendChild(keys(plans[1].time, PARTS, seconds));
    }
    if (data.hot.length) {
      box.appendChild(el("h3", "Most seconds of a step, summed over equal blocks and all stages"));
      box.appendChild(table(["what", "#seconds"], data.hot.map(([what, node, s]) => ({ cells: [link(what, node), seconds(s)] }))));
    }
  }
  function memory() {
    const box = clear($("memory"));
    box.appendChild(el("h2", "Memory per rank at its fullest moment"));
    const m = data.memory;
    if (!m) { box.appendChild(el("div", "not predicted", "soft")); return; }
    const all = m.ranks.concat(diff && plans[1].memory ? plans[1].memory.ranks : []);
    const most = Math.max(m.capacity, ...all.map(([, kinds]) => Object.values(kinds).reduce((a, b) => a + b, 0)));
    const rows = (ranks, capacity) => {
      const list_ = el("div", "", "rows");
      for (const [name, kinds] of ranks) {
        const total = Object.values(kinds).reduce((a, b) => a + b, 0);
        list_.appendChild(el("div", "", "row", [el("span", name), stack(Object.entries(kinds), most, KINDS, capacity), el("span", bytes(total))]));
      }
      box.appendChild(list_);
    };
    rows(m.ranks, m.capacity);
    if (diff && plans[1].memory) { box.appendChild(el("h3", names[1])); rows(plans[1].memory.ranks, plans[1].memory.capacity); }
    const kinds = [...new Set(all.flatMap(([, k]) => Object.entries(k).filter(([, v]) => v > 0).map(([name]) => name)))];
    box.appendChild(keys(kinds.map((k) => [k, 0]), KINDS));
    box.appendChild(el("div", "the red line: " + bytes(m.capacity) + " that a plan may use of a device", "soft"));
  }
  const ACTION = { F: ["forward", 62, 74], B: ["backward", 40, 60], I: ["backward of inputs", 40, 60], W: ["backward of weights", 46, 84] };
  let zoom = 1;
  function lane([kinds, text]) { /* [kind, stage, micro-batch, start, microseconds] of every action (data.py, _lane) */
    const next = kinds.map(() => 0), found = [];
    let now = 0;
    for (const [, letters, micro, waited] of text.matchAll(/([A-Z][a-z]*)(\d*)(?:\+(\d+))?/g)) {
      let k = 0;
      for (const letter of letters.toLowerCase()) k = 8 * k + letter.charCodeAt(0) - 97;
      const [kind, stage, long] = kinds[k];
      if (micro) next[k] = Number(micro);
      now += Number(waited || 0);
      found.push([kind, stage, next[k]++, now, long]);
      now += long;
    }
    return found;
  }
  function clock() {
    const box = clear($("clock")), c = data.clock;
    box.hidden = !c;
    if (!c) return;
    const lanes = c.rows.map(lane), has = (kind) => c.rows.some(([kinds]) => kinds.some((one) => one[0] === kind));
    box.appendChild(el("h2", "The pipeline under " + c.schedule + ": " + seconds(c.end / 1e6) + ", bubbles " + (100 * c.bubble).toFixed(1) + "% of the ranks' time"));
    const bar = el("div", "", "keys");
    bar.appendChild(keyOf("#7fa6dc", "forward"));
    bar.appendChild(keyOf("#5fb57a", "backward" + (has("I") ? " of inputs" : "")));
    if (has("W")) bar.appendChild(keyOf("#c9a64b", "backward of weights"));
    bar.appendChild(keyOf("#eceff3", "bubble"));
    for (const [text, by] of [["−", 0.5], ["+", 2]]) {
      const b = el("button", text);
      b.setAttribute("aria-label", by > 1 ? "zoom in" : "zoom out");
      b.addEventListener("click", () => { zoom = Math.min(64, Math.max(1, zoom * by)); paint(); });
      bar.appendChild(b);
    }
    box.appendChild(bar);
    const view = el("div"), canvas = el("canvas");
    view.id = "clock-view";
    view.appendChild(canvas);
    box.appendChild(view);
    const tip = el("div", "", "");
    tip.id = "clock-tip";
    box.appendChild(tip);
    const left = 54, high = Math.max(9, Math.min(22, 420 / c.rows.length));
    let scale = 1;
    const wide_of = (a) => Math.max(0.4, a[4] * scale);
    function paint() {
      const wide = Math.min(30000, Math.max(200, view.clientWidth - 2) * zoom), ratio = zoom > 4 ? 1 : Math.min(2, window.devicePixelRatio || 1);
      canvas.width = wide * ratio; canvas.height = (high * c.rows.length + 22) * ratio;
      canvas.style.width = wide + "px"; canvas.style.height = high * c.rows.length + 22 + "px";
      const g = canvas.getContext("2d");
      scale = (wide - left - 6) / c.end;
      g.scale(ratio, ratio);
      g.font = Math.min(11, high - 1) + "px system-ui, sans-serif";
      g.textBaseline = "middle";
      lanes.forEach((row, r) => {
        const y = r * high;
        g.fillStyle = "#eceff3"; g.fillRect(left, y + 1, c.end * scale, high - 2);
        g.fillStyle = "#5b6675"; g.fillText("rank " + r, 4, y + high / 2);
        const stages = [...new Set(c.rows[r][0].map((one) => one[1]))], colours = {};
        for (const [kind, stage] of c.rows[r][0]) {
          const shade = stages.length > 1 ? 10 * (stages.indexOf(stage) % 3) : 0;
          colours[kind + stage] = kind === "F" ? "hsl(214, 57%, " + (68 + shade) + "%)" : kind === "W" ? "hsl(43, 54%, " + (54 + shade) + "%)" : "hsl(139, 37%, " + (54 + shade) + "%)";
        }
        for (const a of row) {
          const x = left + a[3] * scale, w = wide_of(a);
          g.fillStyle = colours[a[0] + a[1]];
          g.fillRect(x, y + 1, Math.max(0.4, w - (w > 3 ? 0.7 : 0)), high - 2);
          const text = String(a[2]);
          if (w > 7 * text.length + 4 && high > 10) { g.fillStyle = "#14202e"; g.fillText(text, x + 3, y + high / 2); }
        }
      });
      g.fillStyle = "#5b6675";
      const least = c.end * 90 / (wide - left), power = 10 ** Math.floor(Math.log10(least)); /* a mark every 90 pixels or more */
      const step = power * [1, 2, 5, 10].find((k) => k * power >= least * 0.999);
      for (let k = 0; k * step <= c.end; k++) {
        const x = left + k * step * scale;
        g.fillRect(x, c.rows.length * high, 1, 4);
        g.textAlign = x + 60 < wide ? "left" : "right";
        g.fillText(seconds(k * step / 1e6), x + (x + 60 < wide ? k && 3 : -3), c.rows.length * high + 12);
      }
      g.textAlign = "left";
    }
    function at(event) {
      const r = canvas.getBoundingClientRect(), x = event.clientX - r.left, y = event.clientY - r.top;
      const rank = Math.floor(y / high), hit = (lanes[rank] || []).find((a) => x >= left + a[3] * scale && x <= left + a[3] * scale + wide_of(a));
      tip.textContent = hit ? "rank " + rank + ", stage " + hit[1] + ": " + ACTION[hit[0]][0] + " of micro-batch " + hit[2] + ", from "
        + seconds(hit[3] / 1e6) + " for " + seconds(hit[4] / 1e6) : y < c.rows.length * high && x > left ? "bubble" : "";
    }
    canvas.addEventListener("mousemove", at);
    canvas.addEventListener("click", at);
    clock.paint = paint;
    setTimeout(paint); /* behind the first picture of the page, below which it stands */
  }
  function rest() {
    const box = clear($("search-card")), c = data.candidates;
    box.appendChild(el("h2", "What the search looked at"));
    if (!c) { box.appendChild(el("div", "no search made this plan", "soft")); } else {
      if (c.runner_up) box.appendChild(el("p", "Runner-up: " + c.runner_up, "note"));
      box.appendChild(el("p", "Within " + (100 * c.gap).toFixed(2) + "% of the lower bound (" + c.status + ")"
        + (c.considered ? "; " + c.considered + (c.considered === 1 ? " candidate" : " candidates") + " considered, " + c.pruned + " pruned by bound, " + c.infeasible + " impossible, " + c.solved + " solved" : ""), "note"));
      const best = c.seen.slice().sort((a, b) => (a.step_seconds === null ? Infinity : a.step_seconds) - (b.step_seconds === null ? Infinity : b.step_seconds));
      if (best.length) box.appendChild(table(["candidate", "#micro-batches", "#step", ""], best.slice(0, 12).map((s) =>
        ({ cells: [s.layout, String(s.microbatches), s.step_seconds === null ? "" : seconds(s.step_seconds),
          s.step_seconds === null ? s.outcome : s.alike ? "not told apart from the best" : ""] }))));
    }
    for (const note of data.notes) box.appendChild(el("p", "Note: " + note, "note"));
  }
  function head() {
    $("title").textContent = data.title;
    const box = clear($("chips"));
    for (const [text, what] of data.chips) box.appendChild(el("div", "", "chip", [el("b", text), el("span", what)]));
    if (diff) for (const [text, what] of plans[1].chips.slice(0, 2)) box.appendChild(el("div", "", "chip", [el("b", text), el("span", what + ", " + names[1])]));
  }

  function open(k, changes_) {
    data = plans[k]; diff = changes_; tree = grow(data); zoom = 1; selected = -1;
    document.querySelectorAll("#switch button").forEach((b) => b.setAttribute("aria-pressed", String(Number(b.dataset.plan) === (changes_ ? 2 : k))));
    unfold(); head(); draw(); overview(); time(); memory(); clock(); rest();
  }
  function start() {
    if (plans.length > 1) {
      const box = $("switch");
      box.hidden = false;
      [names[0], names[1], "what differs"].forEach((text, k) => {
        const b = el("button", text);
        b.dataset.plan = k;
        b.addEventListener("click", () => open(k === 1 ? 1 : 0, k === 2));
        box.appendChild(b);
      });
    }
    $("search").addEventListener("input", (event) => search(event.target.value));
    $("search").addEventListener("keydown", (event) => {
      const first = $("found").querySelector("button");
      if (event.key === "Enter" && first) first.click();
      if (event.key === "Escape") $("found").hidden = true;
    });
    document.addEventListener("click", (event) => { if (!event.target.closest(".search")) $("found").hidden = true; });
    $("all").addEventListener("click", () => { unfold(); draw(); });
    $("fit").addEventListener("click", () => cy.fit(undefined, 16));
    $("in").addEventListener("click", () => cy.zoom({ level: cy.zoom() * 1.3, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } }));
    $("out").addEventListener("click", () => cy.zoom({ level: cy.zoom() / 1.3, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } }));
    let waiting = 0;
    window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { cy.resize(); fit(); if (clock.paint) clock.paint(); }, 150); });
    open(0, false);
    window.meshwright = { jump, toggle, open, cy: () => cy, state: () => ({ expanded: [...expanded], selected, diff }) };
    document.body.dataset.ready = "yes";
  }
  start();
})();
