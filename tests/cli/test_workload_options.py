"""What options of requests mean together, as the command line hands them over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fastroof import Trace, TraceError, Workload
from fastroof.cli.workload_options import WORKLOAD, workload_requests, workload_trace
from fastroof.command_group import GroupValues, taking


def parsed(*words: str) -> Trace | Workload:
    """Parse these words as a command with all of the options."""
    app, answers = typer.Typer(), []

    @app.command()
    @taking(workload=WORKLOAD)
    def command(workload: GroupValues) -> None:
        answers.append(workload_requests(**workload))

    result = CliRunner().invoke(app, list(words))
    if result.exception is not None:
        raise result.exception
    (answer,) = answers
    return answer


def drawn(*words: str) -> Workload:
    answer = parsed(*words)
    assert isinstance(answer, Workload)
    return answer


def replayed(*words: str) -> Trace:
    answer = parsed(*words)
    assert isinstance(answer, Trace)
    return answer


def test_without_options_it_is_the_example() -> None:
    assert replayed().name == "example"
    # a router may draw
    assert replayed("--seed", "3").name == "example"
    few = replayed("--limit", "10", "--rate-scale", "2")
    assert (few.arrival_s == replayed().arrival_s[:10] / 2).all()


def test_every_option_of_drawn_requests_is_heard() -> None:
    gamma = drawn(
        "--rate", "5", "--burstiness", "0.5", "--num-requests", "7", "--isl", "lognormal:100:0.5",
        "--osl", "uniform:5:9", "--cached", "share:0.5", "--seed", "3",
    )  # fmt: skip
    assert gamma == Workload(
        rate=5.0, burstiness=0.5, requests=7, isl="lognormal:100:0.5", osl="uniform:5:9",
        cached_tokens="share:0.5", seed=3,
    )  # fmt: skip
    assert drawn("--clients", "4", "--think", "0.5") == Workload(clients=4, think_s=0.5)
    sessions = drawn(
        "--rate", "0.5", "--turns", "3", "--calls", "uniform:1:2", "--think", "exponential:5",
        "--tool", "0.5", "--growth", "20", "--system-prompt", "100",
    )  # fmt: skip
    assert sessions == Workload(
        rate=0.5, turns=3, calls="uniform:1:2", think_s="exponential:5", tool_s=0.5, growth_tokens=20,
        system_tokens=100,
    )  # fmt: skip
    assert drawn("--ramp", "2:20:2") == Workload(ramp=(2, 20, 2))


LOG = (
    "Begun at;In;Out;Model\n2025-10-26 02:59:00;10;1;a\n"
    "2025-10-26 03:01:00;20;2;b\n2025-10-26 03:02:00;30;;b\n"
)


def test_a_custom_log_is_read_by_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "log.csv")
    Path(path).write_text(LOG)
    columns = ("--columns", "arrival=begun_at,input=In,output=out")
    zoned = replayed("--trace", path, *columns)
    assert (zoned.arrival_s.tolist(), zoned.left_out) == ([0.0, 120.0], {"Out missing": 1})
    only = replayed("--trace", path, *columns, "--where", "model=b", "--where", "In<100")
    assert (only.input_tokens.tolist(), only.left_out) == ([20], {"not model=b": 1, "Out missing": 1})
    # lengths that are drawn from a file are read in the same way, and rows of one file go together
    file = f"file:{path}"
    drawn_lengths = workload_requests(
        clients=3, num_requests=50, isl=file, osl=file, columns="input=In,output=Out", where=[]
    )
    assert isinstance(drawn_lengths, Workload)
    lengths = drawn_lengths.trace()
    assert set(zip(lengths.input_tokens.tolist(), lengths.output_tokens.tolist(), strict=True)) == {
        (10, 1), (20, 2),
    }  # fmt: skip
    assert f"{path}: 1 row left out (Out missing)" in capsys.readouterr().err
    blocks = tmp_path / "blocks.jsonl"
    row = {"timestamp": 0, "input_length": 17, "output_length": 1, "hash_ids": [1]}
    blocks.write_text(json.dumps(row))
    assert replayed("--trace", str(blocks)).hash_block_size == 512


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trace", "example", "--isl", "5"), "--trace replays a trace, --isl draws requests"),
        (("--limit", "5", "--isl", "5"), "--limit replays a trace, --isl draws requests"),
        (("--ramp", "2-20"), "--ramp needs"),
        (("--ramp", "2"), "ramp must be two or more"),
        (("--isl", "normal:5:1"), "isl must be"),
        (("--trace", "nowhere.csv"), r"nowhere.csv cannot be read \(No such file or directory\)"),
        (("--columns", "input=prompts"), "trace .*example.* has no column 'prompts'|has no column 'prompts'"),
        (
            ("--where", "model=a", "--rate", "5"),
            "--where needs a trace: give --trace FILE, --isl file:FILE",
        ),
        (("--where", "model"), "where must be COLUMN=VALUE"),
        (("--isl", "file:nowhere.csv"), "nowhere.csv cannot be read"),
    ],
)
def test_what_does_not_go_together_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        parsed(*words)


def test_drawn_requests_need_a_rate_to_be_a_trace() -> None:
    with pytest.raises(TraceError, match="need --rate"):
        workload_trace(isl="100")
    assert workload_trace(rate=5.0, num_requests=3).requests_per_s > 0
    assert workload_trace(limit=3).name == "example"
