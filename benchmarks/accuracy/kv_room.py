"""Compare logged KV cache room of engines with plans of the same runs."""

from __future__ import annotations

import csv
import io
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fastroof.atomic_files import write_whole
from fastroof.config import load_gpu
from fastroof.config.paths import bench_data_root
from fastroof.engines import EngineProfile, KvMemory, engine_of_version
from fastroof.engines.values import holds_for
from fastroof.errors import FastroofError
from fastroof.memory.gpu_memory import MemoryUse, plan_memory
from fastroof.memory.kv_room import VISIBLE_SHARE
from fastroof.memory.plan_memory import PlanMemory
from fastroof.memory.room_errors import MOST, RoomErrors, errors_path, room_kind
from fastroof.models import load_model
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.start import cache_line_tokens
from fastroof.units import GIB

FILE: Final = "kv_room.csv"
STEP_TOKENS: Final = 8192
"""Default of runs without a value, noted in ``assumed``."""

RANGES: Final = ("<0.17", ">=0.17,<0.21", ">=0.21")
"""Versions of vLLM with other memory rules."""

_NUMBERS: Final = {
    "gpu_gib": float, "tp": int, "dp": int, "ep": int, "fraction": float, "max_num_batched_tokens": int,
    "max_num_seqs": int, "max_model_len": int, "kv_gib": float, "kv_tokens": int, "blocks": int,
    "max_concurrency": float, "weights_gib": float, "activation_gib": float, "other_gib": float,
    "graphs_gib": float,
}  # fmt: skip


@dataclass(frozen=True)
class LoggedRoom:
    """One logged engine start; None if the log has no value."""

    id: str
    engine: str
    version: str
    model: str
    gpu: str
    gpu_gib: float | None
    tp: int
    dp: int
    ep: int
    dtype: str
    kv_dtype: str
    fraction: float | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    max_model_len: int | None
    kv_gib: float | None
    kv_tokens: int | None
    blocks: int | None
    max_concurrency: float | None
    weights_gib: float | None
    activation_gib: float | None
    other_gib: float | None
    graphs_gib: float | None
    kind: str
    half: str
    assumed: str
    source: str

    @property
    def group(self) -> str:
        """Engine and range of versions, as the table has them."""
        if self.engine != "vllm":
            return self.engine
        return next(f"vllm {one}" for one in RANGES if holds_for(one, self.version))

    def room_gib(self, memory: PlanMemory) -> float:
        """Return the logged room, GiB; blocks and tokens are converted by the plan's."""
        if self.kv_gib is not None:
            return self.kv_gib
        if self.blocks is not None and memory.block_bytes is not None:
            return self.blocks * memory.block_bytes / GIB
        if self.max_concurrency is not None and self.max_model_len is not None:
            parts = self.max_concurrency * memory.printed_parts(self.max_model_len)
            return parts * memory.part_bytes / GIB
        tokens = self.kv_tokens or 0
        if memory.groups > 1 and self.max_model_len is not None:
            # floor(concurrency x the longest context)
            parts = tokens / self.max_model_len * memory.printed_parts(self.max_model_len)
            return parts * memory.part_bytes / GIB
        return float(tokens * memory.token_bytes / GIB)


def kv_room_rows(path: str | Path | None = None) -> tuple[LoggedRoom, ...]:
    """Read the logged rows."""
    file = bench_data_root() / FILE if path is None else Path(path)
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            found = list(csv.DictReader(lines))
        return tuple(LoggedRoom(**_cells(row)) for row in found)
    except (OSError, UnicodeDecodeError, csv.Error, TypeError, ValueError) as error:
        raise FastroofError(f"cannot read the rooms of {file}: {error}") from None


def _cells(row: dict[str, str]) -> dict[str, Any]:
    return {
        name: (_NUMBERS[name](cell) if cell else None) if name in _NUMBERS else cell
        for name, cell in row.items()
    }


