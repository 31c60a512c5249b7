// Builds the page of a simulated run.

function drawAll() {
  drawDistributions();
  drawOverTime();
}

function start() {
  const warnings = byId("warnings");
  for (const words of report.warnings) warnings.append(make("li", words[0].toUpperCase() + words.slice(1)));
  warnings.hidden = !report.warnings.length;
  for (const words of report.notes) byId("notes").append(make("li", words));
  const stretches = report.series.time_s;
  byId("time-words").textContent = stretches.length < 2 ? ""
    : `Means over ${whole.format(stretches.length)} intervals of ${write(stretches[1] - stretches[0])} s.`;
  buildPercentiles();
  buildFigures();
  buildLegend();
  byId("tail").addEventListener("change", drawDistributions);
  listenToTheme(drawAll);
  drawAll();
}

start();
