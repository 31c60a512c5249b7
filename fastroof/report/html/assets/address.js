// What is filtered, sorted and selected, in the page's address: a link shows what its sender saw.

const text = (each) => (each === null || each === undefined ? "" : String(each));

// Only what is not as the page starts.
function writeAddress() {
  const told = new URLSearchParams();
  for (const [name, list] of boxes) {
    const checked = list.filter((each) => each.box.checked);
    if (checked.length === list.length) continue;
    if (!checked.length) told.append(`no-${name}`, "");
    for (const each of checked) told.append(name, text(each.value));
  }
  for (const [name, { select, values }] of selects) {
    const start = select.querySelector("option[selected]");
    if (select.value === (start ? start.value : "")) continue;
    if (select.value === "") told.append(`all-${name}`, "");
    else told.append(name, text(values[Number(select.value)]));
  }
  for (const [name, input] of limits) if (input.value !== "") told.append(`most-${name}`, input.value);
  if (withinOnly && !withinOnly.checked) told.append("beyond", "");
  if (state.sort !== null) told.append("sort", (state.sort.descending ? "-" : "") + state.sort.name);
  if (state.colour !== state.firstColour) told.append("colour", state.colour);
  if (byId("log-axes").checked) told.append("log", "");
  if (state.isChosen) told.append("row", String(state.selected + 1));
  const words = told.toString();
  const place = location.href.replace(/#.*/s, "");
  history.replaceState(null, "", words ? `${place}#${words}` : place);
}

// Set the page as an address says; false where that names a place of the page. What the page does not have is said.
function readAddress() {
  const words = location.hash.slice(1);
  if (words && !words.includes("=")) return false;
  const told = new URLSearchParams(words);
  const unknown = [];
  const known = new Set();
  const given = (name) => { known.add(name); return told.getAll(name); };
  for (const [name, list] of boxes) {
    const wanted = given(name);
    const isNone = given(`no-${name}`).length > 0;
    const found = wanted.filter((each) => list.some((box) => text(box.value) === each));
    unknown.push(...wanted.filter((each) => !found.includes(each)).map((each) => `${name} ${each}`));
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
  state.sort = isSorted ? { name: sort, descending: told.get("sort").startsWith("-") } : null;
  const colour = given("colour")[0];
  const isColour = [...byId("colour").options].some((option) => option.value === colour);
  if (colour && !isColour) unknown.push(`a column ${colour}`);
  state.colour = byId("colour").value = isColour ? colour : state.firstColour;
  byId("log-axes").checked = given("log").length > 0;
  const row = given("row")[0];
  const isRow = /^[0-9]+$/.test(row ?? "") && Number(row) >= 1 && Number(row) <= report.num_rows;
  if (row && !isRow) unknown.push(`row ${row}`);
  state.isChosen = isRow;
  state.selected = isRow ? Number(row) - 1 : null;
  unknown.push(...[...new Set(told.keys())].filter((name) => !known.has(name)));
  byId("unknown").textContent = unknown.length
    ? `The address asks for ${unknown.slice(0, 5).join(", ")}, which this page does not have.` : "";
  byId("unknown").hidden = !unknown.length;
  return true;
}
