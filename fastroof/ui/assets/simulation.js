// Simulated traffic, as `fastroof simulate` serves it; asked for by a button.

import { groupName, ink, legend } from "./shared/look.js";
import { Chart } from "./chart.js";
import { byId, make } from "./shared/elements.js";
import { count, error, fillRows, limit, number, percent, showCommand } from "./words.js";

const TIMES = { ttft_ms: "TTFT", tpot_ms: "TPOT", itl_ms: "ITL", e2e_ms: "E2E", session_e2e_ms: "session", transfer_ms: "KV transfer" };
const KEYS = ["mean", "p50", "p90", "p95", "p99"];
// what is drawn over time: the axis, a factor, and the columns
const SERIES = {
  requests: ["requests", 1, ["running", "waiting"]],
  use: ["% of the whole", 100, ["kv_use", "busy"]],
  tokens: ["tokens/s", 1, ["computed_tokens_per_s", "output_tokens_per_s"]],
  replicas: ["replicas", 1, ["serving", "starting", "draining"]],
};
const CHOICES = { requests: "requests", use: "KV cache and busy time", tokens: "tokens/s", replicas: "replicas" };
const NAMES = { kv_use: "KV cache in use", busy: "busy with steps", computed_tokens_per_s: "prompts and outputs", output_tokens_per_s: "outputs" };

let series = null;
let drawn = [];

const nameOf = (column) => NAMES[column] || column;
const colour = (i) => groupName([0, 2, 3][i]);

const chart = new Chart("simulation-chart", {
  x: { label: "s" },
  y: { label: "", range: (u, least, most) => [0, most * 1.06 || 1] },
  near: (u) => {
    const i = u.cursor.idx;
    if (i === null || i === undefined) return null;
    const words = drawn.map((column, at) => `${nameOf(column)}: ${number(u.data[at + 1][i])}`);
    return { words: [`from ${number(u.data[0][i])} s`, ...words].join("\n") };
  },
});

function drawSeries() {
  const [axis, factor, columns] = SERIES[byId("simulation-series").value];
  drawn = columns;
  chart.options.y.label = axis;
  const lines = columns.map((column, i) => ({ label: column, stroke: () => ink(colour(i)), width: 2, points: { show: false } }));
  chart.show([series.time_s, ...columns.map((column) => series[column].map((value) => (value === null ? null : value * factor)))], lines);
  legend("simulation-legend", columns.map((column, i) => [nameOf(column), colour(i)]));
  byId("simulation-chart").setAttribute("aria-label", `${columns.map(nameOf).join(", ")} over ${number(series.time_s.at(-1))} s`);
}

function timeRows(answer) {
  return Object.keys(TIMES).filter((name) => answer[name]).flatMap((name) => {
    const pairs = answer.range?.[name];
    const row = [[TIMES[name], "text"], ...KEYS.map((key) => [number(answer[name][key])])];
    return pairs ? [row, [["", "text"], ...KEYS.map((key) => [pairs[key].map((ms) => number(ms)).join(" to "), "quiet"])]] : [row];
  });
}

// Requests within all limits, and whether the percentile is within each.
function limitWords({ goodput, range }) {
  if (!goodput) return "";
  const verdicts = Object.entries(goodput.kept).map(([name, isKept]) => `${TIMES[name]} ${range?.flips.includes(name) ? "open" : isKept ? "kept" : "broken"}`);
  const limits = Object.entries(goodput.limits).map(([name, ms]) => `${TIMES[name]} ${limit(ms)}`).join(" and ");
  return ` ${percent(goodput.share)} within ${limits}; at p99 ${verdicts.join(", ")}.`;
}

export function showSimulation(answer) {
  const { energy, range, autoscaling: scaling, session_e2e_ms: sessions } = answer;
  const perGpu = `${number(answer.output_tokens_per_s_per_gpu)} output tokens/s per GPU`;
  const parts = [
    `: ${number(answer.requests_per_s)} requests/s, ${perGpu}.${limitWords(answer)}`,
    sessions ? ` A session takes ${number(sessions.p50 / 1000)} s, ${number(sessions.p99 / 1000)} s at p99.` : "",
    scaling ? ` ${number(scaling.replicas.mean)} replicas on average, ${number(scaling.gpu_hours)} GPU hours.` : "",
    energy ? ` ${number(energy.joules_per_token)} J a token ${error(energy.relative_error)}.` : "",
    range?.relative_error ? ` Below times: steps one standard error (${percent(range.relative_error)}) faster to slower.` : "",
  ];
  byId("simulation-words").replaceChildren(
    make("strong", `${count(answer.finished)} of ${count(answer.requests)} requests finished in ${number(answer.duration_s)} s`), ...parts,
    ...answer.notes.map((note) => make("span", `${note[0].toUpperCase()}${note.slice(1)}.`, "warning")),
  );
  byId("simulation-times").hidden = false;
  fillRows(byId("simulation-times").tBodies[0], timeRows(answer), () => {});
  series = answer.series;
  const select = byId("simulation-series");
  const before = [...select.options].some(({ value }) => value === "replicas") || !scaling ? select.value : "replicas";
  const offered = Object.keys(SERIES).filter((name) => SERIES[name][2].every((column) => series[column]));
  select.replaceChildren(...offered.map((value) => make("option", CHOICES[value], { value })));
  select.value = offered.includes(before) ? before : "requests";
  select.onchange = drawSeries;
  byId("simulation-over-time").hidden = false;
  drawSeries();
  byId("simulation-figures").replaceChildren(...answer.figures.map(([name, words]) => {
    const item = make("li");
    item.append(make("span", name), words);
    return item;
  }));
  showCommand("simulation-command", answer.command);
}

export function showNoSimulation(message) {
  byId("simulation-words").textContent = message;
  byId("simulation-times").hidden = true;
  byId("simulation-over-time").hidden = true;
  byId("simulation-figures").replaceChildren();
  showCommand("simulation-command", "");
}

export const redrawSimulation = () => chart.redraw();
