"""Progress as one line: what it shows on a terminal, prints elsewhere, and estimates as the time left."""

from __future__ import annotations

import io
import time

import pytest

from fastroof import progress


def test_a_log_has_what_is_left_and_in_the_end_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 10.0, 11.0, 20.0, 30.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.shown_progress("sweep", "evaluations") as show:
        for done in (0, 1_000_000, 2_000_000, 5_000_000, 8_000_000):
            show(done, 8_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "sweep: 1,000,000 of 8,000,000 evaluations, 10 s",
        "sweep: 5,000,000 of 8,000,000 evaluations, 9 s left",
        "sweep: 8,000,000 of 8,000,000 evaluations, 30 s",
    ]


def test_the_remaining_time_ignores_the_start() -> None:
    """A run of 23 s whose first of 41 pieces takes 13: by the mean it would open at minutes."""
    pace = progress.Pace()
    ends = [13.0 + 0.25 * piece for piece in range(41)]
    found = [pace.left_s(done, 41, now) for done, now in enumerate(ends, start=1)]
    assert found[:2] == [None, None]
    assert found[-1] is None
    for left_s, now in zip(found[2:-1], ends[2:-1], strict=True):
        assert left_s == pytest.approx(ends[-1] - now)
    # the pace of now, not of the beginning; a pause counts
    slow = progress.Pace()
    for second in range(1, 11):
        slow.left_s(second, 100, float(second))
    for second in range(11, 31):
        last = slow.left_s(10 + 2 * (second - 10), 100, float(second))
    assert last == pytest.approx((100 - 50) / 2)
    assert slow.left_s(50, 100, 60.0) is None
    paused = slow.left_s(51, 100, 60.0)
    assert last is not None
    assert paused is not None
    assert paused > 2 * last
    # however often it is updated
    long = progress.Pace()
    assert [long.left_s(done, 10_000, done / 10) for done in range(1, 5001)][-1] == pytest.approx(
        500, rel=0.01
    )


def test_the_time_left_runs_down_between_two_reports() -> None:
    pace = progress.Pace()
    for second in range(1, 6):
        last = pace.left_s(second, 10, float(second))
    assert last == pytest.approx(5.0)
    assert pace.left_s(5, 10, 7.0) == pytest.approx(3.0)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a terminal shows, one after another."""
    lines: list[str] = []
    monkeypatch.setattr(progress, "is_terminal", lambda: True)
    monkeypatch.setattr(progress, "DELAY_S", -1.0)
    monkeypatch.setattr(progress, "REDRAW_S", 0.001)
    monkeypatch.setattr(progress._Line, "draw", lambda _, text: lines.append(text))
    return lines


def wait_for(words: str, lines: list[str]) -> str:
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        for line in lines:
            if words in line:
                return line
        time.sleep(0.001)
    raise AssertionError(f"{words!r} is not shown")


def test_the_innermost_phase_is_shown_and_nothing_in_the_end(drawn: list[str]) -> None:
    with progress.shown_progress("best", "candidates") as best:
        assert wait_for("best: ", drawn).startswith("best: starting, ")
        best(1, 4)
        assert wait_for("1 of 4", drawn).startswith("best: 1 of 4 candidates, ")
        with progress.Phase("compiling") as compiling:
            wait_for("compiling: 0 s", drawn)
            compiling(3, 6)
            assert wait_for("3 of 6", drawn).endswith("[############------------]")
        drawn.clear()
        best(2, 3, "deployments simulated")
        assert wait_for("2 of 3", drawn).startswith("best: 2 of 3 deployments simulated, ")
    assert drawn[-1] == ""


@pytest.mark.parametrize(("name", "value"), [("CI", "1"), ("TERM", "dumb")])
def test_only_a_watched_terminal_is_one(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", stream)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert not progress.is_terminal()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert progress.is_terminal()
    monkeypatch.setenv(name, value)
    assert not progress.is_terminal()


def test_without_standard_error_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.sys, "stderr", None)
    with progress.CommandPhase("fastroof"):
        assert not progress.is_terminal()
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(progress.sys, "stderr", closed)
    assert not progress.is_terminal()
