// Filters, sorting and selection in the page's address, so that a link shows the same view.

const text = (each) => (each === null || each === undefined ? "" : String(each));

// Write only what differs from the initial view.
function writeAddress() {
  const parameters = new URLSearchParams();
  for (const [name, list] of boxes) {
    const checked = list.filter((each) => each.box.checked);
    if (checked.length === list.length) continue;
    if (!checked.length) parameters.append(`no-${name}`, "");
    for (const each of checked) parameters.append(name, text(each.value));
  }
  for (const [name, { select, values }] of selects) {
    const start = select.querySelector("option[selected]");
    if (select.value === (start ? start.value : "")) continue;
    if (select.value === "") parameters.append(`all-${name}`, "");
    else parameters.append(name, text(values[Number(select.value)]));
  }
  for (const [name, input] of limits) if (input.value !== "") parameters.append(`most-${name}`, input.value);
  if (withinOnly && !withinOnly.checked) parameters.append("beyond", "");
  if (state.sort !== null) parameters.append("sort", (state.sort.descending ? "-" : "") + state.sort.name);
  if (state.colour !== state.firstColour) parameters.append("colour", state.colour);
  if (byId("axes").value) parameters.append("axes", byId("axes").value);
  if (state.isChosen) parameters.append("row", String(state.selected + 1));
  const fragment = parameters.toString();
  const place = location.href.replace(/#.*/s, "");
  history.replaceState(null, "", fragment ? `${place}#${fragment}` : place);
}

// Restore a view from the address, and report values that the page does not have; false for an anchor of the page.
function readAddress() {
  const fragment = location.hash.slice(1);
  if (fragment && !fragment.includes("=")) return false;
  const parameters = new URLSearchParams(fragment);
  const unknown = [];
  const known = new Set();
  const given = (name) => { known.add(name); return parameters.getAll(name); };
  for (const [name, list] of boxes) {
    const requested = given(name);
    const isNone = given(`no-${name}`).length > 0;
    const found = requested.filter((each) => list.some((box) => text(box.value) === each));
    unknown.push(...requested.filter((each) => !found.includes(each)).map((each) => `${name} ${each}`));
    for (const each of list) each.box.checked = found.length ? found.includes(text(each.value)) : !isNone;
  }
  for (const [name, { select, values }] of selects) {
    const start = select.querySelector("option[selected]");
    select.value = given(`all-${name}`).length ? "" : start ? start.value : "";
    for (const each of given(name)) {
      const at = values.findIndex((one) => text(one) === each);
      if (at < 0) unknown.push(`${name} ${each}`);
      else select.value = String(at);
    }
  }
  for (const [name, input] of limits) input.value = given(`most-${name}`)[0] ?? "";
  if (withinOnly) withinOnly.checked = !given("beyond").length;
  const sort = (given("sort")[0] ?? "").replace(/^-/, "");
  const isSorted = tableColumns.includes(sort);
  if (sort && !isSorted) unknown.push(`a column ${sort}`);
  state.sort = isSorted ? { name: sort, descending: parameters.get("sort").startsWith("-") } : null;
  const colour = given("colour")[0];
  const isColour = [...byId("colour").options].some((option) => option.value === colour);
  if (colour && !isColour) unknown.push(`a column ${colour}`);
  state.colour = byId("colour").value = isColour ? colour : state.firstColour;
  const axes = given("axes")[0] ?? "";
  const isAxes = [...byId("axes").options].some((option) => option.value === axes);
  if (!isAxes) unknown.push(`axes ${axes}`);
  byId("axes").value = isAxes ? axes : "";
  const row = given("row")[0];
  const isRow = /^[0-9]+$/.test(row ?? "") && Number(row) >= 1 && Number(row) <= report.num_rows;
  if (row && !isRow) unknown.push(`row ${row}`);
  state.isChosen = isRow;
  state.selected = isRow ? Number(row) - 1 : null;
  unknown.push(...[...new Set(parameters.keys())].filter((name) => !known.has(name)));
  byId("unknown").textContent = unknown.length
    ? `The address names ${unknown.slice(0, 5).join(", ")}, which this page does not have.` : "";
  byId("unknown").hidden = !unknown.length;
  return true;
}
