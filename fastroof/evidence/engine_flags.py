"""The meaning of engine flags: a setting of a run, no effect, or an effect that is not modelled.

TensorRT-LLM's flags are those of tensorrt_llm/commands/serve.py at 00209af149e7774406881a37283dce303571eb11;
vLLM's and SGLang's are those in public recipes and tests of both, and families of flags of vLLM 0.33.0 and
SGLang 0.5.23. Names are compared with ``_`` instead of ``-``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

SETTINGS: Final = (
    "gpu", "engine", "version", "model", "checkpoint", "dtype", "kv_dtype", "tp", "pp", "dp", "ep",
    "max_num_batched_tokens", "max_num_seqs", "chunked_prefill", "prefill_schedule_interval",
    "prefill_decode_interval", "min_free_slots_delay", "num_draft_tokens", "accepted", "draft",
)  # fmt: skip
"""Names that a user's file may use in addition to the engine's flags."""


class EngineFlags(NamedTuple):
    """The flags of an engine, by their effect; families are those that begin alike.

    A setting or switch that is also not modelled is represented in part.
    """

    settings: Mapping[str, str]
    switches: Mapping[str, tuple[str, str]]
    silent: frozenset[str]
    not_modelled: frozenset[str]
    silent_families: frozenset[str] = frozenset()
    families_not_modelled: frozenset[str] = frozenset()

    def knows(self, flag: str) -> bool:
        """Whether the engine has a flag."""
        return any(
            is_speculative(name)
            or name in self.settings
            or name in self.switches
            or self.is_silent(name)
            or self.is_not_modelled(name)
            for name in names_of(flag)
        )

    def is_silent(self, name: str) -> bool:
        """Whether a flag has no effect on steps."""
        return name in self.silent or name.startswith(tuple(self.silent_families))

    def is_not_modelled(self, name: str) -> bool:
        """Whether a flag may have an effect that is not modelled."""
        is_of_family = name.startswith(tuple(self.families_not_modelled)) and name not in self.silent
        return name in self.not_modelled or is_of_family


def spelled(flag: str) -> str:
    """Return a flag as in the tables: without leading dashes, ``_`` for ``-`` and ``.``, lower case."""
    return flag.lstrip("-").replace("-", "_").replace(".", "_").lower()


def names_of(flag: str) -> tuple[str, str]:
    """Return a flag's name, and what it is a part of if it is dotted: ``--compilation-config.mode``."""
    return spelled(flag), spelled(flag.partition(".")[0])


def is_speculative(name: str) -> bool:
    """Whether a flag, spelled as in the tables, turns speculative decoding on.

    They begin alike, except for vLLM's ``-sc`` and ``num_speculative_tokens``.
    """
    return name.startswith(("speculative", "spec_")) or name in ("sc", "num_speculative_tokens")


def _settings(**flags: str) -> dict[str, str]:
    """Return the setting of each flag, from the flags of each setting."""
    return {flag: setting for setting, names in flags.items() for flag in names.split()}


def _flags(names: str) -> frozenset[str]:
    return frozenset(names.split())


_SERVER: Final = _flags(
    "host port api_key served_model_name trust_remote_code tokenizer tokenizer_mode tokenizer_path revision "
    "download_dir load_format log_level log_requests chat_template tool_call_parser reasoning_parser "
    "enable_auto_tool_choice seed random_seed uvicorn_log_level model_impl skip_server_warmup "
    "enable_metrics stream_interval config_format hf_config_path hf_overrides"
)

