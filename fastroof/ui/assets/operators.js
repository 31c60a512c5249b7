// The step by operator: a bar of groups, and a table of all operators.

import { groupName, legend } from "./shared/look.js";
import { byId, make } from "./shared/elements.js";
import { fillRows, isUnsure, percent, scaled, showCommand, time } from "./words.js";

let last = null;

export function showOperators(answer, groups) {
  last = [answer, groups];
  const { step } = answer;
  const colour = (group) => groupName(Math.max(0, groups.indexOf(group)));
  const parts = Object.entries(step.groups_us);
  byId("stack").replaceChildren(...parts.map(([name, us]) => {
    const part = make("span");
    part.style.flex = `${us} 0 0`;
    part.style.background = `var(${colour(name)})`;
    part.title = `${name}: ${time(us)}, ${percent(us / step.latency_us)}`;
    return part;
  }));
  const words = parts.map(([name, us]) => [`${name} ${time(us)} (${percent(us / step.latency_us)})`, colour(name)]);
  byId("stack").setAttribute("aria-label", `The step: ${words.map(([text]) => text).join(", ")}`);
  legend("groups", words);
  const rows = [...step.operators];
  const shown = step.operators.reduce((sum, part) => sum + part.total_us, 0);
  const rest = step.latency_us - shown;
  if (rest > 1e-9 * step.latency_us) rows.push({ name: "runtime", group: "runtime", total_us: rest, bound: "host", origin: "fitted" });
  if (byId("order").value === "time") rows.sort((a, b) => b.total_us - a.total_us);
  fillRows(byId("operators").tBodies[0], rows.map(cellsOf), (line, i) => {
    line.style.setProperty("--swatch", `var(${colour(rows[i].group)})`);
    line.style.setProperty("--share", rows[i].total_us / step.latency_us);
    line.cells[9].title = rows[i].source || "";
  });
  showCommand("step-command", answer.commands.step);
}

const cellsOf = (part) => [
  [part.name, "text name"], [String(part.calls ?? "")], [time(part.total_us)],
  [percent(part.total_us / last[0].step.latency_us), "share"], [part.bound, "text"],
  [part.mfu ? percent(part.mfu) : "–"], [part.bytes_per_s ? scaled(part.bytes_per_s, "B/s") : "–"],
  [part.origin, `text origin ${isUnsure(part.origin) ? "unsure" : ""}`], [part.dtype || "–", "text"],
  [part.source || "", "text quiet source"],
];

export const redrawOperators = () => last && showOperators(...last);
