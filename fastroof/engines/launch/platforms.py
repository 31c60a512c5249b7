"""Platforms that run engines on Kubernetes: Dynamo, which wraps engines, and llm-d, which routes to them.

Read in the wheel of ai-dynamo 1.6.1 and its operator's API, and in llm-d-router 0.10.0 (charts and sidecar);
tests/engines/arguments has the options and tests/sweep/recommendations/fields.toml the fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from fastroof.engines.launch import sglang, trtllm, vllm
from fastroof.engines.launch.commands import EngineCommands
from fastroof.engines.launch.settings import Command, LaunchSettings

DYNAMO_RELEASE: Final = "1.6.1"
DYNAMO_API: Final = "nvidia.com/v1beta1"
LLM_D_RELEASE: Final = "0.10.0"
LLM_D_CHART: Final = "oci://ghcr.io/llm-d/charts/llm-d-router-standalone"
LLM_D_SIDECAR: Final = "ghcr.io/llm-d/llm-d-router-disagg-sidecar"

_NIXL: Final = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


class DynamoEngine(NamedTuple):
    """An engine in a release of Dynamo.

    Attributes
    ----------
    title, release : str
        The engine and its version in Dynamo's image.
    image : str
        Container image of workers and frontend.
    worker : callable
        Function that returns the command of a worker.
    keys_release : str
        Version in which the keys of its YAML were read; empty if it reads none.
    """

    title: str
    release: str
    image: str
    worker: Callable[[LaunchSettings], Command]
    keys_release: str


class LlmDEngine(NamedTuple):
    """How llm-d's router and its sidecar call an engine.

    Attributes
    ----------
    server_type : str
        Kind of model server in the router's chart.
    connector : str
        Protocol of KV transfers in the sidecar; empty if the sidecar has none for the engine.
    transfer : tuple of tuple of str
        Arguments of workers that only prefill or decode, in addition to the engine's own.
    address_variable : str
        Environment variable that takes a worker's address for KV transfers; empty if there is none.
    """

    server_type: str
    connector: str
    transfer: tuple[tuple[str, ...], ...] = ()
    address_variable: str = ""


def dynamo_engine(engine: str) -> DynamoEngine | None:
    """Return an engine as Dynamo runs it; None if Dynamo does not.

    Examples
    --------
    >>> dynamo_engine("vllm").release, dynamo_engine("sglang").image
    ('0.31.0', 'nvcr.io/nvidia/ai-dynamo/sglang-runtime:1.6.1')
    """
    known = _DYNAMO.get(engine)
    if known is None:
        return None
    title, release, image, worker = known
    keys_release = trtllm.RELEASES[0] if engine == "trtllm" else ""
    image = f"nvcr.io/nvidia/ai-dynamo/{image}:{DYNAMO_RELEASE}"
    return DynamoEngine(title, release, image, worker, keys_release)


def llm_d_engine(engine: EngineCommands) -> LlmDEngine | None:
    """Return how llm-d calls an engine; None if it does not route to it."""
    return _LLM_D.get(engine.engine)


def _dynamo_vllm(settings: LaunchSettings) -> Command:
    command = vllm.server(replace(settings, role=""), _RELEASES["vllm"])
    (model,), *others = command.arguments
    role: list[tuple[str, ...]] = []
    if settings.role:
        role = [("--disaggregation-mode", settings.role), ("--kv-transfer-config", json.dumps(_NIXL))]
    return _worker("vllm", command, [("--model", model), *others, *role])


def _dynamo_sglang(settings: LaunchSettings) -> Command:
    command = sglang.server(replace(settings, role=""), _RELEASES["sglang"])
    role: list[tuple[str, ...]] = []
    if settings.role:
        role = [
            ("--disaggregation-mode", settings.role),
            ("--disaggregation-transfer-backend", "nixl"),
            # where workers that decode ask for a prompt's transfer, from other pods
            ("--host", "0.0.0.0"),
        ]
    return _worker("sglang", command, [*command.arguments, *role])


_TRTLLM_OPTIONS: Final = {
    "--tp_size": "--tensor-parallel-size", "--pp_size": "--pipeline-parallel-size",
    "--ep_size": "--expert-parallel-size", "--max_batch_size": "--max-batch-size",
    "--max_num_tokens": "--max-num-tokens", "--max_seq_len": "--max-seq-len",
}  # fmt: skip
"""What Dynamo's worker calls options of ``trtllm-serve``."""


def _dynamo_trtllm(settings: LaunchSettings) -> Command:
    command = trtllm.server(replace(settings, role=""), trtllm.RELEASES[0])
    (model,), *others = command.arguments
    renamed = ((_TRTLLM_OPTIONS.get(name, name), *value) for name, *value in others)
    arguments: list[tuple[str, ...]] = [("--model", model), *renamed]
    config: dict[str, Any] = dict(command.config)
    if config.get("enable_attention_dp"):
        arguments.append(("--enable-attention-dp",))
    if settings.role:
        arguments.append(("--disaggregation-mode", settings.role))
        config["cache_transceiver_config"] = {"backend": "DEFAULT"}
    return replace(_worker("trtllm", command, arguments), config_option="--extra-engine-args", config=config)


def _worker(engine: str, command: Command, arguments: list[tuple[str, ...]]) -> Command:
    """Return the command of a worker, which takes no port."""
    kept = tuple(one for one in arguments if one[0] != "--port")
    return Command(("python3", "-m", f"dynamo.{engine}"), kept, unsaid=command.unsaid)


_RELEASES: Final = {"vllm": "0.31.0", "sglang": "0.5.21", "trtllm": "1.3.0rc29"}
"""Versions of engines that ai-dynamo requires."""

_DYNAMO: Final[dict[str, tuple[str, str, str, Callable[[LaunchSettings], Command]]]] = {
    "vllm": (vllm.TITLE, _RELEASES["vllm"], "vllm-runtime", _dynamo_vllm),
    "sglang": (sglang.TITLE, _RELEASES["sglang"], "sglang-runtime", _dynamo_sglang),
    "trtllm": (trtllm.TITLE, _RELEASES["trtllm"], "tensorrtllm-runtime", _dynamo_trtllm),
}

_LLM_D: Final = {
    "vllm": LlmDEngine("vllm", "nixlv2", address_variable="VLLM_NIXL_SIDE_CHANNEL_HOST"),
    "sglang": LlmDEngine("sglang", "sglang", (("--disaggregation-transfer-backend", "nixl"),)),
    "trtllm": LlmDEngine("trtllm-serve", ""),
}
