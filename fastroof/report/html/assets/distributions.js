// Distributions: shares of requests, or of gaps, within or beyond a time.

const QUANTITIES = { ttft_ms: "TTFT", tpot_ms: "TPOT", itl_ms: "ITL, all gaps", e2e_ms: "E2E" };
const RUNS = [["here", "as simulated", 0], ["fast", "faster steps", 2], ["slow", "slower steps", 1]];

function drawDistributions() {
  const isTail = byId("tail").checked;
  for (const [name, title] of Object.entries(QUANTITIES)) {
    const traces = [];
    const runs = RUNS.map(([run, ...look]) => [report.distributions[name][run], ...look]).filter(([found]) => found?.ms.length);
    const low = Math.min(...runs.map(([{ ms }]) => ms[0]));
    const high = Math.max(...runs.map(([{ ms }]) => ms[ms.length - 1]));
    const [unit, length] = unitOf(high);
    for (const [found, words, place] of runs) {
      const times = [found.ms[0], ...found.ms].map((ms) => ms / length);
      // a share of 0 cannot be drawn on a logarithmic axis
      const shares = [0, ...found.share].map((share) => (isTail ? (share < 1 ? 1 - share : null) : share));
      const style = place === 0 ? { width: 2.2 } : { width: 1.3, dash: "dot" };
      traces.push({
        x: times, y: shares, name: words, type: "scatter", mode: "lines", showlegend: false,
        line: { color: colourAt(place), shape: isTail ? "vh" : "hv", ...style },
        hovertemplate: `${isTail ? "%{y:.3~%} beyond" : "%{y:.2~%} within"} %{x:,.4~r} ${unit}`,
      });
    }
    const type = low > 0 && high > 20 * low ? "log" : "linear";
    const range = isTail ? { type: "log", tickformat: ".3~%" } : { range: [0, 1.02], tickformat: ".0%" };
    draw(name, traces, {
      xaxis: axis(`${title} (${unit})`, { type }), yaxis: axis("", range), margin: { l: 56, r: 44, t: 14, b: 44 },
      shapes: limitLine(name, "x", high / length, length),
    });
  }
  const limits = Object.entries(facts.limits).map(([name, ms]) => `${QUANTITIES[name]} ${write(ms)} ms`);
  byId("distributions-words").textContent = `Share of requests ${isTail ? "beyond" : "within"} a time`
    + `; for ITL, share of gaps.${limits.length ? ` Dashed: limits, ${limits.join(", ")}.` : ""}`;
}

function buildLegend() {
  const drawn = RUNS.filter(([run]) => run in report.distributions.ttft_ms);
  if (drawn.length < 2) return;
  legend("distributions-legend", drawn.map(([, words, place]) => [words, colourName(place)]));
}
