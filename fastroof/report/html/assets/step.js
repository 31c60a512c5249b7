// The steps of the selected row: time by group of operators, and the operators on the roofline.

const OPERATOR_COLUMNS = ["operator", "calls", "us", "share (%)", "TFLOP", "GB", "MFU (%)", "bound by", "origin"];
const nameOfColour = (group) => groupName(facts.groups.indexOf(group));

function stepsOf(row) {
  return row === null ? [] : report.steps[row] || [];
}

function drawStep() {
  const steps = stepsOf(state.selected);
  const present = facts.groups.filter((name) => steps.some((step) => name in step.groups));
  const names = steps.map((step) => plain(step.name));
  const traces = present.map((name) => ({
    type: "bar", orientation: "h", name, y: names, x: steps.map((step) => (step.groups[name] || 0) / 1e3),
    marker: { color: ink(nameOfColour(name)), line: { color: ink("--card"), width: 1 } },
    hovertext: steps.map((step) => {
      const us = step.groups[name] || 0;
      return `<b>${name}</b><br>${short.format(us / 1e3)} ms, ${short.format(100 * us / step.total_us)} % of the ${plain(step.name)}`;
    }),
    hoverinfo: "text", textposition: "inside", insidetextanchor: "middle", textangle: 0,
    text: steps.map((step) => {
      const share = 100 * (step.groups[name] || 0) / step.total_us;
      return share >= 6 ? `${Math.round(share)} %` : "";
    }),
  }));
  byId("step").hidden = !steps.length;
  if (steps.length) draw("step", traces, {
    barmode: "stack", uniformtext: { minsize: 10, mode: "hide" }, xaxis: axis("ms", { rangemode: "tozero" }), yaxis: axis("", { autorange: "reversed", ticks: "" }),
    showlegend: false, margin: { l: 62, r: isNarrow() ? 8 : 44, t: 10, b: 48 },
  });
  legend("step-legend", present.map((name) => [name, nameOfColour(name)]));
  const all = Object.keys(report.steps).length;
  byId("step-words").textContent = steps.length
    ? steps.map((step) => `${step.name}: ${step.what}, ${short.format(step.total_us / 1e3)} ms`).join("; ") + "."
    : `The page has the steps of ${whole.format(all)} leading rows, such as those on the chart's lines, but not of this row.`;
  drawOperators(steps);
}

function drawOperators(steps) {
  const open = byId("operators").querySelector("details[open]") !== null;
  byId("operators").replaceChildren(...steps.map((step) => {
    const details = make("details");
    details.open = open;
    details.append(make("summary", `Operators of the ${step.name}`));
    const table = make("table");
    table.append(make("caption", `${step.what}: all calls of one step, on one GPU`));
    const head = make("tr");
    OPERATOR_COLUMNS.forEach((name, i) => head.append(make("th", name, { scope: "col", class: i === 0 || i > 6 ? "text" : "" })));
    const body = make("tbody");
    const added = step.groups.runtime ? [["runtime", 1, step.groups.runtime, 0, 0, null, "host", "modelled"]] : [];
    for (const [name, calls, us, work, moved, mfu, bound, origin] of [...step.operators, ...added]) {
      const line = make("tr");
      const cells = [
        name, write(calls), write(us), short.format(100 * us / step.total_us), work ? write(work / 1e12) : "–",
        moved ? write(moved / 1e9) : "–", mfu === null ? "–" : short.format(100 * mfu), bound, origin,
      ];
      cells.forEach((text, i) => line.append(make("td", text, { class: i === 0 || i > 6 ? "text" : "" })));
      body.append(line);
    }
    const thead = make("thead");
    thead.append(head);
    table.append(thead, body);
    details.append(table);
    return details;
  }));
}

// FLOPs per byte and TFLOP/s of some operators together; null if they compute nothing.
function placed(operators, totalUs) {
  let work = 0, moved = 0;
  for (const [, , , flops, bytes, , bound] of operators) {
    work += flops;
    if (bound !== "communication") moved += bytes;
  }
  return work > 0 && moved > 0 ? { x: work / moved, y: work / totalUs / 1e6 } : null;
}

