"""An engine's rules of layouts, for one GPU and what a plan asks for."""

from __future__ import annotations

from typing import Final

from fastroof.config import GpuSpec
from fastroof.engines.profile import EngineProfile
from fastroof.errors import PlanError
from fastroof.models import Layout, ModelSpec
from fastroof.models.exchange_rules import SENDING_EXPERTS, ExchangeRules
from fastroof.models.execution import Execution
from fastroof.models.experts import RoutedExperts
from fastroof.models.quantisation.scheme import BLOCK

__all__ = ["EXCHANGES", "check_engine_layout", "check_expert_blocks", "exchange_rules"]

RACK_LIBRARIES: Final = ("nvlink_one_sided", "nvlink_two_sided")
"""Whose GPUs write into each other's memory over NVLink: alone, or after they told each other what comes."""

EXCHANGES: Final = ("gather", "alltoall", *RACK_LIBRARIES, SENDING_EXPERTS)
"""How tokens reach experts on other GPUs: gathered, or sent to their experts alone, as the engine does, by
kernels of NVLink or by the experts' own kernel."""

NODE_GPUS: Final = 8
"""GPUs behind one NVLink switch where that is a node; a rack has more."""


def exchange_rules(engine: EngineProfile, gpu: GpuSpec, exchange: str | None) -> ExchangeRules:
    """Say what GPUs of a plan send each other for experts."""
    rules = engine.layout
    on_rack = gpu.name in rules.alltoall_gpus
    alltoall = rules.alltoall if on_rack and rules.alltoall == "over_topk" else "never"
    if exchange is not None:
        alltoall = "never" if exchange == "gather" else "always"
    libraries = (rules.decode_library, rules.prefill_library)
    if exchange in (*RACK_LIBRARIES, SENDING_EXPERTS):
        libraries = (exchange, exchange)
    elif on_rack and rules.rack_library:
        libraries = (rules.rack_library, rules.rack_library)
    return ExchangeRules(
        alltoall,
        rules.alltoall_needs_dp,
        libraries,
        rules.comm_dtypes,
        rules.gathered_bytes if gpu.name in rules.gathered_gpus else (),
        rules.token_shares,
        rules.attention_sum,
        rules.copies_embedding,
    )


def check_engine_layout(
    model: ModelSpec, layout: Layout, engine: EngineProfile, exchange: str | None, gpu: GpuSpec
) -> None:
    """Refuse layouts of experts that an engine does not run, or that cannot exchange tokens so."""
    if not any(kind.mlp.has_experts for kind in model.kinds):
        return
    sizes = {"tp": layout.tp, "dp": layout.dp * layout.cp, "ep": layout.ep}
    reasons = engine.layout.obstacles(engine.name, sizes)
    if exchange in RACK_LIBRARIES and gpu.linked_gpus <= NODE_GPUS:
        reasons.append(
            f"{exchange} writes over NVLink between nodes, which join {gpu.linked_gpus} {gpu.name} each: "
            "exchange='alltoall' is the engine's own library, and gb200 and gb300 have racks"
        )
    if exchange is not None and exchange != "gather":
        ranks = layout.stage_gpus
        if layout.moe_tp > 1 or layout.ep == 1:
            reasons.append(f"all-to-all needs experts that are whole on one of several GPUs: ep {ranks}")
        if engine.layout.alltoall_needs_dp and layout.of_prompts.dp == 1:
            reasons.append(f"{engine.name} sends tokens so between ranks of dp alone: tp 1, dp {ranks}")
        if exchange == "alltoall" and not engine.layout.decode_library:
            reasons.append(f"{engine.name} names no library that sends tokens to experts")
    if reasons:
        raise PlanError(f"{model.name} does not run with {layout}: {'; '.join(reasons)}")


def check_expert_blocks(model: ModelSpec, layout: Layout, execution: Execution) -> None:
    """Refuse experts whose share on one GPU is not a whole number of fp8 scale blocks."""
    for kind in model.kinds:
        mlp = kind.mlp
        if not isinstance(mlp, RoutedExperts) or kind.run_as(execution).stored("experts") != "fp8_block":
            continue
        if mlp.intermediate // layout.moe_tp % BLOCK:
            width, gpus = mlp.intermediate // layout.moe_tp, layout.moe_tp * layout.ep
            fit = [n for n in range(1, gpus + 1) if gpus % n == 0 and mlp.intermediate % (n * BLOCK) == 0]
            sizes = [f"ep {gpus // n} with moe_tp {n}" for n in fit]
            raise PlanError(
                f"{model.name} in fp8_block: an expert of width {mlp.intermediate} over {layout.moe_tp} GPUs "
                f"is {width} wide, no multiple of the {BLOCK} that share a scale; "
                f"{' or '.join(sizes) or 'no split'} would do"
            )
