"use strict";
// The charts of a bench report.
const { batches, columns, parts } = data;
const rows = Object.entries(batches).flatMap(([batch, methods]) => Object.entries(methods).map(([method, row]) => ({ batch: Number(batch), method, ...row })));
const methods = [...new Set(rows.map((row) => row.method))];
const fixed = { plain: "target", "gsd-off": "copied", gsd: "drafted" };
/** The colour scale of some methods, with a legend. The engines that the top picture compares keep their colours. */
const coloured = (names, label = (name) => name) => ({
  legend: true, type: "ordinal", domain: names.map(label),
  range: names.map((name, index) => (fixed[name] ? colour(fixed[name]) : d3.schemeTableau10[(methods.includes(name) ? methods.indexOf(name) : index) % 10])),
});

/** Add a chart to "More pictures". */
function picture(title, spec) {
  const id = `chart-${document.querySelectorAll("#charts figure").length}`;
  const figure = d3.select("#charts").append("figure").attr("class", "paper");
  figure.append("figcaption").text(title);
  figure.append("div").attr("id", id);
  chart(id, title, () => ({ height: 260, ...spec() }));
}

const three = rows.filter((row) => columns[row.method] && row.ratio_to_plain);
const named = (row) => columns[row.method];
if (three.length) {
  const names = methods.filter((method) => columns[method]);
  const place = { x: named, fx: "batch" };
  const widest = Math.max(...three.map((row) => row.ratio_to_plain.max));
  chart("columns", "Tokens per second over plain vLLM, by requests at once", (width) => ({
    height: Math.min(380, 200 + width / 5), marginTop: 30, marginLeft: 32, x: { axis: null, domain: names.map((name) => columns[name]) },
    fx: { label: "requests at once", padding: 0.12 }, y: { label: null, grid: true, domain: [0, 1.08 * widest], ticks: 5 },
    color: coloured(names, (name) => columns[name]), style: { fontSize: width < 500 ? "10px" : "13px", background: "none" },
    marks: [
      Plot.barY(three, { ...place, y: (row) => row.ratio_to_plain.median, fill: named,
        title: (row) => `${named(row)}, ${row.batch} at once: ${row.ratio_to_plain.median.toFixed(2)}` }),
      Plot.ruleX(three, { ...place, y1: (row) => row.ratio_to_plain.min, y2: (row) => row.ratio_to_plain.max }),
      Plot.text(width / three.length > 22 ? three : [], { ...place, y: (row) => row.ratio_to_plain.max, text: (row) => row.ratio_to_plain.median.toFixed(2), dy: -8 }),
      Plot.ruleY([0]),
      Plot.ruleY([1], { strokeDasharray: "4 3" }),
    ],
  }));
} else {
  document.getElementById("columns").textContent = "Plain vLLM did not run, so there is no ratio to it.";
}

function ratios(title, name) {
  const found = rows.filter((row) => row[name]);
  if (!found.length) return;
  const at = { x: "batch", z: "method", stroke: "method" };
  picture(title, () => ({
    x: { type: "log", base: 2, label: "requests at once", ticks: Object.keys(batches).map(Number), tickFormat: "d" },
    y: { label: null, grid: true, zero: true }, color: coloured(methods.filter((method) => found.some((row) => row.method === method))),
    marks: [
      Plot.ruleY([1], { strokeDasharray: "4 3" }),
      Plot.ruleX(found, { ...at, y1: (row) => row[name].min, y2: (row) => row[name].max, strokeWidth: 2 }),
      Plot.lineY(found, { ...at, y: (row) => row[name].median, strokeWidth: 2 }),
      Plot.dot(found, { x: "batch", fill: "method", y: (row) => row[name].median, r: 4, tip: true, title: (row) => `${row.setting}: ${row[name].median.toFixed(2)}` }),
    ],
  }));
}
ratios("Tokens per second over plain vLLM, all methods", "ratio_to_plain");
ratios("Tokens per second over our engine without a graph: what the graph is worth", "ratio_to_off");

const times = rows.filter((row) => row.step_parts_ms).flatMap(({ batch, method, step_parts_ms }) => parts.map((part) => ({ batch, method, part, ms: step_parts_ms[part] })));
if (times.length) {
  picture("Milliseconds of a step, by part and requests at once", () => ({
    height: 60 + 22 * methods.length * Object.keys(batches).length, marginLeft: 95, marginRight: 50,
    x: { label: "ms per step", grid: true }, y: { label: null, domain: methods }, fy: { label: null }, color: { legend: true, domain: parts, scheme: "tableau10" },
    marks: [Plot.barX(times, { x: "ms", y: "method", fy: "batch", fill: "part", title: (time) => `${time.part}: ${time.ms.toFixed(1)} ms` }), Plot.ruleX([0])],
  }));
}

