// The controls: filled with the server's choices, and synchronized with the state.

import { byId, make } from "./shared/elements.js";
import { OPTIONAL, TEXTS, change, current } from "./state.js";

const POWERS = [1, 2, 4, 8, 16, 32, 64];
const STEPS_A_DOUBLING = 8;
const SLIDERS = { isl: [16, 131072], osl: [2, 32768], batch: [1, 1024], chunk: [16, 32768] };
const WHOLE = ["isl", "osl", "batch", "chunk", "kv_len", "max_num_batched_tokens", "num_requests", "clients", "turns", "growth"];
const EITHER = { rate: "clients", clients: "rate" };

const form = () => byId("controls");
const control = (name) => form().elements[name];

function fill(name, values, words = String) {
  control(name).replaceChildren(...values.map((value) => make("option", words(value), { value })));
}

export function fillControls(offered) {
  byId("models").replaceChildren(...offered.models.map((value) => make("option", null, { value })));
  const known = Object.fromEntries(offered.gpus.map((gpu) => [gpu.name, gpu]));
  const words = {
    measured: "", scaled: " (kernels of another card)", importable: " (tables to import)",
    datasheet: " (datasheet only)",
  };
  fill("gpu", offered.gpus.map((gpu) => gpu.name), (name) => known[name].title + words[known[name].known]);
  for (const name of ["engine", "dtype", "kv_dtype"]) fill(name, offered.choices[name]);
  fill("percentile", offered.choices.percentile, (value) => `p${value}`);
  for (const name of ["tp", "pp", "dp", "ep"]) fill(name, POWERS);
  fill("gpus", POWERS, (value) => (value === 1 ? "1 GPU" : `${value} GPUs`));
  for (const name of WHOLE) [control(name).min, control(name).max] = offered.sizes[name];
  for (const slider of form().querySelectorAll("[data-of]")) {
    const [least, most] = SLIDERS[slider.dataset.of];
    slider.max = Math.log2(most / least) * STEPS_A_DOUBLING;
    slider.addEventListener("input", () => {
      const name = slider.dataset.of;
      change({ [name]: Math.round(least * 2 ** (slider.value / STEPS_A_DOUBLING)) });
    });
  }
  // some are outside of the form's element
  document.addEventListener("input", (event) => {
    const { name, type } = event.target;
    if (event.target.form !== form() || !name || name === "model" || TEXTS.includes(name)) return;
    if (type === "checkbox") change({ [name]: event.target.checked });
    else if (event.target.tagName === "SELECT") change({ [name]: chosen(name, event.target.value) });
    else if (type === "radio") change({ [name]: event.target.value });
    else typed(event.target);
  });
  // a model is requested when its name is complete: chosen from the list, or when the field loses focus
  const model = control("model");
  model.addEventListener("input", () => {
    if (offered.models.includes(model.value)) change({ model: model.value });
  });
  model.addEventListener("change", () => change({ model: model.value.trim() }));
  // texts are requested when they are complete
  for (const name of TEXTS) control(name).addEventListener("change", (event) => change({ [name]: event.target.value.trim() || null }));
  form().addEventListener("submit", (event) => event.preventDefault());
  if (matchMedia("(max-width: 820px)").matches) form().querySelector(".what").open = false;
}

function chosen(name, value) {
  return ["engine", "dtype", "kv_dtype", "gpu"].includes(name) ? value : Number(value);
}

function typed(input) {
  const value = input.value === "" ? null : Number(input.value);
  const isWrong = input.validity.badInput || (value === null && !OPTIONAL.includes(input.name));
  input.setAttribute("aria-invalid", isWrong);
  const other = EITHER[input.name];
  if (!isWrong) change({ ...(other && value !== null && { [other]: null }), [input.name]: value });
}

// Show a view in the controls, except in the field being edited.
export function showControls(view) {
  for (const [name, value] of Object.entries(view)) {
    const element = control(name);
    if (!element || element === document.activeElement) continue;
    if (element.type === "checkbox") element.checked = value === true;
    else if (element.tagName === "SELECT" && ![...element.options].some((option) => option.value === String(value))) {
      const option = make("option", String(value));
      option.value = value;
      element.append(option);
      element.value = value;
    } else element.value = value === null ? "" : value;
  }
  for (const slider of form().querySelectorAll("[data-of]")) {
    const name = slider.dataset.of;
    const value = current()[name];
    if (slider !== document.activeElement && value) {
      slider.value = Math.log2(value / SLIDERS[name][0]) * STEPS_A_DOUBLING;
    }
    slider.setAttribute("aria-valuetext", value === null ? "auto" : String(value));
  }
  byId("chunk-row").hidden = view.kind === "decode";
}

// Show the values that empty fields stand for, from the answer.
export function showPlaceholders(answer) {
  const [, ...chunks] = [null, ...answer.step.requests.filter(([, added]) => added > 1)];
  control("chunk").placeholder = chunks.length ? String(chunks[0][1]) : "auto";
  const [decode] = answer.step.requests.filter(([, added, context]) => added === 1 && context > 0);
  control("kv_len").placeholder = decode ? `${decode[2] + 1} = isl + osl/2` : "isl + osl/2";
  for (const name of ["dp", "ep"]) control(name).parentElement.classList.toggle("waiting", !answer.plan.has_experts);
}