ENGINE_FLAGS: Final[Mapping[str, EngineFlags]] = {
    "vllm": EngineFlags(
        settings=_settings(
            model="model model_tag",
            tp="tensor_parallel_size tp",
            pp="pipeline_parallel_size pp",
            dp="data_parallel_size dp",
            activations="dtype",
            quantization="quantization q",
            kv_dtype="kv_cache_dtype",
            max_num_batched_tokens="max_num_batched_tokens",
            max_num_seqs="max_num_seqs",
            prefill_schedule_interval="prefill_schedule_interval",
        ),
        switches={
            "enable_expert_parallel": ("expert_parallel", "true"),
            "ep": ("expert_parallel", "true"),
            "enable_chunked_prefill": ("chunked_prefill", "true"),
            "no_enable_chunked_prefill": ("chunked_prefill", "false"),
        },
        silent=_SERVER
        | _flags(
            "max_model_len max_logprobs disable_log_requests disable_log_stats no_enable_log_requests "
            "enable_log_requests gpu_memory_utilization swap_space enable_prefix_caching "
            "no_enable_prefix_caching distributed_executor_backend max_seq_len_to_capture "
            "async_scheduling no_async_scheduling disable_uvicorn_access_log "
            "enable_request_id_headers data_parallel_backend data_parallel_address "
            "data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank headless "
            "api_server_count enable_sleep_mode block_size generation_config "
            "max_cudagraph_capture_size cuda_graph_sizes nnodes node_rank master_addr master_port config "
            "kv_cache_memory_bytes disable_hybrid_kv_cache_manager no_disable_hybrid_kv_cache_manager "
            "case shapes kv_len_jitter kv_init routing exclude_drafter iters samples output_json profile_dir "
            "asc dpa dpb dpp dpl dpr n r device_memory_utilization"
        ),
        not_modelled=_flags(
            "enforce_eager cpu_offload_gb enable_lora enable_dbo all2all_backend enable_eplb "
            "compilation_config o attention_backend moe_backend decode_context_parallel_size "
            "prefill_context_parallel_size kv_transfer_config limit_mm_per_prompt "
            "disable_custom_all_reduce scheduling_policy cc attention_config ac kernel_config "
            "max_loras max_lora_rank lora_modules dcp pcp linear_backend monokernel optimization_level "
            "performance_mode max_num_active_seqs max_num_scheduled_tokens long_prefill_token_threshold "
            "num_gpu_blocks_override ubatch_size quantization_config swa_bounded_replay disaggregation_mode"
        ),
        silent_families=_flags(
            "allow dp_supervisor_ fingerprint_ h11_ jit_monitor_ log_ logging_ otlp_ ssl_ tool_ "
            "trust_request_ response_ return_ sse_ media_io_ watchdog_"
        ),
        families_not_modelled=_flags(
            "cp_kv_ cpu_offload_ cudagraph_ dbo_ dcp_ ec_ elastic_ep engram_ eplb_ gdn_ kda_ "
            "kv_cache_dtype_ kv_offloading_ mamba_ mm_ moe_ offload_ sparse_"
        ),
    ),
    "sglang": EngineFlags(
        settings=_settings(
            model="model_path model",
            tp="tp tp_size tensor_parallel_size",
            pp="pp pp_size pipeline_parallel_size",
            dp="dp dp_size data_parallel_size",
            ep="ep ep_size expert_parallel_size",
            activations="dtype",
            quantization="quantization",
            kv_dtype="kv_cache_dtype",
            max_num_batched_tokens="chunked_prefill_size",
            max_num_seqs="max_running_requests",
            attention_dp="attn_dp_size attention_data_parallel_size",
            prefill_decode_interval="prefill_decode_interval",
            min_free_slots_delay="min_free_slots_delay",
            prefill_graphs="cuda_graph_backend_prefill",
            a2a_backend="moe_a2a_backend",
            role="disaggregation_mode",
            lora_paths="lora_paths",
            cpu_offload_gb="cpu_offload_gb",
            state_strategy="mamba_scheduler_strategy",
        ),
        switches={
            "enable_dp_attention": ("dp_attention", "true"),
            "disable_overlap_schedule": ("async_scheduling", "false"),
            "disable_cuda_graph": ("prefill_graphs", "disabled"),
            "disable_piecewise_cuda_graph": ("prefill_graphs", "disabled"),
            "disable_prefill_cuda_graph": ("prefill_graphs", "disabled"),
            "enable_piecewise_cuda_graph": ("prefill_graphs", "tc_piecewise"),
            "enforce_piecewise_cuda_graph": ("prefill_graphs", "tc_piecewise"),
            "enable_breakable_cuda_graph": ("prefill_graphs", "breakable"),
            "enable_flashinfer_allreduce_fusion": ("fused", "true"),
            "disable_radix_cache": ("no_prefix_cache", "true"),
            "enable_lora": ("lora", "true"),
            "enable_hierarchical_cache": ("offload", "true"),
        },
        silent=_SERVER
        | _flags(
            "context_length mem_fraction_static max_total_tokens max_prefill_tokens cuda_graph_max_bs "
            "cuda_graph_bs page_size schedule_policy schedule_conservativeness "
            "dist_init_addr nccl_port nnodes node_rank decode_log_interval watchdog_timeout "
            "enable_p2p_check stream_output base_gpu_id is_embedding moe_dense_tp_size nccl_init_addr "
            "config cuda_graph_max_bs_decode cuda_graph_bs_decode enable_cache_report "
            "enable_metrics_for_all_schedulers"
        ),
        not_modelled=_flags(
            "disable_cuda_graph enable_torch_compile attention_backend prefill_attention_backend "
            "decode_attention_backend moe_runner_backend moe_a2a_backend deepep_mode "
            "enable_two_batch_overlap enable_eplb disaggregation_mode enable_mixed_chunk "
            "prefill_decode_interval_min_bs enable_prefill_delayer "
            "num_continuous_decode_steps enable_dp_lm_head "
            "disable_custom_all_reduce attn_cp_size attention_context_parallel_size lora_paths "
            "cpu_offload_gb enable_prefill_cp cp_strategy decode_context_parallel_size enable_lora "
            "enable_single_batch_overlap enable_symm_mem enable_mscclpp enable_nvidia_megakernel "
            "disable_shared_experts_fusion swa_full_tokens_ratio context_bucket"
        ),
        silent_families=_flags(
            "abort_ bucket_ gc_ grpc_ smg_ log_ otlp_ ssl_ tokenizer_ tool_ trust_ warmups watchdog_ "
            "weight_loader_ weight_version"
        ),
        families_not_modelled=_flags(
            "bf16_gemm_ cuda_graph_ dcp_ deepep_ disaggregation_ dllm_ dsa_ dsv4_ dwdp_ elastic_ep_ "
            "enable_flashinfer_ ep_ eplb_ flashinfer_ fp4_gemm_ fp8_gemm_ hicache_ kt_ linear_attn_ "
            "lora_ mamba_ max_lora mm_ moe_ offload_ paged_experts_ pdmux_ triton_attention_ "
            "enable_hierarchical_cache enable_hicache"
        ),
    ),
    "trtllm": EngineFlags(
        settings=_settings(
            model="model",
            tp="tensor_parallel_size tp_size",
            pp="pipeline_parallel_size pp_size",
            ep="moe_expert_parallel_size expert_parallel_size ep_size",
            max_num_batched_tokens="max_num_tokens",
            max_num_seqs="max_batch_size",
            kv_dtype="kv_cache_config_dtype kv_cache_dtype",
            dp_attention="enable_attention_dp",
            chunked_prefill="enable_chunked_prefill",
        ),
        switches={
            "enable_chunked_prefill": ("chunked_prefill", "true"),
            "enable_attention_dp": ("dp_attention", "true"),
        },
        silent=_SERVER
        | _flags(
            "backend max_seq_len kv_cache_free_gpu_memory_fraction free_gpu_memory_fraction "
            "gpus_per_node num_postprocess_workers max_beam_width custom_tokenizer custom_module_dirs "
            "print_iter_log kv_cache_config_free_gpu_memory_fraction "
            "kv_cache_config_enable_block_reuse extra_llm_api_options extra_engine_args config "
            "cuda_graph_config_max_batch_size cuda_graph_config_enable_padding "
            "cuda_graph_config_batch_sizes fail_fast_on_attention_window_too_large"
        ),
        not_modelled=_flags(
            "moe_config_backend disable_overlap_scheduler context_parallel_size cp_size "
            "batch_wait_timeout_iters scheduler_config moe_cluster_parallel_size server_role "
            "attn_backend disaggregation_mode cache_transceiver_config_backend"
        ),
    ),
}
"""The known flags of each engine; others are named in a warning."""
