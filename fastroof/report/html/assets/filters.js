// The form on the left: filters the rows of the charts and the table.

const CHECKED_AT_MOST = 60;
const boxes = new Map();
const selects = new Map();
const limits = new Map();
let withinOnly = null;

function checkboxes(name, values) {
  const set = make("fieldset");
  set.append(make("legend", label(name)));
  const list = make("div");
  boxes.set(name, []);
  for (const each of values) {
    const line = make("label");
    const box = make("input", null, { type: "checkbox", name, checked: "" });
    const many = make("span", "", { class: "many" });
    line.append(box, make("span", write(each)), many);
    list.append(line);
    boxes.get(name).push({ box, value: each, many });
  }
  set.append(list);
  return set;
}

function choice(name, values, start) {
  const line = make("label", null, { class: "field" });
  const select = make("select", null, { name });
  select.append(make("option", "all", { value: "" }));
  values.forEach((each, i) => {
    const option = make("option", write(each), { value: String(i) });
    if (each === start) option.setAttribute("selected", "");
    select.append(option);
  });
  line.append(make("span", label(name)), select);
  selects.set(name, { select, values });
  return line;
}

function limit(name) {
  const line = make("label", null, { class: "field" });
  const input = make("input", null, { type: "number", min: "0", step: "any", name: `most-${name}` });
  line.append(make("span", `${label(name)} at most`), input);
  limits.set(name, input);
  return line;
}

function buildFilters() {
  const fields = byId("filter-fields");
  for (const name of workload) fields.append(choice(name, distinct(name, allRows), facts.chosen[name]));
  if (allRows.some(exceeds) && !allRows.every(exceeds)) {
    const line = make("label", null, { class: "field" });
    withinOnly = make("input", null, { type: "checkbox", name: "within", checked: "" });
    line.append(make("span", "only rows within every limit"), withinOnly);
    fields.append(line);
  }
  for (const name of ["ttft_ms", "tpot_ms"]) {
    if (columns.has(name) && columns.get(name).varies) fields.append(limit(name));
  }
  for (const name of settings) {
    const values = distinct(name, allRows);
    fields.append(values.length > CHECKED_AT_MOST ? choice(name, values, null) : checkboxes(name, values));
  }
}

// In a narrow window the form starts folded, so that the charts come first.
function foldFilters() {
  const narrow = window.matchMedia("(max-width: 900px)");
  const fold = () => { byId("filters-fold").open = !narrow.matches; };
  narrow.addEventListener("change", fold);
  fold();
}

// Predicates of a row, without the filters named in leave.
function rowTests(leave) {
  const tests = [];
  for (const [name, list] of boxes) {
    if (leave.includes(name)) continue;
    const checked = new Set(list.filter((each) => each.box.checked).map((each) => each.value));
    if (checked.size < list.length) tests.push((row) => checked.has(value(row, name)));
  }
  for (const [name, { select, values }] of selects) {
    if (leave.includes(name) || select.value === "") continue;
    const chosen = values[Number(select.value)];
    tests.push((row) => value(row, name) === chosen);
  }
  if (!leave.includes("limits")) {
    if (withinOnly && withinOnly.checked) tests.push((row) => !exceeds(row));
    for (const [name, input] of limits) {
      const most = input.valueAsNumber;
      if (!Number.isNaN(most)) tests.push((row) => number(row, name) <= most);
    }
  }
  return tests;
}

function filtered(leave = []) {
  const tests = rowTests(leave);
  return allRows.filter((row) => tests.every((test) => test(row)));
}

// Count the rows of each checkbox under the other filters.
function countBoxes() {
  for (const [name, list] of boxes) {
    const many = new Map();
    for (const row of filtered([name])) many.set(value(row, name), (many.get(value(row, name)) || 0) + 1);
    for (const each of list) each.many.textContent = whole.format(many.get(each.value) || 0);
  }
}
