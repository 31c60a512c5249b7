"""A cached plan answers as one compiled anew, whatever changed on disk since it was cached."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fastroof.config.paths import bench_data_root
from fastroof.file_access import FilesRead
from fastroof.plan import plan_cache

CHECKOUT = Path(__file__).resolve().parents[2]
PRESETS = CHECKOUT / "fastroof" / "models" / "presets"
SOURCE = "aiconfigurator-vllm-0.25.0"


class Shell(NamedTuple):
    """A folder in which `fastroof step` runs, with its cache and the user's tables."""

    folder: Path

    @property
    def tables(self) -> Path:
        return self.folder / "tables"

    def run(self, *words: str, keep: str = "auto", at: str = ".", program: str = "", **changed: str) -> str:
        settings = {
            "PYTHONPATH": str(CHECKOUT),
            "FASTROOF_CACHE_DIR": str(self.folder / "cache"),
            "XDG_CACHE_HOME": str(self.folder / "home"),
            "FASTROOF_TABLES": str(self.tables),
            "FASTROOF_TABLES_IMPORT": "never",
            "FASTROOF_KEEP_PLANS": keep,
            **changed,
        }
        every = ["step", "--decode", "64x4096", "--json", *words]
        call = ("-c", program, json.dumps(every)) if program else ("-m", "fastroof", *every)
        command = [sys.executable, *call]
        done = subprocess.run(
            command, cwd=self.folder / at, env={**os.environ, **settings},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        return done.stdout or done.stderr

    def answers(self, *words: str, **settings: str) -> tuple[str, str]:
        """Answers of a process that may take a cached plan, and of one that compiles."""
        return self.run(*words, **settings), self.run(*words, keep="never", **settings)

    def num_cached(self) -> int:
        return len(self.plans())

    def plans(self) -> list[bytes]:
        """The cached plans, without the errors of steps next to them."""
        files = (path.read_bytes() for path in self.folder.glob("cache/plans/*.plan"))
        cached = [file[2 * hashlib.sha256().digest_size :] for file in files]
        return [entry for entry in cached if len(plan_cache._split(entry)[1]) > 100]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def step_us(answer: str) -> float:
    return float(json.loads(answer)["latency_us"])


def fp8_config(folder: Path, name: str = "config.json") -> Path:
    """A small model's config.json, unquantised."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((PRESETS / "llama-3.1-8b.json").read_text("utf-8"))
    path = folder / name
    path.write_text(json.dumps(config))
    return path


def halve(config: Path) -> str:
    """Text of a config.json with half its layers, as long as before."""
    text = config.read_text("utf-8")
    return text.replace('"num_hidden_layers": 32', '"num_hidden_layers": 16')


HF_QUANT = '{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": null}}'


def own_source(folder: Path, factor: float = 1.0, *, whole: bool = False) -> None:
    """A source like the shipped one, its GEMMs multiplied; with all tables, or that of GEMMs alone."""
    import pyarrow.parquet as pq

    shipped = bench_data_root() / "h100" / SOURCE
    folder.mkdir(parents=True, exist_ok=True)
    for other in shipped.glob("*.parquet") if whole else ():
        shutil.copy(other, folder)
    table = pq.read_table(shipped / "gemm.parquet")
    place = table.column_names.index("latency_us")
    times = table.column(place).to_numpy() * factor
    pq.write_table(table.set_column(place, "latency_us", [times]), folder / "gemm.parquet")
    (folder / "provenance.toml").write_text('gpu = "h100"\nrank = 1\nframework = "vllm"\n')


# -- the five ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hf_quant_config_next_to_a_named_config_is_seen(shell: Shell) -> None:
    config = fp8_config(shell.folder, "mine-config.json")
    words = ("--model", str(config))
    before = shell.run(*words)
    assert shell.num_cached() == 1
    (shell.folder / "mine-hf_quant_config.json").write_text(HF_QUANT)
    cached, fresh = shell.answers(*words)
    assert cached == fresh
    assert step_us(fresh) < step_us(before)


@pytest.mark.slow
def test_a_linked_config_is_seen_where_it_is_linked(shell: Shell) -> None:
    """As Hugging Face's cache has it: a snapshot's files are links to blobs."""
    blobs, snapshot = shell.folder / "blobs", shell.folder / "snapshots" / "abc"
    fp8_config(blobs, "1111")
    (blobs / "2222").write_text(halve(blobs / "1111"))
    snapshot.mkdir(parents=True)
    link = snapshot / "config.json"
    link.symlink_to("../../blobs/1111")
    words = ("--model", str(link))
    before = shell.run(*words)
    assert shell.num_cached() == 1
    (blobs / "3333").write_text(HF_QUANT)
    (snapshot / "hf_quant_config.json").symlink_to("../../blobs/3333")
    cached, fresh = shell.answers(*words)
    assert cached == fresh
    assert step_us(fresh) < step_us(before)
    (snapshot / "hf_quant_config.json").unlink()
    link.unlink()
    link.symlink_to("../../blobs/2222")
    cached, fresh = shell.answers(*words)
    assert cached == fresh
    assert step_us(fresh) < step_us(before)


@pytest.mark.slow
def test_a_source_given_by_its_path_is_seen(shell: Shell) -> None:
    own_source(shell.folder / "one" / "mine")
    own_source(shell.folder / "two" / "mine", 2.0)
    words = ("--model", "llama-3.1-8b", "--source", "gemm=./mine")
    one, two = (shell.run(*words, at=at) for at in ("one", "two"))
    assert shell.num_cached() == 1
    assert two == shell.run(*words, keep="never", at="two")
    assert step_us(one) < step_us(two)
    own_source(shell.folder / "one" / "mine", 3.0)
    cached, fresh = shell.answers(*words, at="one")
    assert cached == fresh
    assert step_us(fresh) > step_us(two)


@pytest.mark.slow
def test_the_users_tables_of_a_gpu_given_by_its_path_are_seen(shell: Shell) -> None:
    gpu = str(bench_data_root() / "h100")
    words = ("--model", "llama-3.1-8b", "--gpu", gpu)
    before = shell.run(*words)
    assert shell.num_cached() == 1
    own_source(shell.tables / "h100" / "mine", 3.0)
    cached, fresh = shell.answers(*words)
    assert cached == fresh
    assert step_us(fresh) > step_us(before)


@pytest.mark.slow
def test_tables_next_to_a_linked_gpu_toml_are_seen(shell: Shell) -> None:
    text = (bench_data_root() / "h100" / "gpu.toml").read_text("utf-8")
    for name, bandwidth in (("one.toml", "3.35"), ("two.toml", "3.05")):
        (shell.folder / "cards").mkdir(exist_ok=True)
        card = text.replace("num_sms = 132", "num_sms = 130").replace("= 3.35", f"= {bandwidth}")
        (shell.folder / "cards" / name).write_text(card)
    link = shell.folder / "mine" / "gpu.toml"
    own_source(link.parent / "measured", whole=True)
    link.symlink_to("../cards/one.toml")
    words = ("--model", "llama-3.1-8b", "--gpu", str(link))
    before = shell.run(*words)
    assert shell.num_cached() == 0  # it is modelled in part, with a warning
    own_source(link.parent / "measured", 2.0, whole=True)
    cached, fresh = shell.answers(*words)
    assert cached == fresh
    assert step_us(fresh) > step_us(before)
    link.unlink()
    link.symlink_to("../cards/two.toml")
    cached, again = shell.answers(*words)
    assert cached == again
    assert step_us(again) != step_us(fresh)


# -- everything that a plan reads ----------------------------------------------------------------

WATCHED = """
import json, os, sys
looked = {"open": [], "list": [], "status": []}
lstat = os.lstat
def is_here(name):
    try:
        return bool(lstat(name))
    except OSError:
        return False
def hook(event, args):
    # names without a folder that are not here are relative to an open folder, as in the cache
    if event == "open" and isinstance(args[0], str) and ("/" in args[0] or is_here(args[0])):
        looked["open"].append(args[0])
    elif event in ("os.listdir", "os.scandir") and isinstance(args[0], str | os.PathLike):
        looked["list"].append(os.fspath(args[0]))
def watched(ask):
    def stat(path, *rest, **more):
        if isinstance(path, str | os.PathLike) and more.get("dir_fd") is None:
            looked["status"].append(os.fspath(path))
        return ask(path, *rest, **more)
    return stat
os.stat, os.lstat = watched(os.stat), watched(os.lstat)
sys.addaudithook(hook)
sys.argv[1:] = json.loads(sys.argv[1])
from fastroof.cli import main
try:
    main()
finally:
    there = {kind: sorted({os.path.abspath(path) for path in paths}) for kind, paths in looked.items()}
    with open("looked.json", "w") as file:
        json.dump(there, file)
"""


def preset(shell: Shell) -> Sequence[str]:
    return ("--model", "llama-3.1-8b")


def config_by_path(shell: Shell) -> Sequence[str]:
    (fp8_config(shell.folder / "mine").parent / "hf_quant_config.json").write_text(HF_QUANT)
    return ("--model", "./mine", "--engine", "vllm")


def linked_config(shell: Shell) -> Sequence[str]:
    snapshot = shell.folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    fp8_config(shell.folder / "blobs", "1111")
    (snapshot / "config.json").symlink_to("../../blobs/1111")
    return ("--model", str(snapshot / "config.json"))


def own_tables(shell: Shell) -> Sequence[str]:
    own_source(shell.folder / "mine" / "measured", whole=True)
    (shell.folder / "mine" / "notes").mkdir()
    return ("--model", "llama-3.1-8b", "--tables", "mine")


def own_tree(shell: Shell) -> Sequence[str]:
    shutil.copytree(CHECKOUT / "tests" / "golden_sample" / "infersim", shell.folder / "tree")
    return (
        "--model",
        "qwen3-30b-a3b",
        "--tables",
        "tree",
        "--gpu",
        "h20",
        "--engine",
        "kernels",
        "--allow-modelled",
    )


def own_gpu(shell: Shell) -> Sequence[str]:
    own_source(shell.folder / "mine" / "measured", whole=True)
    # its plan is cached, for the card is the shipped one: others are modelled in part, with a warning
    shutil.copy(bench_data_root() / "h100" / "gpu.toml", shell.folder / "mine" / "gpu.toml")
    return ("--model", "llama-3.1-8b", "--gpu", "mine")


def source_by_path(shell: Shell) -> Sequence[str]:
    own_source(shell.folder / "mine")
    return ("--model", "llama-3.1-8b", "--source", "gemm=./mine")


def own_profile(shell: Shell) -> Sequence[str]:
    profile = (CHECKOUT / "fastroof" / "engines" / "profiles" / "vllm.toml").read_text("utf-8")
    (shell.folder / "mine.toml").write_text(profile)
    return ("--model", "llama-3.1-8b", "--engine", "mine.toml")


def users_tables(shell: Shell) -> Sequence[str]:
    own_source(shell.tables / "h100" / "mine")
    return ("--model", "llama-3.1-8b", "--gpu", "H100-SXM")


QUESTIONS: dict[str, Callable[[Shell], Sequence[str]]] = {
    made.__name__: made
    for made in (
        preset, config_by_path, linked_config, own_tables, own_tree, own_gpu, source_by_path, own_profile,
        users_tables,
    )
}  # fmt: skip


class Read(NamedTuple):
    """What a process looked at, and what the plan that it cached recorded of that."""

    shell: Shell
    looked: dict[str, list[str]]
    entries: list[list[Any]]

    def recorded(self, *kinds: str) -> set[str]:
        return {
            os.path.join(self.shell.folder, question[1])
            for question, _, _ in self.entries
            if not kinds or question[0] in kinds
        }


@pytest.fixture(scope="module", params=QUESTIONS)
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Read:
    shell = Shell(tmp_path_factory.mktemp(request.param))
    words = QUESTIONS[request.param](shell)
    shell.run(*words, program=WATCHED)
    (plan,) = shell.plans()
    entries, _ = plan_cache._split(plan)
    return Read(shell, json.loads((shell.folder / "looked.json").read_text()), entries)


def is_input(path: str, shell: Shell) -> bool:
    """Whether a path belongs neither to Python, the cache nor the package."""
    inside = [str(bench_data_root()), str(shell.folder)]
    outside = [str(shell.folder / "cache"), str(shell.folder / "looked.json")]
    return any(path.startswith(f"{place}/") for place in inside) and not path.startswith(tuple(outside))


def is_matched(path: str, patterns: set[tuple[str, str]]) -> bool:
    """Whether looking for a pattern looks at a path on its way."""
    for folder, pattern in patterns:
        if path == folder or path.startswith(f"{folder}/"):
            parts, wanted = Path(path).relative_to(folder).parts, Path(pattern).parts
            if len(parts) <= len(wanted) and all(map(fnmatch, parts, wanted)):
                return True
    return False


@pytest.mark.slow
def test_everything_that_a_plan_looks_at_is_on_record(read: Read) -> None:
    opened, listed, args = (
        {path for path in read.looked[kind] if is_input(path, read.shell)}
        for kind in ("open", "list", "status")
    )
    patterns = {
        (os.path.join(read.shell.folder, question[1]), question[2])
        for question, _, _ in read.entries
        if question[0] == "matches"
    }
    assert opened
    assert opened == {path for path in read.recorded("content") if path in opened}
    assert [path for path in listed - read.recorded("names_in") if not is_matched(path, patterns)] == []
    known = read.recorded()
    ends = {answer for (kind, *_), answer, _ in read.entries if kind == "resolved"}
    above = ends | {str(folder) for path in read.recorded("resolved") | ends for folder in Path(path).parents}
    assert [path for path in args - known - above if not is_matched(path, patterns)] == []


def test_whatever_of_it_changes_is_noticed(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(read.shell.folder)
    assert FilesRead.holds(read.entries)
    changed = 0
    for (kind, name, *pattern), answer, _ in read.entries:
        path = Path(os.path.abspath(name))
        if not path.is_relative_to(read.shell.folder) or any(folder.is_file() for folder in path.parents):
            continue
        for change in changes(kind, path, answer, *pattern):
            with change:
                assert not FilesRead.holds(read.entries), (kind, name)
            changed += 1
        assert FilesRead.holds(read.entries), (kind, name)
    assert changed


def test_every_entry_counts(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(read.shell.folder)
    for place, (question, answer, _) in enumerate(read.entries):
        other = (
            not answer if isinstance(answer, bool) else [] if isinstance(answer, list) and answer else "no"
        )
        entries = [*read.entries[:place], [question, other, None], *read.entries[place + 1 :]]
        assert not FilesRead.holds(entries), question


@contextmanager
def rewritten(path: Path) -> Iterator[None]:
    """A byte changed, with the size and the modification time from before."""
    status, content = path.stat(), path.read_bytes()
    other = bytearray(content)
    other[len(other) // 2] ^= 1
    for data in (bytes(other), content):
        path.write_bytes(data)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        if data != content:
            yield


@contextmanager
def put(path: Path, *, is_folder: bool = False) -> Iterator[None]:
    """A file or a folder in a place, whatever is there."""
    with moved(path) if os.path.lexists(path) else nullcontext():
        missing = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if is_folder else path.write_text("")
        try:
            yield
        finally:
            path.rmdir() if is_folder else path.unlink()
            for folder in missing:
                folder.rmdir()


@contextmanager
def moved(path: Path) -> Iterator[None]:
    """A missing file in place of an existing one."""
    aside = path.parent.parent / "aside"
    path.rename(aside)
    try:
        yield
    finally:
        aside.rename(path)


@contextmanager
def linked(path: Path) -> Iterator[None]:
    """A link in place of a file or folder, which has another name."""
    with moved(path):
        path.symlink_to(path.parent.parent / "aside")
        try:
            yield
        finally:
            path.unlink()


def changes(kind: str, path: Path, answer: Any, pattern: str = "") -> list[AbstractContextManager[None]]:
    """Changes that another answer to a question comes of."""
    match kind:
        case "content" if path.exists():
            return [rewritten(path), moved(path)]
        case "names_in" if path.exists():
            return [put(path / "another"), moved(path)]
        case "matches":
            return [put(path / pattern.replace("*", "another"))]
        case "resolved":
            return [linked(path)]
        case _:
            return [moved(path) if answer is True else put(path, is_folder=kind == "is_folder")]
