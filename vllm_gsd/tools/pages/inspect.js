"use strict";
// The inspector: the coloured answer, the slider over steps, the graph of a step, and charts over all steps.
const { steps, summary, kinds, plans } = data;
const byId = (id) => document.getElementById(id);
const slider = byId("slider");
const kindOf = { root: "target", draft: "drafted", ngram: "copied", shared: "copied", agreed: "copied", grammar: "grammar" };
const said = { native: "drafted", merged: "merged", ngram: "copied from its own text", shared: "copied from another answer",
  agreed: "drafted and copied", grammar: "by the grammar", target: "chosen by the target", draft: "drafted" };
const percent = (value) => (value >= 0.0995 ? `${Math.round(100 * value)}%` : `${(100 * value).toFixed(1)}%`);
let now = 0;

/** A token's text with its spaces visible, at most `most` characters. */
function shown(text, most = Infinity) {
  if (text === "") return "∅";
  const seen = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "·");
  return [...seen].length > most ? [...seen].slice(0, most - 1).join("") + "…" : seen;
}

// --- the answer -------------------------------------------------------------------------------------

const spans = steps.map(({ tokens }, index) => {
  const group = document.createElement("span");
  group.className = "step";
  group.dataset.step = index;
  tokens.text.forEach((text, place) => {
    const span = document.createElement("span");
    span.className = `token ${kinds[tokens.source[place]]}`;
    span.title = `${said[tokens.source[place]]}, step ${index + 1}`;
    span.textContent = text;
    group.append(span);
  });
  return group;
});
byId("answer").append(...spans);
byId("answer").addEventListener("click", (event) => {
  const span = event.target.closest("[data-step]");
  if (span) show(Number(span.dataset.step));
});

// --- one step ---------------------------------------------------------------------------------------

/** What the target chose after its walk: its text, the node above it, and its own node if the graph had it, else -1. */
function choiceOf({ graph, tokens }) {
  const last = tokens.source.length - 1;
  if (tokens.source[last] !== "target" || !graph.token.length) return undefined;
  const end = last > 0 ? tokens.node[last - 1] : 0;
  const parent = graph.merged[end] >= 0 ? graph.merged[end] : end;
  const node = graph.token.findIndex((token, index) => token === tokens.token[last] && graph.parent[index] === parent);
  return { text: tokens.text[last], parent, node };
}

/** The nodes to draw of a step, as objects; what the target chose after its walk is the last. */
function nodesOf(step) {
  const { graph, tokens } = step;
  const hidden = byId("all").checked ? [] : ["left out", "pruned"];
  const nodes = graph.token.map((token, index) => ({
    index, token, text: token === null ? "hidden" : graph.text[index], parent: graph.parent[index], prob: graph.prob[index],
    survival: graph.survival[index], origin: graph.origin[index], merged: graph.merged[index], state: graph.state[index],
    kind: graph.merged[index] >= 0 ? "merged" : kindOf[graph.origin[index]],
  }));
  const choice = choiceOf(step);
  if (choice?.node >= 0) Object.assign(nodes[choice.node], { state: "chosen", was: nodes[choice.node].state });
  const kept = nodes.filter((node) => !hidden.includes(node.state));
  if (choice?.node === -1) {
    kept.push({ index: nodes.length, text: choice.text, parent: choice.parent, state: "chosen", kind: "target", merged: -1 });
  }
  // A merged edge's target may lie below a node that is not drawn.
  const drawn = new Set(kept.map((node) => node.index));
  for (const node of kept) {
    for (let above = node.parent; above >= 0 && !drawn.has(above); above = nodes[above].parent) {
      drawn.add(above);
      kept.push(nodes[above]);
    }
  }
  return kept;
}

