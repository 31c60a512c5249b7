"""Files of other programs: packages and profiles to import, trees of tables, runs of load generators."""

from __future__ import annotations

import io
import json
import shutil
from abc import abstractmethod
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from benchmarks.accuracy.rows import read_rows
from fastroof.compat import infersim, roofline_v2
from fastroof.evidence.engine_arguments import read_engine_arguments
from fastroof.evidence.load_generators import read_runs
from fastroof.evidence.steps.step_files import read_own_steps
from fastroof.evidence.steps.step_logs import COLUMNS as LOG_COLUMNS
from fastroof.load.aiconfigurator import import_aiconfigurator
from fastroof.load.simulator_profiles.llmservingsim import convert_llmservingsim
from fastroof.load.simulator_profiles.vidur import convert_vidur
from fastroof.load.sources import load_sources
from fastroof.load.steps_file import read_step_rows
from fastroof.load.trees import load_tree
from tests.evidence import test_step_files as of_steps
from tests.evidence.test_engine_arguments import COMPOSE, DOCUMENTS, KUBERNETES, LOG
from tests.evidence.test_load_generators import PRINTED, RECORDED, aiperf_request, vllm
from tests.fuzz.arrow_mutators import mutated_table, parquet_bytes
from tests.fuzz.mutators import mutated_bytes, mutated_text, mutated_tree
from tests.fuzz.target import SkippedError, Target, Wrong, all_finite
from tests.load import test_llmservingsim as of_llmservingsim
from tests.load import test_vidur as of_vidur
from tests.reference.packages import ALLREDUCE, ATTENTION, GEMM, MOE, NCCL, QUANTISE, package

CHECKOUT = Path(__file__).resolve().parents[3]


def checked_tables(tables: Any) -> None:
    """Raise Wrong for a kernel that takes no time, or more than there is."""
    if not tables.tables:
        raise Wrong("nothing was read, and nothing reported")
    for table in tables.tables.values():
        all_finite(table.columns)
        if not (table.columns["latency_us"] > 0.0).all():
            raise Wrong("a kernel takes no time")


class FolderFiles(Target):
    """A folder of files, one of them mutated: a case is its path in the folder, and its content."""

    ci_cases = 120
    is_bytes = True

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.root = folder / "made"
        self.root.mkdir()
        self.write(self.root)
        self.files = {
            path.relative_to(self.root).as_posix(): path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            if path.is_file()
        }
        self.wanted = [name for name in self.files if self.files[name] and self.is_mutated(name)]
        self.others = [self.files[name] for name in self.wanted]
        self.was = ""

    @abstractmethod
    def write(self, root: Path) -> None:
        """Write the folder as it should be."""

    def is_mutated(self, name: str) -> bool:
        return True

    def mutated(self, content: bytes, random: Random) -> bytes:
        return mutated_text(content, random, self.others)

    def examples(self) -> list[bytes]:
        name = self.wanted[0]
        return [name.encode() + b"\n" + self.files[name]]

    def case(self, random: Random) -> bytes:
        name = random.choice(self.wanted)
        return name.encode() + b"\n" + self.mutated(self.files[name], random)

    def check(self, case: bytes) -> None:
        word, _, content = case.partition(b"\n")
        name = word.decode(errors="replace")
        if name not in self.wanted:
            raise SkippedError
        path = self.root / name
        path.write_bytes(content)
        try:
            self.read()
        finally:
            path.write_bytes(self.files[name])

    @abstractmethod
    def read(self) -> None:
        """Read the folder."""


