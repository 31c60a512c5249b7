// Comparison of layouts: throughput per GPU against time per token over clients, and the limits.

import { groupName, ink, legend } from "./shared/look.js";
import { Chart, clipped, dot, line, nearest, pixels, text } from "./chart.js";
import { byId, make } from "./shared/elements.js";
import { count, error, limit, number, percent, showCommand } from "./words.js";
import { change } from "./state.js";

const COLOURED = 8;
const NAMES = { ttft_ms: "TTFT", tpot_ms: "TPOT" };

let answer = null;
let curves = [];
let points = [];
let here = null;
let hovered = null;

const chart = new Chart("pareto", {
  x: { label: "time per output token, ms", log: 2, range: (u, least, most) => [least, most] },
  y: { label: "tokens/s per GPU", range: (u, least, most) => [0, most * 1.08 || 1] },
  draw: (u) => clipped(u, (ctx, ratio) => {
    const { top, height } = u.bbox;
    const most = answer.limits.tpot_ms;
    if (most !== undefined && most >= u.scales.x.min && most <= u.scales.x.max) {
      const x = u.valToPos(most, "x", true);
      ctx.fillStyle = ink("--shade");
      ctx.fillRect(x, top, u.bbox.left + u.bbox.width - x, height);
      line(ctx, [[x, top], [x, top + height]], { colour: ink("--bad"), width: 1.5 * ratio, dash: [6 * ratio, 4 * ratio] });
      text(ctx, `TPOT ${limit(most)}`, x + 5 * ratio, top + 10 * ratio, { colour: ink("--bad") });
    }
    for (const curve of curves) {
      const colour = colourOf(curve);
      const places = curve.points.map((point) => pixels(u, point.x, point.y));
      // dashed where the limit on TTFT is exceeded
      for (let i = 1; i < places.length; i += 1) {
        const isLate = curve.points[i].isLate;
        const width = (curve === hovered ? 3.5 : curve.is_shown ? 3 : 1.75) * ratio;
        line(ctx, [places[i - 1], places[i]], { colour, width, dash: isLate ? [3 * ratio, 4 * ratio] : [] });
      }
      curve.points.forEach((point, i) => { if (point.isFront) dot(ctx, places[i], 3 * ratio, colour); });
    }
    const best = answer.best && curves.find((curve) => curve.number === answer.best.layout)?.points[answer.best.point];
    if (best) star(ctx, pixels(u, best.x, best.y), 9 * ratio);
    placeMark(u);
  }),
  near: (u, left, top) => {
    const near = nearest(u, points, left, top);
    if (hovered !== (near?.curve || null)) {
      hovered = near?.curve || null;
      queueMicrotask(() => chart.redraw());
    }
    return near && { words: near.words(), pick: () => take(near) };
  },
});

const nameOf = (curve) => (curve.rank < COLOURED ? groupName(curve.rank) : "--line");
const colourOf = (curve) => ink(nameOf(curve));

function star(ctx, [x, y], radius) {
  ctx.beginPath();
  for (let i = 0; i < 10; i += 1) {
    const r = i % 2 ? radius * 0.45 : radius;
    const angle = (i * Math.PI) / 5 - Math.PI / 2;
    ctx.lineTo(x + r * Math.cos(angle), y + r * Math.sin(angle));
  }
  ctx.closePath();
  ctx.fillStyle = ink("--good");
  ctx.strokeStyle = ink("--card");
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.fill();
  ctx.stroke();
}

function take({ curve, i }) {
  const { split } = curve;
  change({ ...split, batch: Math.max(1, Math.min(4096, Math.round(curve.clients[i] / (split.dp * split.pp)))) });
}

function pointsOf(curve) {
  const late = answer.limits.ttft_ms ?? Infinity;
  return curve.clients.map((clients, i) => ({
    curve, i, x: curve.tpot_ms[i], y: curve.tokens_per_s_per_gpu[i], isFront: curve.on_front[i], isLate: curve.ttft_ms[i] > late,
    words: () => `${curve.layout}, ${count(clients)} clients\n${number(curve.tokens_per_s_per_gpu[i])} tokens/s per GPU\n`
      + `TPOT ${number(curve.tpot_ms[i])} ms ${error(curve.tpot_relative_error?.[i])}\nTTFT ${number(curve.ttft_ms[i])} ms ${error(curve.ttft_relative_error?.[i])}`
      + `${curve.within[i] ? "\nwithin the limits" : ""}`,
  }));
}

// A layout's point in the table: the most throughput within the limits, otherwise of all.
function chosenPoint(curve) {
  const isAny = curve.within.some(Boolean);
  let best = -1;
  curve.tokens_per_s_per_gpu.forEach((rate, i) => {
    if ((!isAny || curve.within[i]) && (best < 0 || rate > curve.tokens_per_s_per_gpu[best])) best = i;
  });
  return [best, isAny];
}

