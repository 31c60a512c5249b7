// The capacity: the highest rate within limits on percentiles, and the percentiles over the rate.

import { groupName, ink, legend } from "./shared/look.js";
import { Chart, clipped, line, text } from "./chart.js";
import { byId, make } from "./shared/elements.js";
import { limit, number, percent, showCommand } from "./words.js";
import { showCapacityTile } from "./headline.js";

const MOST = 2;
const NEAR_ZERO = 0.4;
const WORDS = { goodput: "goodput", throughput: "throughput: requests arrive faster than they are served", none: "none: even all requests at one time stay within the limits" };

let answer = null;
let least = 0;
let most = 1;

const words = (name) => `${name.startsWith("ttft") ? "TTFT" : "TPOT"} ${name.split("_")[1]}`;
const named = (i) => groupName(i ? 2 : 0);

const chart = new Chart("capacity", {
  x: { label: "requests/s", values: (value) => String(+value.toPrecision(3)), range: () => [least, most] },
  y: { label: "% of the limit", range: () => [0, MOST * 100] },
  draw: (u) => clipped(u, (ctx, ratio) => {
    const { left, width, top, height } = u.bbox;
    const full = u.valToPos(100, "y", true);
    line(ctx, [[left, full], [left + width, full]], { colour: ink("--bad"), width: 1.5 * ratio, dash: [6 * ratio, 4 * ratio] });
    if (!answer.requests_per_s) return;
    const [low, at, high] = [answer.low, answer.requests_per_s, answer.high].map((rate) => u.valToPos(rate, "x", true));
    ctx.fillStyle = ink("--shade");
    ctx.fillRect(low, top, high - low, height);
    line(ctx, [[at, top], [at, top + height]], { colour: ink("--accent"), width: 2 * ratio });
    const isRight = at > left + width * 0.7;
    text(ctx, `${number(answer.requests_per_s)}/s`, at + (isRight ? -6 : 6) * ratio, top + 10 * ratio, { align: isRight ? "right" : "left" });
  }),
});

export function showCapacity(answered, view) {
  answer = answered;
  const names = Object.keys(answer.limits);
  const rows = answer.simulated.filter((one) => one.requests_per_s !== null);
  const tokens = `${number(answer.requests_per_s_per_gpu * view.osl)} output tokens/s per GPU`;
  const per = answer.requests_per_s ? `, ${answer.gpus > 1 ? `${number(answer.requests_per_s_per_gpu)} per GPU, ` : ""}${tokens}` : "";
  const at = Object.entries(answer.at_capacity).map(([name, ms]) => `${words(name)} ${number(ms)} ms`);
  const range = answer.relative_error === null ? "the error of its steps is unknown" : `${number(answer.low)} to ${number(answer.high)} with steps one standard error (${percent(answer.relative_error)}) longer and shorter`;
  const chance = answer.sampling_error === null ? "" : ` By chance ±${percent(answer.sampling_error)}.`;
  const binds = WORDS[answer.limit] || words(answer.limit);
  byId("capacity-words").replaceChildren(
    make("strong", answer.requests_per_s ? `${number(answer.requests_per_s)} requests/s` : "No rate is within the limits"),
    `${per}; ${range}. Binding limit: ${binds}.${at.length ? ` At this rate: ${at.join(", ")}.` : ""} ${chance} ${answer.simulations} simulations of up to ${answer.requests.toLocaleString("en-US")} requests; ramp and drain do not count.`,
  );
  const isAny = rows.length > 0;
  byId("capacity").hidden = !isAny;
  if (isAny) {
    const lowest = Math.min(...rows.map((one) => one.requests_per_s), answer.low);
    most = Math.max(...rows.map((one) => one.requests_per_s).filter((rate) => rate < 2.5 * (answer.requests_per_s || Infinity)), answer.high) * 1.04;
    least = lowest > NEAR_ZERO * most ? lowest / 1.04 : 0;
    const share = (name) => rows.map((one) => (one[name] === null ? null : Math.min((one[name] / answer.limits[name]) * 100, MOST * 150)));
    const series = names.map((name, i) => ({ label: name, stroke: () => ink(named(i)), width: 2, points: { show: true, size: 6, fill: () => ink(named(i)) } }));
    chart.show([rows.map((one) => one.requests_per_s), ...names.map(share)], series);
  }
  legend("capacity-legend", isAny ? names.map((name, i) => [`${words(name)} of ${limit(answer.limits[name])}`, named(i)]) : []);
  byId("capacity").setAttribute("aria-label", byId("capacity-words").textContent);
  showCommand("capacity-command", answer.command);
  showCapacityTile(answer);
}

export function showNoCapacity(message) {
  byId("capacity-words").textContent = message;
  byId("capacity").hidden = true;
  legend("capacity-legend", []);
  showCommand("capacity-command", "");
  showCapacityTile(null);
}

export const redrawCapacity = () => chart.redraw();
