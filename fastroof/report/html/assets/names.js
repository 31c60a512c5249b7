// What columns are called: short in charts and tables, in plain words and with units where one row is told.

const LABELS = {
  tokens_per_s_per_user: "tokens/s per user",
  tokens_per_s_per_gpu: "tokens/s per GPU",
  tokens_per_s: "tokens/s",
  requests_per_s: "requests/s",
  request_rate_per_s: "requests/s asked",
  ttft_ms: "TTFT (ms)",
  tpot_ms: "TPOT (ms)",
  itl_ms: "ITL (ms)",
  kv_len: "kv_len (tokens)",
  batch_size: "batch size (sequences)",
  concurrency: "concurrency (requests)",
};

const ROW_GROUPS = [
  ["What runs", {
    model: "model", gpu: "GPU", total_gpus: "GPUs in all", mode: "mode", replicas: "replicas",
    prefill_workers: "workers that prefill", decode_workers: "workers that decode",
    tp: "GPUs that share each layer (tp)", pp: "pipeline stages (pp)", dp: "ranks of attention (dp)",
    ep: "groups of experts (ep)", routing: "how tokens spread over experts", dtype: "weights",
    kv_dtype: "KV cache", runtime: "engine", kernels: "measured kernels",
    max_batched_tokens: "a step holds at most", num_draft_tokens: "draft tokens", draft: "drafted by",
    accepted: "tokens a step says",
  }],
  ["What it is asked", {
    isl: "prompt (isl)", osl: "output (osl)", kv_len: "attended to (kv_len)", concurrency: "clients at once",
    request_rate_per_s: "rate asked for", batch_size: "batch", prefix_hit: "share of prompts in the prefix cache",
  }],
  ["What a user sees", {
    ttft_ms: "time to first token (TTFT)", tpot_ms: "time per output token (TPOT)",
    itl_ms: "time between tokens (ITL)", request_latency_ms: "a whole request",
    tokens_per_s_per_user: "tokens for each user", wait_ms: "of TTFT, waiting",
  }],
  ["What the GPUs give", {
    tokens_per_s_per_gpu: "tokens from each GPU", tokens_per_s: "tokens from all", requests_per_s: "requests from all",
    cost_per_million_tokens: "price of a million output tokens",
  }],
  ["Inside", {
    effective_concurrency: "requests that run concurrently", step_us: "a step", decode_step_ms: "a decode-only step",
    mixed_step_ms: "a step with prompts", mixed_share: "steps that hold prompts", kv_share: "KV cache in use",
    weight_bytes: "weights on a GPU", max_kv_tokens: "room for KV cache", bound: "time is mostly bound by",
    limited_by: "a larger batch is stopped by", exceeds: "limit exceeded", origin: "how times were made",
    relative_error: "standard error of a step",
  }],
];
const PLAIN = Object.assign({}, ...ROW_GROUPS.map(([, words]) => words));

const UNITS = {
  concurrency: "clients", batch_size: "sequences", request_rate_per_s: "requests/s", requests_per_s: "requests/s",
  effective_concurrency: "requests", tokens_per_s: "tokens/s", tokens_per_s_per_gpu: "tokens/s",
  tokens_per_s_per_user: "tokens/s", isl: "tokens", osl: "tokens", kv_len: "tokens", max_batched_tokens: "tokens",
  max_kv_tokens: "tokens", num_draft_tokens: "tokens", accepted: "tokens", tp: "GPUs", total_gpus: "GPUs",
};
const SHARES = new Set(["prefix_hit", "mixed_share", "kv_share", "relative_error"]);
const LOWER_IS_BETTER = /_(ms|us)$|^cost_|^relative_error$|^kv_share$|^total_gpus$/;

// Columns that say nothing of a row that has none of what they count.
const NOTHING = {
  replicas: 0, prefill_workers: 0, decode_workers: 0, num_draft_tokens: 0, pp: 1, dp: 1, ep: 1, routing: "none",
  prefix_hit: 0, wait_ms: 0,
};

function label(name) {
  if (name in LABELS) return LABELS[name];
  const column = columns.get(name);
  const words = name.replace(/_(ms|us|bytes)$/, "").replaceAll("_", " ");
  return column.unit && column.unit !== "B" ? `${words} (${column.unit})` : words;
}

function percent(share) {
  if (share > 0 && share < 1e-3) return "under 0.1 %";
  return `${new Intl.NumberFormat("en", { maximumSignificantDigits: 3 }).format(100 * share)} %`;
}

function milliseconds(ms) {
  return Math.abs(ms) >= 1e4 ? `${short.format(ms / 1e3)} s` : `${short.format(ms)} ms`;
}

// A value with its unit, as one says it.
function said(row, name) {
  const found = value(row, name), column = columns.get(name);
  if (typeof found !== "number") return write(found, column);
  if (name === "weight_bytes") return write(found, { unit: "B" });
  if (SHARES.has(name)) return percent(found);
  if (name.endsWith("_ms")) return milliseconds(found);
  if (name.endsWith("_us")) return milliseconds(found / 1e3);
  const unit = UNITS[name] || (column.unit === "B" ? "" : column.unit);
  const one = found === 1 && !unit.includes("/") ? unit.replace(/s$/, "") : unit;
  return one ? `${write(found, column)} ${one}` : write(found, column);
}