function drawGraph(step) {
  const nodes = nodesOf(step);
  const place = d3.select("#graph");
  place.selectChildren().remove();
  if (nodes.length < 2) {
    place.append("p").attr("class", "soft").text("Nothing was drafted for this step.");
    return;
  }
  const tree = d3.tree().nodeSize([44, 132])(d3.stratify().id((node) => node.index).parentId((node) => (node.parent < 0 ? null : node.parent))(nodes));
  const all = tree.descendants();
  const of = new Map(all.map((node) => [node.data.index, node]));
  const [low, high] = d3.extent(all, (node) => node.x);
  const [width, height] = [132 * (tree.height + 1), high - low + 44];
  const svg = place.append("svg").attr("width", width).attr("height", height).attr("viewBox", [-4, low - 22, width, height])
    .attr("role", "img").attr("aria-label", `${sentence(step)} The table below lists the nodes.`);
  svg.append("marker").attr("id", "tip").attr("viewBox", "0 0 8 8").attr("refX", 7).attr("refY", 4).attr("markerWidth", 7)
    .attr("markerHeight", 7).attr("orient", "auto").append("path").attr("d", "M0 0L8 4L0 8z").attr("fill", colour("merged"));
  const accepted = (node) => ["accepted", "chosen"].includes(node.data.state);
  const box = 112;
  svg.append("g").selectAll().data(tree.links()).join("path")
    .attr("class", ({ target }) => `edge ${accepted(target) ? "accepted" : ""}`)
    .attr("d", d3.linkHorizontal().source(({ source }) => [source.y + box, source.x]).target(({ target }) => [target.y, target.x]));
  svg.append("g").selectAll().data(all.filter((node) => of.has(node.data.merged))).join("path")
    .attr("class", "edge joins").attr("marker-end", "url(#tip)")
    .attr("d", (node) => {
      const goal = of.get(node.data.merged);
      const [x, y] = [node.y + box, goal.y + box];
      return `M${x} ${node.x}C${Math.max(x, y) + 40} ${node.x} ${Math.max(x, y) + 40} ${goal.x} ${y} ${goal.x}`;
    });
  const node = svg.append("g").selectAll().data(all).join("g")
    .attr("class", ({ data: one }) => `node ${one.kind} ${one.state.replace(" ", "-")}`)
    .attr("transform", (one) => `translate(${one.y},${one.x})`);
  node.append("title").text(({ data: one }) => describe(one));
  node.append("rect").attr("y", -17).attr("width", box).attr("height", 34);
  node.append("text").attr("class", "word").attr("x", 7).attr("y", -2).text(({ data: one }) => shown(one.text, 12));
  node.append("text").attr("class", "odds").attr("x", 7).attr("y", 12)
    .text(({ data: one }) => (one.state === "chosen" ? "target's choice" : one.parent < 0 ? "last token" : `${percent(one.prob)} / ${percent(one.survival)}`));
  const frame = place.node();
  frame.scrollTop = -low + 22 - frame.clientHeight / 2; // the last token of the text in the middle
}

const describe = (node) => node.state === "chosen" ? `“${node.text}”: what the target chose${node.was ? `; the graph had it, ${node.was}` : ""}`
  : node.parent < 0 ? `“${node.text}”: the last token of the text`
  : `“${node.text}” ${node.token === null ? "" : `(token ${node.token})`}: ${node.state}, ${said[node.origin]}${node.merged >= 0 ? ", merged" : ""}, `
    + `probability ${percent(node.prob)}, survival ${percent(node.survival)}`;

/** What happened in a step, in words. */
function sentence(step) {
  const { token, text, source } = step.tokens;
  const accepted = source.filter((one) => one !== "target").length;
  const rows = step.verified.node.length;
  const nodes = rows === 1 ? "node" : "nodes";
  const first = rows ? `The target verified ${rows} ${nodes} and accepted ${accepted}.` : "Nothing was verified.";
  if (source[token.length - 1] !== "target") return first;
  const choice = choiceOf(step);
  const known = choice?.node >= 0 ? `, which the graph had (${step.graph.state[choice.node]})` : "";
  return `${first} ${rows ? "It then" : "The target"} chose “${shown(text[token.length - 1])}” itself${known}.`;
}

function numbersOf(step) {
  const states = d3.rollup(step.graph.state.slice(1), (all) => all.length, (state) => state);
  const ms = (value) => (value === undefined ? undefined : `${value.toFixed(1)} ms`);
  const rates = step.rates?.length ? ` (${step.rates.map((rate) => (1000 * rate).toFixed(0)).join(" against ")} tokens/s)` : "";
  return {
    "tokens before": step.length,
    "emitted": step.tokens.token.length,
    "graph nodes": step.graph.state.slice(1).filter((state) => state !== "pruned").length,
    "verified": step.verified.node.length,
    "cut": states.get("cut") ?? 0,
    "candidates pruned": step.pruned,
    "draft forwards (rows)": step.draft_forwards === undefined ? undefined : `${step.draft_forwards} (${step.draft_rows})`,
    "drafting": ms(step.draft_ms),
    "verifying": ms(step.verify_ms),
    "requests in the batch": step.requests,
    "plan": step.plan && plans[step.plan] + rates,
  };
}

