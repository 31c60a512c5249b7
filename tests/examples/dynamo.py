"""Replay a workload in Dynamo's mocker with a plan's times: ``python -m tests.examples.dynamo``.

The mocker's native core, without a GPU, a cluster or the rest of Dynamo:

    pip install fastroof ai-dynamo-runtime==1.6.1
    pip install --no-deps ai-dynamo==1.6.1    # for python -m dynamo.mocker, not for this
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import fastroof
from fastroof.backends.dynamo import write_dynamo_profile

ISL, OSL = 1024, 128


def engine(plan: fastroof.StepPlan, profile: Path) -> dict[str, Any]:
    """The mocker's engine: whose times it takes, and how many KV blocks the GPU holds."""
    timing = {"type": "external", "provider": "dynamo_profile", "config": {"path": str(profile)}}
    blocks = plan.memory.max_kv_tokens // 64
    return {"engine": {"timing_model": timing, "num_gpu_blocks": blocks, "enable_prefix_caching": False}}


def main() -> None:
    """Print what 1 to 256 clients see."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "llama.npz"
        profile = write_dynamo_profile(plan, path, prompt_len=ISL)
        print(f"{plan}\n{path.stat().st_size:,} bytes:", {name: a.shape for name, a in profile.items()})
        try:
            replay = import_module("dynamo._core").run_mocker_synthetic_trace_replay
        except ImportError:
            print("pip install ai-dynamo-runtime==1.6.1 to replay it")
            return
        print(f"\n{ISL} tokens in, {OSL} out\nclients  TTFT ms  TPOT ms  tokens/s  simulated in ms")
        for clients in (1, 4, 16, 64, 256):
            report = replay(
                ISL, OSL, 8 * clients, extra_engine_args=engine(plan, path), replay_concurrency=clients
            )
            seen = ("mean_ttft_ms", "mean_tpot_ms", "output_throughput_tok_s", "wall_time_ms")
            ttft, tpot, tokens, wall = (report.summary[name] for name in seen)
            print(f"{clients:7}  {ttft:7.1f}  {tpot:7.2f}  {tokens:8.0f}  {wall:15.1f}")


if __name__ == "__main__":
    main()
