// Curves over the load: the selected row's setting and the best of the others.

const MOST_CURVES = 8;
const LEAST_TICK = 1 / 8;

function series() {
  const leave = ["limits", facts.load];
  const rows = filtered(leave).filter((row) => Number.isFinite(number(row, facts.load)));
  const lines = new Map();
  for (const row of rows) {
    const key = keyOf(row, facts.series);
    if (!lines.has(key)) lines.set(key, []);
    lines.get(key).push(row);
  }
  const best = (line) => line.reduce((most, row) => {
    const rate = number(row, facts.y);
    return !exceeds(row) && rate > most ? rate : most;
  }, -1);
  const ranked = [...lines].map(([key, line]) => ({ key, line, rate: best(line) }));
  ranked.sort((a, b) => b.rate - a.rate || b.line.length - a.line.length);
  // alternate between models, or the smallest one would take all places
  const turns = new Map();
  for (const each of ranked) {
    const model = value(each.line[0], "model");
    each.turn = turns.get(model) || 0;
    turns.set(model, each.turn + 1);
  }
  ranked.sort((a, b) => a.turn - b.turn || b.rate - a.rate);
  const own = state.selected === null ? null : keyOf(state.selected, facts.series);
  const chosen = ranked.filter((each) => each.key === own).concat(ranked.filter((each) => each.key !== own));
  for (const { line } of chosen) line.sort((a, b) => number(a, facts.load) - number(b, facts.load));
  return { curves: chosen.slice(0, MOST_CURVES), count: ranked.length };
}

function drawCurves() {
  const { curves, count } = series();
  const firsts = curves.map(({ line }) => line[0]);
  const differ = facts.series.filter((name) =>
    !(name in alike) && new Set(firsts.map((row) => value(row, name))).size > 1);
  const names = curves.map(({ line }) => (differ.length ? words(line[0], differ) : words(line[0], ["model"])));
  const loads = [...new Set(curves.flatMap(({ line }) => line.map((row) => number(row, facts.load))))];
  const along = loadAxis(loads);
  const limited = [];
  const title = (name) => label(name).replace(/ \(.*\)/, "");
  facts.curves.forEach((name, place) => {
    const traces = curves.map(({ line }, i) => ({
      x: line.map((row) => number(row, facts.load)), y: line.map((row) => value(row, name)),
      customdata: line, hovertext: line.map(hover), hoverinfo: "text", type: "scatter", mode: "lines+markers",
      name: plain(names[i]), line: { color: colourAt(i), width: i === 0 ? 3.5 : 1.6 },
      marker: { color: colourAt(i), symbol: SYMBOLS[i], size: i === 0 ? 7 : 5 },
    }));
    const at = state.selected;
    if (at !== null && curves.length && curves[0].line.includes(at) && value(at, name) !== null) traces.push({
      x: [number(at, facts.load)], y: [value(at, name)], type: "scatter", mode: "markers", showlegend: false,
      hoverinfo: "skip", marker: { symbol: "circle-open", size: 17, color: ink("--ink"), line: { width: 2.5 } },
    });
    const { low, high } = range(curves, name);
    const type = high > 50 * low ? "log" : "linear";
    const shapes = limitLine(name, "y", high);
    if (shapes.length) limited.push(`${title(name)} ${milliseconds(facts.limits[name])}`);
    draw(`curve-${place}`, traces, {
      xaxis: axis(label(facts.load), along),
      yaxis: axis(label(name), { type, rangemode: type === "log" ? "normal" : "tozero" }),
      showlegend: false, margin: { l: 62, r: isNarrow() ? 8 : 40, t: 14, b: 48 }, shapes,
    });
  });
  legend("curves-legend", names.map((name, i) => [name, colourName(i)]));
  const heading = `${facts.curves.map(title).join(" and ")} over ${title(facts.load)}`;
  byId("curves-heading").textContent = heading[0].toUpperCase() + heading.slice(1);
  const most = count > curves.length
    ? `: ${curves.length} with the most tokens/s per GPU of each model, of ${whole.format(count)}` : "";
  const own = state.selected === null ? "" : " The first, thick one is the selected row's.";
  const dashed = limited.length ? ` Dashed: the sweep's limits, ${limited.join(" and ")}.` : "";
  byId("curves-words").textContent = `One curve per setting${most}, including rows beyond a limit.${own}${dashed}`;
}

function range(curves, name) {
  let low = Infinity, high = 0;
  for (const { line } of curves) for (const row of line) {
    const found = number(row, name);
    if (found > 0) { low = Math.min(low, found); high = Math.max(high, found); }
  }
  return { low, high };
}

// An axis of loads: logarithmic over a wide range, with ticks at loads that are far enough apart.
function loadAxis(loads) {
  const found = loads.filter((load) => load > 0).sort((a, b) => a - b);
  const low = found[0], high = found[found.length - 1];
  const isLog = high >= 4 * low;
  const place = (load) => (isLog ? Math.log(load / low) / Math.log(high / low) : (load - low) / (high - low));
  const doubled = Array.from({ length: 40 }, (_, i) => 2 ** i).filter((load) => load >= low && load <= high);
  const candidates = found.length <= 14 ? found : isLog ? doubled : [];
  const tickvals = [];
  for (const load of candidates) {
    if (!tickvals.length || place(load) - place(tickvals[tickvals.length - 1]) >= LEAST_TICK) tickvals.push(load);
  }
  // loads that crowd on a linear axis are better labelled by round numbers
  const ticks = isLog || tickvals.length === found.length ? { tickvals, ticktext: tickvals.map(sizeWords) } : { nticks: 6 };
  return { type: isLog ? "log" : "linear", ...ticks };
}