function drawTable(step) {
  const heads = ["node", "parent", "token", "probability", "survival", "source", "merged into", "became"];
  const rows = nodesOf(step).map((node) => node.state === "chosen"
    ? [node.was ? node.index : "", node.parent, shown(node.text), node.prob ?? "", node.survival ?? "", node.origin ?? "target", "", "the target's choice"]
    : [node.index, node.parent < 0 ? "" : node.parent, shown(node.text), node.prob, node.survival, node.origin,
        node.merged < 0 ? "" : node.merged, node.state]);
  const table = d3.select("#table");
  table.selectChildren().remove();
  table.append("tr").selectAll().data(heads).join("th").attr("scope", "col").text((head) => head);
  table.selectAll(null).data(rows).join("tr").selectAll().data((row) => row).join("td").text((cell) => cell);
}

/** Show step `index`, counted from 0. */
function show(index) {
  if (!steps.length) return;
  spans[now].classList.remove("now");
  now = Math.max(0, Math.min(steps.length - 1, index));
  const step = steps[now];
  spans[now].classList.add("now");
  const first = spans[now];
  const answer = byId("answer");
  if (first.offsetTop < answer.scrollTop || first.offsetTop > answer.scrollTop + answer.clientHeight - 40) {
    answer.scrollTop = first.offsetTop - answer.clientHeight / 2;
  }
  slider.value = now + 1;
  slider.setAttribute("aria-valuetext", `Step ${now + 1} of ${steps.length}: ${step.tokens.text.join("").trim()}`);
  byId("place").textContent = `Step ${now + 1} of ${steps.length}`;
  byId("back").disabled = now === 0;
  byId("forth").disabled = now === steps.length - 1;
  byId("said").textContent = sentence(step);
  drawGraph(step);
  drawTable(step);
  const numbers = Object.entries(numbersOf(step)).filter(([, value]) => value !== undefined);
  d3.select("#numbers").selectAll("div").data(numbers).join("div").html(null)
    .call((one) => { one.append("dt").text(([name]) => name); one.append("dd").text(([, value]) => value); });
}

slider.addEventListener("input", () => show(Number(slider.value) - 1));
byId("back").addEventListener("click", () => show(now - 1));
byId("forth").addEventListener("click", () => show(now + 1));
byId("all").addEventListener("change", () => show(now));
document.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: steps.length - 1 };
  if (!(event.key in moves) || event.target.closest("input, .graph") || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  show(moves[event.key]);
});

// --- all steps --------------------------------------------------------------------------------------

const speed = steps.map((step, index) => ({ step: index + 1, tokens: step.tokens.token.length }));
chart("speed", "Tokens per step over the answer", () => ({
  height: 220, x: { label: "step" }, y: { label: "tokens", zero: true, grid: true },
  marks: [
    Plot.dot(speed, { x: "step", y: "tokens", r: 1.5, fill: colour("soft"), fillOpacity: 0.5 }),
    Plot.lineY(speed, Plot.windowY({ k: Math.max(1, Math.ceil(steps.length / 20)), anchor: "middle" }, { x: "step", y: "tokens", stroke: colour("accent"), strokeWidth: 2 })),
    Plot.ruleY([0]),
  ],
}));
const cells = d3.flatRollup(summary.acceptance, (rows) => [d3.sum(rows, (row) => row.accepted), d3.sum(rows, (row) => row.verified)],
  (row) => kinds[row.source], (row) => row.depth).map(([kind, depth, [accepted, verified]]) => ({ kind, depth, accepted, verified }));
const share = { x: "depth", y: (cell) => cell.accepted / cell.verified };
chart("depths", "Share of verified nodes that were accepted, by depth and source", () => ({
  height: 220, x: { label: "depth", type: "point" }, y: { label: "accepted", domain: [0, 1], grid: true },
  color: { legend: true, type: "ordinal", domain: [...new Set(cells.map((cell) => cell.kind))], range: [...new Set(cells.map((cell) => colour(cell.kind)))] },
  marks: [
    Plot.lineY(cells, { ...share, z: "kind", stroke: "kind", strokeWidth: 2 }),
    Plot.dot(cells, { ...share, fill: "kind", r: 3.5, tip: true, title: (cell) => `${cell.kind}, depth ${cell.depth}: ${cell.accepted} of ${cell.verified}` }),
  ],
}));
const fates = Object.entries(summary.nodes).map(([state, nodes]) => ({ state: state === "verified" ? "verified in vain" : state, nodes }));
chart("nodes", "What became of the graphs' nodes", () => ({
  height: 220, marginLeft: 110, marginRight: 50, x: { label: null, axis: null }, y: { label: null, domain: fates.map((fate) => fate.state) },
  marks: [
    Plot.barX(fates, { x: "nodes", y: "state", z: null, fill: (fate) => colour(fate.state === "accepted" ? "accent" : "line") }),
    Plot.textX(fates, { x: "nodes", y: "state", text: "nodes", textAnchor: "start", dx: 5 }),
    Plot.ruleX([0]),
  ],
}));
show(0);
