// The recommendation in sentences: the best filtered row of each model and workload.

const MOST_VERDICTS = 4;
const KIND = ["gpu", "mode", "tp", "pp", "dp", "ep", "routing", "dtype", "kv_dtype", "engine"];

function splitWords(row) {
  return ["tp", "pp", "dp", "ep"].filter((name) => name === "tp" || value(row, name) > 1)
    .map((name) => `${name} ${write(value(row, name))}`).join(" ");
}

function layoutWords(row) {
  const count = (many, noun) => `${write(many)} ${noun}${many === 1 ? "" : "s"}`;
  const split = splitWords(row);
  const gpus = value(row, "total_gpus");
  const on = gpus === null ? `on ${value(row, "gpu")}` : `on ${write(gpus)} x ${value(row, "gpu")}`;
  if (value(row, "mode") === "disaggregated") {
    const workers = ["prefill", "decode"].map((what) => count(value(row, `${what}_workers`), `${what} worker`));
    return `${workers.join(" and ")} of ${split} ${on}`;
  }
  const replicas = value(row, "replicas");
  return replicas > 1 ? `${count(replicas, "replica")} of ${split} ${on}` : `${split} ${on}`;
}

function loadWords(row) {
  if (columns.has("batch_size")) return `batch ${cell(row, "batch_size")} at kv_len ${cell(row, "kv_len")}`;
  if (facts.load === "request_rate_per_s") return `${withUnit(row, facts.load)} (${withUnit(row, "clients")})`;
  return withUnit(row, "clients");
}

// Limits by their margin, the smallest first.
function margins(row) {
  return Object.entries(facts.limits)
    .filter(([name]) => LOWER_IS_BETTER.test(name) && columns.has(name) && typeof value(row, name) === "number")
    .map(([name, limit]) => ({ name, limit, left: 1 - value(row, name) / limit })).sort((a, b) => a.left - b.left);
}

function marginWords(row) {
  const found = margins(row);
  if (!found.length) return "";
  const words = found.map(({ name, limit, left }) => {
    const title = label(name).replace(/ \(.*\)/, "");
    const most = SHARES.has(name) ? percent(limit) : name.endsWith("_ms") ? milliseconds(limit) : write(limit);
    return `${title} ${withUnit(row, name)} of ${most} (${percent(left)} left)`;
  });
  const error = value(row, "relative_error");
  const near = found[0].left < error && found[0].name === "tpot_ms"
    ? ` TPOT is nearer to its limit than the standard error of the estimate, ${percent(error)}: measure it, or leave more room.` : "";
  return ` ${found.length > 1 ? "Nearest limit" : "Limit"}: ${words.join(", ")}.${near}`;
}

// The next best of another kind if the file has all rows; otherwise the fastest row of the front.
function otherWords(best, rows) {
  const rate = (row) => number(row, facts.best);
  if (facts.is_complete) {
    const other = rows.filter((row) => keyOf(row, KIND) !== keyOf(best, KIND)).sort(byMerit)[0];
    if (other === undefined) return "";
    const ratio = rate(other) / rate(best);
    const errors = [best, other].map((row) => value(row, "relative_error"));
    const isTie = errors.every((error) => typeof error === "number") && Math.abs(Math.log(ratio)) < Math.hypot(...errors);
    const tie = isTie ? ", within the errors of the estimates: measure both" : "";
    const behind = Math.abs(1 - ratio) < 1e-6 ? "is equally good" : `is ${percent(Math.abs(1 - ratio))} behind${tie}`;
    return ` Next best of another kind: ${layoutWords(other)}, ${value(other, "dtype")}, with ${loadWords(other)}, ${behind}.`;
  }
  const fast = rows.reduce((most, row) => (number(row, facts.x) > number(most, facts.x) ? row : most), best);
  if (!(number(fast, facts.x) > 1.05 * number(best, facts.x))) return "";
  return ` Fastest for a user: ${layoutWords(fast)}, ${value(fast, "dtype")}, with ${loadWords(fast)}: ` +
    `${withUnit(fast, facts.x)} per user, ${withUnit(fast, facts.y)} per GPU.`;
}

function verdict(rows) {
  const best = rows.slice().sort(byMerit)[0];
  const names = workload.length ? ` (${workload.map((name) => `${label(name).replace(/ \(.*\)/, "")} ${cell(best, name)}`).join(", ")})` : "";
  const line = make("p");
  line.append(make("strong", `${value(best, "model")}${names}`));
  const what = facts.best === "cost_per_million_tokens" ? `${withUnit(best, facts.best)} per million output tokens`
    : `${withUnit(best, facts.best)}${facts.best === facts.y ? " per GPU" : facts.best === facts.x ? " per user" : ""}`;
  const both = facts.best === facts.x ? "" : `, ${withUnit(best, facts.x)} per user`;
  line.append(`: run ${layoutWords(best)}, ${value(best, "dtype")} weights, with ${loadWords(best)}: ${what}${both}.` +
    marginWords(best) + otherWords(best, rows) + " ");
  const button = make("button", "Show", { type: "button", "aria-label": `select the best row of ${value(best, "model")}${names}` });
  button.addEventListener("click", () => {
    select(best);
    byId("selected-section").scrollIntoView({ block: "start" });
  });
  line.append(button);
  return line;
}

function drawVerdict() {
  const usable = state.shown.filter((row) => !exceeds(row) && Number.isFinite(number(row, facts.best)));
  const groups = new Map();
  for (const row of usable) {
    const key = keyOf(row, ["model", ...workload]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  const ranked = [...groups.values()].map((rows) => ({ rows, best: rows.slice().sort(byMerit)[0] }))
    .sort((a, b) => byMerit(a.best, b.best));
  const lines = ranked.slice(0, MOST_VERDICTS).map(({ rows }) => verdict(rows));
  const more = ranked.length - lines.length;
  if (more > 0) lines.push(make("p", `The table has ${whole.format(more)} more models or workloads: filter for one.`));
  if (!lines.length) {
    const beyond = state.shown.filter(exceeds);
    const many = new Map();
    for (const row of beyond) many.set(value(row, "exceeds"), (many.get(value(row, "exceeds")) || 0) + 1);
    const why = [...many].map(([name, count]) => `${name} ${whole.format(count)}`).join(", ");
    lines.push(make("p", beyond.length
      ? `No filtered row is within all limits; rows beyond a limit: ${why}.`
      : "No filtered row is within all limits: remove a filter."));
  }
  byId("verdict").replaceChildren(...lines);
}
