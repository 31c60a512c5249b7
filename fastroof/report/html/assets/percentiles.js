// The table of percentiles, and the figures.

const KEYS = ["mean", "p50", "p90", "p95", "p99"];

function buildPercentiles() {
  const head = make("tr");
  head.append(make("th", "", { scope: "col", class: "text" }), ...KEYS.map((key) => make("th", key, { scope: "col" })));
  const table = byId("percentiles");
  table.tHead.append(head);
  for (const row of report.percentiles) {
    const largest = Math.max(...KEYS.flatMap((key) => [row.values[key] ?? 0, ...(row.range?.[key] ?? [])]));
    const [unit, length] = unitOf(largest);
    const format = fixed(decimals(largest / length));
    const words = (ms) => (ms === null ? "–" : format.format(ms / length));
    const line = make("tr");
    line.append(make("th", `${row.name} (${unit})`, { scope: "row", class: "text" }));
    for (const key of KEYS) {
      const cell = make("td", words(row.values[key]));
      if (row.range) cell.append(make("span", row.range[key].map(words).join(" – "), { class: "between" }));
      line.append(cell);
    }
    table.tBodies[0].append(line);
  }
  byId("percentiles-words").textContent = report.error === null ? ""
    : `Below each value: its range with steps ${(100 * report.error).toFixed(1)} % (one standard error) faster and slower.`;
}

function buildFigures() {
  for (const [name, words] of report.figures) {
    const pair = make("div");
    pair.append(make("dt", name), make("dd", words));
    byId("figures").append(pair);
  }
}