def rule_of_row(row: LoggedRoom) -> KvMemory:
    """Return the memory rule of a row's version, with the log's limits on any GPU."""
    rule = replace(engine_of_version(row.engine, row.version).memory, small_gib=0.0, small_gpus=())
    if "V2 runner" in row.assumed and rule.runners:
        runner = replace(rule.runners[0], architectures=(), dense=False)
        rule = replace(rule, runners=(runner,), run_extras=())
    if "TensorRT engine" in row.assumed:
        rule = engine_of_version(row.engine, "0.17").memory
    if "ESTIMATE_CUDAGRAPHS=0" in row.assumed:
        rule = replace(rule, graphs=None)
    if "for Marlin" in row.assumed:
        rule = rule.without("triton_kernels")
    if "before another rule" in row.assumed:
        rule = replace(rule, other_share=1.0)
    return rule if row.fraction is None else replace(rule, fraction=row.fraction)


def plan_of_row(row: LoggedRoom) -> StepPlan:
    """Compile a row's model on its GPU's memory and links, without kernels."""
    gpu = replace(load_gpu("h100"), name=row.gpu, hbm_bytes=round((row.gpu_gib or 0) / VISIBLE_SHARE * GIB))
    if row.gpu in _SLOW_LINKS:
        gpu = replace(gpu, nvlink_bytes_per_s=load_gpu("l40s").nvlink_bytes_per_s)
    with warnings.catch_warnings():
        # nothing is timed
        warnings.simplefilter("ignore")
        return compile_plan(
            load_model(_CONFIGS.get(row.model, row.model)),
            gpu,
            None,
            tp=row.tp,
            dp=row.dp,
            ep=row.ep,
            dtype=row.dtype,
            kv_dtype=row.kv_dtype,
            engine=EngineProfile("kernels"),
        )


def memory_of_row(row: LoggedRoom, rule: KvMemory | None = None) -> PlanMemory:
    """Return the memory of a logged run's plan."""
    plan = plan_of_row(row)
    seqs = engine_of_version(row.engine, row.version).scheduling.max_num_seqs
    tokens = row.max_num_batched_tokens or STEP_TOKENS
    use = MemoryUse(tokens, row.max_num_seqs or seqs, max_model_len=row.max_model_len)
    rule = rule_of_row(row) if rule is None else rule
    return plan_memory(plan.model, plan.layout, plan.gpu, plan.execution, use, rule=rule)


def _config(family: str, hidden: int, layers: int, heads: int, inner: int, vocab: int) -> dict[str, Any]:
    """Return the published sizes of a dense model without a preset."""
    is_qwen = family == "Qwen2ForCausalLM"
    return {
        "architectures": [family],
        "model_type": "qwen2" if is_qwen else "mistral",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2 if hidden < 2048 else 8,
        "head_dim": 64 if hidden < 1024 else 128,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": hidden < 2048,
        "torch_dtype": "bfloat16",
    }


_CONFIGS: Final = {
    "mistral-small-24b": _config("MistralForCausalLM", 5120, 40, 32, 32768, 131072),
    "qwen2.5-1.5b": _config("Qwen2ForCausalLM", 1536, 28, 12, 8960, 151936),
    "qwen2.5-14b": _config("Qwen2ForCausalLM", 5120, 48, 40, 13824, 152064),
}

_SLOW_LINKS: Final = (
    "a100", "h100_nvl", "l40s", "rtx_3090", "rtx_4090", "rtx_5090", "rtx_a6000", "rtx_pro_5000_72gb",
    "rtx_pro_6000",
)  # fmt: skip


@dataclass(frozen=True)
class RoomError:
    """A row, and the rooms that it logged and that a rule leaves, GiB."""

    row: LoggedRoom
    logged_gib: float
    rule_gib: float
    memory: PlanMemory
    kind: str
    tokens: int

    @property
    def off_tokens(self) -> float | None:
        """The rule's printed tokens relative to the logged ones, less 1; None if the log has none."""
        return self.tokens / self.row.kv_tokens - 1 if self.row.kv_tokens else None

    @property
    def off_gib(self) -> float:
        """The rule's room less the logged one."""
        return self.rule_gib - self.logged_gib


