# Sourced on the measuring host: unpacks the bundle, once unless it changed, and sets paths. The scripts source it.
BUNDLE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
UNPACKED=${KERNELS_BENCH_UNPACKED:-/tmp/kernels_bench}
cmp -s "$BUNDLE/sha256.txt" "$UNPACKED/sha256.txt" || python3 "$BUNDLE/unpack.py" "$BUNDLE" "$UNPACKED"
[ -w "${HOME:-/nowhere}" ] || export HOME=$UNPACKED  # Triton and others cache what they compile below it
export PYTHONPATH=$UNPACKED/site PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 KERNELS_BENCH_STAND_INS=1
export DG_JIT_USE_NVRTC=${DG_JIT_USE_NVRTC:-1} DG_JIT_CACHE_DIR=$UNPACKED/deep_gemm  # DeepGEMM compiles without nvcc
KERNELS_BENCH_COMMIT=$(cat "$BUNDLE/commit" 2>/dev/null)
export KERNELS_BENCH_COMMIT VLLM_CACHE_ROOT=$UNPACKED/vllm_cache
