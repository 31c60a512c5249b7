"""SGLang's own scheduler and radix cache, with step times of a plan, against `fastroof.simulate`.

    python -m benchmarks.upstream.sglang

Python needs fastroof, SGLang 0.5.23 (its wheel alone: `pip install --no-deps`) and what its scheduler
imports, with any build of torch. Kernels and the processes around the scheduler do not run.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from array import array
from types import SimpleNamespace
from typing import Any

import sglang
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers import tp_worker
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

import fastroof
from benchmarks.upstream.schedulers import (
    ANY_TOKEN,
    Clients,
    Counts,
    Run,
    compare,
    equal_prefixes,
    open_loop,
    sessions,
    write_model,
)
from fastroof.units import US_PER_S

PLAN = fastroof.compile_plan("llama-3.1-8b", "h100", engine="sglang-0.5.23", front_end="none")
MOST_TOKENS = 16_384


class Gpu:
    """When the GPU's last step ends, and the scheduler's time."""

    now_s = 0.0
    end_s = 0.0
    tokens = 400_000
    seqs = 256


class Event:
    """The end of a step, for which the scheduler waits."""

    end_s = 0.0

    def record(self) -> None:
        self.end_s = Gpu.end_s

    def synchronize(self) -> None:
        Gpu.now_s = max(Gpu.now_s, self.end_s)


class Worker(tp_worker.TpModelWorker):
    """SGLang's worker without a model: its pools count tokens, a step takes the plan's time."""

    preloaded_weights_bytes = 0

    def __init__(self, server_args: ServerArgs, **_: Any) -> None:
        self.server_args, self.device, self.random_seed, self.dllm_algorithm = server_args, "cpu", 0, None
        self.model_config = ModelConfig.from_server_args(server_args)
        self.model_runner_list: list[Any] = []
        self.world_group = sglang_scheduler.get_parallel().world_group
        kv = SimpleNamespace(size=Gpu.tokens, page_size=1, post_capture_active=False, device="cpu")
        self.req_to_token_pool = ReqToTokenPool(Gpu.seqs, MOST_TOKENS + 4, "cpu", False)
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(Gpu.tokens, torch.bfloat16, "cpu", kv, False)
        self._model_runner = SimpleNamespace(
            memory_pool_config=kv,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            token_to_kv_pool=kv,
            device="cpu",
            model=None,
            model_config=self.model_config,
            forward_stream=torch.cpu.Stream(),
            attn_backend=SimpleNamespace(needs_cpu_seq_lens=True),
            prewarm_sampling=lambda: None,
            ngram_embedding_manager=SimpleNamespace(prepare_for_forward=lambda batch, chunked_req: batch),
            canary_manager=None,
            is_hybrid_swa=False,
            prefill_aware_swa=False,
            mtp_draft_device_pools=(),
            mtp_draft_mamba_pools=(),
            logical_max_total_num_tokens=Gpu.tokens,
            effective_logical_max_total_num_tokens=Gpu.tokens,
            max_total_num_tokens=Gpu.tokens,
            max_running_requests=Gpu.seqs,
            graph_memory_usage={},
            graph_time_usage={},
            weight_load_time=0.0,
            weight_load_mem_usage=0.0,
        )

    def init_attention_backends(self, *_: Any, **__: Any) -> None:
        """Do nothing: there are no kernels."""

    def init_cuda_graphs(self, *_: Any, **__: Any) -> None:
        """Do nothing: there are no kernels."""

    def forward_batch_generation(self, batch: ScheduleBatch, **_: Any) -> GenerationBatchResult:
        """Return a token for each request, when the step ends."""
        if batch.forward_mode.is_decode():
            new, context = [1] * len(batch.reqs), [length - 1 for length in batch.seq_lens_cpu.tolist()]
        else:
            new, context = list(batch.extend_lens), list(batch.prefix_lens)
        Gpu.end_s = max(Gpu.now_s, Gpu.end_s) + PLAN.step_scalar(new, context) / US_PER_S
        if not batch.enable_overlap:
            Gpu.now_s = Gpu.end_s
        return GenerationBatchResult(next_token_ids=torch.full((len(new),), ANY_TOKEN))


def scheduler_of(engine: dict[str, Any]) -> sglang_scheduler.Scheduler:
    """SGLang's scheduler, as its process starts it."""
    options = {"chunked_prefill_size": 8192, "disable_radix_cache": True, **engine}
    Gpu.tokens, Gpu.seqs = options.pop("tokens", 400_000), options.pop("seqs", 256)
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        arguments = ServerArgs(
            model_path=folder, device="cpu", load_format="dummy", skip_tokenizer_init=True, log_level="error",
            page_size=1, context_length=MOST_TOKENS, **options,
        )  # fmt: skip
        ranks = sglang_scheduler.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        sglang_scheduler.publish(arguments, role="scheduler", ranks=ranks)
        found = sglang_scheduler.Scheduler(arguments, PortArgs.init_new(arguments))
    # a process has its groups once; here it has several schedulers, one after the other
    sglang_scheduler.bootstrap.init_parallel_runtime = lambda **_: None
    found.device_module = SimpleNamespace(Event=Event, StreamContext=torch.cpu.StreamContext)
    return found


