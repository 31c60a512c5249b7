"""Estimates of closed loops: what :func:`fastroof.serving.estimate` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastroof.arrow import RELATIVE_ERROR, ArrowResult, answer


@dataclass(frozen=True, eq=False)
class ServingEstimate(ArrowResult):
    """Estimates of closed loops: floats, or arrays of the scenarios' shape.

    Attributes
    ----------
    ttft_ms : float or ndarray of float64
        Mean time to first token, ms: from sending a request to its first token, with the front end of the
        plan's engine (``front_end`` of :func:`fastroof.compile_plan`).
    tpot_ms, itl_ms : float or ndarray of float64
        Mean time per output token after the first, ms, and mean time between two tokens: both are equal,
        since all outputs have the same length. nan if osl is 1. The underlying gaps are of two kinds,
        ``decode_step_us`` and ``mixed_step_us``; the accepted tokens of a step arrive together.
    request_latency_ms : float or ndarray of float64
        ``ttft_ms + tpot_ms * (osl - 1)``.
    tokens_per_s_per_gpu : float or ndarray of float64
        Output tokens/s of all clients, divided by the plan's GPUs (all ranks and stages).
    wait_ms : float or ndarray of float64
        Share of ``ttft_ms`` that a request waits because not all clients fit the KV cache, max_num_seqs or
        the token budget; 0 if they fit.
    effective_concurrency : float or ndarray of float64
        Number of requests that run concurrently.
    decode_step_us, mixed_step_us : float or ndarray of float64
        Mean decode-only step, and mean mixed step (decodes and prompts), us; 0 without any. With
        speculative decoding they include the draft.
    mixed_share : float or ndarray of float64
        Share of the steps that contain prompts, as a decoding request sees them. If prompts run first, a
        mixed step has only prompts and produces no output token: TPOT is the mean step over one
        minus this share.
    decodes : float or ndarray of float64
        Requests that decode in a step, of one rank and one micro-batch; 0 if osl is 1.
    prefill_tokens, prompts : float or ndarray of float64
        Prompt tokens and prompts in a step that contains any; 0 if
        ``mixed_share`` is 0.
    kv_len : float or ndarray of float64
        Mean tokens that a decode attends to.
    relative_error : float or ndarray of float64, or None
        One standard error relative to ``decode_step_us``, nan if that is 0; None if not requested.
    tpot_relative_error, ttft_relative_error : float or ndarray of float64, or None
        One standard error relative to ``tpot_ms`` and ``ttft_ms`` (in ln), from the engine's profile:
        runs of models, GPUs, versions and benches that no fit has seen, by protocol: larger for bursts,
        requests that wait, and steps of short kernels. Four of five runs are within ``exp(1.28 error)`` times
        either way. None if not requested or not in the profile.
    joules_per_token, joules_relative_error : float or ndarray of float64, or None
        Joules of all GPUs per output token, idle time included, and one standard error relative to it;
        None if not requested.
    made_from : mapping of str to str
        fastroof's version, the tables' hash and the plan's settings: metadata of its Arrow table.
    """

    ttft_ms: Any = answer("ms", "mean time to first token")
    tpot_ms: Any = answer("ms", "mean time per output token after the first; empty if osl is 1")
    itl_ms: Any = answer("ms", "mean time between two tokens; equals tpot_ms")
    request_latency_ms: Any = answer("ms", "ttft_ms + tpot_ms * (osl - 1)")
    tokens_per_s_per_gpu: Any = answer("tokens/s", "output tokens of all clients, over GPUs")
    wait_ms: Any = answer("ms", "share of ttft_ms that a request waits to be admitted", 0)
    effective_concurrency: Any = answer("", "requests that run concurrently")
    decode_step_us: Any = answer("us", "mean decode-only step; 0 without any", 0)
    mixed_step_us: Any = answer("us", "mean mixed step (decodes and prompts); 0 without any", 0)
    mixed_share: Any = answer("", "share of the steps that contain prompts", 0)
    decodes: Any = answer("", "requests that decode in a step; 0 if osl is 1", 0)
    prefill_tokens: Any = answer("tokens", "prompt tokens in a step with prompts; 0 if none has any", 0)
    prompts: Any = answer("", "prompts in a step with prompts; 0 if none has any", 0)
    kv_len: Any = answer("tokens", "mean tokens that a decode attends to")
    relative_error: Any = answer(RELATIVE_ERROR.unit, RELATIVE_ERROR.meaning, 0, default=None)
    tpot_relative_error: Any = answer(
        "", "relative standard error of tpot_ms on unseen runs", 0, default=None
    )
    ttft_relative_error: Any = answer(
        "", "relative standard error of ttft_ms on unseen runs", 0, default=None
    )
    joules_per_token: Any = answer("J", "energy of all GPUs per output token, idle time too", default=None)
    joules_relative_error: Any = answer("", "relative standard error of joules_per_token", 0, default=None)
    made_from: Mapping[str, str] = field(default_factory=dict, repr=False)
