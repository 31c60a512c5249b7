// The hover text of a chart's points.

// Describe a row by some settings.
function words(row, names) {
  const isNone = (name) => /^(replicas|.*_workers)$/.test(name) && value(row, name) === 0;
  return names.filter((name) => !isNone(name)).map((name) => {
    const found = cell(row, name);
    if (name === "model" || name === "gpu" || name === "dtype" || name === "mode") return found;
    return `${name.replaceAll("_", " ")} ${found}`;
  }).join(", ");
}

const HOVERED = [
  "clients", "request_rate_per_s", "batch_size", "kv_len", "isl", "osl", "ttft_ms", "tpot_ms",
  "tokens_per_s_per_user", "tokens_per_s_per_gpu", "cost_per_million_tokens", "joules_per_token", "total_gpus", "bound",
  "limited_by", "exceeds", "origin", "relative_error",
];

function hover(row) {
  const first = facts.settings.filter((name) => columns.has(name)).slice(0, 6);
  const lines = [`<b>${plain(words(row, first))}</b>`];
  for (const name of HOVERED) {
    const found = value(row, name);
    if (found !== null && found !== undefined && found !== "") lines.push(`${plain(label(name))}: ${plain(cell(row, name))}`);
  }
  return lines.join("<br>");
}