def serve(scheduler: sglang_scheduler.Scheduler, clients: Clients) -> Counts:
    """Serve the clients in virtual time, by SGLang's own event loop."""
    Gpu.now_s = Gpu.end_s = 0.0
    retractions: dict[str, int] = {}
    ended: set[str] = set()

    def receive_requests(**_: Any) -> list[TokenizedGenerateReqInput]:
        if not clients.open and not scheduler.result_queue:
            if clients.next_s is None:
                scheduler.gracefully_exit = True
                return []
            Gpu.now_s = max(Gpu.now_s, clients.next_s)
        return [request_of(clients, place) for place in clients.due(Gpu.now_s)]

    def stream(_: Any, requests: list[Req], *__: Any, **___: Any) -> None:
        for request in requests:
            if not request.output_ids or request.rid in ended:
                continue
            retractions[request.rid] = request.retraction_count
            if is_last := request.finished():
                ended.add(request.rid)
            clients.receive(int(request.rid), Gpu.now_s, is_last=is_last)

    scheduler.request_receiver = SimpleNamespace(recv_requests=receive_requests)
    type(scheduler.output_streamer).stream_output = stream
    scheduler.run_event_loop()
    return Counts(scheduler.forward_ct, sum(retractions.values()))


def request_of(clients: Clients, place: int) -> TokenizedGenerateReqInput:
    """SGLang's form of a request."""
    params = SamplingParams(max_new_tokens=int(clients.trace.output_tokens[place]), ignore_eos=True)
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=str(place), input_text=None, input_ids=array("q", clients.tokens[place]), input_embeds=None,
        mm_inputs=None, token_type_ids=None, sampling_params=params, return_logprob=False,
        logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False,
    )  # fmt: skip


def is_equal(run: Run) -> bool:
    """Compare a run with its simulation."""
    scheduler = scheduler_of(run.engine)

    def simulated(trace: fastroof.Trace) -> fastroof.Simulation:
        settings = {
            "num_gpu_blocks": Gpu.tokens,
            "max_num_seqs": Gpu.seqs,
            "max_num_batched_tokens": scheduler.chunked_prefill_size,
            "async_scheduling": scheduler.enable_overlap,
            "prefix_cache": "given" if scheduler.disable_radix_cache else "lru",
        }
        return fastroof.simulate(PLAN, trace, **settings | run.settings)

    return compare(run, lambda clients: serve(scheduler, clients), simulated)


def runs() -> list[Run]:
    """Open loops, chunks, prompts that wait, scarce tokens, mixed steps, sessions and equal prefixes."""
    load = open_loop()
    cached = {"disable_radix_cache": False}
    spaced, delayed = {"prefill_decode_interval": 4}, {"min_free_slots_delay": 4}
    overlapped = [
        Run("open loop", load, {}),
        Run("chunks of 512 tokens", load, {"chunked_prefill_size": 512}),
        Run("16 sequences", load, {"seqs": 16}),
        Run("4 decode steps after prompts", load, spaced, spaced),
        Run("prompts once 4 of 16 slots are free", load, {"seqs": 16, **delayed}, delayed),
        Run("mixed chunks", load, {"enable_mixed_chunk": True}, {"order": "mixed"}),
        Run("sessions", sessions(), cached),
    ]
    plain = [*overlapped, Run("equal prefixes", equal_prefixes(), cached)]
    # of requests with ignore_eos SGLang reserves whole outputs, and keeps two tokens free
    reserved = {"reserve_output": True, "prefix_cache": "given", "num_gpu_blocks": 31_998}
    overlapped.append(Run("32,000 tokens", load, {"tokens": 32_000, **cached}, reserved))
    return [
        *(run._replace(engine={**run.engine, "disable_overlap_schedule": True}) for run in plain),
        *(run._replace(name=f"{run.name}, overlapped") for run in overlapped),
    ]


if __name__ == "__main__":
    logging.disable()
    tp_worker.TpModelWorker = Worker
    print(
        f"SGLang {sglang.__version__}: requests, steps, retractions, worst difference of TTFT, TPOT and E2E"
    )
    equal = [is_equal(run) for run in runs()]
    if not all(equal):
        sys.exit("SGLang's scheduler and simulate differ")
