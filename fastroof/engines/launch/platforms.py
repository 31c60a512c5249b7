"""Platforms that run engines on Kubernetes: Dynamo, which wraps engines, and llm-d, which routes to them.

Read in the wheel of ai-dynamo 1.6.1 and its operator's API, and in llm-d-router 0.10.0 (charts and sidecar);
tests/engines/arguments has the options and tests/sweep/recommendations the fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from fastroof.engines.launch import sglang, trtllm, vllm
from fastroof.engines.launch.settings import LOOPBACK, Command, LaunchSettings

DYNAMO_RELEASE: Final = "1.6.1"
DYNAMO_API: Final = "nvidia.com/v1beta1"
LLM_D_RELEASE: Final = "0.10.0"
LLM_D_CHART: Final = "oci://ghcr.io/llm-d/charts/llm-d-router-standalone"
LLM_D_SIDECAR: Final = "ghcr.io/llm-d/llm-d-router-disagg-sidecar"

POD: Final = "status.podIP"
"""Address of a copy in a pod of its own: the field that has it."""


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


LLM_D_SERVERS: Final = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm-serve"}
"""What llm-d's chart calls engines."""
LLM_D_CONNECTORS: Final = {"vllm": "nixlv2", "sglang": "sglang"}
"""What its sidecar calls their KV transfers."""

_DYNAMO: Final = {
    "vllm": (vllm, "0.31.0", "vllm-runtime"),
    "sglang": (sglang, "0.5.21", "sglang-runtime"),
    "trtllm": (trtllm, "1.3.0rc29", "tensorrtllm-runtime"),
}
"""Engines in the versions that ai-dynamo requires, and their images."""


def dynamo_engine(engine: str) -> DynamoEngine | None:
    """Return an engine as Dynamo runs it; None if Dynamo does not.

    Examples
    --------
    >>> dynamo_engine("vllm").release, dynamo_engine("sglang").image
    ('0.31.0', 'nvcr.io/nvidia/ai-dynamo/sglang-runtime:1.6.1')
    """
    if engine not in _DYNAMO:
        return None
    module, release, image = _DYNAMO[engine]
    keys_release = module.RELEASES[0] if module is trtllm else ""
    image = f"nvcr.io/nvidia/ai-dynamo/{image}:{DYNAMO_RELEASE}"
    return DynamoEngine(module.TITLE, release, image, partial(_worker, engine), keys_release)


_TRTLLM_OPTIONS: Final = {
    "--tp_size": "--tensor-parallel-size", "--pp_size": "--pipeline-parallel-size",
    "--ep_size": "--expert-parallel-size", "--max_batch_size": "--max-batch-size",
    "--max_num_tokens": "--max-num-tokens", "--max_seq_len": "--max-seq-len",
}  # fmt: skip
"""What Dynamo's worker calls options of ``trtllm-serve``."""


def _worker(engine: str, settings: LaunchSettings) -> Command:
    """Return the command of a worker: the server's arguments, but for the port, which Dynamo gives."""
    module, release, _ = _DYNAMO[engine]
    place = {"address": POD if settings.role else LOOPBACK, "side_port": module.SIDE_PORT}
    command: Command = module.server(replace(settings, **place), release)
    # where workers that decode ask for a prompt's transfer, from other pods
    given = {"--port"} if module is sglang else {"--port", "--host"}
    arguments = [
        (_TRTLLM_OPTIONS.get(name, name), *values) if name.startswith("-") else ("--model", name)
        for name, *values in command.arguments
        if name not in given
    ]
    if command.config.get("enable_attention_dp"):
        arguments.append(("--enable-attention-dp",))
    if settings.role and module is not sglang:
        arguments.append(("--disaggregation-mode", settings.role))
    return replace(
        command,
        program=("python3", "-m", f"dynamo.{engine}"),
        arguments=tuple(arguments),
        config_option="--extra-engine-args",
        environment={},
    )
