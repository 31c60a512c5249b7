"""Records of engines' arguments: reading them out of wheels, writing what changed, and reading them back."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.engines.arguments as arguments
from tests.engines.arguments import Option, recorded, write
from tests.engines.arguments.__main__ import report
from tests.engines.arguments.wheels import package_of, read_wheel

VLLM = {
    "vllm/config/model.py": '''
CacheDType = Literal["auto", "fp8"]
if TYPE_CHECKING:
    Methods = Literal["a", "b"]
else:
    Methods = str
class Base:
    seed: int = 0
    """Deprecated: of no effect."""
class ModelConfig(Base):
    dtype: CacheDType = "auto"
    method: Methods | None = None
    max_model_len: int = Field(default=2 * 1024, gt=0)
    eager: bool = False
    most: int = computed()
''',
    "vllm/engine/arg_utils.py": """
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        model_kwargs = get_kwargs(ModelConfig)
        group = parser.add_argument_group("ModelConfig")
        group.add_argument("model_tag", nargs="?")
        group.add_argument("--dtype", "-d", **model_kwargs["dtype"])
        group.add_argument("--method", **model_kwargs["method"])
        group.add_argument("--max-model-len", **model_kwargs["max_model_len"])
        group.add_argument("--eager", **model_kwargs["eager"])
        group.add_argument("--most", **model_kwargs["most"])
        group.add_argument("--seed", **model_kwargs["seed"])
""",
    "vllm/entrypoints/common/cli_args.py": """
class FrontendArgs:
    port: int = 8000
    docs: bool = True
class Other:
    hidden: int = 1
""",
    "vllm/benchmarks/serve.py": """
KINDS = {"openai": one, "vllm": two}
def add_cli_args(parser):
    parser.add_argument("--backend", choices=list(KINDS.keys()), default="openai")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--old", deprecated=True)
""",
}
FIELDS = "sglang/srt/arg_groups/fields/parallel.py"
SGLANG = {
    "sglang/cli/serve.py": "",
    "sglang/launch_server.py": "warnings.warn(\"'python -m sglang.launch_server' is still supported\")",
    "sglang/srt/arg_groups/choices.py": 'CHOICES = ["auto", "fp8"]',
    FIELDS: """
class Parallel:
    tp_size: A[int, Arg(help="Size.", aliases=["--tensor-parallel-size"])] = 1
    kv_dtype: A[str, Arg(help="Format.", choices=CHOICES)] = "auto"
    own: A[bool, Arg(no_cli=True)] = False
    plain: A[bool, "Whether."] = False
    internal: int = 3
""",
    "sglang/srt/server_args.py": """
class ServerArgs:
    def add_cli_args(parser):
        parser.add_argument("--own", action=DeprecatedStoreTrueAction, new_flag="--other <n>")
        parser.add_argument("--size", type=int, default=ServerArgs.size)
    size: int = 4
