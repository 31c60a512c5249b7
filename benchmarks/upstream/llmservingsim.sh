#!/bin/sh
# LLMServingSim's own lookups on exported files, compared with the plan: one row a kind of steps.
#
#     sh benchmarks/upstream/llmservingsim.sh CHECKOUT [v1.1 | bundle] [MODEL]
#
# CHECKOUT: a checkout of casys-kaist/LLMServingSim. Python needs fastroof, msgspec, pandas, PyYAML and rich;
# $PYTHON names it.
set -eu
checkout=$(cd "${1:?usage: llmservingsim.sh CHECKOUT [v1.1 | bundle] [MODEL]}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
PYTHONPATH=$root:$checkout exec "${PYTHON:-python}" - "$checkout" "${2:-v1.1}" "${3:-llama-3.1-8b}" <<'END'
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import fastroof
from benchmarks.upstream.steps import KINDS, own_us, print_errors, random_steps, version
from fastroof.backends.llmservingsim import export_llmservingsim

checkout, form, model = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
plan = fastroof.compile_plan(model, "h100")


def step_ns(tables, arch, step):
    """A step as the simulator adds it up: whole nanoseconds of each layer of its sequence."""
    prompts = [(new, context) for new, context in step if new > 1]
    contexts = [context for new, context in step if new == 1]
    tokens, count = sum(new for new, _ in step), len(contexts)
    mean = sum(contexts) // count if count else 0
    keys = (sum(new for new, _ in prompts), sum(context for _, context in prompts))

    def layer_ns(name):
        if name in arch["catalog"].get("per_sequence", {}):
            return reader._lookup_per_sequence(tables, name, 1, len(step))
        if name in arch["catalog"].get("attention", {}):
            return reader._lookup_attention_with_skew(
                tables, 1, *keys, count, mean, max(contexts, default=0), min(contexts, default=0)
            )
        known = name in tables["tables"][1]["dense"]
        return reader._lookup_dense(tables, name, 1, tokens) if known else 0

    def section_ns(*names):
        return sum(layer_ns(name) for section in names for name in arch["sequence"].get(section) or [])

    block_ns = section_ns("pre_attn", "post_attn", "mlp_dense")
    return section_ns("prologue", "head") + plan.model.num_layers * block_ns


with tempfile.TemporaryDirectory() as folder:
    perf = Path(folder, "profiler", "perf")
    release = "1.1" if form == "v1.1" else "unreleased"
    written = export_llmservingsim(plan, perf, release=release)
    (perf.parent / "models").symlink_to(checkout / "profiler" / "models")
    Path(folder, "serving").mkdir()
    os.chdir(Path(folder, "serving"))  # the simulator reads ../profiler
    from serving.core import trace_generator as reader

    if "prefill_key" in Path(reader.__file__).read_text():
        sys.exit("this source looks prompts up by prefill_key: release 1.1.0 to 5daddb2 were run")
    kind_of_model = "qwen3" if plan.model.only_kind.attention.qk_norm else "llama"
    start = time.perf_counter()
    tables = reader._load_perf_db(
        *written.folder.relative_to(perf).parts[:1],
        "/".join(written.folder.relative_to(perf).parts[1:-1]),
        written.folder.name,
        {1},
        kind_of_model,
    )
    print(f"{written.rows:,} rows, read in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    arch = tables["architecture"]
    for kind in KINDS:
        steps = random_steps(plan, kind)
        found = np.array([step_ns(tables, arch, step) / 1e3 for step in steps])
        errors = found / np.array([own_us(plan, step) for step in steps]) - 1
        print_errors(f"LLMServingSim, `{form}`", version(checkout), kind, errors)
END
