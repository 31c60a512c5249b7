#!/usr/bin/env bash
# Measures whole steps of vLLM on the host of a bundle.
#
#   OUT=results bash BUNDLE/measure_steps.sh [SECONDS, 300] [MODELS] [options of kernels-bench steps]
#
# $OUT gets five files, two folders deep, so that hosts that return few files return all: steps.log and vllm/ with
# steps.csv, steps.toml, vllm_steps.jsonl, the journal, and vLLM's own vllm.log.
set -u
LIMIT=${1:-300}; shift || true
MODELS=${1:-llama-3.1-8b,qwen3-30b-a3b-fp8,qwen3-14b-fp8}; shift || true
BEGUN=$(date +%s); left() { echo $((LIMIT - ($(date +%s) - BEGUN))); }
OUT=${OUT:?give OUT=FOLDER}
mkdir -p "$OUT"
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
KB="python3 -m kernels_bench"
timeout -k 5 $(($(left) - 5)) $KB steps --model "$MODELS" -o "$OUT/vllm" \
  --deadline $(($(left) - 25)) "$@" > "$OUT/steps.log" 2>&1
echo "vllm: exit code $?, $(left) s left"
tail -60 "$OUT/steps.log"
grep -E 'Error|error' "$OUT/vllm/vllm.log" 2>/dev/null | cut -c1-300 | tail -8
ls -la "$OUT" "$OUT/vllm" 2>/dev/null
