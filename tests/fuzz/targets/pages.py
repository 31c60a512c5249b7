"""Views of the local page, as a browser sends them, and the questions about them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from fastroof.backends.serve.answers import for_json, write_reply
from fastroof.documents import parse_json
from fastroof.errors import BatchError
from fastroof.ui.answers import capacity_answer, layouts_answer, start_answer, step_answer
from fastroof.ui.deployment import deployment_answer
from fastroof.ui.plans import PlanStore
from fastroof.ui.simulation import simulation_answer
from fastroof.ui.view import View
from tests.fuzz.mutators import HOSTILE_WORDS, VALUES, mutated_text, mutated_tree
from tests.fuzz.target import SkippedError, Target, Wrong
from tests.fuzz.targets.simulations import SIMULATE

QUESTIONS = {
    "simulation": simulation_answer, "step": step_answer, "start": start_answer, "capacity": capacity_answer,
    "deployment": deployment_answer, "layouts": layouts_answer,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "model": "llama-3.1-8b", "tp": 1, "isl": 200, "osl": 20, "batch": 8, "num_requests": 40, "rate": 20.0,
    "gpus": 2, "engine": "vllm",
}  # fmt: skip
SESSIONS = {**SMALL, "turns": 3, "think_s": 0.1}
FLEETS = (
    "--replicas 2 --router least_load", "--replicas 64 --router power_of_two",
    "--autoscale concurrency:4 --max-replicas 3 --startup 1",
    "--autoscale kv:0.9:0.5 --max-replicas 2 --min-replicas 1 --startup 0 --scale-interval 1",
    "--autoscale rate:5 --max-replicas 4 --startup 2 --scale-down-delay 9",
    "--prefill-replicas 1 --decode-replicas 2 --kv-bandwidth 50",
    "--prefill-replicas 2 --decode-replicas 1 --prefill-tp 2 --back-pressure",
    "--prefill-replicas 1 --decode-replicas 1 --back-pressure --router prefix_aware",
)  # fmt: skip
TIERS = tuple(text.strip("'") for text in SIMULATE["kv_tiers"])
LORAS = ("16", "16:4", "32:2/8:attention", "16:1:q_proj+v_proj", "0", "16:0", "8:9/4", "16:4:x", "/nowhere")
FIELDS: dict[str, tuple[Any, ...]] = {
    "fleet": FLEETS, "kv_tiers": TIERS, "lora": LORAS, "clients": (1, 8, 2**16), "turns": (1, 2, 9),
    "growth": (1, 50, None), "rate": (None, 1e-3, 1e6), "think_s": (0, 0.5, 1e6),
    "prefix_cache": (True, False), "tp": (2, 3), "pp": (2,), "dp": (2,), "osl": (2, 100), "isl": (1, 9000),
    "spread": (0.5, 2), "max_num_batched_tokens": (1, 64, 2**16), "engine": ("sglang", "tensorrt_llm"),
    "num_requests": (1, 2, 500), "front_end": (0, 1e9), "percentile": (50,), "gpu": ("a100", "l4"),
}  # fmt: skip
WORDS = (*HOSTILE_WORDS, "--replicas", "--autoscale", "--router", "--help", "--startup", "9999", "0", "inf/s")


class Pages(Target):
    """A case is a question's name, a line's end and the JSON of a view."""

    name = "page"
    suffix = ".json"
    limit_s = 30.0  # most of it to compile
    is_bytes = True
    ci_cases = 120

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.store = PlanStore()

    def examples(self) -> list[bytes]:
        views = [SMALL, {**SMALL, "rate": None, "clients": 4}, {**SESSIONS, "kv_tiers": "host:1GB:1GB/s"}]
        views += [{**SMALL, "fleet": fleet} for fleet in FLEETS[:7]]
        wanted = [("simulation", view) for view in views] + [(name, SMALL) for name in QUESTIONS]
        return [f"{name}\n{json.dumps(view)}".encode() for name, view in wanted]

    def case(self, random: Random) -> bytes:
        question = random.choice(("simulation",) * 12 + tuple(QUESTIONS))
        view = dict(random.choice((SMALL, SESSIONS)))
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            name = random.choice(("fleet", "kv_tiers", *FIELDS))
            value = random.choice(FIELDS[name])
            what = random.random()
            if isinstance(value, str) and what < 0.4:
                mutated = mutated_text(value.encode(), random, (), WORDS)
                value = mutated.decode(errors="replace")
            elif what > 0.9:
                value = random.choice(VALUES)
            view[name] = value
        what = random.random()
        if what < 0.1:
            view = mutated_tree(view, random)
        body = json.dumps(view).encode(errors="surrogatepass")
        return question.encode() + b"\n" + (mutated_text(body, random) if what > 0.95 else body)

    def check(self, case: bytes) -> None:
        question, _, body = case.partition(b"\n")
        answer = QUESTIONS.get(question.decode(errors="replace"))
        if answer is None:
            raise BatchError(f"no question {question!r}")
        view = View.of(parse_json(body, "a view", BatchError))
        if view.num_requests > 1000 or view.osl > 1000:
            raise SkippedError  # fine, and takes long
        reply = json.loads(write_reply(for_json(answer(self.store, view))), parse_constant=_no_constant)
        if answer is step_answer and not reply["step"]["latency_us"] > 0.0:
            raise Wrong(f"a step takes {reply['step']['latency_us']} us")


def _no_constant(word: str) -> None:
    raise Wrong(f"the answer has {word}")


TARGETS = [Pages]
