"""Help in groups, the most used options first, and the option that a wrong name means."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Final

from typer.core import TyperCommand

from fastroof.documents import read_toml
from fastroof.errors import FastroofError

ALL: Final = "--help-all"
FEW: Final = 14
"""Commands with this number of options, --help included, or fewer show all of them."""

_MOST_USED: Final = (
    "model", "gpu", "gpus", "isl", "osl", "clients", "rate", "trace", "ttft", "tpot", "decode", "prefill",
    "tp", "engine", "dtype", "explain", "max_num_seqs", "max_model_len", "fewest", "price", "save", "output",
    "requests", "report",
)  # fmt: skip
"""Options that --help shows: the first ten that a command has."""

_GROUPS: Final = {
    "Model and GPU": """model gpu gpus tables source tp pp dp ep cp dtype kv_dtype
        method routing allow_modelled exchange eplb two_batch_overlap lora
        memory_fraction kv_cache_gib free_gib mode most_gpus_each replicas""",
    "Load": """decode prefill trace rate_scale limit columns where rate sessions
        burstiness ramp hourly clients think turns calls tool growth system_prompt
        num_requests isl osl cached seed period prefix_hit image requests_per_client
        length_spread beside kv_len batch_size""",
    "Limits": """ttft tpot itl e2e percentile mean slo objective
        fewest by_hour draws steady max_model_len""",
    "Engine": """engine front_end max_num_batched_tokens max_num_seqs num_gpu_blocks block_size
        async_scheduling order chunked_prefill prefill_schedule_interval
        timeout router prefix_cache kv_tiers
        autoscale min_replicas max_replicas startup scale_interval scale_down_delay prefill_replicas
        decode_replicas prefill_tp kv_bandwidth back_pressure too_long
        disaggregated num_draft_tokens accepted draft prefix_caching""",
}
_OTHERS: Final = "Output and run"
_GROUP_OF: Final = {name: group for group, names in _GROUPS.items() for name in names.split()}

_MEANT: Final = {
    "isl": "input prompt prompt-len prompt-length input-len input-length input-tokens random-input-len",
    "osl": "output output-len output-length output-tokens max-tokens random-output-len",
    "clients": "concurrency max-concurrency users num-users",
    "rate": "qps rps request-rate requests-per-s requests-per-second",
    "num-requests": "num-prompts requests request-count",
    "gpu": "system device card hardware gpus accelerator",
    "gpus": "total-gpus num-gpus gpu-count world-size",
    "model": "models model-path model-name",
    "engine": "backend runtime framework",
    "tp": "tp-size tensor-parallel-size tensor-parallel",
    "pp": "pp-size pipeline-parallel-size",
    "dp": "dp-size data-parallel-size",
    "ep": "ep-size expert-parallel-size moe-ep-size",
    "dtype": "quantization quant precision",
    "kv-dtype": "kv-cache-dtype kvcache-dtype",
    "max-num-seqs": "max-seqs max-running-requests max-batch-size batch-size",
    "max-num-batched-tokens": "max-batched-tokens max-num-tokens chunked-prefill-size token-budget",
    "max-model-len": "context-length max-seq-len context",
    "memory-fraction": "gpu-memory-utilization mem-fraction-static free-gpu-memory-fraction",
    "num-draft-tokens": "num-speculative-tokens speculative-num-draft-tokens",
    "ttft": "ttft-ms ttft-p99 ttft-p99-ms slo", "tpot": "tpot-ms tpot-p99 tpot-p99-ms", "itl": "itl-ms",
    "e2e": "e2e-ms e2e-p99 request-latency request-latency-ms latency", "price": "gpu-hour-price cost",
    "kv-bandwidth": "link-gb-per-s", "explain": "verbose breakdown",
    "image": "images image-size", "set": "keep per speculation", "address": "executor ray",
}  # fmt: skip
"""What other programs, and this one before, call an option."""
_MEANINGS: Final = {word: option for option, words in _MEANT.items() for word in words.split()}


def meant(given: str, known: list[str]) -> str:
    """Return the option that a wrong name means, or the closest one; empty without a close one."""
    import difflib

    word = given.lstrip("-").replace("_", "-")
    for one in (word, _MEANINGS.get(word, "")):
        if one and f"--{one}" in known:
            return f"--{one}"
    return next(iter(difflib.get_close_matches(f"--{word}", known, 1, 0.75)), "")


def _name(option: Any) -> str:
    """Return the name that users type."""
    long: str = next((one for one in option.opts if one.startswith("--")), option.name)
    return long.strip("-").replace("-", "_")


class HelpfulCommand(TyperCommand):
    """A command whose --help shows its most used options in groups, and --help-all every one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a command line."""
        if ALL in args:
            ctx.meta[ALL] = True
            args = ["--help"]
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options by group."""
        params = [one for one in self.get_params(ctx) if one.get_help_record(ctx)]
        options = [one for one in params if one.param_type_name == "option"]
        shown = {_name(one) for one in options}
        is_short = self._is_short(ctx)
        if is_short:
            used = [name for name in _MOST_USED if name in shown][:10]
            shown &= {*used, "json", "help", *(_name(one) for one in options if one.required)}
        groups: dict[str, list[Any]] = {
            "Arguments": [],
            **{name: [] for name in _GROUPS},
            _OTHERS: [],
        }
        for one in params:
            is_option = one.param_type_name == "option"
            if not is_option or _name(one) in shown:
                group = _GROUP_OF.get(_name(one), _OTHERS) if is_option else "Arguments"
                groups[group].append(one.get_help_record(ctx))
        for group, records in groups.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)
        if is_short:
            formatter.write_paragraph()
            keys = ", and the keys of --json" if "json" in shown else ""
            formatter.write_text(f"{len(options) - len(shown)} more options{keys}: {ctx.command_path} {ALL}")

    def _is_short(self, ctx: Any) -> bool:
        """Return whether some options are left to --help-all."""
        shown = [one for one in self.get_params(ctx) if one.get_help_record(ctx)]
        return ALL not in ctx.meta and sum(one.param_type_name == "option" for one in shown) > FEW

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, what follows them only in the whole help, and the columns of tables."""
        whole = inspect.cleandoc(self.epilog or "")
        cut = self._is_short(ctx)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(whole.partition("\n\n\b\nJSON")[0] if cut else whole)
        names = []
        while ctx.parent is not None:
            names.append(ctx.info_name)
            ctx = ctx.parent
        if ctx.command.program == "fastroof" and (meanings := column_meanings(" ".join(reversed(names)))):
            with formatter.section("Columns"):
                formatter.write_dl(meanings.items())


def column_meanings(command: str) -> dict[str, str]:
    """Return what the columns of a command's tables mean, from columns.toml; ... in a name is any text."""
    sections = read_toml(Path(__file__).with_name("columns.toml"), FastroofError)
    own: dict[str, Any] = sections.get(command) or sections.get(command.partition(" ")[0], {})
    return {name: sections["same"][name] for name in own.pop("same", ())} | own
