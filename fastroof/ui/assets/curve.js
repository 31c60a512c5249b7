// The step's time over its batch or prompt: by part, with its standard error and the memory limit.

import { groupName, ink, legend } from "./shared/look.js";
import { Chart, clipped, dot, faint, line, pixels, text } from "./chart.js";
import { byId } from "./shared/elements.js";
import { count, error, number, time } from "./words.js";
import { pinned } from "./pin.js";
import { change } from "./state.js";

const PARTS = {
  tokens: ["operators on all tokens", 0], logits: ["LM head", 6], decode_attention: ["decode attention", 2],
  prefill_attention: ["prefill attention", 3], runtime: ["runtime", 7],
};

let curve = null;
let names = [];

const chart = new Chart("curve", {
  x: { label: "decoding requests", log: 2, range: (u, least, most) => [least, most] },
  y: { label: "ms", range: (u, least, most) => [0, Math.max(most, ...pinnedPoints().map(([, ms]) => ms)) * 1.06 || 1] },
  draw: (u) => clipped(u, (ctx, ratio) => {
    const { top, height, left, width } = u.bbox;
    const full = Math.max(curve.fits, curve.x[0]);
    if (full < curve.x.at(-1)) {
      const at = u.valToPos(full, "x", true);
      ctx.fillStyle = ink("--shade");
      ctx.fillRect(at, top, left + width - at, height);
      line(ctx, [[at, top], [at, top + height]], { colour: ink("--quiet"), width: ratio, dash: [4 * ratio, 4 * ratio] });
      const isLate = at > left + width / 2;
      const words = curve.fits >= 1 ? `KV cache full: ${count(Math.floor(curve.fits))}` : "no room for KV cache";
      text(ctx, words, at + (isLate ? -6 : 6) * ratio, top + 10 * ratio, { colour: ink("--quiet"), align: isLate ? "right" : "left" });
    }
    const earlier = pinnedPoints().map(([size, ms]) => pixels(u, size, ms));
    line(ctx, earlier, { colour: ink("--g5"), width: 2.5 * ratio, dash: [7 * ratio, 5 * ratio] });
    const here = curve.x.indexOf(curve.at);
    if (here < 0) return;
    const [x, y] = pixels(u, curve.at, curve.latency_us[here] / 1000);
    line(ctx, [[x, y], [x, top + height]], { colour: ink("--accent"), width: 1.5 * ratio });
    dot(ctx, [x, y], 5 * ratio, ink("--accent"), ink("--card"), 2 * ratio);
    const isRight = x > left + width * 0.6;
    text(ctx, time(curve.latency_us[here]), x + (isRight ? -9 : 9) * ratio, y + (y < top + 36 * ratio ? 14 : -10) * ratio, { align: isRight ? "right" : "left" });
  }),
  near: (u) => {
    const i = u.cursor.idx;
    if (i === null || i === undefined) return null;
    const parts = names.map((name) => `${PARTS[name]?.[0] || name}: ${time(curve.parts_us[name][i])}`);
    const words = [
      `${count(curve.x[i])} ${curve.x_name}`, `${time(curve.latency_us[i])} ${error(curve.relative_error?.[i])}`,
      ...parts, curve.origin[i],
    ];
    const field = curve.x_name === "decodes" ? "batch" : "chunk";
    return { words: words.join("\n"), pick: () => change({ [field]: curve.x[i] }) };
  },
});

// The pinned view's curve over the same sizes.
function pinnedPoints() {
  const earlier = pinned()?.curve;
  if (!earlier || earlier.x_name !== curve.x_name) return [];
  return earlier.x.map((size, i) => [size, earlier.latency_us[i] / 1000]).filter(([size]) => size <= curve.x.at(-1));
}

export function showCurve(answer) {
  curve = answer.curve;
  names = Object.keys(curve.parts_us);
  // stacked areas: the sum of all is drawn first, behind the others
  const sums = [];
  let below = curve.x.map(() => 0);
  for (const name of names) {
    below = below.map((sum, i) => sum + curve.parts_us[name][i] / 1000);
    sums.unshift(below);
  }
  const colours = names.map((name) => groupName(PARTS[name]?.[1] ?? 5)).reverse();
  const total = curve.latency_us.map((us) => us / 1000);
  const off = curve.relative_error || total.map(() => 0);
  const data = [curve.x, ...sums, total.map((ms, i) => ms * (1 + off[i])), total.map((ms, i) => ms * (1 - off[i])), total];
  const areas = [...names].reverse().map((name, i) => ({
    label: name, fill: () => faint(colours[i]), stroke: () => faint(colours[i]), width: 0, points: { show: false },
  }));
  const edges = ["high", "low"].map((name) => ({ label: name, stroke: "transparent", width: 0, points: { show: false } }));
  const own = { label: "step", stroke: () => ink("--ink"), width: 2, points: { show: false } };
  const first = areas.length + 1;
  const isPrompt = curve.x_name !== "decodes";
  chart.options.x.label = isPrompt ? "prompt tokens of the step" : "decoding requests";
  areas.forEach((area) => { area.key = chart.options.x.label; });
  const fill = () => `${ink("--ink")}26`;
  chart.show(data, [...areas, ...edges, own], [{ series: [first, first + 1], fill }]);
  const here = curve.x.indexOf(curve.at);
  const what = isPrompt ? "prompt tokens" : "batch";
  const words = `against its ${what}; band: one standard error; click to select a size`;
  byId("curve-words").textContent = answer.curve.relative_error ? words : words.replace("band: one standard error; ", "");
  const summary = here < 0 ? "" : `, ${time(curve.latency_us[here])} at ${count(curve.at)}`;
  byId("curve").setAttribute("aria-label", `Step time from ${number(total[0])} ms to ${number(total.at(-1))} ms${summary}`);
  const items = names.map((name) => [PARTS[name]?.[0] || name, groupName(PARTS[name]?.[1] ?? 5)]);
  legend("curve-legend", pinnedPoints().length ? [...items, ["pinned", "--g5"]] : items);
}

export const redrawCurve = () => chart.redraw();
