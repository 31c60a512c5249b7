"""Every kind of plan over every route: the plan's bits, a file with its error, or a refusal with a reason.

A new kind of layers, layout or engine is a row of KINDS; a new adapter is one of ROUTES or a test.
"""

from __future__ import annotations

import ctypes
import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import StepBatch
from fastroof.backends.c import export_c
from fastroof.backends.dynamo import dynamo_profile
from fastroof.backends.llm_d import fit_llm_d
from fastroof.backends.llmservingsim import export_llmservingsim
from fastroof.backends.serve.answers import ServedPlans, answer_line
from fastroof.backends.serve.client import PlanClient
from fastroof.backends.sglang import StepTimePredictor
from fastroof.compiled.steps import MIXED_KV_US
from fastroof.errors import BackendError, PlanRangeError
from fastroof.plan import StepPlan
from fastroof.units import US_PER_MS, US_PER_S
from tests.backends import sglang_simulator
from tests.reference.compilers import links_a_library

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama-3.1-8b", {}),
    "fp8": ("llama-3.1-70b", {"tp": 4, "dtype": "fp8", "kv_dtype": "fp8"}),
    "experts": ("mixtral-8x7b", {"tp": 2}),
    "experts, ranks": ("qwen3-30b-a3b", {"dp": 2, "ep": 2}),
    "latent attention": ("deepseek-v3", {"tp": 8}),
    "latent attention, ranks": ("deepseek-v3", {"dp": 16, "ep": 16}),
    "sparse latent attention": ("deepseek-v3.2", {"tp": 8}),
    "compressed latent attention": ("deepseek-v4-flash", {"tp": 4}),
    "windows": ("gemma-3-12b", {}),
    "windows, experts": ("gpt-oss-120b", {"tp": 2}),
    "states": ("bamba-9b", {}),
    "states, latent attention": ("kimi-k3", {"tp": 8}),
    "states, experts": ("qwen3-next-80b-a3b", {"tp": 2}),
    "stages": ("llama-3.1-70b", {"tp": 2, "pp": 2}),
    "context parallel": ("llama-3.1-70b", {"tp": 4, "cp": 2}),
    "vision": ("qwen3-vl-8b", {}),
    "vllm": ("llama-3.1-8b", {"engine": "vllm"}),
    "vllm-0.19.0": ("llama-3.1-8b", {"engine": "vllm-0.19.0"}),
    # later ones pad prompts, which some files have no place for
    "sglang": ("llama-3.1-8b", {"engine": "sglang-0.5.9"}),
    "trtllm": ("llama-3.1-8b", {"engine": "trtllm"}),
}
MAX_TOKENS, MAX_SEQS = 1024, 32
KIND = pytest.mark.parametrize("kind", KINDS)

Run = Callable[[StepPlan, str, StepBatch], list[float]]


@pytest.fixture(scope="module")
def plans(h100: fastroof.Tables) -> dict[str, StepPlan]:
    # what no shipped table has is modelled: it is the route that is tested
    limits = {"max_num_batched_tokens": MAX_TOKENS, "max_num_seqs": MAX_SEQS, "allow_modelled": True}
    return {
        kind: fastroof.compile_plan(model, "h100", h100, **{"engine": "kernels", **limits, **options})
        for kind, (model, options) in KINDS.items()
    }


@pytest.fixture(scope="module")
def batch() -> StepBatch:
    """Decodes, prompts, chunks, all of them mixed, and a step without requests."""
    rng = np.random.default_rng(20)
    steps = [
        [(1, 4095)] * 16,
        [(512, 0)],
        [(100, 700), (300, 0)],
        [(256, 2000)] + [(1, int(length)) for length in rng.integers(1, 9000, 20)],
        [],
        [(1, int(length)) for length in rng.integers(1, 9000, MAX_SEQS)],
    ]
    return StepBatch.from_requests(steps)


def requests_of(batch: StepBatch) -> list[list[tuple[int, int]]]:
    pairs = list(zip(batch.new_tokens.tolist(), batch.context_len.tolist(), strict=True))
    return [pairs[start:end] for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]


# Routes that ask the plan


def by_scalar(plan: StepPlan, _: str, batch: StepBatch) -> list[float]:
    return [plan.step_scalar([n for n, _ in one], [c for _, c in one]) for one in requests_of(batch)]


def by_numba(plan: StepPlan, _: str, batch: StepBatch) -> list[float]:
    step_us, data = fastroof.numba_step(plan)
    steps = (np.array(one, np.int64).reshape(-1, 2).T.copy() for one in requests_of(batch))
    return [step_us(data, new, context) for new, context in steps]


def by_json(plan: StepPlan, kind: str, batch: StepBatch) -> list[float]:
    message = {"plan": kind, "requests": requests_of(batch)}
    reply = json.loads(answer_line(ServedPlans({kind: plan}), json.dumps(message).encode()))
    return reply["latency_us"]  # type: ignore[no-any-return]


def by_sglang(plan: StepPlan, _: str, batch: StepBatch) -> list[float]:
    predictor = StepTimePredictor(plan)
    batches = [sglang_simulator.extend_batch(*zip(*one, strict=True)) for one in requests_of(batch) if one]
    times = iter(predictor.predict_infer_time(one) * US_PER_S for one in batches)
    return [next(times) if one else 0.0 for one in requests_of(batch)]


ROUTES: dict[str, Run] = {"scalar": by_scalar, "numba": by_numba, "JSON lines": by_json, "SGLang": by_sglang}


