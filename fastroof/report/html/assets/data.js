// Access to the rows, which are stored by column.

const columns = new Map();
for (const column of report.columns) {
  if ("codes" in column) column.at = (row) => column.words[column.codes[row]];
  else if ("values" in column) column.at = (row) => column.values[row];
  else column.at = () => column.constant;
  column.varies = !("constant" in column);
  columns.set(column.name, column);
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

// Columns that distinguish the same rows as an earlier one, such as total_gpus with a single replica.
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

// State of the page: shown are the filtered rows, sort is null for best first, isChosen if the user selected the row.
const state = { shown: allRows, selected: null, isChosen: false, colour: null, sort: null, page: 0 };

// Compare two rows, the better one first: rows within the limits, then by the sweep's objective.
function byMerit(a, b) {
  const left = value(a, facts.best), right = value(b, facts.best);
  const missing = (found) => typeof found !== "number";
  if (exceeds(a) !== exceeds(b)) return exceeds(a) - exceeds(b);
  if (missing(left) || missing(right)) return missing(left) - missing(right) || a - b;
  return (LOWER_IS_BETTER.test(facts.best) ? left - right : right - left) || a - b;
}
