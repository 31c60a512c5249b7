"""Other methods, reproduced: their lookups, steps and scenarios, and the comparison with them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from fastroof.compat import infersim, roofline_v2
from fastroof.compat.compare import compare
from tests.fuzz.expressions import (
    NAMES,
    call_text,
    evaluated,
    integer,
    integer_array,
    odd,
    sizes,
    skip_many_points,
)
from tests.fuzz.made_plans import h100
from tests.fuzz.mutators import mutated_tree
from tests.fuzz.target import SkippedError, Target, Wrong, all_finite
from tests.fuzz.targets.plan_arguments import whole_numbers
from tests.fuzz.targets.simulations import REALS, Calls
from tests.reference.roofline_v2 import write_tree

SAMPLE = Path(__file__).resolve().parents[2] / "golden_sample" / "roofline_v2"
FILES = {
    "gemm/h20/data.csv": "m,k,n,latency_us,mfu\n16,4096,6144,60.5,0.09\n64,4096,6144,70.5,0.309\n",
    "mha/prefill/h20/32-8-128.csv": "dtype,seq_len,latency_us,mfu\nbf16,1024,120.5,0.481\n"
    "bf16,4096,1500.5,0.62\n",
    "mha/decode/h20/32-8-128.csv": "dtype,kv_dtype,batch_size,kv_len,latency_us,mfu\n"
    "bf16,bf16,1,1024,12.5,0.009\nbf16,bf16,16,1024,32.5,0.056\n",
}
LOOKUPS: dict[str, dict[str, Any]] = {
    "v2.prefill_mfu": {"attn_config": "32-8-128", "seq_len": 3000},
    "v2.decode_mfu": {"attn_config": "32-8-128", "batch_size": 8, "kv_len": 3000, "tp": 2},
    "v2.gemm_mfu": {"m": 64, "k": 4096, "n": 6144},
    "v2.nearest_attention": {"num_heads": 40, "num_kv_heads": 8, "head_dim": 128},
    "infersim.gemm_mfu": {"device": "H20", "m": 64, "k": 4096, "n": 6144},
    "infersim.attn_prefill_mfu": {"device": "h20", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
                                  "seq_len": 2000, "tp_size": 1},
    "infersim.attn_decode_mfu": {"device": "h20", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
                                 "batch_size": 8, "kv_len": 2000, "tp_size": 1, "fp8_kv": False},
    "infersim.grouped_gemm_mfu": {"device": "h800", "phase": "decode", "num_experts": 8, "topk": 2,
                                  "hidden": 4096, "intermediate": 2048, "tokens_per_gpu": 64, "num_gpus": 1},
}  # fmt: skip
MODULES = {"v2": roofline_v2, "infersim": infersim}


class OtherLookups(Target):
    """Lookups of roofline V2 and InferSim: ``f('v2.gemm_mfu', m=64, k=4096, n=6144)``."""

    name = "compat.lookups"
    ci_cases = 1000

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.tables = {
            "v2": roofline_v2.load(write_tree(SAMPLE, folder / "bench_data")),
            "infersim": infersim.read_files(FILES),
        }

    def examples(self) -> list[bytes]:
        return [
            call_text(name, {key: repr(value) for key, value in wanted.items()})
            for name, wanted in LOOKUPS.items()
        ]

    def case(self, random: Random) -> bytes:
        name, wanted = random.choice(list(LOOKUPS.items()))
        words = {key: repr(value) for key, value in wanted.items()}
        for _ in range(random.choice((1, 1, 2))):
            key = random.choice(list(wanted))
            if isinstance(wanted[key], str | bool):
                known = ("'h20'", "'x'", "['h20', 'h800']", "True", "[0, 1]", "'64-8-128'", "['32-8-128']")
                words[key] = random.choice(known) if random.random() < 0.7 else odd(random)
            else:
                words[key] = sizes(random, 3 * wanted[key]) if random.random() < 0.9 else odd(random)
        if random.random() < 0.03:
            del words[random.choice(list(words))]
        return call_text(name, words)

    def check(self, case: bytes) -> None:
        (name,), options = evaluated(case.decode(), NAMES)
        if name not in LOOKUPS or not options.keys() == LOOKUPS[name].keys():
            raise SkippedError
        skip_many_points(options)
        module, _, function = name.partition(".")
        found = getattr(MODULES[module], function)(self.tables[module], **options)
        for key, value in options.items():
            if not isinstance(LOOKUPS[name][key], str | bool):
                whole_numbers(value)
        if isinstance(found, str):
            return
        all_finite(found)
        if np.any(np.asarray(found) < 0.0):
            raise Wrong(f"an MFU of {found!r:.80}")


MODEL: dict[str, Any] = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "bytes_per_param": 2,
}  # fmt: skip
HARDWARE = {"TFlopsPeak": 989.5, "BwPeakTBs": 3.35, "bwEfficiencyFactor": 0.82, "perLayerOverhead": 100}


class OtherSteps(Target):
    """Steps of roofline V2: ``f(model, hardware, tp, steps)``."""

    name = "compat.steps"
    ci_cases = 800

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.tables = roofline_v2.load(write_tree(SAMPLE, folder / "bench_data"))
        self.names = {**NAMES, "Steps": roofline_v2.StepRequests}

    def examples(self) -> list[bytes]:
        words = f"{MODEL}, {HARDWARE}, 1, [([(0, 100)], [5, 600]), ([], [])]"
        return [f"f({words})".encode()]

    def case(self, random: Random) -> bytes:
        words = [repr(MODEL), repr(HARDWARE), "1", self._steps(random)]
        what = random.random()
        if what < 0.25:
            words[0] = _mutated(MODEL, random)
        elif what < 0.5:
            words[1] = _mutated(HARDWARE, random)
        elif what < 0.6:
            words[2] = sizes(random, 9)
        return f"f({', '.join(words)})".encode()

    def _steps(self, random: Random) -> str:
        what = random.random()
        if what < 0.3:
            counts = [random.choice((0, 1, 2)) for _ in range(2)]
            arrays = [integer_array(random, 5000, count) for count in (counts[0], counts[0], counts[1])]
            ends = [f"[0, {count}]" if random.random() < 0.9 else odd(random) for count in counts]
            return f"({', '.join((arrays[0], arrays[1], ends[0], arrays[2], ends[1]))})"
        if what < 0.4:
            return odd(random)
        size = (lambda: integer(random, 5000)) if what < 0.9 else (lambda: odd(random))
        steps = [
            f"([{', '.join(f'({size()}, {size()})' for _ in range(random.choice((0, 1, 2))))}],"
            f" [{', '.join(size() for _ in range(random.choice((0, 1, 3))))}])"
            for _ in range(random.choice((0, 1, 2)))
        ]
        return f"[{', '.join(steps)}]"

    def check(self, case: bytes) -> None:
        given, _ = evaluated(case.decode(), self.names)
        if len(given) != 4:
            raise SkippedError
        model, hardware, tp, steps = given
        if isinstance(steps, tuple) and len(steps) == 5:
            arrays = steps
            steps = roofline_v2.StepRequests(*steps)
            for value in arrays:
                whole_numbers(value)
        found, parts = roofline_v2.step_parts(self.tables, model, hardware, tp, steps)
        all_finite(parts)
        all_finite(found)
        if (found < 0.0).any():
            raise Wrong(f"a step takes {found} us")


CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 12288, "head_dim": 128,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **CONFIG,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
SCENARIO: dict[str, Any] = {
    "device": "H20", "world_size": 1, "tp_size": 1, "num_nodes": 1, "max_prefill_tokens": 4096,
    "decode_bs": [16, 32], "target_tgs": 2560.0, "target_tpot": 50.0, "isl": 4096, "osl": 1024, "fp8_gemm": 0,
    "fp8_kv": 0, "deepep": 0, "tbo": 0,
}  # fmt: skip


class Scenarios(Target):
    """InferSim's estimates: a case is JSON, a config and scenarios."""

    name = "compat.scenarios"
    suffix = ".json"
    ci_cases = 600

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.tables = infersim.read_files(FILES)

    def examples(self) -> list[bytes]:
        return [json.dumps([config, SCENARIO]).encode() for config in (CONFIG, EXPERTS)]

    def case(self, random: Random) -> bytes:
        config, scenario = random.choice((CONFIG, EXPERTS)), SCENARIO
        what = random.random()
        if what < 0.6:
            scenario = mutated_tree(scenario, random, (SCENARIO,))
        if what > 0.4:
            config = mutated_tree(config, random, (CONFIG, EXPERTS))
        return json.dumps([config, scenario]).encode(errors="surrogatepass")

    def check(self, case: bytes) -> None:
        config, scenario = json.loads(case)
        found = infersim.evaluate(self.tables, config, scenario)
        for name in ("ttft_ms", "tpot_ms"):
            times = found[name].drop_null().to_numpy()
            all_finite(times, name)
            if (times < 0.0).any():
                raise Wrong(f"{name} is {times.min()}")


