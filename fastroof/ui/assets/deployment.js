// What to run on all GPUs within the limits, as `fastroof best` recommends; asked for by a button.

import { byId, make } from "./shared/elements.js";
import { count, number, percent, showCommand } from "./words.js";

const TIMES = { ttft_ms: "TTFT", tpot_ms: "TPOT" };
const FAMILIES = {
  experts_across_nodes: "Expert parallelism across nodes",
  stages_across_nodes: "Pipeline stages across nodes",
  disaggregated: "Separate workers for prefill and decode",
};

const limitsOn = (answer) => (answer.limits_on === "mean" ? "mean" : answer.limits_on);

function marginWords(answer, { name, value, limit }) {
  return TIMES[name] ? `${limitsOn(answer)} ${TIMES[name]} ${number(value)} of ${number(limit)} ms` : `${name} ${number(value)} of ${number(limit)}`;
}

function familyWords({ family, layout, gain }) {
  if (layout === null) return `${FAMILIES[family]}: not within the limits, or not simulated.`;
  if (gain === null) return `${FAMILIES[family]}: ${layout}; nothing within nodes keeps the limits.`;
  return `${FAMILIES[family]}: ${layout}, ${percent(Math.abs(gain))} ${gain < 0 ? "less" : "more"} than the best within nodes.`;
}

function row(answer, choice) {
  const line = make("tr");
  const value = (name) => choice.margins.find((one) => one.name === name)?.value;
  line.append(
    make("td", choice.layout, "text"), make("td", count(choice.clients)), make("td", number(choice.requests_per_s, 4)),
    make("td", number(choice.tokens_per_s_per_gpu, 4)), make("td", choice.behind ? `${percent(Math.abs(choice.behind))}${choice.behind < 0 ? " ahead" : ""}${choice.is_tie ? " (tie)" : ""}` : ""),
    make("td", number(value("tpot_ms"))), make("td", number(value("ttft_ms"))),
    make("td", count(choice.max_num_batched_tokens)), make("td", count(choice.max_num_seqs)), make("td", choice.why_not, "text"),
  );
  return line;
}

export function showDeployment(answer) {
  const [best] = answer.choices;
  const gpus = answer.gpus === 1 ? "1 GPU" : `${answer.gpus} GPUs`;
  if (best) {
    const chance = best.sampling_error === null ? "" : ` (± ${percent(best.sampling_error)} by chance)`;
    const means = answer.limits_on === "mean" && answer.why_mean !== "no time has a limit";
    byId("deployment-words").replaceChildren(
      answer.default_limits && `Limits by default: ${answer.default_limits}. `,
      make("strong", `Best on ${gpus}: ${best.layout}`),
      `: ${number(best.requests_per_s, 4)} requests/s${chance} from ${count(best.clients)} clients on average, ${number(best.tokens_per_s_per_gpu, 4)} tokens/s per GPU`
      + `${best.margins.length ? `; ${best.margins.map((one) => marginWords(answer, one)).join(", ")}` : ""}.`
      + `${means ? ` Limits are on means: ${answer.why_mean}.` : ""} ${count(answer.configurations)} deployments compared, ${count(answer.simulated)} of them simulated.`,
    );
  } else {
    const near = answer.nearest;
    const most = near && Object.entries(near.exceeds).map(([name, times]) => `${near.limits_on} ${TIMES[name] || name} ${number(near.values[name])} (${number(times)} times the limit)`).join(", ");
    byId("deployment-words").textContent = `${answer.default_limits && `Limits by default: ${answer.default_limits}. `}No deployment on ${gpus} is within the limits.${near ? ` Nearest: ${near.layout}: ${most}.` : " The model does not fit: use more GPUs or another format."}`;
  }
  byId("deployment").hidden = !best;
  byId("deployment").tBodies[0].replaceChildren(...answer.choices.map((choice) => row(answer, choice)));
  byId("deployment-families").replaceChildren(...answer.families.filter((one) => FAMILIES[one.family]).map((one) => make("li", familyWords(one))));
  const servers = Object.entries(answer.servers).map(([role, command]) => (role === "server" ? command : `# ${role}\n${command}`));
  showCommand("deployment-server", servers.join("\n"));
  showCommand("deployment-command", answer.command);
}

export function showNoDeployment(message) {
  byId("deployment-words").textContent = message;
  byId("deployment").hidden = true;
  byId("deployment-families").replaceChildren();
  showCommand("deployment-server", "");
  showCommand("deployment-command", "");
}
