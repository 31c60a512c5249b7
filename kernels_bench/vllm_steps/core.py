"""vLLM's EngineCore in this process: scheduler, model runner, sampler and CUDA graphs, without a server.

A batch with a long context needs no prefill: a request is added with ``num_computed_tokens`` set, so that the
scheduler allocates its pages and computes only the rest. Written for vLLM 0.26.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kernels_bench.vllm_steps.points import EnginePoint

GPU_MEMORY_SHARE: Final = 0.92
CPU_MEMORY_SHARE: Final = 0.1
"""vLLM's CPU build takes it for the host's memory, which other processes use too."""
CPU_BLOCKS: Final = 128
MAX_LEN: Final = 70_000
"""Tokens of a request; the longest point needs 65,536 and what the steps add."""
GRAPH_SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
LEVELS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "custom_ops": ["all"]},
    {"mode": 0, "cudagraph_mode": "NONE", "custom_ops": ["all"]},
)
"""Compilation: vLLM's default; CUDA graphs of decode steps without torch.compile; neither."""
LEVEL_WORDS: Final = ("", ", no torch.compile", ", eager")
_FILL_ELEMENTS: Final = 2**26
_PROMPT_TOKENS: Final = 512
"""Random tokens of a prompt; a longer one repeats them."""


class VllmCore:
    """One model in one EngineCore."""

    def __init__(
        self, folder: Path, max_position: int, level: int, overrides: Mapping[str, Any], on_cpu: bool
    ) -> None:
        engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
        core = importlib.import_module("vllm.v1.engine.core").EngineCore
        executor = importlib.import_module("vllm.v1.executor").Executor
        _inspect_models_here()
        arguments: dict[str, Any] = {
            "model": str(folder),
            "tokenizer": str(folder),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "max_model_len": min(max_position, MAX_LEN),
            "max_num_seqs": 512,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "compilation_config": dict(LEVELS[level]),
            "gpu_memory_utilization": CPU_MEMORY_SHARE if on_cpu else GPU_MEMORY_SHARE,
            "seed": 0,
        }
        if on_cpu:
            arguments["num_gpu_blocks_override"] = CPU_BLOCKS
        else:
            arguments["compilation_config"]["cudagraph_capture_sizes"] = list(GRAPH_SIZES)
        self.config = engine_args(**arguments | dict(overrides)).create_engine_config()
        self._core = core(self.config, executor.get_class(self.config), log_stats=False)
        model, cache = self.config.model_config, self.config.cache_config
        self.kv_tokens = int(
            getattr(cache, "kv_cache_size_tokens", 0) or cache.num_gpu_blocks * cache.block_size
        )
        self._vocab = model.get_vocab_size()
        # Random sampling with experts: equal tokens would all go to the same ones.
        self.temperature = 1.0 if getattr(model, "is_moe", False) else 0.0
        self._random = random.Random(0)
        self._count = 0

    @property
    def facts(self) -> dict[str, Any]:
        """What it was configured to, for the journal."""
        config = self.config
        return {
            "kv_tokens": self.kv_tokens,
            "block_size": config.cache_config.block_size,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "quantization": str(config.model_config.quantization or ""),
            "model_runner": "v2" if config.use_v2_model_runner else "v1",
            "compilation_mode": str(config.compilation_config.mode),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "temperature": self.temperature,
        }

    def unfit(self, point: EnginePoint) -> str:
        """Return why a point exceeds a limit of this engine, or an empty string."""
        scheduler = self.config.scheduler_config
        batch, max_len = point.batch, self.config.model_config.max_model_len
        if sum(batch.new_tokens) > scheduler.max_num_batched_tokens:
            return f"a step has at most {scheduler.max_num_batched_tokens} tokens"
        if len(batch.new_tokens) > scheduler.max_num_seqs:
            return f"max_num_seqs is {scheduler.max_num_seqs}"
        if point.longest > max_len:
            return f"max_model_len is {max_len}"
        if point.kv_tokens > 0.97 * self.kv_tokens:
            return f"the KV cache has {self.kv_tokens:,} tokens, the point needs {point.kv_tokens:,}"
        return ""

    def fill_cache(self) -> int:
        """Write normally distributed numbers to every page; return how many tensors did not take them."""
        torch = importlib.import_module("torch")
        failed = 0
        for cache in self._caches():
            try:
                if cache.element_size() > 1:
                    cache.normal_()
                    continue
                flat = cache.view(torch.uint8).view(-1)
                size = min(flat.numel(), _FILL_ELEMENTS)
                part = torch.randn(size, device=cache.device).to(torch.float8_e4m3fn).view(torch.uint8)
                for begin in range(0, flat.numel(), size):
                    piece = flat[begin : begin + size]
                    piece.copy_(part[: piece.numel()])
            except Exception:
                failed += 1
        return failed

    def _caches(self) -> list[Any]:
        worker = self._core.model_executor.driver_worker
        runner = getattr(worker, "worker", worker).model_runner
        found, stack = list[Any](), list(runner.kv_caches)
        while stack:
            one = stack.pop()
            (stack.extend if isinstance(one, list | tuple) else found.append)(one)
        return found

    def add(self, prompt: int, cached: int, max_tokens: int) -> str:
        """Add a request of ``prompt`` tokens, ``cached`` of them in the cache already; return its name."""
        sampling = importlib.import_module("vllm.sampling_params").SamplingParams
        request_type = importlib.import_module("vllm.v1.request").Request
        self._count += 1
        name = f"r{self._count}"
        params = sampling(
            max_tokens=max_tokens,
            min_tokens=0,
            ignore_eos=True,
            temperature=self.temperature,
            detokenize=False,
        )
        tokens = [self._random.randrange(self._vocab) for _ in range(min(prompt, _PROMPT_TOKENS))]
        request = request_type(name, (tokens * (prompt // len(tokens) + 1))[:prompt], params, None)
        request.num_computed_tokens = cached
        self._core.add_request(request)
        return name

    def step(self) -> dict[str, tuple[int, bool]]:
        """Run one step; by request, the new tokens and whether it finished."""
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        return {
            output.request_id: (len(output.new_token_ids), output.finished)
            for client in (outputs or {}).values()
            for output in client.outputs
        }

    def abort(self, names: Sequence[str]) -> None:
        """Remove requests and let the steps in flight end."""
        self._core.abort_requests(list(names))
        for _ in range(4):
            self.step()
            if not self._core.scheduler.has_requests():
                return

    def synchronize(self) -> None:
        """Wait for the device."""
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def close(self) -> None:
        """Shut the engine down."""
        self._core.shutdown()


def _inspect_models_here() -> None:
    """Let vLLM look at a model's class in this process: it starts another, which imports all of vLLM again.

    It does so to leave CUDA alone before a fork. Nothing is forked here, and the class is loaded anyway.
    """
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda function: function()
