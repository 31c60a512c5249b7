"""Results as notebooks show them: text is text, units are there, and no table is long."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import StepBatch, StepPlan, Tables
from fastroof.arrow import MOST_ROWS, cell_text, facts_html, html_table, rows_html
from fastroof.columns import ORIGINS, Column
from fastroof.serving import estimate
from fastroof.simulation import Fleet, Link, Pool, simulate

HOSTILE = "<script>alert('\"&')</script>"
TAGS = {"table", "caption", "thead", "tbody", "tr", "th", "td", "br", "small"}


class Page(HTMLParser):
    """Tags, attributes and cells of some HTML; every tag is closed in its order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.styles: set[str] = set()
        self.texts: list[str] = []
        self.rows = 0
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.styles |= {value or "" for name, value in attrs if name == "style"}
        self.rows += tag == "tr"
        if tag != "br":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data)


def page_of(html: str) -> Page:
    page = Page(html)
    assert page.tags <= TAGS
    assert page.attributes <= {"scope", "title", "style", "colspan"}
    assert page.styles <= {"text-align: left", "text-align: right"}
    return page


@pytest.fixture(scope="module")
def plan(h100: Tables) -> StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")


def test_a_hostile_name_is_text(plan: StepPlan) -> None:
    hostile = dataclasses.replace(plan, model=dataclasses.replace(plan.model, name=HOSTILE))
    trace = fastroof.Trace([0.0], [100], [10], name=HOSTILE)
    for result in (
        hostile,
        hostile.explain([(1, 9)]),
        hostile.run(StepBatch.from_requests([[(1, 9)]])),
        estimate(hostile, 1000, 200, 8),
        fastroof.simulate(hostile, trace),
    ):
        page = page_of(result._repr_html_())
        assert any(HOSTILE in text or repr(HOSTILE) in text for text in page.texts), type(result)


def test_text_is_escaped_everywhere() -> None:
    column = Column(HOSTILE, "text", HOSTILE, HOSTILE)
    page = page_of(html_table([column], [[HOSTILE]], HOSTILE))
    assert page.texts == [HOSTILE] * 4
    assert page_of(facts_html([(HOSTILE, HOSTILE, "")], HOSTILE)).texts == [HOSTILE] * 3


def test_heads_have_units_and_origins_are_words(plan: StepPlan, h100: Tables) -> None:
    looked_up = page_of(h100.lookup("gemm", m=[64, 100], n=6144, k=4096)._repr_html_())
    assert looked_up.texts[:4] == ["Lookup, 2 rows: h100", "latency_us", "us", "mfu"]
    assert {"measured", "interpolated"} <= set(looked_up.texts)
    assert "relative_error" not in looked_up.texts, "what was not asked for is no empty column"
    explained = page_of(plan.explain([(1, 99)])._repr_html_())
    assert "us" in explained.texts
    assert set(ORIGINS) & set(explained.texts)
    assert "tokens" in page_of(estimate(plan, 1000, 200, [8, 64])._repr_html_()).texts
    of_plan = page_of(plan._repr_html_()).texts
    assert of_plan[of_plan.index("max_num_batched_tokens") + 1] == "8,192 tokens"
    assert of_plan[of_plan.index("weights") + 1] == "16.06 GB a GPU"


def test_a_table_shows_twenty_rows_and_counts_the_others(h100: Tables) -> None:
    many = np.arange(1, 1_000_001)
    page = page_of(h100.lookup("gemm", m=many, n=6144, k=4096)._repr_html_())
    assert page.rows == 1 + MOST_ROWS + 1
    assert page.texts[-1] == "... 999,980 more"
    assert (
        page_of(h100.lookup("gemm", m=many[:MOST_ROWS], n=6144, k=4096)._repr_html_()).rows == 1 + MOST_ROWS
    )
    assert page_of(h100.lookup("gemm", m=[], n=1, k=1)._repr_html_()).texts == ["Lookup, 0 rows: h100"]


def test_a_simulation_shows_its_summary(plan: StepPlan) -> None:
    simulation = fastroof.simulate(plan, fastroof.Trace([0.0, 0.1], [1000, 2000], [100, 50]))
    summary, texts = simulation.summary(), page_of(simulation._repr_html_()).texts
    place = texts.index("time to first token")
    assert texts[place + 1] == cell_text(summary["ttft_ms"]["mean"])
    assert texts[texts.index("requests_per_s") + 1] == f"{summary['requests_per_s']:.4g} requests/s"
    assert all(sentence in texts for sentence in summary["warnings"])


