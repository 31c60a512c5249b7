// Shared by all charts: uPlot on a card, axes in the page's colours, tooltips.

import { byId } from "./shared/elements.js";
import { ink } from "./shared/look.js";
import { short } from "./words.js";

// A colour of the page blended with its card's colour by a share; both are #rrggbb.
export function faint(name, share = 0.42) {
  const [from, to] = [ink(name), ink("--card")].map((colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)));
  return `rgb(${from.map((part, i) => Math.round(part + (to[i] - part) * share)).join(" ")})`;
}
export const pixels = (u, x, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];

const FONT = '12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';
const LOG = 3;

// Powers of a base, spaced to fit the axis.
function powers(base) {
  return (u, i, least, most, room, space) => {
    const from = Math.ceil(Math.log(least) / Math.log(base) - 1e-9);
    const to = Math.floor(Math.log(most) / Math.log(base) + 1e-9);
    const step = Math.max(1, Math.ceil(((to - from) * 44) / Math.max(room, 1)));
    const splits = [];
    for (let power = from; power <= to; power += step) splits.push(base ** power);
    return splits;
  };
}

function axis(label, { log = 0, values, side = 2, size }) {
  return {
    label, side, stroke: () => ink("--quiet"), font: FONT, labelFont: FONT, labelSize: 18, labelGap: 0, size,
    grid: { stroke: () => ink("--grid"), width: 1 }, ticks: { stroke: () => ink("--line"), width: 1, size: 4 },
    values: (u, splits) => splits.map(values || short),
    ...(log && { splits: powersOf(log), filter: (u, splits) => splits }),
  };
}

function powersOf(base) {
  const splits = powers(base);
  return (u, i, least, most) => splits(u, i, least, most, i === 0 ? u.bbox.width / devicePixelRatio : u.bbox.height / devicePixelRatio);
}

export class Chart {
  // options: x and y {label, log, values, range}, series, bands, draw(u, canvas), near(u, left, top) -> words, picks
  constructor(id, options) {
    this.place = byId(id);
    this.options = options;
    this.plot = null;
    this.answer = null;
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.place;
    if (this.plot && width && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({ width, height });
  }

  // Draw data; series are created again if their names change.
  show(data, series, bands = []) {
    const made = JSON.stringify([series.map((one) => [one.label, one.key]), bands.map((band) => band.series)]);
    if (this.plot && made === this.made) {
      this.plot.setData(data);
      return;
    }
    this.plot?.destroy();
    this.made = made;
    const { x, y } = this.options;
    this.plot = new uPlot({
      width: this.place.clientWidth || 400, height: this.place.clientHeight || 300,
      padding: [14, 18, 0, 0], legend: { show: false }, series: [{}, ...series], bands,
      scales: {
        x: { time: false, distr: x.log ? LOG : 1, log: x.log || 10, range: x.range },
        y: { distr: y.log ? LOG : 1, log: y.log || 10, range: y.range },
      },
      axes: [axis(x.label, { ...x, size: 34 }), axis(y.label, { ...y, side: 3, size: 56 })],
      cursor: { drag: { x: false, y: false }, points: { show: false }, x: !this.options.near?.free, y: false },
      hooks: { draw: [(u) => this.options.draw?.(u, u.ctx)], setCursor: [(u) => this.point(u)] },
    }, data, this.place);
    this.plot.over.addEventListener("click", () => this.pick());
    this.plot.over.addEventListener("mouseleave", () => hideTip());
  }

  redraw() {
    this.plot?.redraw(false, true);
  }

  point(u) {
    const { left, top } = u.cursor;
    const near = left >= 0 ? this.options.near?.(u, left, top) : null;
    this.picked = near?.pick || null;
    u.over.style.cursor = this.picked ? "pointer" : "default";
    if (near) showTip(u, near.words, left, top);
    else hideTip();
  }

  pick() {
    this.picked?.();
  }
}

function showTip(u, words, left, top) {
  const tip = byId("tip");
  tip.textContent = words;
  tip.hidden = false;
  const box = u.over.getBoundingClientRect();
  const x = box.left + left + 14;
  const y = box.top + top + 12;
  tip.style.left = `${Math.max(4, Math.min(x, innerWidth - tip.offsetWidth - 6))}px`;
  tip.style.top = `${y + tip.offsetHeight > innerHeight ? box.top + top - tip.offsetHeight - 10 : y}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}

// The nearest of some {x, y} points to the pointer, within a number of pixels.
export function nearest(u, points, left, top, within = 26) {
  let best = null;
  let least = within * within;
  for (const point of points) {
    const dx = u.valToPos(point.x, "x") - left;
    const dy = u.valToPos(point.y, "y") - top;
    if (dx * dx + dy * dy < least) [best, least] = [point, dx * dx + dy * dy];
  }
  return best;
}

// Draw clipped to the plot's frame.
export function clipped(u, paint) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  paint(ctx, devicePixelRatio);
  ctx.restore();
}

export function line(ctx, points, { colour, width, dash = [] }) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.setLineDash(dash);
  ctx.beginPath();
  points.forEach(([x, y], i) => (i ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
  ctx.stroke();
  ctx.setLineDash([]);
}

export function dot(ctx, [x, y], radius, fill, stroke, width = 1.5) {
  ctx.beginPath();
  ctx.arc(x, y, radius, 0, 2 * Math.PI);
  if (fill) {
    ctx.fillStyle = fill;
    ctx.fill();
  }
  if (stroke) {
    ctx.strokeStyle = stroke;
    ctx.lineWidth = width;
    ctx.stroke();
  }
}

export function text(ctx, words, x, y, { colour = ink("--ink"), align = "left", base = "middle" } = {}) {
  ctx.font = FONT.replace("12px", `${12 * devicePixelRatio}px`);
  ctx.textAlign = align;
  ctx.textBaseline = base;
  ctx.lineWidth = 3 * devicePixelRatio;
  ctx.lineJoin = "round";
  ctx.strokeStyle = ink("--card");
  ctx.strokeText(words, x, y);
  ctx.fillStyle = colour;
  ctx.fillText(words, x, y);
}

// Boxes of labels next to their points, the first point first: right, left, below or above it, where the box is
// inside the frame and covers no point and no other box; null where there is no room.
export function labelBoxes(points, taken, frame, gap = 3) {
  const boxes = [...taken, ...points.map(({ x, y, radius: r }) => ({ left: x - r, right: x + r, top: y - r, bottom: y + r }))];
  const isFree = (box) => box.left >= frame.left && box.right <= frame.right && box.top >= frame.top && box.bottom <= frame.bottom
    && boxes.every((one) => one.right <= box.left || one.left >= box.right || one.bottom <= box.top || one.top >= box.bottom);
  return points.map(({ x, y, radius, width, height }) => {
    if (!width) return null;
    const off = radius + gap;
    const beside = y - height / 2;
    const starts = [x - width / 2, x + radius - width, x - radius];
    const corners = [[x + off, beside], [x - off - width, beside], ...[y + off, y - off - height].flatMap((top) => starts.map((left) => [left, top]))];
    const box = corners.map(([left, top]) => ({ left, top, right: left + width, bottom: top + height })).find(isFree) ?? null;
    if (box) boxes.push(box);
    return box;
  });
}

export function textWidth(ctx, words) {
  ctx.font = FONT.replace("12px", `${12 * devicePixelRatio}px`);
  return ctx.measureText(words).width;
}
