// The rows, column by column.

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

function cell(row, name) {
  return write(value(row, name), columns.get(name));
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
