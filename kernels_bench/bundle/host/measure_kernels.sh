#!/usr/bin/env bash
# Measures kernels on the host of a bundle, and leaves what is needed in $OUT.
#
#   OUT=results bash BUNDLE/measure_kernels.sh [SECONDS, 400] [GRID, first_run] [options of kernels-bench run]
#
# $OUT gets host.txt, smoke.txt, run.log, run/journal-*.jsonl, run/gpu.toml and rotation-*.jsonl of the study of
# the L2; `kernels-bench tables` makes the tables. Without vLLM's libraries torch's kernels are measured; a process that dies is resumed.
set -u
LIMIT=${1:-400}; shift || true
GRID=${1:-first_run}; shift || true
BEGUN=$(date +%s); left() { echo $((LIMIT - ($(date +%s) - BEGUN))); }
OUT=${OUT:?give OUT=FOLDER}
mkdir -p "$OUT/run"
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
KB="python3 -m kernels_bench"
{
  date -u +%FT%TZ; nproc; nvcc --version | tail -2; nvidia-smi; nvidia-smi -q -d CLOCK,POWER,PERFORMANCE
  ldconfig -p | grep -E 'libcuda\.|libnvidia-ml|libstdc'
  python3 -c 'import importlib.metadata as m; print({d.metadata["Name"]: d.version for d in m.distributions()})'
  cat "$BUNDLE/libraries.txt" "$BUNDLE/versions.txt" "$BUNDLE/commit"
} > "$OUT/host.txt" 2>&1

PROVIDERS=()
for word in "$@"; do [ "$word" != --providers ] || PROVIDERS=("$@"); done
smoke() { timeout -k 5 $(($1 + 45)) $KB smoke --deadline "$@" >> "$OUT/smoke.txt" 2>&1; echo "smoke: exit code $?"; }
passed() { grep -c ' ok *$' "$OUT/smoke.txt" 2>/dev/null || true; }
if [ ${#PROVIDERS[@]} -eq 0 ]; then
  smoke 45
  if [ "$(passed)" -lt 5 ]; then
    tail -15 "$OUT/smoke.txt"; echo "== torch alone"
    set -- "$@" --providers torch
    smoke 25 --providers torch
  fi
  echo "$(passed) points passed, $(left) s left"
  if [ "$(passed)" -lt 3 ]; then
    tail -25 "$OUT/smoke.txt"; echo "NOTHING WORKS: stopped, so that no time is lost"; exit 3
  fi
  grep -E 'reference|error' "$OUT/smoke.txt" | cut -c1-220 | head -12
fi

# What rotating inputs over 0, 2 and 5 L2 caches changes: three short runs of one grid.
[ "$GRID" != first_run ] || [ "$(left)" -lt 200 ] || for times in 0 2 5; do
  study=$UNPACKED/rotation-$BEGUN-$times
  KERNELS_BENCH_ROTATION=$times timeout -k 5 30 $KB run rotation -o "$study" --deadline 20 >> "$OUT/run.log" 2>&1
  cp "$study"/journal-*.jsonl "$OUT/rotation-$times.jsonl" && echo "rotation $times: $(left) s left"
done

RUN=$UNPACKED/run-$BEGUN  # another call measures anew; kernels-bench merge joins runs
save() { cp -f "$RUN"/journal-*.jsonl "$RUN/gpu.toml" "$OUT/run/" 2>/dev/null; }
(while sleep 15; do save; done) & SAVER=$!
limited() { timeout -k 5 $(($(left) + 8)) "$@" >> "$OUT/run.log" 2>&1; }
limited $KB run "$GRID" -o "$RUN" --deadline $(($(left) - 8)) "$@"; CODE=$?
# 1: the device was lost to that process, or no provider is left; above 128: it crashed.
for _ in 1 2 3; do
  { [ $CODE -eq 1 ] || [ $CODE -ge 128 ]; } && [ "$(left)" -gt 40 ] || break
  echo "run: exit code $CODE, resumed with $(left) s left"
  limited $KB resume "$RUN" --deadline $(($(left) - 8)); CODE=$?
done
echo "run: exit code $CODE, $(left) s left"
kill $SAVER 2>/dev/null; save
grep -vE '^ *[0-9,]+ of|^[0-9,]+/' "$OUT/run.log" | cut -c1-260 | tail -32
ls -la "$OUT" "$OUT/run"
