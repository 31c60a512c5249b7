// Putting it together: what is drawn again when something is chosen.

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
  drawAll();
}

// The row that a page starts with: of those within the limits the most tokens/s a GPU, one with a breakdown first.
function leader() {
  const better = (row, than) => than === null || number(row, facts.y) > number(than, facts.y);
  let found = null, explained = null;
  for (const row of state.shown) {
    if (exceeds(row) || !Number.isFinite(number(row, facts.y))) continue;
    if (better(row, found)) found = row;
    if (row in report.steps && better(row, explained)) explained = row;
  }
  return explained ?? found ?? state.shown[0] ?? null;
}

function applyFilters() {
  state.shown = filtered();
  state.page = 0;
  if (state.selected === null || !state.shown.includes(state.selected)) state.selected = leader();
  countBoxes();
  byId("count").textContent = `${whole.format(state.shown.length)} of ${whole.format(report.num_rows)} rows`;
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
  colour.value = state.colour;
  state.sort = { name: facts.y, descending: true };
  for (const note of report.notes.length ? report.notes : ["Every row of the results is on this page."]) {
    byId("notes").append(make("li", note));
  }
  buildTable();
  colour.addEventListener("change", () => { state.colour = colour.value; drawPareto(); });
  byId("log-axes").addEventListener("change", drawPareto);
  listenToTheme();
  byId("filters").addEventListener("input", applyFilters);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(applyFilters));
  applyFilters();
}

start();
