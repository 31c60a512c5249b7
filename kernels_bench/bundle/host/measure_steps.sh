#!/usr/bin/env bash
# Measures whole steps of vLLM on the host of a bundle, then with the time that is left the same kernels without
# an engine.
#
#   OUT=results bash BUNDLE/measure_steps.sh [SECONDS, 300] [MODELS] [options of kernels-bench steps --engine vllm]
#
# $OUT gets seven files, two folders deep, so that hosts that return few files return all: steps.log, vllm/ and
# steps/ with steps.csv and steps.toml each, and vllm/vllm_steps.jsonl, the journal, next to vLLM's own vllm.log.
set -u
LIMIT=${1:-300}; shift || true
MODELS=${1:-llama-3.1-8b,qwen3-30b-a3b-fp8,qwen3-14b-fp8}; shift || true
BEGUN=$(date +%s); left() { echo $((LIMIT - ($(date +%s) - BEGUN))); }
OUT=${OUT:?give OUT=FOLDER}
mkdir -p "$OUT"
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
KB="python3 -m kernels_bench"
timeout -k 5 $(($(left) - 5)) $KB steps --engine vllm --model "$MODELS" -o "$OUT/vllm" \
  --deadline $(($(left) - 25)) "$@" > "$OUT/steps.log" 2>&1
echo "vllm: exit code $?, $(left) s left"
tail -60 "$OUT/steps.log"
grep -E 'Error|error' "$OUT/vllm/vllm.log" 2>/dev/null | cut -c1-300 | tail -8
if [ "$(left)" -gt 40 ]; then
  timeout -k 5 $(($(left) - 2)) $KB steps --model "${MODELS%%,*}" -o "$OUT/steps" \
    --deadline $(($(left) - 12)) >> "$OUT/steps.log" 2>&1
  echo "steps: exit code $?"; tail -3 "$OUT/steps.log"
fi
ls -la "$OUT" "$OUT/vllm" 2>/dev/null