export function showLayouts(answered) {
  answer = answered;
  curves = answer.layouts.map((one, number) => ({ ...one, number })).filter((one) => !one.problem);
  const rows = curves.map((curve) => [curve, ...chosenPoint(curve)]);
  rows.sort(([a, i, isA], [b, j, isB]) => isB - isA || b.tokens_per_s_per_gpu[j] - a.tokens_per_s_per_gpu[i]);
  rows.forEach(([curve], rank) => { curve.rank = rank; });
  for (const curve of curves) curve.points = pointsOf(curve);
  points = curves.flatMap((curve) => curve.points);
  // draw the best last, in front
  curves.sort((a, b) => b.rank - a.rank);
  const xs = points.map((point) => point.x);
  const ys = points.map((point) => point.y);
  const few = points.length ? [Math.min(...xs) / 1.06, Math.max(...xs) * 1.06] : [1, 100];
  const data = [few, [0, Math.max(...ys, 1)]];
  chart.show(data, [{ label: "range", stroke: "transparent", width: 0, points: { show: false }, paths: () => null }]);
  const coloured = rows.filter((row, rank) => rank < COLOURED).map(([curve]) => [curve.layout, nameOf(curve)]);
  if (rows.length > COLOURED) coloured.push([`${rows.length - COLOURED} others`, "--line"]);
  legend("pareto-legend", coloured);
  byId("best").replaceChildren(...bestWords());
  byId("pareto").setAttribute("aria-label", byId("best").textContent);
  byId("layouts").tBodies[0].replaceChildren(...rows.map(row));
  byId("layouts").hidden = !rows.length;
  const refused = answer.layouts.filter((one) => one.problem);
  byId("refused").hidden = !refused.length;
  byId("refused").firstElementChild.textContent = `${refused.length} ${refused.length === 1 ? "layout" : "layouts"} left out, with reasons`;
  byId("refused").lastElementChild.replaceChildren(...refused.map((one) => make("li", `${one.layout}: ${one.problem}`)));
  showCommand("layouts-command", answer.best?.command);
}

function bestWords() {
  if (!curves.length) return ["No layout can serve this load: use more GPUs, another format or shorter requests."];
  const limits = answer.default_limits && `Limits by default: ${answer.default_limits}. `;
  if (!answer.best) return [`${limits}No layout is within the limits at any number of clients: use looser limits or more GPUs.`];
  const curve = curves.find((one) => one.number === answer.best.layout);
  const i = answer.best.point;
  const margins = Object.entries(answer.best.margins).sort(([, a], [, b]) => a - b).map(([name, left]) => `${NAMES[name]} has ${percent(left)} left`);
  const gpus = curve.gpus === 1 ? "1 GPU" : `${curve.gpus} GPUs`;
  const best = make("strong", `Best copy by means: ${curve.layout} with ${count(curve.clients[i])} clients per replica of ${gpus}`);
  return [limits, best, `: ${number(curve.tokens_per_s_per_gpu[i])} tokens/s per GPU${margins.length ? `; ${margins.join(", ")}` : ""}. Dots: Pareto front; dashes: TTFT is above its limit.`];
}

function row([curve, i, isWithin]) {
  const line = make("tr", undefined, `${curve.is_shown ? "shown" : ""} ${answer.best?.layout === curve.number ? "best" : ""}`);
  line.style.setProperty("--swatch", `var(${nameOf(curve)})`);
  const button = make("button", "Use");
  button.type = "button";
  button.setAttribute("aria-label", `Use ${curve.layout} with ${curve.clients[i]} clients`);
  button.addEventListener("click", () => take({ curve, i }));
  const cell = make("td");
  cell.append(button);
  const broken = Object.entries(answer.limits).filter(([name, most]) => curve[name][i] > most).map(([name]) => NAMES[name]);
  line.append(
    make("td", curve.layout, "text name"), make("td", String(curve.gpus)), make("td", count(curve.clients[i])),
    make("td", number(curve.tokens_per_s_per_gpu[i])), make("td", number(curve.tpot_ms[i])), make("td", number(curve.ttft_ms[i])),
    make("td", number(1000 / curve.tpot_ms[i])),
    make("td", isWithin ? "within" : `${broken.join(", ")} exceeded`, isWithin ? "text good" : "text bad"), cell,
  );
  return line;
}

// Mark the view's own clients with a separate element, so that a slider does not redraw the curves.
export function showHere(serving) {
  here = serving.problem || !serving.tpot_ms ? null : { x: serving.tpot_ms, y: serving.tokens_per_s_per_gpu };
  if (chart.plot) placeMark(chart.plot);
}

function placeMark(u) {
  let mark = u.under.querySelector(".mark");
  if (!mark) {
    mark = make("span", undefined, "mark");
    u.under.append(mark);
  }
  mark.hidden = here === null;
  if (here) mark.style.transform = `translate(${u.valToPos(here.x, "x")}px, ${u.valToPos(here.y, "y")}px)`;
}

export const redrawLayouts = () => chart.redraw();
