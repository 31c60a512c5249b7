"""Settings that the generator of a public bench gave its engines, where no row states them.

Runs behind Dynamo were started by aiconfigurator's generator. Its rules for aggregated workers, by the day on
which they were committed to https://github.com/ai-dynamo/aiconfigurator:

* TensorRT-LLM, 2025-08-20 (1f004eb, src/aiconfigurator/cli/backends/trtllm.py): ``max_num_tokens`` is
  ``max_batch_size + isl + 1500``; since 2026-01-30 (71bb3d0, generator/rule_plugin/benchmark/trtllm.rule)
  rounded up to whole blocks of 32;
* vLLM, 2025-12-04 (95ddf24, generator/rule_plugin/vllm.rule): the same;
* SGLang, 2025-12-04 (95ddf24, sglang.rule): ``max_prefill_tokens`` is ``isl + 1500``; since 2026-01-19
  (fa895ff) ``enable_mixed_chunk``. Before, the generator did not know it.

``max_batch_size`` are the clients of a rank. That the generator started these runs is inferred: the sample is
aiconfigurator's, and no log shows the arguments.
"""

from __future__ import annotations

import math
from typing import Any, Final

from fastroof.engines.values import holds_for, is_version

MORE_TOKENS: Final = 1500
BLOCK: Final = 32


def dynamo_settings(engine: str, version: str, isl: float, clients: float, ranks: int) -> dict[str, Any]:
    """Return the limits of a step and the order of an aggregated engine behind Dynamo, and their source.

    Empty for versions that are older than the generator's rule of their engine.
    """
    batch = math.ceil(clients / ranks)
    tokens = batch + round(isl) + MORE_TOKENS
    if engine == "trtllm":
        # a development version of 2026
        is_later = is_version(version) and holds_for(">=1.1", version)
        source = "71bb3d0" if is_later else "1f004eb"
        tokens = -(-tokens // BLOCK) * BLOCK if is_later else tokens
        return _written(tokens, batch, source)
    if engine == "vllm" and is_version(version) and holds_for(">=0.12", version):
        return _written(tokens, batch, "95ddf24")
    if engine == "sglang" and is_version(version) and holds_for(">=0.5.6", version):
        return {**_written(round(isl) + MORE_TOKENS, batch, "fa895ff"), "order": "mixed"}
    return {}


def _written(tokens: int, batch: int, source: str) -> dict[str, Any]:
    return {"max_num_batched_tokens": tokens, "max_num_seqs": batch, "settings_from": f"generator {source}"}
