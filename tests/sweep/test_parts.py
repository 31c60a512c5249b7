"""The folder beside an output: fastroof's own, or left alone; what is damaged in it is computed again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fastroof import SweepError
from fastroof.sweep import checkpoint, run_sweep
from fastroof.sweep.checkpoint import parts_folder
from fastroof.sweep.steps import StepSweep
from tests.sweep.conftest import stopped_after

SPEC: dict[str, Any] = {
    "models": ["llama-3.1-8b"],
    "tp": [1, 2],
    "batch_size": [1, 8, 64],
    "kv_len": [1024, 8192, 100_000],
    "keep": "all",
}


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch, cut_units: Callable[[int], None]) -> None:
    cut_units(5)
    monkeypatch.setattr(checkpoint, "PART_EVERY_S", 0.0)


def stop(output: Path, count: int = 3) -> None:
    """Run a sweep that is interrupted after some units."""
    stopped_after(SPEC, output, count)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output beside which an interrupted sweep has left its parts."""
    path = tmp_path / "here" / "r.parquet"
    path.parent.mkdir()
    stop(path)
    assert len(list(parts_folder(path).glob("*.arrow"))) == 3
    return path


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


WAYS = [{"resume": True}, {"restart": True}]
WAY_NAMES = ["resume", "restart"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
def test_a_link_in_the_folders_place_is_not_followed(tmp_path: Path, output: Path, way: Any) -> None:
    mine = tmp_path / "mine"
    parts_folder(output).rename(mine)
    (mine / "000000007.arrow").write_bytes(b"a file of the user's")
    parts_folder(output).symlink_to(mine)
    before = tree(mine)
    for options in (way, {}):
        with pytest.raises(SweepError, match=r"r\.parquet\.parts is a link"):
            run_sweep(SPEC, output, **options)
    assert tree(mine) == before
    parts_folder(output).unlink()
    parts_folder(output).symlink_to(tmp_path / "nowhere")
    with pytest.raises(SweepError, match=r"r\.parquet\.parts is a link"):
        run_sweep(SPEC, output, **way)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
@pytest.mark.parametrize("name", ["lock", "manifest.json", "000000000.arrow"])
def test_a_link_within_is_neither_followed_nor_truncated(
    tmp_path: Path, output: Path, way: Any, name: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"content")
    (parts_folder(output) / name).unlink()
    for linked in (Path.symlink_to, Path.hardlink_to):
        linked(parts_folder(output) / name, precious)
        before = tree(parts_folder(output))
        with pytest.raises(SweepError, match=f"holds '{name}', "):
            run_sweep(SPEC, output, **way)
        assert tree(parts_folder(output)) == before
        assert precious.read_bytes() == b"content"
        (parts_folder(output) / name).unlink()
    run_sweep(SPEC, output, **way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
@pytest.mark.parametrize("name", ["notes.txt", "12.arrow", "x.arrow", ".hidden", "000000001.arrow.bak"])
def test_what_no_sweep_made_is_named_and_nothing_is_removed(output: Path, way: Any, name: str) -> None:
    (parts_folder(output) / name).write_text("the user's")
    before = tree(parts_folder(output))
    with pytest.raises(SweepError, match=f"holds '{name}', not a file of a sweep; nothing was removed"):
        run_sweep(SPEC, output, **way)
    assert tree(parts_folder(output)) == before


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
def test_a_folder_or_pipe_within_is_refused_and_not_waited_for(output: Path, way: Any) -> None:
    inside = parts_folder(output)
    (inside / "000000000.arrow").unlink()
    (inside / "000000000.arrow").mkdir()
    with pytest.raises(SweepError, match=r"holds '000000000\.arrow', not a regular file"):
        run_sweep(SPEC, output, **way)
    (inside / "000000000.arrow").rmdir()
    (inside / "manifest.json").unlink()
    os.mkfifo(inside / "manifest.json")
    for options in (way, {}):
        with pytest.raises(SweepError, match="not a regular file"):
            run_sweep(SPEC, output, **options)


def test_a_folder_of_another_user_is_not_used(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = parts_folder(output)
    before = tree(inside)
    inside.chmod(0o775)
    with pytest.raises(SweepError, match="may be written to by other users"):
        run_sweep(SPEC, output, resume=True)
    inside.chmod(0o755)
    if os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    os.chown(inside, 65_534, 65_534)
    with pytest.raises(SweepError, match=r"belongs to another user \(uid 65534\)"):
        run_sweep(SPEC, output, restart=True)
    assert tree(inside) == before


def test_only_the_owner_may_write_to_the_folder_whatever_the_mask(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        stop(tmp_path / "r.parquet")
    finally:
        os.umask(mask)
    inside = parts_folder(tmp_path / "r.parquet")
    assert oct(inside.stat().st_mode & 0o777) == "0o700"


@pytest.mark.slow
def test_what_comes_into_the_folder_meanwhile_stays(output: Path) -> None:
    def put(*_: int) -> None:
        (parts_folder(output) / "notes.txt").write_text("the user's")

    run_sweep(SPEC, output, resume=True, progress=put)
    assert tree(parts_folder(output)) == {"notes.txt": b"the user's"}


@pytest.mark.slow
def test_a_part_of_another_sweep_is_dropped(tmp_path: Path, output: Path) -> None:
    run_sweep(SPEC, tmp_path / "whole.parquet")
    other = tmp_path / "other.parquet"
    stop_other = {**SPEC, "batch_size": [2, 9, 65]}
    evaluate, done = StepSweep.evaluate, []

    def once(*given: Any) -> Any:
        if done:
            raise KeyboardInterrupt
        done.append(1)
        return evaluate(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepSweep, "evaluate", once)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(stop_other, other)
    (parts_folder(other) / "000000000.arrow").replace(parts_folder(output) / "000000000.arrow")
    run_sweep(SPEC, output, resume=True)
    assert pq.read_table(output).equals(pq.read_table(tmp_path / "whole.parquet"))
