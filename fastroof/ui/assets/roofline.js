// The step's operators on the GPU's roofline.

import { groupColour, ink } from "./shared/look.js";
import { Chart, clipped, dot, labelBoxes, line, nearest, pixels, text, textWidth } from "./chart.js";
import { byId } from "./shared/elements.js";
import { number, percent, scaled, time } from "./words.js";

let roofs = [];
let points = [];
let groups = [];
let bandwidth = 1;

const LABELS = 5;
const HEIGHT = 14;
const powerOf = (value) => 10 ** Math.floor(Math.log10(value));

const chart = new Chart("roofline", {
  x: { label: "FLOP per byte", log: 10, values: (value) => value.toLocaleString("en-US"), range: (u, least, most) => [least, most] },
  y: { label: "TFLOP/s", log: 10, values: (value) => value.toLocaleString("en-US"), range: (u, least, most) => [least, most] },
  draw: (u) => clipped(u, (ctx, ratio) => {
    const [least, most] = [u.scales.x.min, u.scales.x.max];
    const taken = [];
    for (const roof of roofs) {
      const ridge = (roof.peak * 1e12) / bandwidth;
      const start = pixels(u, least, (least * bandwidth) / 1e12);
      const corner = pixels(u, ridge, roof.peak);
      const end = pixels(u, most, roof.peak);
      line(ctx, [start, corner, end], { colour: ink("--quiet"), width: 1.5 * ratio });
      const width = textWidth(ctx, roof.name);
      const [right, bottom] = [end[0] - 5 * ratio, end[1] - 3 * ratio];
      text(ctx, roof.name, right, bottom, { colour: ink("--quiet"), align: "right", base: "bottom" });
      taken.push({ left: right - width, right, top: bottom - HEIGHT * ratio, bottom });
    }
    const dots = points.map((point, i) => {
      const [x, y] = pixels(u, point.x, point.y);
      const radius = point.radius * ratio;
      dot(ctx, [x, y], radius, `${groupColour(point.group)}b0`, groupColour(point.group), ratio);
      return { x, y, radius, width: i < LABELS ? textWidth(ctx, point.name) : 0, height: HEIGHT * ratio };
    });
    const { left, top, width, height } = u.bbox;
    labelBoxes(dots, taken, { left, top, right: left + width, bottom: top + height }).forEach((box, i) => {
      if (box) text(ctx, points[i].name, box.left, (box.top + box.bottom) / 2);
    });
  }),
  near: (u, left, top) => nearest(u, points, left, top),
});

export function showRoofline(answer, order) {
  const { step, roofs: gpu } = answer;
  groups = order;
  bandwidth = gpu.hbm_bytes_per_s;
  const placed = step.operators.filter((part) => part.flops_per_s);
  // peaks of the used formats: an operator's rate divided by its MFU
  const used = placed.map((part) => part.flops_per_s / part.mfu);
  // among formats with the same peak, prefer those of the operators
  const formats = new Map();
  for (const [name, peak] of Object.entries(gpu.peaks)) {
    if (!used.some((one) => Math.abs(one / peak - 1) < 1e-6)) continue;
    const isMeant = placed.some((part) => part.dtype.startsWith(name));
    const [names, others] = formats.get(peak) || [[], []];
    (isMeant ? names : others).push(name);
    formats.set(peak, [names, others]);
  }
  roofs = [...formats].map(([peak, [names, others]]) => ({ name: (names.length ? names : others).join(", "), peak: peak / 1e12 }));
  points = placed.map((part) => ({
    name: part.name, x: part.flops_per_byte, y: part.flops_per_s / 1e12, group: Math.max(0, groups.indexOf(part.group)),
    radius: Math.max(3.5, Math.sqrt(part.total_us / step.latency_us) * 22),
    words: `${part.name}, ${part.calls} calls\n${time(part.total_us)}, ${percent(part.total_us / step.latency_us)} of the step\n`
      + `${scaled(part.flops_per_s, "FLOP/s")}, MFU ${percent(part.mfu)}\n${part.flops_per_byte.toFixed(1)} FLOP per byte, ${scaled(part.bytes_per_s, "B/s")}\n`
      + `bound by ${part.bound}, ${part.dtype}, ${part.origin}`,
  })).sort((a, b) => b.radius - a.radius);
  const xs = points.map((point) => point.x);
  const ys = points.map((point) => point.y);
  const peak = Math.max(...roofs.map((roof) => roof.peak), ...ys, 1);
  const x = [powerOf(Math.min(1, ...xs)), 3.5 * Math.max(...xs, (peak * 1e12) / bandwidth)];
  const y = [powerOf(Math.min(...ys, 10) / 2), peak * 2.5];
  chart.show([x, y], [{ label: "range", stroke: "transparent", width: 0, points: { show: false }, paths: () => null }]);
  const without = {};
  for (const part of step.operators) if (!part.flops_per_s) without[part.group] = (without[part.group] || 0) + part.total_us;
  if (step.groups_us.runtime) without.runtime = step.groups_us.runtime;
  const rest = Object.entries(without).map(([name, us]) => `${name} ${percent(us / step.latency_us)}`);
  const peaks = roofs.map((roof) => `${roof.name} ${number(roof.peak)} TFLOP/s`);
  byId("roofline-words").textContent = `${gpu.title}: HBM ${scaled(bandwidth, "B/s")}, ${peaks.join(", ")}; areas: time`;
  byId("roofline-rest").textContent = rest.length ? `Not shown, as they compute next to nothing: ${rest.join(", ")}.` : "";
  const labels = points.slice(0, LABELS).map((point) => `${point.name} ${point.y.toFixed(0)} TFLOP/s`);
  byId("roofline").setAttribute("aria-label", `Roofline of ${gpu.title}: ${labels.join(", ")}`);
}

export const redrawRoofline = () => chart.redraw();
