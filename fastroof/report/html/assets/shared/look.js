// Colours of the theme, legends, and the choice of a light, dark or system theme, which the browser stores.

import { byId, make } from "./elements.js";

const THEME_KEY = "fastroof-look";

// Cached: reading a style while a chart is drawn makes the browser recompute the layout of a changed page.
const inks = new Map();

export function ink(name) {
  if (!inks.has(name)) inks.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return inks.get(name);
}

export const groupName = (i) => `--g${i % 8}`;
export const groupColour = (i) => ink(groupName(i));

// items: a text, and the name of a colour, which follows the theme.
export function legend(id, items) {
  byId(id).replaceChildren(...items.map(([words, colour]) => {
    const item = make("li", words);
    item.style.setProperty("--swatch", `var(${colour})`);
    return item;
  }));
}

function storedTheme() {
  try {
    return localStorage.getItem(THEME_KEY) || "auto";
  } catch {
    return "auto";
  }
}

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

export function listenToTheme(redraw) {
  const control = byId("theme");
  control.value = storedTheme();
  showTheme(control.value);
  const changed = () => {
    inks.clear();
    redraw();
  };
  control.addEventListener("change", () => {
    showTheme(control.value);
    try {
      localStorage.setItem(THEME_KEY, control.value);
    } catch { /* without storage the choice lasts until the page is closed */ }
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}
