// The rows, column by column, and how numbers and names are written.

const report = JSON.parse(document.getElementById("results").textContent);
const facts = report.facts;
const byId = (id) => document.getElementById(id);

const columns = new Map();
for (const column of report.columns) {
  if ("codes" in column) column.at = (row) => column.words[column.codes[row]];
  else if ("values" in column) column.at = (row) => column.values[row];
  else column.at = () => column.constant;
  column.varies = !("constant" in column);
  columns.set(column.name, column);
}

const LABELS = {
  tokens_per_s_per_user: "tokens/s per user",
  tokens_per_s_per_gpu: "tokens/s per GPU",
  tokens_per_s: "tokens/s",
  requests_per_s: "requests/s",
  request_rate_per_s: "requests/s asked",
  ttft_ms: "TTFT (ms)",
  tpot_ms: "TPOT (ms)",
  itl_ms: "ITL (ms)",
  kv_len: "kv_len (tokens)",
  batch_size: "batch size (sequences)",
  concurrency: "concurrency (requests)",
};

function label(name) {
  if (name in LABELS) return LABELS[name];
  const column = columns.get(name);
  const words = name.replace(/_(ms|us|bytes)$/, "").replaceAll("_", " ");
  return column.unit && column.unit !== "B" ? `${words} (${column.unit})` : words;
}

function value(row, name) {
  const column = columns.get(name);
  return column === undefined ? null : column.at(row);
}

function number(row, name) {
  const found = value(row, name);
  return typeof found === "number" ? found : NaN;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

function write(found, column) {
  if (found === null || found === undefined) return "–";
  if (typeof found !== "number") return String(found);
  if (column && column.unit === "B" && Math.abs(found) >= 1e6) return `${short.format(found / 1e9)} GB`;
  return Number.isInteger(found) || Math.abs(found) >= 1e4 ? whole.format(found) : short.format(found);
}

function cell(row, name) {
  return write(value(row, name), columns.get(name));
}

// Plotly reads some tags in its texts: names are to be shown as they are.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function make(tag, text, attributes) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [name, given] of Object.entries(attributes || {})) element.setAttribute(name, given);
  return element;
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}

function distinct(name, rows) {
  return [...new Set(rows.map((row) => value(row, name)))].sort(compare);
}

const allRows = Array.from({ length: report.num_rows }, (_, row) => row);
const exceeds = (row) => {
  const limit = value(row, "exceeds");
  return limit !== null && limit !== undefined && limit !== "";
};
const keyOf = (row, names) => JSON.stringify(names.map((name) => value(row, name)));

// Columns that tell no rows apart which an earlier one does not: as total_gpus does, where there is one replica.
const alike = {};
const varying = facts.settings.filter((name) => columns.get(name).varies);
varying.forEach((name, i) => {
  const same = varying.slice(0, i).find((earlier) => !(earlier in alike) && isRenamed(earlier, name));
  if (same !== undefined) alike[name] = same;
});
const settings = varying.filter((name) => !(name in alike));
const workload = facts.workload.filter((name) => columns.get(name).varies);

function isRenamed(a, b) {
  const there = new Map(), back = new Map();
  return allRows.every((row) => {
    const left = value(row, a), right = value(row, b);
    if (!there.has(left)) there.set(left, right);
    if (!back.has(right)) back.set(right, left);
    return there.get(left) === right && back.get(right) === left;
  });
}

// What is chosen on the page; shown holds the rows that the filters leave.
const state = { shown: allRows, selected: null, colour: null, sort: null, page: 0 };
