// Whether the engine starts: a GPU's memory by use, limits, changes that make it start, and its command.

import { byId, make } from "./shared/elements.js";
import { count, fillRows, number, showCommand } from "./words.js";

const WIDTHS = ["text", "", "text"];
const PLAIN = () => {};

export function showStart(answer) {
  const verdict = make("strong", answer.starts ? "It starts." : "It does not start.", answer.starts ? "good" : "bad");
  const reasons = answer.refusals.map((one) => ` ${one.is_warning ? "Note: " : ""}${one.reason}.`);
  byId("start-words").replaceChildren(verdict, ...reasons);
  fillRows(byId("start-memory").tBodies[0], answer.memory_rows.map((row) => row.map((words, i) => [words, WIDTHS[i]])), PLAIN);
  byId("start-facts").replaceChildren(...answer.facts.map(([name, text]) => make("li", `${name}: ${text}`)));
  const changes = byId("start-changes");
  changes.hidden = !answer.changes.length;
  const rows = answer.changes.map(([option, longest, requests]) => [[option, "text"], [count(longest)], [number(requests)]]);
  fillRows(changes.getElementsByTagName("table")[0].tBodies[0], rows, PLAIN);
  showCommand("start-launch", answer.starts && answer.command ? answer.command.text : "");
  showCommand("start-command", answer.asked);
}

export function showNoStart(message) {
  byId("start-words").textContent = message;
  byId("start-facts").replaceChildren();
  byId("start-changes").hidden = true;
  fillRows(byId("start-memory").tBodies[0], [], PLAIN);
  showCommand("start-launch", "");
  showCommand("start-command", "");
}
