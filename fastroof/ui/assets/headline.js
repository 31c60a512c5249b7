// The summary: step, latency, throughput, memory and capacity, each with its error, origin and limit.

import { offPin } from "./pin.js";
import { byId, make } from "./shared/elements.js";
import { count, error, gib, limit, number, originChip, percent, time } from "./words.js";

const LIMIT = { ttft: "ttft_ms", tpot: "tpot_ms" };

function tile(id, big, unit, quiet, state = "", value = null) {
  const place = byId(`tile-${id}`);
  const [first] = place.getElementsByClassName("big");
  first.className = `big ${state}`;
  first.replaceChildren(big, ...(unit ? [" ", make("small", unit)] : []));
  const off = offPin(id, value);
  const parts = off ? [make("strong", off), ", ", ...quiet] : quiet;
  place.getElementsByClassName("quiet")[0].replaceChildren(...parts);
}

export function sentence({ plan }) {
  const gpus = plan.gpus > 1 ? `${plan.gpus} × ${plan.gpu_title} (${plan.layout})` : plan.gpu_title;
  const adapters = plan.lora === null ? "" : `, LoRA ${plan.lora}`;
  return `${plan.model} on ${gpus}, ${plan.dtype} weights, ${plan.kv_dtype} KV cache${adapters}, engine ${plan.engine_title}`;
}

// Of an output token served, with the engine's idle time; below, of the step alone.
function showEnergy({ step, serving, plan }) {
  const { energy } = step;
  if (!energy) tile("energy", "–", "", ["power unknown"]);
  else {
    const origin = originChip(energy.basis);
    origin.title = "how the power of kernels on this GPU is known";
    const watts = `${count(energy.watts)} W a GPU in the step`;
    if (serving.problem) tile("energy", "–", "", [`${watts}, `, origin]);
    else tile("energy", number(serving.joules_per_token), "J/token", [`${error(serving.joules_relative_error)} `, origin, `, ${watts}`], "", serving.joules_per_token);
  }
  byId("step-energy").textContent = energy
    ? `Energy: ${number(energy.joules_per_token)} J a token, ${number(energy.joules)} J in all, ${count(energy.watts)} W a GPU ${error(energy.relative_error)}; power ${energy.basis}${energy.basis === "measured" ? " on this GPU" : ""}`
    : `Energy: the power of ${plan.gpu_title} is unknown (no [power] in its gpu.toml)`;
}

export function showHeadline(answer, view) {
  const { step, serving, plan } = answer;
  const [value, unit] = time(step.latency_us).split(" ");
  const origin = originChip(step.origin);
  origin.title = "origin of its least certain part";
  tile("step", value, unit, [`${error(step.relative_error)} `, origin], "", step.latency_us);
  showEnergy(answer);
  for (const [name, key] of Object.entries(LIMIT)) {
    const ms = serving[key];
    const most = view[key];
    const state = most === null || ms === undefined || ms === null ? "" : ms <= most ? "good" : "bad";
    const words = most === null ? "" : state === "good" ? ` within ${limit(most)}` : state ? ` above ${limit(most)}` : "";
    const wait = name === "ttft" && serving.wait_ms > 0 ? ` (waits ${number(serving.wait_ms)} ms)` : "";
    if (serving.problem) tile(name, "–", "", ["does not fit"]);
    else tile(name, number(ms), "ms", [`${error(serving[`${name}_relative_error`])}${wait}${words && ","}${words}`], state, ms);
  }
  if (serving.problem) tile("rate", "–", "", ["no client can be served"]);
  else tile("rate", number(serving.tokens_per_s_per_gpu), "tokens/s", [`${count(serving.clients)} clients, ${number(serving.tpot_ms ? 1000 / serving.tpot_ms : 0)} each`], "", serving.tokens_per_s_per_gpu);
  const { weights = 0, kv_cache: cache = 0 } = plan.memory_bytes;
  const held = Math.max(0, plan.gpu_bytes - weights - cache);
  const share = step.kv_share;
  tile("memory", share === null ? "no room" : percent(share), share === null ? "" : "used", [`${gib(weights)} weights, ${gib(cache)} for ${count(plan.max_kv_tokens)} tokens`], share === null || share > 1 ? "bad" : "");
  const bar = byId("tile-memory").getElementsByClassName("bar")[0];
  bar.replaceChildren(...[weights, held, cache].map((bytes, i) => {
    const part = make("span");
    part.style.flex = `${bytes} 0 0`;
    part.title = `${["weights", "working set and reserve", "KV cache"][i]} ${gib(bytes)}`;
    return part;
  }));
  // screen readers announce it only if it changes
  const summary = sentence(answer);
  if (byId("sentence").textContent !== summary) byId("sentence").textContent = summary;
}

export function showCapacityTile(answer) {
  if (!answer) {
    tile("capacity", "–", "", ["see below"]);
    return;
  }
  const range = answer.relative_error === null ? "" : `${number(answer.low)} to ${number(answer.high)}, `;
  tile("capacity", number(answer.requests_per_s), "requests/s", [`${range}p${/p(\d+)/.exec(Object.keys(answer.limits)[0])[1]} within limits`]);
}