class Comparisons(Calls):
    """``compare``: the same steps by all methods."""

    name = "compare"
    limit_s = 30.0
    ci_cases = 15
    known: ClassVar[dict[str, tuple[str, ...]]] = {
        "decode": ("[(32, 4096)]", "[(1, 2), (8, 99)]", "[(1, 1)]", "[(0, 5)]", "[5]", "[(1, 2, 3)]"),
        "prefill": ("[2048]", "[1]", "[0]", "(7, 9)", "range(3, 5)"), "tp": ("1", "2", "3"),
        "dp": ("1", "2"), "ep": ("1", "2"), "moe_tp": ("None", "1", "2"), "dtype": ("'bf16'", "'fp8'"),
        "routing": ("None", "'balanced'"), "allow_modelled": ("True", "False"), "tables": ("tables", "None"),
        "roofline_v2_root": ("None", "'/nowhere'"), "infersim_root": ("None", "'/nowhere'"),
    }  # fmt: skip
    always: ClassVar[dict[str, str]] = {"decode": "[(4, 999)]", "tables": "tables"}

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.names = {**NAMES, "tables": h100()}

    def examples(self) -> list[bytes]:
        return [b"f('llama-3.1-8b', 'h100', decode=[(4, 999)], prefill=[100], tables=tables)"]

    def first(self, random: Random) -> list[str]:
        model = random.choice(("'llama-3.1-8b'", "'llama-3.1-8b'", "'qwen3-30b-a3b'", "'deepseek-v3'"))
        words = [model if random.random() < 0.9 else odd(random), "'h100'"]
        if random.random() < 0.05:
            words[1] = odd(random)
        return words

    def check(self, case: bytes) -> None:
        given, options = self.call(case)
        if len(given) != 2:
            raise SkippedError
        found = compare(*given, **options)
        for step in found.steps:
            own = step.times[0]
            all_finite([own.total_us, own.components_us])
            if own.total_us <= 0.0:
                raise Wrong(f"{step} takes no time")
            for time in step.times[1:]:
                if not time.why_not and not 0.0 < time.total_us < 1e15:
                    raise Wrong(f"{time.method} returns {time.total_us} us")


def _mutated(given: dict[str, Any], random: Random, share: float = 1.0) -> str:
    """A dict as text, one value of it another, or something that is hardly one."""
    if random.random() > share:
        return repr(given)
    if random.random() < 0.1:
        return odd(random)
    words = {repr(key): repr(value) for key, value in given.items()}
    key = random.choice(list(words))
    words[key] = random.choice((*REALS, integer(random, 99), odd(random)))
    if random.random() < 0.1:
        del words[key]
    return f"{{{', '.join(f'{key}: {value}' for key, value in words.items())}}}"


TARGETS = [OtherLookups, OtherSteps, Scenarios, Comparisons]
