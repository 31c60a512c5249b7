// Builds the page of a sweep, and redraws it when the state changes.

function drawAll() {
  drawPareto();
  drawSelected();
  drawCurves();
  drawStep();
  drawRoofline();
  drawTable();
}

function select(row) {
  state.selected = row;
  state.isChosen = true;
  drawAll();
  writeAddress();
}

// The initially selected row: the best within the limits, preferring rows with a breakdown.
function leader() {
  let found = null, explained = null;
  for (const row of state.shown) {
    if (exceeds(row) || !Number.isFinite(number(row, facts.best))) continue;
    if (found === null || byMerit(row, found) < 0) found = row;
    if (row in report.steps && (explained === null || byMerit(row, explained) < 0)) explained = row;
  }
  return explained ?? found ?? state.shown[0] ?? null;
}

function applyFilters() {
  state.shown = filtered();
  state.page = 0;
  if (!state.isChosen || !state.shown.includes(state.selected)) {
    state.selected = leader();
    state.isChosen = false;
  }
  countBoxes();
  byId("count").textContent = `${whole.format(state.shown.length)} of ${whole.format(report.num_rows)} rows`;
  drawVerdict();
  drawAll();
}

function start() {
  buildFilters();
  const colour = byId("colour");
  const choices = [...settings, ...workload];
  for (const name of choices.length ? choices : ["model"]) {
    colour.append(make("option", label(name), { value: name }));
  }
  const several = (name) => distinct(name, allRows).length;
  state.colour = ["model", "tp", "dtype", "gpu"].find((name) => choices.includes(name) && several(name) > 1) || colour.value;
  colour.value = state.firstColour = state.colour;
  for (const note of report.notes.length ? report.notes : ["Every row of the results is on this page."]) {
    byId("notes").append(make("li", note));
  }
  buildTable();
  colour.addEventListener("change", () => { state.colour = colour.value; drawPareto(); writeAddress(); });
  byId("axes").addEventListener("change", () => { drawPareto(); writeAddress(); });
  listenToTheme(drawAll);
  const filter = () => { applyFilters(); writeAddress(); };
  byId("filters").addEventListener("input", filter);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(filter));
  foldFilters();
  listenToExports();
  readAddress();
  applyFilters();
  window.addEventListener("hashchange", () => {
    if (readAddress()) applyFilters();
  });
}

start();