@pytest.mark.slow
@KIND
@pytest.mark.parametrize("route", ROUTES)
def test_a_route_has_the_plans_bits(
    route: str, kind: str, plans: dict[str, StepPlan], batch: StepBatch
) -> None:
    expected = plans[kind].step_us(batch).tolist()
    if route == "SGLang":  # in seconds
        expected = [time_us / US_PER_S * US_PER_S for time_us in expected]
    assert ROUTES[route](plans[kind], kind, batch) == expected


@pytest.fixture(scope="module")
def http_port(plans: dict[str, StepPlan]) -> Iterator[int]:
    pytest.importorskip("uvicorn")
    from fastroof.backends.serve.http_server import HttpServer

    with HttpServer(plans) as server:
        yield server.port


@KIND
def test_http_has_the_plans_bits(
    kind: str, http_port: int, plans: dict[str, StepPlan], batch: StepBatch
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=60)
    message = json.dumps({"plan": kind, "requests": requests_of(batch)})
    connection.request("POST", "/message", message, {"Content-Type": "application/json"})
    assert json.load(connection.getresponse())["latency_us"] == plans[kind].step_us(batch).tolist()
    connection.close()


@KIND
def test_arrow_over_http_has_the_plans_bits(
    kind: str, http_port: int, plans: dict[str, StepPlan], batch: StepBatch
) -> None:
    with PlanClient(f"http://127.0.0.1:{http_port}") as client:
        assert client.step_us(batch, kind).tolist() == plans[kind].step_us(batch).tolist()
        found = client.step_with_errors(batch, kind)
    assert found.latency_us.tolist() == plans[kind].step_us(batch).tolist()
    assert np.array_equal(found.relative_error, plans[kind].step_error(batch), equal_nan=True)


@pytest.fixture(scope="module")
def library(plans: dict[str, StepPlan], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("exported")
    named = {f"plan{number}": plan for number, plan in enumerate(plans.values())}
    files = export_c(named, folder, shared=None if links_a_library() else False).files
    path = next((path for path in files if path.suffix in (".so", ".dylib")), None)
    if path is None:
        pytest.skip("no C compiler links the shared library")
    return ctypes.CDLL(str(path)), folder


@pytest.mark.slow
@KIND
def test_c_has_the_plans_bits(
    kind: str, library: tuple[Any, Path], plans: dict[str, StepPlan], batch: StepBatch
) -> None:
    loaded, folder = library
    plan, times = ctypes.c_void_p(), np.empty(batch.num_steps)
    assert (
        loaded.fastroof_open(bytes(folder / f"plan{list(KINDS).index(kind)}.plan"), ctypes.byref(plan)) == 0
    )
    new, context, offsets = (
        np.ascontiguousarray(one, np.int64) for one in (batch.new_tokens, batch.context_len, batch.offsets)
    )
    sizes = (ctypes.c_void_p(new.ctypes.data), ctypes.c_void_p(context.ctypes.data), ctypes.c_int64(len(new)))
    steps = (ctypes.c_void_p(offsets.ctypes.data), ctypes.c_int64(len(times)))
    assert loaded.fastroof_steps_us(plan, *sizes, *steps, ctypes.c_void_p(times.ctypes.data)) == 0
    assert times.tolist() == plans[kind].step_us(batch).tolist()
    loaded.fastroof_close(plan)


# Files, which know less than a plan: they hold it, or list what they would lose


@KIND
def test_dynamos_profile_holds_its_decodes_or_is_refused(kind: str, plans: dict[str, StepPlan]) -> None:
    plan = plans[kind]
    if plan.arena[MIXED_KV_US] > 0.0:
        with pytest.raises(BackendError, match="mixed_attention of its profile"):
            dynamo_profile(plan)
        return
    profile = dynamo_profile(plan, max_context=4096, max_batch_size=MAX_SEQS)
    active, context = (profile[f"decode_{name}"] for name in ("active_kv_tokens", "context_length"))
    at = active.searchsorted(16 * 2048), context.searchsorted(2048)
    assert profile["decode_itl"][at] == pytest.approx(plan.decode_us(16, 2048) / US_PER_MS, rel=1e-12)


@KIND
def test_llm_ds_settings_hold_a_point_that_fits(kind: str, plans: dict[str, StepPlan]) -> None:
    point = {"clients": [8], "isl": [256], "osl": [32]}
    if plans[kind].memory.max_kv_tokens < 8 * (256 + 32):
        with pytest.raises((BackendError, PlanRangeError), match="KV cache"):
            fit_llm_d(plans[kind], **point)
        return
    ttft, tpot = fit_llm_d(plans[kind], **point).errors
    # what is waited for is whole milliseconds
    assert abs(ttft[0]) < 0.05
    assert abs(tpot[0]) < 0.15


@KIND
def test_profiles_of_like_layers_are_of_them_alone(
    kind: str, plans: dict[str, StepPlan], tmp_path: Path
) -> None:
    alike = {"dense", "fp8", "vision", "vllm", "vllm-0.19.0", "sglang", "trtllm"}
    if kind in alike:
        assert export_llmservingsim(plans[kind], tmp_path / "perf").rows > 1000
    else:
        with pytest.raises(
            BackendError, match=r"LLMServingSim's profile has no place for .* export c, serve"
        ):
            export_llmservingsim(plans[kind], tmp_path / "perf")
        assert not (tmp_path / "perf").exists()
