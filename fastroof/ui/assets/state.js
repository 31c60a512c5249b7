// The chosen settings: one view, stored in the page's address so that it can be bookmarked and shared.

const NUMBERS = ["tp", "pp", "dp", "ep", "isl", "osl", "batch", "percentile", "spread", "gpus", "num_requests", "turns", "think_s"];
export const OPTIONAL = ["kv_len", "chunk", "max_num_batched_tokens", "ttft_ms", "tpot_ms", "front_end", "rate", "clients", "growth"];
export const TEXTS = ["lora", "kv_tiers", "fleet"];
const FLAGS = ["allow_modelled", "prefix_cache"];

const RESTS_MS = 250; // browsers limit how often the address may change, such as on every move of a slider
let start = {};
let view = {};
const listeners = [];
let timer = 0;

function read(name, text) {
  if (FLAGS.includes(name)) return text === "1";
  if ([...OPTIONAL, ...TEXTS].includes(name) && text === "") return null;
  // text that is not a number goes to the server, whose error lists the valid values
  if (NUMBERS.includes(name) || OPTIONAL.includes(name)) return text !== "" && Number.isFinite(+text) ? +text : text;
  return text;
}

function written(name, value) {
  if (FLAGS.includes(name)) return value ? "1" : "0";
  return value === null ? "" : String(value);
}

export function openState(first) {
  start = first;
  const given = new URLSearchParams(location.search);
  view = { ...start };
  for (const [name, text] of given) if (name in start) view[name] = read(name, text);
}

export const current = () => view;
export const sizesOf = (names) => JSON.stringify(names.map((name) => view[name]));

// The address of the view.
export function address() {
  const query = new URLSearchParams();
  for (const name of Object.keys(start)) if (view[name] !== start[name]) query.set(name, written(name, view[name]));
  const text = query.toString();
  return location.origin + location.pathname + (text && `?${text}`);
}

export function change(changes) {
  view = { ...view, ...changes };
  clearTimeout(timer);
  timer = setTimeout(() => history.replaceState(null, "", address()), RESTS_MS);
  for (const listener of listeners) listener(view, Object.keys(changes));
}

export function reset() {
  change({ ...start });
}

export function onChange(listener) {
  listeners.push(listener);
}