class ConfiguratorPackages(FolderFiles):
    """aiconfigurator-core's Parquet files."""

    name = "import.aiconfigurator"
    suffix = ".parquet"

    def write(self, root: Path) -> None:
        package(
            root, gemm=[GEMM, GEMM | {"m": 64, "latency": 0.005}], context=[ATTENTION | {"isl": 512}],
            generation=[ATTENTION], moe=[MOE], allreduce=[ALLREDUCE], nccl=[NCCL], quantise=[QUANTISE],
        )  # fmt: skip

    def is_mutated(self, name: str) -> bool:
        return name.endswith(".parquet")

    def mutated(self, content: bytes, random: Random) -> bytes:
        if random.random() < 0.2:
            return mutated_bytes(content, random, self.others)
        tables = [pa.parquet.read_table(io.BytesIO(one)) for one in (content, random.choice(self.others))]
        try:
            return parquet_bytes(mutated_table(tables[0], random, tables[1:]), random)
        except (pa.ArrowException, ValueError):
            return content[:-1]

    def read(self) -> None:
        checked_tables(import_aiconfigurator("h100_sxm", "vllm", "0.24.0", self.root / "aisimulate_core"))


class VidurProfiles(FolderFiles):
    name = "import.vidur"
    suffix = ".csv"

    def write(self, root: Path) -> None:
        model = root / of_vidur.MODEL
        of_vidur.write(model / "mlp.csv", of_vidur.mlp(), of_vidur.mlp(tp=4))
        chunk = of_vidur.attention(chunk=128, cache=0)
        of_vidur.write(model / "attention.csv", chunk, of_vidur.attention(8, cache=1023))
        of_vidur.write(root / "network/a100_dgx/all_reduce.csv", of_vidur.allreduce())

    def read(self) -> None:
        out = self.folder / "out"
        try:
            checked_tables(load_sources(convert_vidur(self.root, out)))
        finally:
            shutil.rmtree(out, ignore_errors=True)


class LlmServingSimProfiles(VidurProfiles):
    name = "import.llmservingsim"

    def write(self, root: Path) -> None:
        write = of_llmservingsim.write
        folder = root / "H100" / of_llmservingsim.MODEL / "bf16" / "tp2"
        dense = (
            "qkv_proj,64,30.5",
            "o_proj,64,20.5",
            "gate_up_proj,64,90.5",
            "down_proj,64,50.5",
            "act_fn,64,2.5",
        )
        write(folder / "dense.csv", of_llmservingsim.DENSE, *dense, "layernorm,64,2.25")
        write(folder / "per_sequence.csv", of_llmservingsim.PER_SEQUENCE, "lm_head,8,352.5", "sampler,8,30.5")
        attention = ("attention,0,0.0,8,1023,1,30.25", "attention,64,32.0,0,0,1,9.25")
        write(folder / "attention.csv", of_llmservingsim.ATTENTION, *attention)

    def read(self) -> None:
        out = self.folder / "out"
        try:
            # times of another card would be beyond its roofline
            checked_tables(load_sources(convert_llmservingsim(self.root, out, gpu="h100")))
        finally:
            shutil.rmtree(out, ignore_errors=True)


class Trees(FolderFiles):
    """InferSim's and roofline V2's CSV: as tables of our own, and as those two methods read them."""

    name = "tables.tree"
    suffix = ".csv"
    ci_cases = 300

    def write(self, root: Path) -> None:
        files = {
            "gemm/h20/data.csv": "m,k,n,latency_us,mfu\n16,4096,6144,60.5,0.09\n64,4096,6144,70.5,0.309\n",
            "mha/prefill/h20/32-8-128.csv": "dtype,seq_len,latency_us,mfu\nbf16,1024,120.5,0.481\n"
            "bf16,4096,1500.5,0.62\n",
            "mha/decode/h20/32-8-128.csv": "dtype,kv_dtype,batch_size,kv_len,latency_us,mfu\n"
            "bf16,bf16,1,1024,12.5,0.009\nbf16,bf16,16,1024,32.5,0.056\n",
            "mha/decode/h20/32-8-128-tp1.csv": "dtype,kv_dtype,batch_size,kv_len,latency_us,mfu\n"
            "bf16,bf16,1,1024,12.5,0.009\nbf16,bf16,16,1024,32.5,0.056\n",
        }
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)

    def read(self) -> None:
        from fastroof.errors import FastroofError

        refusal = None
        for reader in (load_tree, infersim.load, roofline_v2.load):
            try:
                reader(self.root)  # type: ignore[operator]
            except FastroofError as error:
                refusal = error
        if refusal is not None:
            raise refusal


