// Light, dark, or as the system has it; kept by this browser, not in the address.

import { byId } from "./words.js";

const KEY = "fastroof-look";

function kept() {
  try {
    return localStorage.getItem(KEY) || "auto";
  } catch {
    return "auto";
  }
}

function set(look) {
  if (look === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = look;
}

export function listenToTheme(redraw) {
  const control = byId("theme");
  control.value = kept();
  set(control.value);
  control.addEventListener("change", () => {
    set(control.value);
    try {
      localStorage.setItem(KEY, control.value);
    } catch { /* a browser that keeps nothing shows it until the page is left */ }
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
