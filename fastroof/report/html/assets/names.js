// Names of columns: short ones for charts and tables, descriptive ones with units for a single row.

const LABELS = {
  tokens_per_s_per_user: "tokens/s per user",
  tokens_per_s_per_gpu: "tokens/s per GPU",
  tokens_per_s: "tokens/s",
  requests_per_s: "requests/s",
  request_rate_per_s: "requested requests/s",
  ttft_ms: "TTFT (ms)",
  tpot_ms: "TPOT (ms)",
  itl_ms: "ITL (ms)",
  kv_len: "kv_len (tokens)",
  batch_size: "batch size (sequences)",
  clients: "clients",
};

const ROW_GROUPS = [
  ["Deployment", {
    model: "model", gpu: "GPU", total_gpus: "total GPUs", mode: "mode", replicas: "replicas",
    prefill_workers: "prefill workers", decode_workers: "decode workers",
    tp: "tensor-parallel size (tp)", pp: "pipeline stages (pp)", dp: "ranks of data-parallel attention (dp)",
    ep: "expert-parallel groups (ep)", routing: "how tokens spread over experts", dtype: "weights",
    kv_dtype: "KV cache", engine: "engine", kernels: "measured kernels",
    max_num_batched_tokens: "max tokens per step", num_draft_tokens: "draft tokens", draft: "drafter",
    accepted: "tokens per request and step",
  }],
  ["Load", {
    isl: "prompt (isl)", osl: "output (osl)", kv_len: "context (kv_len)", clients: "concurrent clients",
    request_rate_per_s: "requested rate", batch_size: "batch", prefix_hit: "share of prompts in the prefix cache",
  }],
  ["Latency", {
    ttft_ms: "time to first token (TTFT)", tpot_ms: "time per output token (TPOT)",
    itl_ms: "inter-token latency (ITL)", request_latency_ms: "end-to-end latency (E2E)",
    tokens_per_s_per_user: "output rate per user", wait_ms: "waiting, as part of TTFT",
  }],
  ["Throughput", {
    tokens_per_s_per_gpu: "output rate per GPU", tokens_per_s: "output rate", requests_per_s: "request rate",
    cost_per_million_tokens: "price per million output tokens", joules_per_token: "energy per output token",
  }],
  ["Details", {
    effective_concurrency: "running requests", step_us: "step", decode_step_ms: "decode step",
    mixed_step_ms: "mixed step", mixed_share: "share of mixed steps", kv_share: "KV cache in use",
    weight_bytes: "weights per GPU", max_kv_tokens: "KV cache capacity", bound: "bound by",
    limited_by: "larger batch prevented by", exceeds: "limit exceeded", origin: "origin of the times",
    relative_error: "standard error of a step",
  }],
];
const PLAIN = Object.assign({}, ...ROW_GROUPS.map(([, words]) => words));

const UNITS = {
  clients: "clients", batch_size: "sequences", request_rate_per_s: "requests/s", requests_per_s: "requests/s",
  effective_concurrency: "requests", tokens_per_s: "tokens/s", tokens_per_s_per_gpu: "tokens/s",
  tokens_per_s_per_user: "tokens/s", isl: "tokens", osl: "tokens", kv_len: "tokens", max_num_batched_tokens: "tokens",
  max_kv_tokens: "tokens", joules_per_token: "J", num_draft_tokens: "tokens", accepted: "tokens", tp: "GPUs", total_gpus: "GPUs",
};
const SHARES = new Set(["prefix_hit", "mixed_share", "kv_share", "relative_error"]);
const LOWER_IS_BETTER = /_(ms|us)$|^cost_|^joules_|^relative_error$|^kv_share$|^total_gpus$/;

// Values of columns that are not worth showing.
const NOTHING = {
  replicas: 0, prefill_workers: 0, decode_workers: 0, num_draft_tokens: 0, pp: 1, dp: 1, ep: 1, routing: "none",
  prefix_hit: 0, wait_ms: 0, accepted: 1,
};

function label(name) {
  if (name in LABELS) return LABELS[name];
  const column = columns.get(name);
  const words = name.replace(/_(ms|us|bytes)$/, "").replaceAll("_", " ");
  return column.unit && column.unit !== "B" ? `${words} (${column.unit})` : words;
}

// A unit stays on its number's line.
function percent(share) {
  if (share > 0 && share < 1e-3) return "under 0.1\u00a0%";
  return `${new Intl.NumberFormat("en", { maximumSignificantDigits: 3 }).format(100 * share)}\u00a0%`;
}

function milliseconds(ms) {
  return Math.abs(ms) >= 1e4 ? `${short.format(ms / 1e3)}\u00a0s` : `${short.format(ms)}\u00a0ms`;
}

// Format a value with its unit.
function withUnit(row, name) {
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