def room_errors(rows: Iterable[LoggedRoom] | None = None) -> list[RoomError]:
    """Return the errors of all rows with a known model and format."""
    found = []
    for row in kv_room_rows() if rows is None else rows:
        if row.half == "none":
            continue
        plan, memory = plan_of_row(row), memory_of_row(row)
        left = memory.kv_cache_bytes - max(memory.missing_bytes - memory.part_bytes, 0)
        context = row.max_model_len or plan.model.max_position
        tokens = cache_line_tokens(rule_of_row(row), memory, context) if memory.parts else 0
        kind = room_kind(plan.model, plan.dtype)
        found.append(RoomError(row, row.room_gib(memory), left / GIB, memory, kind, tokens))
    return found


NOT_OF_A_RULE: Final = "m4"
"""Its error is the estimate of graphs, which answers state next to that of the rules."""
FEW: Final = 5
"""Starts of a kind from which its errors are recorded apart."""


def judged_errors(errors: Iterable[RoomError]) -> list[RoomErrors]:
    """Return the errors of starts that chose nothing, by engine, range of versions and kind of model."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for error in errors:
        if error.row.half == "judge" and error.row.id != NOT_OF_A_RULE:
            groups[error.row.group, ""].append(abs(error.off_gib))
            if error.row.group == f"vllm {RANGES[-1]}":
                groups[error.row.group, error.kind].append(abs(error.off_gib))
    found = []
    for (group, kind), sizes in sorted(groups.items()):
        engine, _, versions = group.partition(" ")
        most = sorted(sizes)[math.ceil(MOST * len(sizes)) - 1]
        if not kind or len(sizes) >= FEW:
            found.append(RoomErrors(engine, versions, kind, len(sizes), statistics.median(sizes), most))
    return found


def table_lines(errors: list[RoomError]) -> list[str]:
    """Return the median and the worst error by engine and version, by kind and by half."""
    groups = defaultdict(list)
    for error in errors:
        row = error.row
        groups[row.group, "all", "all"].append(error)
        groups[row.group, "all", row.half].append(error)
        groups["all", "all", row.half].append(error)
        groups[row.group, row.kind, "all"].append(error)
    lines = [
        f"{'engine and version':20} {'kind':24} {'half':6} {'rows':>4} {'median GiB':>10} {'in 1 GiB':>8} "
        f"{'tokens':>7}  worst GiB"
    ]
    for (group, kind, half), some in sorted(groups.items()):
        sizes = [abs(error.off_gib) for error in some]
        near = sum(size <= 1.0 for size in sizes) / len(sizes)
        tokens = [abs(error.off_tokens) for error in some if error.off_tokens is not None]
        of_tokens = f"{statistics.median(tokens):7.1%}" if tokens else f"{'':7}"
        worst = max(some, key=lambda error: abs(error.off_gib))
        lines.append(
            f"{group:20} {kind:24} {half:6} {len(some):4} {statistics.median(sizes):10.2f} {near:8.0%} "
            f"{of_tokens}  {worst.off_gib:+.2f} {worst.row.id}"
        )
    return lines


def errors_text(errors: Iterable[RoomErrors]) -> str:
    """Return errors as the text of the recorded file."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(RoomErrors._fields)
    rows.writerows((*one[:4], f"{one.median_gib:.2f}", f"{one.most_gib:.2f}") for one in errors)
    return text.getvalue()


def main() -> None:
    """Compare logged KV cache room with the profile's rule, and record the errors for fastroof fit."""
    columns = ("log GiB", "rule", "off")
    print(f"{'run':10} {'half':5} {'model on gpu':44} " + " ".join(f"{name:>9}" for name in columns))
    errors = room_errors()
    for error in errors:
        row = error.row
        where = f"{row.engine} {row.version} {row.model} tp {row.tp} {row.gpu}"[:44]
        cells = (f"{error.logged_gib:.2f}", f"{error.rule_gib:.2f}", f"{error.off_gib:+.2f}")
        print(f"{row.id:10} {row.half:5} {where:44} " + " ".join(f"{cell:>9}" for cell in cells))
    print()
    print("\n".join(table_lines(errors)))
    path = errors_path()
    write_whole(path, errors_text(judged_errors(errors)))
    print(f"\nwritten to {path.name}, which fastroof fit names: {len(judged_errors(errors))} groups")
