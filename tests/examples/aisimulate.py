"""Predict a load in AISimulate with a plan's step times: ``python -m tests.examples.aisimulate``.

pip install fastroof aisimulate==0.13.0.dev202610270000000085
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fastroof
from fastroof.backends.aisimulate import write_fpm
from fastroof.documents import yaml_text


def predict(engine: Path, traffic: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of ``aisimulate predict`` with an engine of `write_fpm`; empty if it cannot run."""
    config = engine.with_name("predict.yaml")
    config.write_text(engine.read_text() + yaml_text({"traffic": traffic}))
    command = [sys.executable, "-m", "aisimulate", "predict", "-c", str(config), "--format", "json"]
    done = subprocess.run(
        [*command, "--output-dir", str(engine.with_name("out")), "--overwrite"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named" in done.stderr:
        return {}
    if done.returncode:
        raise RuntimeError(done.stderr)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def main() -> None:
    """Print what 1 to 64 clients see."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "llama.parquet"
        # AISimulate knows this name without the Hugging Face hub
        rows = write_fpm(plan, table, model="meta-llama/Meta-Llama-3.1-8B", max_context=16384)
        print(f"{plan}\n{rows:,} steps, {table.stat().st_size:,} bytes\nclients  TTFT ms  TPOT ms  tokens/s")
        for clients in (1, 8, 64):
            traffic = {
                "source": {"type": "synthetic", "input_tokens": 1024, "output_tokens": 128},
                "load": {"type": "concurrency", "concurrency": clients},
                "stop": {"requests": 4 * clients},
            }
            seen = predict(table.with_suffix(".yaml"), traffic)
            if not seen:
                print("pip install aisimulate==0.13.0.dev202610270000000085 to predict with it")
                return
            print(
                f"{clients:7}  {seen['mean_ttft_ms']:7.1f}  {seen['mean_tpot_ms']:7.2f}  "
                f"{seen['output_throughput_tok_s']:8.0f}"
            )


if __name__ == "__main__":
    main()
