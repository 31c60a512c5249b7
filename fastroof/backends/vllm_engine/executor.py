"""The executor whose steps take the time of a plan."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput

from fastroof.backends.vllm_engine import GPU, PLAN
from fastroof.checks import shown
from fastroof.documents import parse_json
from fastroof.errors import BackendError
from fastroof.plan import StepPlan, compile_plan
from fastroof.simulation.settings import EngineSettings
from fastroof.units import US_PER_S

ANY_TOKEN: Final = 64
"""The letter a in byte-level vocabularies, as of Llama, Qwen and GPT: a text of its own."""

_UNSUPPORTED: Final = (
    ("speculative_config", "speculative decoding"),
    ("lora_config", "LoRA adapters"),
    ("kv_transfer_config", "KV transfer"),
)


class Clock:
    """The machine's time; sub-classes may advance one of their own."""

    def now_s(self) -> float:
        """Return seconds from any start."""
        return time.monotonic()

    def wait_until(self, end_s: float) -> None:
        """Sleep until the clock reaches a time."""
        time.sleep(max(end_s - time.monotonic(), 0.0))


class Row(NamedTuple):
    """One request of a step; it samples when its last known token is computed."""

    request: str
    new_tokens: int
    context_len: int
    samples: bool


class Step(Future):  # type: ignore[type-arg]
    """A step in flight."""

    def __init__(self, clock: Clock, end_s: float, answer: ModelRunnerOutput) -> None:
        super().__init__()
        self.clock, self.end_s, self.answer = clock, end_s, answer

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Return the step's answer at its end."""
        self.clock.wait_until(self.end_s)
        return self.answer


class PlanExecutor(Executor):  # type: ignore[misc]
    """vLLM's executor whose steps take the time of a plan.

    Attributes
    ----------
    plan : StepPlan
        The plan of vLLM's own configuration.
    clock : Clock
        Where the time of a step passes.
    """

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return True: steps can be scheduled while another runs."""
        return True

    def _init_executor(self) -> None:
        self.plan, self.clock = plan_of(self.vllm_config), Clock()
        self._paced = self.plan.bottleneck
        self._stages_free_s = [0.0] * self.parallel_config.pipeline_parallel_size
        self._prompts: dict[str, int] = {}
        self._rows: list[Row] = []
        scheduler, memory = self.scheduler_config, self.plan.memory
        self._settings = EngineSettings.of_plan(
            self.plan,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            block_size=self.cache_config.block_size,
        )
        # only the number of blocks counts: one layer stands for the model
        self._layer = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=1,
            head_size=max(round(memory.token_bytes / 4), 1),
            dtype=torch.bfloat16,
        )

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """Return the one layer."""
        return [{"model": self._layer}]

    def determine_available_memory(self) -> list[int]:
        """Return the bytes of the plan's KV blocks."""
        # vLLM keeps one block as its null block
        return [int(self._layer.page_size_bytes) * (self._settings.num_gpu_blocks + 1)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Return all layouts."""
        return [[layout.name for layout in KVCacheLayout]]

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Answer what vLLM asks its workers; there are none."""
        answers = [("generate",)] if method == "get_supported_tasks" else []
        return _done(answers) if non_block else answers

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Take a step, which :meth:`sample_tokens` runs."""
        self._rows = self._rows_of(scheduler_output)
        answer = None if self._rows else ModelRunnerOutput([], {})
        return _done(answer) if non_block else answer

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the tokens of the step when it ends."""
        rows = self._rows
        step_us = self._paced.step_scalar([row.new_tokens for row in rows], [row.context_len for row in rows])
        # a step that is scheduled early follows the one before it through the stages
        end_s, stages = self.clock.now_s(), len(self._stages_free_s)
        for stage, free_s in enumerate(self._stages_free_s):
            end_s = max(end_s, free_s) + step_us / stages / US_PER_S
            self._stages_free_s[stage] = end_s
        answer = ModelRunnerOutput(
            req_ids=[row.request for row in rows],
            req_id_to_index={row.request: place for place, row in enumerate(rows)},
            sampled_token_ids=[[ANY_TOKEN] if row.samples else [] for row in rows],
        )
        step = Step(self.clock, end_s, answer)
        return step if non_block else step.result()

    def check_health(self) -> None:
        """Do nothing: there are no workers to check."""

    def shutdown(self) -> None:
        """Do nothing: there are no workers to stop."""

    def _rows_of(self, scheduled: SchedulerOutput) -> list[Row]:
        for request in scheduled.finished_req_ids:
            self._prompts.pop(request, None)
        known = {}
        for new in scheduled.scheduled_new_reqs:
            self._prompts[new.req_id] = len(new.prompt_token_ids or ())
            known[new.req_id] = new.num_computed_tokens, self._prompts[new.req_id]
        cached = scheduled.scheduled_cached_reqs
        for request, computed, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            known[request] = computed, self._prompts[request] + outputs
        return [
            Row(request, count, known[request][0], known[request][0] + count >= known[request][1])
            for request, count in scheduled.num_scheduled_tokens.items()
        ]


def _done(answer: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


def plan_of(config: VllmConfig) -> StepPlan:
    """Return the plan of vLLM's own configuration.

    Raises
    ------
    BackendError
        If no GPU is named, the options of the plan are not JSON, or the configuration is not supported.
    """
    gpu = os.environ.get(GPU)
    if not gpu:
        raise BackendError(f"{GPU} is not set; it names the GPU that steps are predicted for, as {GPU}=h100")
    given = parse_json(os.environ.get(PLAN, "{}"), PLAN, BackendError)
    if not isinstance(given, dict) or "gpu" in given:
        raise BackendError(
            f"{PLAN} must be a JSON object of options of compile_plan without gpu; got {shown(given)}"
        )
    parallel, scheduler, cache = config.parallel_config, config.scheduler_config, config.cache_config
    for name, words in _UNSUPPORTED:
        if getattr(config, name) is not None:
            raise BackendError(f"{words} cannot run without a GPU here; leave out vLLM's {name}")
    if parallel.data_parallel_size > 1:
        raise BackendError("dp cannot run without a GPU here; start one server for each copy")
    model = config.model_config.model
    folder = Path(model)
    tp = parallel.tensor_parallel_size
    options: dict[str, Any] = {
        "model": str(folder / "config.json") if folder.is_dir() else model,
        "tp": tp,
        "pp": parallel.pipeline_parallel_size,
        "ep": tp if parallel.enable_expert_parallel else 1,
        "max_num_batched_tokens": max(scheduler.max_num_batched_tokens, 8192),
        "max_num_seqs": max(scheduler.max_num_seqs, 1024),
        "memory_fraction": cache.gpu_memory_utilization,
        "kv_dtype": "fp8" if cache.cache_dtype.startswith("fp8") else "auto",
        **given,
    }
    plan = compile_plan(options.pop("model"), gpu, **options)
    if plan.memory.windows or not plan.memory.token_parts or plan.memory.request_parts:
        raise BackendError(
            f"{plan.model.name} has windows or states in its KV cache; without a GPU only full attention runs"
        )
    return plan
