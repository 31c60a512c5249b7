// Distributions: shares of requests, or of gaps, within or beyond a time.

const QUANTITIES = { ttft_ms: "TTFT (ms)", tpot_ms: "TPOT (ms)", itl_ms: "ITL, all gaps (ms)", e2e_ms: "E2E (ms)" };
const RUNS = [["here", "as simulated", 0], ["fast", "faster steps", 2], ["slow", "slower steps", 1]];

function drawDistributions() {
  const isTail = byId("tail").checked;
  for (const [name, title] of Object.entries(QUANTITIES)) {
    const traces = [];
    let low = Infinity, high = 0;
    for (const [run, words, place] of RUNS) {
      const found = report.distributions[name][run];
      if (!found || !found.ms.length) continue;
      low = Math.min(low, found.ms[0]);
      high = Math.max(high, found.ms[found.ms.length - 1]);
      // a share of 0 cannot be drawn on a logarithmic axis
      const shares = found.share.map((share) => (isTail ? (share < 1 ? 1 - share : null) : share));
      const style = run === "here" ? { width: 2.2 } : { width: 1.3, dash: "dot" };
      traces.push({
        x: found.ms, y: shares, name: words, type: "scatter", mode: "lines", showlegend: false,
        line: { color: colourAt(place), shape: isTail ? "vh" : "hv", ...style },
        hovertemplate: isTail ? "%{y:.3~%} beyond %{x:.4~g} ms" : "%{y:.2~%} within %{x:.4~g} ms",
      });
    }
    const type = low > 0 && high > 20 * low ? "log" : "linear";
    const range = isTail ? { type: "log", tickformat: ".3~%" } : { range: [0, 1.02], tickformat: ".0%" };
    draw(name, traces, {
      xaxis: axis(title, { type }), yaxis: axis("", range), margin: { l: 56, r: 44, t: 14, b: 44 },
      shapes: limitLine(name, "x", high),
    });
  }
  byId("distributions-words").textContent = `Share of requests ${isTail ? "beyond" : "within"} a time`
    + `; for ITL, share of gaps.${Object.keys(facts.limits).length ? " Dashed: limits." : ""}`;
}

function buildLegend() {
  const drawn = RUNS.filter(([run]) => run in report.distributions.ttft_ms);
  if (drawn.length < 2) return;
  byId("distributions-legend").replaceChildren(...drawn.map(([, words, place]) => legendItem(words, colourAt(place))));
}
