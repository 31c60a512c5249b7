// The table of filtered rows, sorted by any column.

const ROWS_A_PAGE = 100;
const FIRST = [
  "model", "gpu", "mode", "tp", "replicas", "total_gpus", "dtype", "kv_dtype", "engine", "isl", "osl", "kv_len",
  "clients", "request_rate_per_s", "batch_size", "ttft_ms", "tpot_ms", "tokens_per_s_per_user", "tokens_per_s_per_gpu",
];
const tableColumns = FIRST.filter((name) => columns.has(name))
  .concat([...columns.keys()].filter((name) => !FIRST.includes(name)))
  .filter((name) => columns.get(name).varies);

// Columns of numbers that are not whole have the same decimals in all rows: four digits of their median.
const formats = new Map();
for (const name of tableColumns) {
  const { kind, unit } = columns.get(name);
  if (kind !== "float" || unit === "B") continue;
  const found = allRows.map((row) => number(row, name)).filter((each) => !Number.isNaN(each)).sort((a, b) => a - b);
  if (!found.every(Number.isInteger)) formats.set(name, fixed(decimals(found[found.length >> 1])));
}

function tableCell(row, name) {
  const found = value(row, name);
  return typeof found === "number" && formats.has(name) ? formats.get(name).format(found) : cell(row, name);
}

function sorted() {
  if (state.sort === null) return state.shown.slice().sort(byMerit);
  const { name, descending } = state.sort;
  const missing = (found) => found === null || found === undefined;
  return state.shown.slice().sort((a, b) => {
    const left = value(a, name), right = value(b, name);
    if (missing(left) || missing(right)) return missing(left) - missing(right) || a - b;
    return (descending ? compare(right, left) : compare(left, right)) || a - b;
  });
}

function sortBy(sort) {
  state.sort = sort;
  state.page = 0;
  drawTable();
  writeAddress();
}

function buildTable() {
  const head = make("tr");
  head.append(make("th", "row", { scope: "col" }));
  for (const name of tableColumns) {
    const column = columns.get(name);
    const th = make("th", null, { scope: "col", class: column.kind === "text" ? "text" : "", "data-name": name });
    const button = make("button", label(name), { type: "button", title: column.meaning || name });
    button.addEventListener("click", () => {
      const again = state.sort !== null && state.sort.name === name;
      const bestIsHigh = column.kind !== "text" && !LOWER_IS_BETTER.test(name);
      sortBy({ name, descending: again ? !state.sort.descending : bestIsHigh });
    });
    th.append(button);
    head.append(th);
  }
  byId("rows").tHead.append(head);
  const same = report.columns.filter((column) => !column.varies && column.constant !== null && column.constant !== ""
    && NOTHING[column.name] !== column.constant);
  byId("constants").textContent = same.length
    ? `The same in all rows: ${same.map((column) => `${label(column.name)} ${write(column.constant, column)}`).join("; ")}.` : "";
  byId("best-first").addEventListener("click", () => sortBy(null));
  byId("previous").addEventListener("click", () => { state.page -= 1; drawTable(); });
  byId("next").addEventListener("click", () => { state.page += 1; drawTable(); });
}

function drawTable() {
  for (const th of byId("rows").tHead.querySelectorAll("th[data-name]")) {
    const isSorted = state.sort !== null && th.dataset.name === state.sort.name;
    th.setAttribute("aria-sort", isSorted ? (state.sort.descending ? "descending" : "ascending") : "none");
    const mark = isSorted ? (state.sort.descending ? " ▼" : " ▲") : "";
    th.firstChild.textContent = label(th.dataset.name) + mark;
  }
  byId("best-first").setAttribute("aria-pressed", String(state.sort === null));
  const rows = sorted();
  const pages = Math.max(1, Math.ceil(rows.length / ROWS_A_PAGE));
  state.page = Math.min(Math.max(state.page, 0), pages - 1);
  const start = state.page * ROWS_A_PAGE;
  const lines = rows.slice(start, start + ROWS_A_PAGE).map((row) => {
    const line = make("tr", null, row === state.selected ? { class: "selected", "aria-current": "true" } : {});
    const first = make("td");
    const button = make("button", whole.format(row + 1), { type: "button", "aria-label": `select row ${row + 1}` });
    button.addEventListener("click", () => {
      select(row);
      const again = byId("rows").tBodies[0].querySelector("tr.selected button");
      if (again) again.focus();
    });
    first.append(button);
    line.append(first);
    for (const name of tableColumns) {
      line.append(make("td", tableCell(row, name), { class: columns.get(name).kind === "text" ? "text" : "" }));
    }
    return line;
  });
  byId("rows").tBodies[0].replaceChildren(...lines);
  byId("page").textContent = rows.length
    ? `${whole.format(start + 1)} to ${whole.format(start + lines.length)} of ${whole.format(rows.length)}` : "no rows";
  byId("previous").disabled = state.page === 0;
  byId("next").disabled = state.page === pages - 1;
}
