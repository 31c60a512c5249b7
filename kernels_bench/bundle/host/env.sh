# Sourced on the measuring host: unpacks the bundle once and sets paths. The scripts next to it source it.
BUNDLE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
UNPACKED=${KERNELS_BENCH_UNPACKED:-/tmp/kernels_bench}
[ -e "$UNPACKED/unpacked" ] || python3 "$BUNDLE/unpack.py" "$BUNDLE" "$UNPACKED"
export PYTHONPATH=$UNPACKED/site PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 KERNELS_BENCH_STAND_INS=1
KERNELS_BENCH_COMMIT=$(cat "$BUNDLE/commit" 2>/dev/null)
export KERNELS_BENCH_COMMIT VLLM_CACHE_ROOT=$UNPACKED/vllm_cache