function roofTraces(roof) {
  const tera = 1e12;
  const top = Math.max(...Object.values(roof.peaks)) / tera;
  const perByte = roof.hbm_bytes_per_s / tera;
  const line = { color: ink("--ink"), width: 1.6 };
  const shared = { type: "scatter", mode: "lines+text", showlegend: false, hoverinfo: "skip", line };
  // few operators lie right of the bandwidth's lower end, or at the peaks' right ends
  const slope = [0.3, top / perByte];
  const traces = [{
    ...shared, x: slope, y: slope.map((x) => x * perByte), textposition: "bottom right", text: ["HBM", ""],
  }];
  for (const [peak, names] of peaksOf(roof)) {
    const height = peak / tera;
    traces.push({ ...shared, x: [height / perByte, 2e4], y: [height, height], textposition: "top left", text: ["", plain(names)] });
  }
  return traces;
}

// Peaks, FLOP/s, and the formats that have them, the highest first.
function peaksOf(roof) {
  const dtypes = new Map();
  for (const [dtype, peak] of Object.entries(roof.peaks)) dtypes.set(peak, [...(dtypes.get(peak) || []), dtype]);
  return [...dtypes].map(([peak, names]) => [peak, names.join(", ")]).sort(([a], [b]) => b - a);
}

function drawRoofline() {
  const row = state.selected;
  const roof = row === null ? undefined : report.gpus[value(row, "gpu")];
  if (roof === undefined) {
    draw("roofline", [], { xaxis: axis(""), yaxis: axis("") });
    byId("roofline-words").textContent = "The peaks of this GPU are unknown.";
    return;
  }
  const traces = roofTraces(roof);
  const others = state.shown.filter((each) => each !== row && each in report.steps && value(each, "gpu") === value(row, "gpu"));
  const dots = others.map((each) => ({ each, step: report.steps[each][0] }))
    .map(({ each, step }) => ({ each, at: placed(step.operators, step.total_us) })).filter(({ at }) => at);
  if (dots.length) traces.push({
    type: "scatter", mode: "markers", name: "other leading rows, decode step", x: dots.map(({ at }) => at.x), y: dots.map(({ at }) => at.y),
    customdata: dots.map(({ each }) => each), hovertext: dots.map(({ each }) => hover(each)), hoverinfo: "text",
    marker: { color: ink("--quiet"), size: 7, opacity: 0.45 },
  });
  stepsOf(row).forEach((step, i) => {
    const points = step.operators.filter((part) => part[3] > 0);
    const at = points.map((part) => placed([part], part[2]));
    traces.push({
      type: "scatter", mode: "markers", name: plain(`${step.name}: operators`), x: at.map((point) => point.x), y: at.map((point) => point.y),
      hovertext: points.map((part) => `<b>${plain(part[0])}</b><br>${plain(step.name)}: ${write(part[2])} us, bound by ${plain(part[6])}<br>MFU ${short.format(100 * part[5])} %`),
      hoverinfo: "text",
      marker: {
        color: colourAt(i), symbol: SYMBOLS[i], line: { color: ink("--card"), width: 1 },
        size: points.map((part) => 8 + 26 * Math.sqrt(part[2] / step.total_us)), opacity: 0.85,
      },
    });
    const whole_ = placed(step.operators, step.total_us);
    if (whole_) traces.push({
      type: "scatter", mode: "markers", name: plain(`whole ${step.name}`), x: [whole_.x], y: [whole_.y],
      hovertext: [`<b>whole ${plain(step.name)}</b><br>${plain(step.what)}<br>${short.format(whole_.y)} TFLOP/s`], hoverinfo: "text",
      marker: { color: colourAt(i), symbol: "star", size: 17, line: { color: ink("--ink"), width: 1.5 } },
    });
  });
  draw("roofline", traces, {
    xaxis: axis("FLOP per compulsory byte", { type: "log" }), yaxis: axis("achieved TFLOP/s on one GPU", { type: "log" }),
  });
  const peaks = peaksOf(roof).map(([peak, names]) => `${names} ${write(peak / 1e12)} TFLOP/s`);
  byId("roofline-words").textContent =
    `Roofs of ${roof.title}: HBM ${short.format(roof.hbm_bytes_per_s / 1e12)} TB/s, ${peaks.join(", ")}. Areas grow with an operator's time; operators that compute nothing are not shown.`;
}