""",
}


def wheel_of(folder: Path, package: str, version: str, files: dict[str, str], requires: str = "") -> Path:
    path = folder / f"{package}-{version}-py3-none-any.whl"
    metadata = f"Name: {package}\nVersion: {version}\n{requires}\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in {**files, f"{package}-{version}.dist-info/METADATA": metadata}.items():
            wheel.writestr(name, text)
    return path


def test_options_of_fields_and_calls_are_read(tmp_path: Path) -> None:
    serve, bench = read_wheel(wheel_of(tmp_path, "vllm", "9.1.0", VLLM))
    assert (serve.command, serve.release, bench.command) == ("vllm serve", "9.1.0", "vllm bench serve")
    assert serve.options == {
        "--dtype": Option(("-d",), "auto", ("auto", "fp8")),
        "--method": Option((), "", ("a", "b")),
        "--max-model-len": Option((), "2048"),
        "--eager": Option(("--no-eager",), "false"),
        "--most": Option(),
        "--seed": Option((), "0", (), True),
        "--port": Option((), "8000"),
        "--docs": Option(("--no-docs",), "true"),
    }
    assert bench.options == {
        "--backend": Option((), "openai", ("openai", "vllm")),
        "--ignore-eos": Option((), "false"),
        "--old": Option((), "", (), True),
    }
    assert serve.read_in == ("vllm/engine/arg_utils.py", "vllm/entrypoints/common/cli_args.py")


def test_annotated_fields_and_retired_flags_are_read(tmp_path: Path) -> None:
    serve, launch = read_wheel(wheel_of(tmp_path, "sglang", "9.0.1", SGLANG))
    assert (serve.is_deprecated, launch.is_deprecated) == (False, True)
    assert serve.options == launch.options == {
        "--tp-size": Option(("--tensor-parallel-size",), "1"),
        "--kv-dtype": Option((), "auto", ("auto", "fp8")),
        "--plain": Option((), "false"),
        "--own": Option((), "", (), True, "--other <n>"),
        "--size": Option((), "4"),
    }  # fmt: skip
    assert serve.find("--tensor-parallel-size") is serve.options["--tp-size"]
    assert serve.find("--internal") is None


def test_a_platform_takes_the_options_of_the_engine_that_it_requires(tmp_path: Path) -> None:
    files = {
        "dynamo/common/configuration/groups/runtime_args.py": 'add_argument(g, flag_name="--endpoint")',
        "dynamo/vllm/backend_args.py": """
add_argument(g, flag_name="--model", obsolete_flag="--model-path", default="")
add_negatable_bool_argument(g, flag_name="--enable-rl", default=False)
""",
    }
    requires = "Requires-Dist: vllm[otel]==0.31.0; extra == 'vllm'"
    (worker,) = read_wheel(wheel_of(tmp_path, "ai_dynamo", "9.0.0", files, requires))
    assert (worker.command, worker.takes_also) == ("python3 -m dynamo.vllm", "vllm-0.31.0")
    assert worker.options == {
        "--endpoint": Option(),
        "--model": Option(("--model-path",)),
        "--enable-rl": Option(("--no-enable-rl",), "false"),
    }


@pytest.fixture
def nothing_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(arguments, "HERE", tmp_path)
    recorded.cache_clear()
    yield
    recorded.cache_clear()


@pytest.mark.usefixtures("nothing_recorded")
def test_a_release_is_recorded_as_its_differences(tmp_path: Path) -> None:
    old = read_wheel(wheel_of(tmp_path, "sglang", "9.0.1", SGLANG))
    assert "the first that is recorded" in next(report("sglang", old))
    write(old, "SGLang", "sglang")
    assert recorded("sglang") == tuple(old)
    fields = SGLANG[FIELDS].replace("] = 1", "] = 2").replace("plain", "new")
    files = {**SGLANG, FIELDS: fields}
    files["sglang/srt/arg_groups/choices.py"] = 'CHOICES = ["auto", "fp4"]'
    new = read_wheel(wheel_of(tmp_path, "sglang", "9.0.2", files))
    lines = list(report("sglang", new))
    assert lines[1:6] == [
        "  appeared (1): --new",
        "  vanished (1): --plain",
        "  other default (1): --tp-size 1 -> 2",
        "  other choices (1): --kv-dtype +fp4 -fp8",
        "  fastroof passes --attn-dp-size, which this release does not have",
    ]
    assert "  the same options as sglang serve" in lines
    text = write(new, "SGLang", "sglang").read_text()
    assert 'after = "9.0.1"' in text
    assert "--size" not in text
    assert recorded("sglang") == (*new, *old)


def test_a_retired_option_that_is_passed_is_reported(tmp_path: Path) -> None:
    field = 'tp_size: A[int, Arg(help="Deprecated. Use another.")] = 1'
    files = {**SGLANG, FIELDS: f"class Parallel:\n    {field}\n"}
    lines = report("sglang", read_wheel(wheel_of(tmp_path, "sglang", "0.5.99", files)))
    assert "  fastroof passes --tp-size, which is deprecated; use another" in lines


def test_other_wheels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"numpy-2\.whl is not a wheel of vllm, sglang, ai-dynamo"):
        package_of(Path("numpy-2.whl"))
