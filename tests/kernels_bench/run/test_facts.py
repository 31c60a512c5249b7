"""Facts of the software in a start line: the commit, with git and where no .git travels."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastroof.errors import MeasureError
from kernels_bench.run import facts

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the checkout that has no .git."""
    monkeypatch.setattr(facts, "__file__", str(tmp_path / "kernels_bench" / "run" / "facts.py"))
    monkeypatch.delenv("KERNELS_BENCH_COMMIT", raising=False)
    return tmp_path


@pytest.mark.parametrize("commit", [COMMIT, f"{COMMIT}-dirty", COMMIT[:7]])
def test_the_environment_names_the_commit_where_no_git_travels(
    copied: Path, monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    assert facts.checkout_commit() == ""
    monkeypatch.setenv("KERNELS_BENCH_COMMIT", f"{commit}\n")
    assert facts.checkout_commit() == commit


def test_the_environment_serves_where_git_fails(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copied / ".git").mkdir()  # git refuses it
    monkeypatch.setenv("KERNELS_BENCH_COMMIT", COMMIT)
    assert facts.checkout_commit() == COMMIT


def test_git_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERNELS_BENCH_COMMIT", raising=False)
    of_git = facts.checkout_commit()
    if not of_git:
        pytest.skip("this is no git checkout")
    monkeypatch.setenv("KERNELS_BENCH_COMMIT", COMMIT)
    assert facts.checkout_commit() == of_git


def test_the_environment_that_chooses_kernels_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    monkeypatch.setenv("SECRET_TOKEN", "s")
    found = facts.environment()
    assert found["VLLM_USE_DEEP_GEMM"] == "0"
    assert "SECRET_TOKEN" not in found


@pytest.mark.parametrize("given", ["main", "0123", COMMIT.upper(), "-dirty", f"{COMMIT} {COMMIT}"])
def test_invalid_commits_are_refused(copied: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("KERNELS_BENCH_COMMIT", given)
    with pytest.raises(MeasureError, match=r"KERNELS_BENCH_COMMIT is .* is not a commit: give 7 to 64"):
        facts.checkout_commit()