def test_pools_show_what_is_sent_between_them(plan: StepPlan) -> None:
    trace = fastroof.Trace([0.0, 0.1], [4000, 2000], [100, 50])
    simulation = simulate(Fleet([Pool(plan), Pool(plan)], link=Link(50e9)), trace)
    texts = page_of(simulation._repr_html_()).texts
    place = texts.index("time to send a KV cache")
    assert texts[place + 1] == cell_text(simulation.summary()["transfer_ms"]["mean"])
    assert simulation.to_arrow().column_names[-1] == "transfer_ms"


def test_plans_without_room_and_unpickled_plans_are_shown(h100: Tables) -> None:
    for layout in ({"tp": 1}, {"tp": 1, "pp": 2}):
        plan = fastroof.compile_plan("llama-3.1-405b", "h100", h100, engine="vllm", **layout)
        assert "0 tokens that fit beside the weights" in page_of(plan._repr_html_()).texts
        assert pickle.loads(pickle.dumps(plan))._repr_html_() == plan._repr_html_()


@pytest.fixture(scope="module")
def found() -> fastroof.sweep.Recommendation:
    return fastroof.recommend("llama-3.1-8b", "h100", total_gpus=2, isl=1000, osl=100, tpot_ms=20)


@pytest.mark.slow
def test_recommendations_and_sweeps_show_their_best(
    found: fastroof.sweep.Recommendation, tmp_path: Path
) -> None:
    page = page_of(found._repr_html_())
    assert found._repr_html_() == found.answers._repr_html_()
    assert page.rows == 1 + len(found.answers.answers[0].choices)
    assert {"best", "tokens/s", "llama-3.1-8b"} <= set(page.texts)
    grid = {"kv_len": [1024], "batch_size": [1, 64], "report_kv_len": 1024}
    steps = {"models": ["llama-3.1-8b"], "gpu": "h100", "tp": [1, 2], "with_error": True, **grid}
    loads = {"models": ["llama-3.1-8b"], "tp": [1], "isl": 1000, "osl": 100, "clients": [1, 8]}
    requests = {"requests": 100, "isl": 500, "osl": 50}
    capacities = {"models": ["llama-3.1-8b"], "tp": [1], "workload": requests, "slo": {"tpot_p99_ms": 25}}
    for name, spec in {"steps": steps, "deployments": loads, "capacities": capacities}.items():
        summary: Any = fastroof.run_sweep(spec, tmp_path / f"{name}.parquet")
        page = page_of(summary._repr_html_())
        assert page.texts[0].startswith(f"sweep over {name}, ")
        assert page.rows == 1 + len(summary.best)
        assert {"1/s" if name == "capacities" else "tokens/s", "llama-3.1-8b"} <= set(page.texts)
        assert summary.to_arrow()["model"].to_pylist() == ["llama-3.1-8b"] * len(summary.best)
        assert summary.to_arrow().column_names == list(summary.best_rows()[0])
        assert summary.to_arrow().to_pylist()[0] == {
            key: None if value != value else value for key, value in summary.best_rows()[0].items()
        }


@pytest.mark.slow
def test_answers_as_rows(found: fastroof.sweep.Recommendation) -> None:
    table = found.to_arrow()
    choices = found.answers.answers[0].choices
    assert table["place"].to_pylist() == list(range(1, len(choices) + 1))
    assert table["ttft_ms"].to_pylist() == [choice.row["ttft_ms"] for choice in choices]
    assert table["standing"].to_pylist()[0] == "best"
    assert table.schema.field("ttft_ms").metadata[b"unit"] == b"ms"
    assert table.schema.metadata[b"fastroof.version"].decode() == fastroof.__version__
    nothing = fastroof.recommend("llama-3.1-8b", "h100", total_gpus=1, isl=1000, osl=100, tpot_ms=0.01)
    assert nothing.to_arrow().num_rows == 0
    assert page_of(nothing._repr_html_()).rows == 1


def test_empty_columns_are_left_out() -> None:
    columns = (Column("a", "int", "", ""), Column("b", "float", "us", ""))
    assert page_of(rows_html(columns, [{"a": 1, "b": None}, {"a": 2}], "rows")).texts == [
        "rows",
        "a",
        "1",
        "2",
    ]


def test_it_needs_no_pandas_and_no_numba() -> None:
    code = "import sys, fastroof.arrow, fastroof.arrow; print({'pandas', 'numba'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
