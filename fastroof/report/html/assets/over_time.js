// Charts over time: requests, KV cache, tokens and latencies.

// Times of the run in its unit: seconds, or hours.
const lastOf = (times) => times[times.length - 1] ?? 0;
const [clockUnit, clockMs] = unitOf(Math.max(1e5, 1e3 * lastOf(report.series.time_s)));
const clocked = (times) => times.map((seconds) => 1e3 * seconds / clockMs);

function line(name, place, values, more) {
  return {
    x: clocked(report.series.time_s), y: values, name, type: "scatter", mode: "lines", connectgaps: false,
    line: { color: colourAt(place), width: 1.6, shape: "hv" }, hovertemplate: "%{y:,.4~r}", ...more,
  };
}

function drawOverTime() {
  const { running, waiting, kv_use, busy, computed_tokens_per_s, output_tokens_per_s } = report.series;
  const shape = { hovermode: "x unified", margin: { l: 62, r: 44, t: 34, b: 44 } };
  const percent = (values) => values.map((share) => (share === null ? null : 100 * share));
  draw("requests", [line("running", 0, running), line("waiting", 1, waiting)], {
    ...shape, xaxis: axis(`time (${clockUnit})`), yaxis: axis("requests", { rangemode: "tozero" }),
  });
  draw("use", [line("KV cache in use", 2, percent(kv_use)), line("busy", 7, percent(busy), { opacity: 0.6 })], {
    ...shape, xaxis: axis(`time (${clockUnit})`), yaxis: axis("%", { range: [0, 105] }),
  });
  draw("tokens", [line("tokens computed", 3, computed_tokens_per_s), line("output tokens", 0, output_tokens_per_s)], {
    ...shape, xaxis: axis(`time (${clockUnit})`), yaxis: axis("tokens/s", { rangemode: "tozero" }),
  });
  drawReplicas(shape);
  drawByArrival();
}

function drawReplicas(shape) {
  const { serving, starting, draining } = report.series;
  byId("replicas").hidden = !serving;
  if (!serving) return;
  const stacked = { stackgroup: "replicas" };
  const parts = [["serving", serving, 0], ["starting", starting, 1], ["draining", draining, 7]];
  draw("replicas", parts.map(([name, values, place]) => line(name, place, values, stacked)), {
    ...shape, xaxis: axis(`time (${clockUnit})`), yaxis: axis("replicas", { rangemode: "tozero" }),
  });
}

function drawByArrival() {
  const { ttft_ms, e2e_ms } = report.by_arrival;
  const parts = [["TTFT", ttft_ms, 4], ["E2E", e2e_ms, 5]];
  const times = parts.flatMap(([, found]) => found.ms ?? found.p99);
  const [unit, length] = unitOf(times.reduce((most, ms) => Math.max(most, ms), 0));
  const traces = [];
  for (const [name, found, place] of parts) {
    const color = colourAt(place);
    const shared = { type: "scatter", x: clocked(found.time_s), hovertemplate: `%{y:,.4~r} ${unit}` };
    const add = (values, words, look) => traces.push({ ...shared, y: values.map((ms) => ms / length), name: words, ...look });
    if (found.ms) add(found.ms, name, { mode: "markers", marker: { color, size: 4, opacity: 0.6 } });
    else for (const [key, dash] of [["p50", "solid"], ["p99", "dot"]]) {
      add(found[key], `${name} ${key}`, { mode: "lines", line: { color, dash, width: 1.6 } });
    }
  }
  draw("by-arrival", traces.filter((trace) => trace.x.length), {
    xaxis: axis(`arrival (${clockUnit})`), yaxis: axis(unit, { type: "log" }), margin: { l: 62, r: 44, t: 34, b: 44 },
  });
}
