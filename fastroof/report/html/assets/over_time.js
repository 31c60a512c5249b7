// Charts over time: requests, KV cache, tokens and latencies.

const clock = () => axis("time (s)");

function line(name, place, values, more) {
  return {
    x: report.series.time_s, y: values, name, type: "scatter", mode: "lines", connectgaps: false,
    line: { color: colourAt(place), width: 1.6, shape: "hv" }, hovertemplate: "%{y:.4~g}", ...more,
  };
}

function drawOverTime() {
  const { running, waiting, kv_use, busy, computed_tokens_per_s, output_tokens_per_s } = report.series;
  const shape = { hovermode: "x unified", margin: { l: 62, r: 44, t: 34, b: 44 } };
  const percent = (values) => values.map((share) => (share === null ? null : 100 * share));
  draw("requests", [line("running", 0, running), line("waiting", 1, waiting)], {
    ...shape, xaxis: clock(), yaxis: axis("requests", { rangemode: "tozero" }),
  });
  draw("use", [line("KV cache in use", 2, percent(kv_use)), line("busy", 7, percent(busy), { opacity: 0.6 })], {
    ...shape, xaxis: clock(), yaxis: axis("%", { range: [0, 105] }),
  });
  draw("tokens", [line("tokens computed", 3, computed_tokens_per_s), line("output tokens", 0, output_tokens_per_s)], {
    ...shape, xaxis: clock(), yaxis: axis("tokens/s", { rangemode: "tozero" }),
  });
  drawByArrival();
}

function drawByArrival() {
  const { ttft_ms, e2e_ms } = report.by_arrival;
  const traces = [];
  const parts = [["TTFT", ttft_ms, 4], ["E2E", e2e_ms, 5]];
  for (const [name, found, place] of parts) {
    const color = colourAt(place);
    const dots = { type: "scatter", mode: "markers", marker: { color, size: 4, opacity: 0.6 } };
    const shared = { x: found.time_s, hovertemplate: "%{y:.4~g} ms" };
    if ("ms" in found) {
      traces.push({ ...shared, ...dots, y: found.ms, name });
      continue;
    }
    for (const [key, dash] of [["p50", "solid"], ["p99", "dot"]]) {
      traces.push({ ...shared, type: "scatter", mode: "lines", y: found[key], name: `${name} ${key}`, line: { color, dash, width: 1.6 } });
    }
  }
  draw("by-arrival", traces.filter((trace) => trace.x.length), {
    xaxis: axis("arrival (s)"), yaxis: axis("ms", { type: "log" }), margin: { l: 62, r: 44, t: 34, b: 44 },
  });
}