class ServingRows(FolderFiles):
    """CSV of served runs, and of measured steps."""

    name = "evidence.csv"
    suffix = ".csv"
    ci_cases = 200

    def write(self, root: Path) -> None:
        for path in sorted((CHECKOUT / "bench_data" / "h100" / "serving").glob("*.csv")):
            lines = path.read_bytes().split(b"\n")
            if not lines[0].startswith(b"#"):
                (root / path.name).write_bytes(b"\n".join([*lines[:6], b""]))
        self.read_of = {}
        for path in sorted(root.iterdir()):
            for reader in (read_rows, read_step_rows):
                try:
                    reader(path)  # type: ignore[operator]
                except Exception:
                    continue
                self.read_of[path.name] = reader
        for path in list(root.iterdir()):
            if path.name not in self.read_of:
                path.unlink()

    def check(self, case: bytes) -> None:
        self.mutated_name = case.partition(b"\n")[0].decode(errors="replace")
        super().check(case)

    def read(self) -> None:
        self.read_of[self.mutated_name](self.root / self.mutated_name)  # type: ignore[operator]


class OwnRuns(Target):
    """Results of load generators, as JSON."""

    name = "runs.json"
    suffix = ".json"
    is_bytes = True
    ci_cases = 600

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.path = folder / "run.json"
        self.documents = [json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json*"))]
        self.documents.append(vllm())

    def case(self, random: Random) -> bytes:
        document = random.choice(self.documents)
        if random.random() < 0.8:
            return json.dumps(mutated_tree(document, random, self.documents)).encode(errors="surrogatepass")
        return mutated_text(json.dumps(document).encode(), random)

    def check(self, case: bytes) -> None:
        self.path.write_bytes(case)
        for run in read_runs([self.path]).runs:
            if not run.refused:
                kept = [float(value) for value in (run.isl, run.osl, run.concurrency, run.tpot_ms)]
                all_finite(kept)
                if min(kept) <= 0.0:
                    raise Wrong(f"a run of {kept}")


class OtherRuns(OwnRuns):
    """Results of load generators in CSV and YAML, as printed tables, and request by request."""

    name = "runs.others"
    suffix = ".txt"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.texts = {
            path.name: path.read_bytes() for path in RECORDED.iterdir() if path.suffix in (".csv", ".yaml")
        }
        self.texts["table.txt"] = PRINTED.format(times="Mean TPOT (ms): 10.00").encode()
        self.texts["requests.jsonl"] = "\n".join(aiperf_request(i / 4, 900.0) for i in range(30)).encode()

    def case(self, random: Random) -> bytes:
        name = random.choice(list(self.texts))
        return name.encode() + b"\n" + mutated_text(self.texts[name], random, list(self.texts.values()))

    def check(self, case: bytes) -> None:
        name, _, content = case.partition(b"\n")
        if name.decode(errors="replace") not in self.texts:
            raise SkippedError
        self.path = self.folder / name.decode()
        super().check(content)


class OwnSteps(FolderFiles):
    """Whole steps that vLLM's bench and aisimulate wrote."""

    name = "steps.files"

    def write(self, root: Path) -> None:
        cases = [of_steps.case(name, requests, 5e3) for name, requests in of_steps.STEPS.items()]
        of_steps.written(root, cases)
        table = of_steps.table_of(root, lambda *_: 1.0)
        # its digest would refuse every change
        table.with_suffix(".metadata.json").unlink()
        rows = [(i, 10**7 * (i + 1), 9, i % 3 == 0, 8, 5 * (i % 3 == 0), 900, 700) for i in range(90)]
        columns = (list(map(int, column)) for column in zip(*rows, strict=True))
        pa.parquet.write_table(pa.table(dict(zip(LOG_COLUMNS, columns, strict=True))), root / "log.parquet")

    def is_mutated(self, name: str) -> bool:
        return not name.endswith(".sh")

    def mutated(self, content: bytes, random: Random) -> bytes:
        if not content.startswith(b"PAR1"):
            document = json.loads(content)
            return json.dumps(mutated_tree(document, random, [document])).encode(errors="surrogatepass")
        if random.random() < 0.5:
            return mutated_bytes(content, random, self.others)
        table = pa.parquet.read_table(io.BytesIO(content))
        try:
            return parquet_bytes(mutated_table(table, random), random)
        except (pa.ArrowException, ValueError):
            return content[:-1]

    def read(self) -> None:
        given = {"gpu": "h100", "version": of_steps.VLLM}
        for name in self.wanted:
            for step in read_own_steps(self.root / name, self.root / "forward.sh", given).steps:
                all_finite([step.latency_us])
                if step.latency_us <= 0.0 or min(step.new_tokens) < 1 or min(step.context_len) < 0:
                    raise Wrong(f"a step of {step.latency_us} us and {step.name}")


ARGUMENTS = {
    "args.txt": b"vllm serve meta-llama/Llama-3.1-8B -tp 2 --max-num-seqs 256 --max-num-batched-tokens=8192 "
    b"--kv-cache-dtype fp8 --enable-chunked-prefill --quantization fp8 --gpu-memory-utilization 0.9\n",
    "args.json": b'{"model": "meta-llama/Llama-3.1-8B", "tensor_parallel_size": 2, "max_num_seqs": 256,'
    b' "enable_chunked_prefill": true, "kv_cache_dtype": "fp8", "compilation_config": {"level": 3}}',
    "args.toml": b'model = "meta-llama/Llama-3.1-8B"\ntensor_parallel_size = 2\nmax_num_seqs = 256\n',
    "compose.yaml": COMPOSE.format(model="meta-llama/Llama-3.1-8B").encode(),
    "k8s.yaml": KUBERNETES.format(model="meta-llama/Llama-3.1-8B").encode(),
    "log.txt": LOG.encode(),
    **{
        f"{kind}.yaml": text.format(model="meta-llama/Llama-3.1-8B").encode()
        for kind, text in DOCUMENTS.items()
    },
    "drafts.txt": b"vllm serve meta-llama/Llama-3.1-8B --speculative-config "
    b'\'{"method": "mtp", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}\'\n',
    "drafts.json": b'{"model": "x", "speculative_config": {"decoding_type": "MTP", '
    b'"num_nextn_predict_layers": 2}, "accepted": "0.8,0.5", "draft": "mtp"}',
    "args.yaml": b"model: meta-llama/Llama-3.1-8B\ntensor-parallel-size: 2\nenable-chunked-prefill: true\n",
}


class EngineArguments(Target):
    """How an engine was started: a command line or a file of flags. A case is the file's name and content."""

    name = "engine.arguments"
    is_bytes = True
    ci_cases = 600

    def case(self, random: Random) -> bytes:
        name = random.choice(list(ARGUMENTS))
        return name.encode() + b"\n" + mutated_text(ARGUMENTS[name], random, list(ARGUMENTS.values()))

    def check(self, case: bytes) -> None:
        name, _, content = case.partition(b"\n")
        if name not in [known.encode() for known in ARGUMENTS]:
            raise SkippedError
        path = self.folder / name.decode()
        path.write_bytes(content)
        read_engine_arguments(path, {"gpu": "h100", "engine": "vllm", "version": "0.24.0"})


TARGETS = [
    ConfiguratorPackages, VidurProfiles, LlmServingSimProfiles, Trees, ServingRows, OwnRuns, OtherRuns,
    OwnSteps, EngineArguments,
]  # fmt: skip
