// Light, dark or system theme; stored by the browser, not in the address.

import { byId } from "./words.js";

const KEY = "fastroof-look";

function stored() {
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
  control.value = stored();
  set(control.value);
  control.addEventListener("change", () => {
    set(control.value);
    try {
      localStorage.setItem(KEY, control.value);
    } catch { /* without storage the choice lasts until the page is closed */ }
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
