// The Pareto chart: every row as a point, and the front of each colour as a line.

const MOST_POINTS = 5000;
const MOST_COLOURS = 8;
const MOST_OUTLINED = 30;
const NEIGHBOURS = 1.25;

function front(rows) {
  const sorted = rows.slice().sort((a, b) =>
    number(b, facts.x) - number(a, facts.x) || number(b, facts.y) - number(a, facts.y));
  const found = [];
  let highest = -Infinity;
  for (const row of sorted) {
    if (number(row, facts.y) > highest) {
      highest = number(row, facts.y);
      found.push(row);
    }
  }
  return found.reverse();
}

// Keep one point per cell of the chart, so that overlapping points are drawn once.
function thinned(rows) {
  if (rows.length <= MOST_POINTS) return rows;
  const largest = (name) => rows.reduce((most, row) => Math.max(most, number(row, name)), 0);
  const right = largest(facts.x), top = largest(facts.y);
  for (let cells = 400; ; cells /= 2) {
    const seen = new Map();
    for (const row of rows) {
      const at = Math.floor(cells * number(row, facts.x) / right) * 1e4 + Math.floor(cells * number(row, facts.y) / top);
      if (!seen.has(at)) seen.set(at, row);
    }
    if (seen.size <= MOST_POINTS || cells < 30) return [...seen.values()];
  }
}

// The most frequent values, which get their own colour; the others share the last one.
function coloured(name) {
  const many = new Map();
  for (const row of allRows) many.set(value(row, name), (many.get(value(row, name)) || 0) + 1);
  const byCount = [...many].sort((a, b) => b[1] - a[1]).map(([each]) => each);
  return byCount.length <= MOST_COLOURS
    ? byCount.sort(compare) : byCount.slice(0, MOST_COLOURS - 1).sort(compare);
}

function drawPareto() {
  const usable = state.shown.filter((row) =>
    Number.isFinite(number(row, facts.x)) && Number.isFinite(number(row, facts.y)));
  const values = coloured(state.colour);
  const groups = new Map(values.map((each) => [each, []]));
  const others = [];
  for (const row of usable) (groups.get(value(row, state.colour)) || others).push(row);
  const traces = [];
  const named = [...groups].map(([each, rows], i) => [write(each), rows, i]);
  if (others.length) named.push(["others", others, MOST_COLOURS - 1]);
  let drawn = 0;
  for (const [name, rows, i] of named) {
    if (!rows.length) continue;
    const line = front(rows);
    const onFront = new Set(line);
    const rest = thinned(rows.filter((row) => !onFront.has(row)));
    drawn += rest.length + line.length;
    const points = (of) => ({
      x: of.map((row) => number(row, facts.x)), y: of.map((row) => number(row, facts.y)),
      customdata: of, hovertext: of.map(hover), hoverinfo: "text", type: "scatter",
    });
    const beyond = rest.map((row) => (exceeds(row) ? 0.15 : 0.4));
    if (rest.length) traces.push({
      ...points(rest), mode: "markers", showlegend: false, name: plain(name),
      marker: { color: colourAt(i), symbol: SYMBOLS[i], size: 6, opacity: beyond },
    });
    traces.push({
      ...points(line), mode: "lines+markers", name: plain(`${state.colour} ${name}`), showlegend: true,
      line: { color: colourAt(i), width: 2 },
      marker: line.length > MOST_OUTLINED
        ? { color: colourAt(i), symbol: SYMBOLS[i], size: 5 }
        : { color: colourAt(i), symbol: SYMBOLS[i], size: 9, line: { color: ink("--card"), width: 1 } },
    });
  }
  const selected = state.selected;
  if (selected !== null && Number.isFinite(number(selected, facts.x))) traces.push({
    x: [number(selected, facts.x)], y: [number(selected, facts.y)], type: "scatter", mode: "markers",
    showlegend: false, hoverinfo: "skip", customdata: [selected],
    marker: { symbol: "circle-open", size: 19, color: ink("--ink"), line: { width: 2.5 } },
  });
  const type = byId("log-axes").checked ? "log" : "linear";
  // close neighbours, such as the best few of a sweep, would be one dot on axes from zero
  const rangemode = (name) => {
    const found = usable.map((row) => number(row, name));
    const low = found.reduce((least, each) => Math.min(least, each), Infinity);
    const high = found.reduce((most, each) => Math.max(most, each), 0);
    return type === "log" || high < NEIGHBOURS * low ? "normal" : "tozero";
  };
  const shapes = limitLine(facts.x, "x", usable.reduce((most, row) => Math.max(most, number(row, facts.x)), 0));
  draw("pareto", traces, {
    xaxis: axis(label(facts.x), { type, rangemode: rangemode(facts.x) }),
    yaxis: axis(label(facts.y), { type, rangemode: rangemode(facts.y) }), shapes,
  });
  const thin = drawn < usable.length ? ` ${whole.format(drawn)} of ${whole.format(usable.length)} points are drawn, without overlapping ones.` : "";
  const dashed = shapes.length ? " Dashed: the sweep's TPOT limit; points to its right are within it." : "";
  byId("pareto-words").textContent =
    `Each point is one of the ${report.noun}; lines are the Pareto front of each ${state.colour.replaceAll("_", " ")}.${dashed}${thin}`;
}
