// Formatting of numbers with units and significant digits, and parts of elements.

import { byId, make } from "./shared/elements.js";

export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

// Three significant digits; large numbers without decimals.
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1);
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value) || 1)));
  return value.toLocaleString("en-US", { minimumFractionDigits: Math.min(places, 3), maximumFractionDigits: Math.min(places, 3) });
}

// A limit with the digits that it was given with.
export const limit = (ms) => `${ms.toLocaleString("en-US", { maximumSignificantDigits: 12 })} ms`;

export function time(us) {
  if (us === null || us === undefined) return "–";
  if (us >= 1e6) return `${number(us / 1e6)} s`;
  return us >= 1000 ? `${number(us / 1000)} ms` : `${number(us)} µs`;
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  // the sign stays on the number's line
  return `${(share * 100).toFixed(Math.abs(share) < 0.0995 ? 1 : 0)}\u00a0%`;
}

const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function scaled(value, unit) {
  if (value === null || value === undefined) return "–";
  const [factor, prefix] = PREFIXES.find(([least]) => value >= least) || [1, ""];
  return `${number(value / factor)} ${prefix}${unit}`;
}

export function gib(bytes) {
  return `${number(bytes / 2 ** 30)} GiB`;
}

export function short(value) {
  if (value >= 1024 && value % 1024 === 0) return `${value / 1024}k`;
  return value >= 10000 ? `${number(value / 1000)}k` : (+value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

export function error(relative) {
  return relative === null || relative === undefined ? "error unknown" : `± ${percent(relative)}`;
}

const UNSURE = new Set(["extrapolated", "borrowed", "modelled"]);

export const isUnsure = (origin) => UNSURE.has(origin);

export function originChip(origin) {
  return make("span", origin, isUnsure(origin) ? "chip unsure" : "chip");
}

export function copies(button, text) {
  button.addEventListener("click", async () => {
    const was = button.textContent;
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => { button.textContent = was; }, 1200);
  });
}

// Fill a table's body with rows of cells, changing only what differs.
export function fillRows(body, rows, dress) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, i) => {
    const line = body.rows[i] || body.insertRow();
    while (line.cells.length < cells.length) line.insertCell();
    cells.forEach(([words, className = ""], j) => {
      const cell = line.cells[j];
      if (cell.className !== className) cell.className = className;
      if (cell.textContent !== words) cell.textContent = words;
    });
    dress(line, i);
  });
}

// A command with a button that copies it; created once, then only its text changes.
export function showCommand(id, text) {
  const place = byId(id);
  if (!place.firstChild) {
    const button = make("button", "Copy", { type: "button" });
    place.append(make("code"), button);
    copies(button, () => place.firstChild.textContent);
  }
  place.hidden = !text;
  place.firstChild.textContent = text || "";
}