const smallest = rows.filter((row) => row.batch === rows[0].batch && row.acceptance_by_depth.length);
const depths = smallest.flatMap(({ method, acceptance_by_depth }) => acceptance_by_depth.map((share, index) => ({ method, depth: index + 1, share })));
if (depths.length) {
  picture(`Share of drafts that were accepted to a depth, ${rows[0].batch} at once`, () => ({
    x: { label: "depth", type: "point" }, y: { label: null, domain: [0, 1], grid: true }, color: coloured(smallest.map((row) => row.method)),
    marks: [Plot.lineY(depths, { x: "depth", y: "share", z: "method", stroke: "method", strokeWidth: 2 }), Plot.dot(depths, { x: "depth", y: "share", fill: "method", r: 3.5, tip: true })],
  }));
}

/** Ratios as dots with ranges, one line per category: `found` has category, name, mean and perhaps low and high. */
function dots(title, found, names) {
  picture(title, () => ({
    height: 60 + 34 * new Set(found.map((row) => row.category)).size, marginLeft: 110, x: { label: null, grid: true }, y: { label: null, type: "band" },
    color: coloured(names),
    marks: [
      Plot.ruleX([1], { strokeDasharray: "4 3" }),
      Plot.ruleY(found.filter((row) => row.low), { y: "category", x1: "low", x2: "high", stroke: "name", strokeWidth: 2 }),
      Plot.dot(found, { y: "category", x: "mean", fill: "name", r: 5, tip: true, title: (row) => `${row.name}: ${row.mean.toFixed(2)}` }),
    ],
  }));
}
const byCategory = Object.entries(data.categories ?? {}).flatMap(([category, all]) =>
  Object.entries(all).filter(([name]) => name !== "plain").map(([name, mean]) => ({ category: category || "none", name, mean })));
if (byCategory.length) dots("Speed over plain vLLM by category, smallest batch", byCategory, [...new Set(byCategory.map((row) => row.name))]);
const inTurns = Object.entries(data.forms_in_turns ?? {}).flatMap(([category, all]) =>
  Object.entries(all).filter(([name]) => name !== "prompts").map(([name, ratio]) => ({ category: category || "all", name: `over ${name}`, ...ratio })));
if (inTurns.length) dots("Speed of the graph over its other forms, in turns in one engine", inTurns, [...new Set(inTurns.map((row) => row.name))]);

for (const [key, tried] of Object.entries(data.analyses?.ablations ?? {})) {
  // On one scale, the cost of deep graphs would flatten the line of what they give.
  for (const [value, name] of [["tokens_per_step", "Tokens per step"], ["drafted_per_accepted", "Rows of the draft per accepted token"]]) {
    picture(`${name}, by ${key}`, () => ({
      x: { label: key }, y: { label: null, grid: true },
      marks: [Plot.lineY(tried, { x: "value", y: value, stroke: colour("accent"), strokeWidth: 2 }), Plot.dot(tried, { x: "value", y: value, fill: colour("accent"), r: 3.5, tip: true })],
    }));
  }
}
const byForm = Object.entries(data.analyses?.forms ?? {}).flatMap(([form, tried]) => tried.map((row) => ({ form, ...row })));
for (const [x, label] of [["nodes", "nodes"], ["draft_rows_per_step", "rows of the draft per step"]]) {
  if (byForm.length) picture(`Tokens per step of graph, tree and chain, by ${label}`, () => ({
    x: { label }, y: { label: null, grid: true }, color: { legend: true },
    marks: [Plot.lineY(byForm, { x, y: "tokens_per_step", z: "form", stroke: "form", strokeWidth: 2 }), Plot.dot(byForm, { x, y: "tokens_per_step", fill: "form", r: 3.5, tip: true })],
  }));
}
const recurring = Object.entries(data.analyses?.recurring_ngrams ?? {}).map(([n, share]) => ({ n, share }));
if (recurring.length) {
  picture("Share of drafted nodes whose last n tokens occurred before", () => ({
    x: { label: "n", type: "band" }, y: { label: null, grid: true }, marks: [Plot.barY(recurring, { x: "n", y: "share", fill: colour("accent") }), Plot.ruleY([0])],
  }));
}
