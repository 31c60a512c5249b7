// The Pareto chart: every row as a point, and the front of each colour as a line.

const MOST_POINTS = 5000;
const MOST_COLOURS = 8;
const MOST_OUTLINED = 30;
const NEIGHBOURS = 2.5;
const FAR_APART = 2;

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

// The values with the best rows, which get their own colour; the others share the last one.
function coloured(name) {
  const best = new Map();
  for (const row of allRows) {
    const each = value(row, name);
    if (!best.has(each) || byMerit(row, best.get(each)) < 0) best.set(each, row);
  }
  const ranked = [...best].sort((a, b) => byMerit(a[1], b[1])).map(([each]) => each);
  return (ranked.length <= MOST_COLOURS ? ranked : ranked.slice(0, MOST_COLOURS - 1)).sort(compare);
}

// By default an axis is logarithmic if fronts end far apart on it: a linear one would flatten the lowest.
function axisType(name, fronts) {
  if (byId("axes").value) return byId("axes").value;
  const ends = fronts.filter((line) => line.length).map((line) => Math.max(...line.map((row) => number(row, name))));
  return Math.max(...ends) >= FAR_APART * Math.min(...ends) ? "log" : "linear";
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
  const fronts = [];
  for (const [name, rows, i] of named) {
    if (!rows.length) continue;
    // the others are different values, whose common front means nothing
    const line = rows === others ? [] : front(rows);
    fronts.push(line);
    const onFront = new Set(line);
    const rest = thinned(rows.filter((row) => !onFront.has(row)));
    drawn += rest.length + line.length;
    const points = (of) => ({
      x: of.map((row) => number(row, facts.x)), y: of.map((row) => number(row, facts.y)),
      customdata: of, hovertext: of.map(hover), hoverinfo: "text", type: "scatter",
    });
    const beyond = rest.map((row) => (exceeds(row) ? 0.15 : 0.4));
    if (rest.length) traces.push({
      ...points(rest), mode: "markers", showlegend: rows === others, name: plain(name),
      marker: { color: colourAt(i), symbol: SYMBOLS[i], size: 6, opacity: beyond },
    });
    if (line.length) traces.push({
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
  // close neighbours, such as the best few of a sweep, would be one dot on axes from zero
  const scaled = (name) => {
    const found = usable.map((row) => number(row, name));
    const low = found.reduce((least, each) => Math.min(least, each), Infinity);
    const high = found.reduce((most, each) => Math.max(most, each), 0);
    const type = axisType(name, fronts);
    return axis(label(name), { type, rangemode: type === "log" || high < NEIGHBOURS * low ? "normal" : "tozero" });
  };
  const shapes = limitLine(facts.x, "x", usable.reduce((most, row) => Math.max(most, number(row, facts.x)), 0));
  draw("pareto", traces, { xaxis: scaled(facts.x), yaxis: scaled(facts.y), shapes });
  const thin = drawn < usable.length ? ` ${whole.format(drawn)} of ${whole.format(usable.length)} points are drawn, without overlapping ones.` : "";
  const dashed = shapes.length ? " Dashed: the sweep's TPOT limit; points to its right are within it." : "";
  byId("pareto-words").textContent =
    `Each point is one of the ${report.noun}; lines are the Pareto front of each ${state.colour.replaceAll("_", " ")}.${dashed}${thin}`;
}
