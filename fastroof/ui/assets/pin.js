// A pinned view to compare with the next ones: its curve, and the differences of its times.

import { byId } from "./shared/elements.js";
import { sentence } from "./headline.js";

let pin = null;

export const pinned = () => pin;

export function pinAnswer(answer) {
  pin = answer && {
    curve: answer.curve, words: sentence(answer),
    values: { step: answer.step.latency_us, ttft: answer.serving.ttft_ms, tpot: answer.serving.tpot_ms, rate: answer.serving.tokens_per_s_per_gpu, energy: answer.serving.joules_per_token },
  };
  byId("pin").textContent = pin ? "Unpin" : "Pin";
  byId("pin").setAttribute("aria-pressed", pin !== null);
  byId("pinned").hidden = pin === null;
  byId("pinned").textContent = pin ? `Pinned, dashed in the chart and compared above: ${pin.words}` : "";
}

// The difference of a value from the pinned one.
export function offPin(name, value) {
  const before = pin?.values[name];
  if (!before || value === null || value === undefined) return "";
  const off = value / before - 1;
  if (Math.abs(off) < 5e-4) return "as pinned";
  return `${off > 0 ? "+" : "−"}${Math.abs(off * 100).toFixed(Math.abs(off) < 0.0995 ? 1 : 0)} % vs pinned`;
}
