// The page: changes of the controls send quick questions immediately, and slow ones once the controls rest.

import { byId, make } from "./shared/elements.js";
import { copies, showCommand } from "./words.js";
import { address, current, onChange, openState, reset, sizesOf } from "./state.js";
import { fillControls, showControls, showPlaceholders } from "./controls.js";
import { questioner } from "./ask.js";
import { showHeadline } from "./headline.js";
import { redrawOperators, showOperators } from "./operators.js";
import { redrawCurve, showCurve } from "./curve.js";
import { redrawRoofline, showRoofline } from "./roofline.js";
import { redrawLayouts, showHere, showLayouts } from "./layouts.js";
import { redrawCapacity, showCapacity, showNoCapacity } from "./capacity.js";
import { showNoStart, showStart } from "./start.js";
import { showDeployment, showNoDeployment } from "./deployment.js";
import { redrawSimulation, showNoSimulation, showSimulation } from "./simulation.js";
import { pinAnswer, pinned } from "./pin.js";
import { listenToTheme } from "./shared/look.js";

const RESTS_MS = 120;
const PLAN = ["model", "gpu", "tp", "pp", "dp", "ep", "dtype", "kv_dtype", "engine", "allow_modelled", "front_end", "lora", "isl", "osl", "max_num_batched_tokens", "ttft_ms", "tpot_ms"];
const START = ["model", "gpu", "tp", "pp", "dp", "ep", "dtype", "kv_dtype", "engine", "lora", "max_num_batched_tokens"];
const OF = { start: START, layouts: [...PLAN, "gpus"], capacity: [...PLAN, "percentile", "spread"] };
const DEPLOYMENT = [...PLAN.filter((name) => !["tp", "pp", "dp", "ep"].includes(name)), "gpus", "percentile"];
const SIMULATION = [...PLAN, "spread", "rate", "clients", "num_requests", "turns", "growth", "think_s", "prefix_cache", "kv_tiers", "fleet"];
const IMMEDIATE = ["step-card", "curve", "roofline"];

let groups = [];
let changedAt = null;
let last = null;
const lastSettings = {};
const waits = (id, isWaiting) => byId(id).classList.toggle("waiting", isWaiting);

// Count the shown answers, for measurements.
function countPicture() {
  const { dataset } = document.documentElement;
  dataset.pictures = 1 + Number(dataset.pictures || 0);
}

const askStep = questioner("step", {
  showsAll: true,
  show: (answer, view) => {
    last = [answer, view];
    byId("problem").hidden = true;
    for (const id of IMMEDIATE) byId(id).classList.remove("stale");
    showHeadline(answer, view);
    showOperators(answer, groups);
    showCurve(answer);
    showRoofline(answer, groups);
    showHere(answer.serving);
    showPlaceholders(answer);
    const notes = [...answer.notes, ...(answer.serving.problem ? [`Clients: ${answer.serving.problem}`] : [])];
    byId("notes").hidden = !notes.length;
    byId("notes").replaceChildren(...notes.map((note) => make("p", note)));
    showCommand("serving-command", answer.commands.serving);
    requestAnimationFrame(() => {
      const ms = changedAt === null ? null : performance.now() - changedAt;
      const took = ms === null ? "" : `; from control to picture ${ms.toFixed(0)} ms`;
      byId("timing").textContent = `fastroof ${answer.version}${took}`;
      if (ms !== null) document.documentElement.dataset.pictureMs = ms.toFixed(1);
      countPicture();
    });
  },
  fail: (message, view) => {
    byId("problem").hidden = false;
    byId("problem").textContent = message;
    byId("sentence").textContent = `${view.model} on ${view.gpu}: no answer`;
    byId("notes").hidden = true;
    for (const id of IMMEDIATE) byId(id).classList.add("stale");
    countPicture();
  },
});

const askLayouts = questioner("layouts", {
  delayMs: RESTS_MS,
  waits: () => waits("layouts-card", true),
  show: (answer) => {
    waits("layouts-card", false);
    for (const id of ["pareto", "layouts"]) byId(id).classList.remove("stale");
    showLayouts(answer);
  },
  fail: (message) => {
    waits("layouts-card", false);
    for (const id of ["pareto", "layouts"]) byId(id).classList.add("stale");
    byId("best").textContent = message;
  },
});

const askCapacity = questioner("capacity", {
  delayMs: RESTS_MS,
  waits: () => waits("capacity-card", true),
  show: (answer, view) => {
    waits("capacity-card", false);
    showCapacity(answer, view);
  },
  fail: (message) => {
    waits("capacity-card", false);
    showNoCapacity(message);
  },
});

const askStart = questioner("start", {
  delayMs: RESTS_MS,
  waits: () => waits("start-card", true),
  show: (answer) => {
    waits("start-card", false);
    showStart(answer);
  },
  fail: (message) => {
    waits("start-card", false);
    showNoStart(message);
  },
});

// Questions of a button: their settings, and what fades once these have changed.
const ASKED = {
  deployment: [DEPLOYMENT, ["deployment-words", "deployment", "deployment-families", "deployment-server"]],
  simulation: [SIMULATION, ["simulation-words", "simulation-times", "simulation-chart", "simulation-figures"]],
};

function ages(name) {
  const [settings, ids] = ASKED[name];
  const isStale = lastSettings[name] !== undefined && lastSettings[name] !== sizesOf(settings);
  for (const id of ids) byId(id).classList.toggle("stale", isStale);
}

function askedByButton(name, button, show, showNone) {
  const shown = (put) => (...given) => {
    waits(`${name}-card`, false);
    put(...given);
    ages(name);
  };
  const ask = questioner(name, { overtakes: true, waits: () => waits(`${name}-card`, true), show: shown(show), fail: shown(showNone) });
  byId(button).addEventListener("click", () => {
    lastSettings[name] = sizesOf(ASKED[name][0]);
    ask(current());
  });
}

// Send a question again only if a setting that it depends on has changed.
function askWhatChanged(view) {
  askStep(view);
  for (const [name, ask] of [["start", askStart], ["layouts", askLayouts], ["capacity", askCapacity]]) {
    const depends = sizesOf(OF[name]);
    if (lastSettings[name] !== depends) {
      lastSettings[name] = depends;
      ask(view);
    }
  }
  for (const name of Object.keys(ASKED)) ages(name);
}

async function begin() {
  const reply = await fetch("choices");
  const offered = await reply.json();
  if (!reply.ok) throw new Error(offered.message);
  groups = offered.groups;
  openState(offered.start);
  fillControls(offered);
  showControls(current());
  onChange((view) => {
    changedAt = performance.now();
    showControls(view);
    askWhatChanged(view);
  });
  listenToTheme(() => {
    for (const redraw of [redrawCurve, redrawRoofline, redrawLayouts, redrawCapacity, redrawSimulation]) redraw();
  });
  byId("order").addEventListener("change", redrawOperators);
  byId("reset").addEventListener("click", () => {
    document.activeElement?.blur();
    reset();
  });
  askedByButton("deployment", "find", showDeployment, showNoDeployment);
  askedByButton("simulation", "simulate", showSimulation, showNoSimulation);
  byId("pin").addEventListener("click", () => {
    pinAnswer(pinned() || !last ? null : last[0]);
    if (!last) return;
    showHeadline(...last);
    showCurve(last[0]);
  });
  copies(byId("link"), address);
  askWhatChanged(current());
}

begin().catch((error) => {
  byId("problem").hidden = false;
  byId("problem").textContent = `the page cannot start: ${error.message}`;
});
