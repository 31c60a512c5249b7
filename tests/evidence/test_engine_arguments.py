"""How an engine was started: command lines and files come down to one, and what contradicts is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fastroof.config.gpu import load_gpu
from fastroof.engines.launch.platforms import dynamo_engine
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.engine_arguments import EngineArguments, read_engine_arguments
from fastroof.evidence.engine_flags import ENGINE_FLAGS
from fastroof.evidence.speculative_flags import DraftFlags
from fastroof.models import Layout
from tests.engines.arguments import recorded
from tests.engines.arguments.passed import MODULES, ONE

LLAMA = "meta-llama/Llama-3.1-70B-Instruct"
NEWEST = "the newest is assumed"


def started(tmp_path: Path, command: str, name: str = "serve.txt", **given: Any) -> EngineArguments:
    path = tmp_path / name
    path.write_text(command)
    return read_engine_arguments(path, {"gpu": "h100"} | given)


def test_vllm(tmp_path: Path) -> None:
    engine = started(
        tmp_path,
        "export HF_HOME=/x\n# as started\nVLLM_USE_V1=1 vllm serve "
        + LLAMA
        + " --tensor-parallel-size 4 \\\n"
        "  --kv-cache-dtype fp8 --max-num-batched-tokens=16384 --max-num-seqs 256 "
        "--gpu-memory-utilization 0.95 "
        "--port 8000 | tee log\n",
        version="0.15.1",
    )
    assert (engine.engine, engine.version, engine.model) == ("vllm", "0.15.1", LLAMA)
    assert (engine.dtype, engine.kv_dtype, engine.layout) == ("bf16", "fp8", Layout(4))
    schedule = engine.profile.scheduling
    assert (schedule.max_num_batched_tokens, schedule.max_num_seqs) == (16384, 256)
    assert engine.warnings == ()


def test_vllm_in_a_container(tmp_path: Path) -> None:
    engine = started(
        tmp_path,
        "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.15.1 --model Qwen/Qwen3-30B-A3B -tp 2 -dp 2 "
        "--enable-expert-parallel --no-enable-chunked-prefill",
    )
    assert engine.version == "0.15.1"
    assert engine.layout == Layout(2, dp=2, ep=4)
    assert not engine.profile.scheduling.chunked_prefill


@pytest.mark.parametrize(
    "ranks",
    [
        "--tp-size 8 --attn-dp-size 4",
        "--tensor-parallel-size 8 --attention-data-parallel-size 4",
        "--tp 8 --dp 4 --enable-dp-attention",
        "--tp-size 8 --data-parallel-size 4 --enable-dp-attention",
    ],
)
def test_both_spellings_of_ranks_that_share_experts(tmp_path: Path, ranks: str) -> None:
    engine = started(tmp_path, f"sglang serve deepseek-ai/DeepSeek-R1 {ranks} --ep-size 8")
    assert engine.layout == Layout(2, dp=4, ep=8)
    assert engine.model == "deepseek-ai/DeepSeek-R1"


def test_ranks_are_given_once(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="--attn-dp-size 4 and --dp-size 2: SGLang takes one of them"):
        started(tmp_path, "sglang serve deepseek-ai/DeepSeek-R1 --tp 8 --dp 2 --attn-dp-size 4")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_all_or_no_spellings_of_an_option_are_known(engine: str) -> None:
    flags = ENGINE_FLAGS[engine]
    for record in recorded(engine):
        if record.command not in ("vllm serve", "sglang serve"):
            continue
        for name, option in record.options.items():
            others = [one for one in option.also if not one.startswith("--no-")]
            assert {flags.knows(one) for one in (name, *others)} in ({True}, {False}), (record.release, name)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("split", [(4, 1, 1, 1), (2, 2, 1, 1), (1, 1, 8, 8), (2, 1, 4, 8)])
def test_fastroofs_own_commands_are_read_back(
    tmp_path: Path, engine: str, split: tuple[int, int, int, int]
) -> None:
    tp, pp, dp, ep = (1, 1, 8, 8) if engine == "trtllm" and split[2] > 1 else split
    wanted = dataclasses.replace(
        ONE, model="deepseek-ai/DeepSeek-R1", tp=tp, pp=pp, dp=dp, ep=ep, has_experts=True,
        dtype="fp8_block", checkpoint_dtype="fp8_block",
    )  # fmt: skip
    worker = dynamo_engine(engine)
    assert worker is not None
    commands = {release: MODULES[engine].server(wanted, release) for release in MODULES[engine].RELEASES}
    for release, command in {**commands, "": worker.worker(wanted)}.items():
        (tmp_path / "engine.yaml").write_text(json.dumps(command.config))
        text = command.shell("engine.yaml" if command.config else "")
        back = started(tmp_path, text, version=release or None)
        assert back.engine == engine
        assert back.layout == Layout(tp, pp=pp, dp=dp, ep=ep), (release, text)
        limits = back.profile.scheduling
        assert limits.max_num_batched_tokens == wanted.max_num_batched_tokens
        assert not any("unknown flags" in one for one in back.warnings)


def test_sglang_with_attention_by_ranks(tmp_path: Path) -> None:
    engine = started(
        tmp_path,
        "python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 --tp 8 --ep 8 --dp 8 "
        "--enable-dp-attention --chunked-prefill-size 16384 --cuda-graph-bs 1 2 4",
    )
    assert (engine.engine, engine.dtype, engine.layout) == ("sglang", "fp8_block", Layout(1, dp=8, ep=8))
    # SGLang divides it by the ranks
    assert engine.profile.scheduling.max_num_batched_tokens == 16384 // 8


def test_trtllm_with_its_options(tmp_path: Path) -> None:
    options = {
        "command": "trtllm-serve nvidia/Llama-3.1-8B-Instruct-FP8 --tp_size 2 --max_num_tokens 8192",
        "kv_cache_config": {"dtype": "fp8", "free_gpu_memory_fraction": 0.9},
        "enable_chunked_prefill": True,
        "gpu": "h200",
    }
    (tmp_path / "a.json").write_text(json.dumps(options))
    engine = read_engine_arguments(tmp_path / "a.json")
    assert (engine.gpu, engine.engine, engine.dtype, engine.kv_dtype) == ("h200", "trtllm", "fp8", "fp8")
    assert engine.profile.scheduling.chunked_prefill
    options |= {"enable_attention_dp": True, "moe_expert_parallel_size": 2}
    (tmp_path / "a.json").write_text(json.dumps(options))
    assert read_engine_arguments(tmp_path / "a.json").layout == Layout(1, dp=2, ep=2)


def test_files_agree_with_the_command(tmp_path: Path) -> None:
    command = f"vllm serve {LLAMA} --tensor-parallel-size 4 --kv-cache-dtype fp8"
    own = started(tmp_path, command, version="0.15.1")
    toml = f'engine = "vllm"\nmodel = "{LLAMA}"\ntensor-parallel-size = 4\nkv_cache_dtype = "fp8"\n'
    yaml = f"engine: vllm\nmodel: {LLAMA}\ntp: 4\nkv_dtype: fp8\n"
    assert started(tmp_path, toml, "a.toml", version="0.15.1") == own
    assert started(tmp_path, yaml, "a.yaml", version="0.15.1") == own
    listed = json.dumps({"command": command.split()})
    assert started(tmp_path, listed, "a.json", version="0.15.1") == own


CONFIG = f"model: {LLAMA}\ntensor-parallel-size: 4\nkv-cache-dtype: fp8\nenable-expert-parallel: false\n"
COMPOSE = """
services:
  db: {{image: postgres:16, command: postgres -c fsync=off}}
  vllm:
    image: vllm/vllm-openai:v0.15.1
    command: >
      --model {model} --tensor-parallel-size 4
      --kv-cache-dtype fp8
"""
KUBERNETES = """
kind: Service
spec: {{ports: [{{port: 8000}}]}}
---
kind: Deployment
spec: {{template: {{spec: {{containers: [{{image: "vllm/vllm-openai:v0.15.1", command: [bash, -c],
  args: ["vllm serve {model} -tp=4 --kv-cache-dtype fp8"]}}]}}}}}}
"""
LOG = (
    "INFO 03-17 11:29:48 [api.py:1] vLLM API server version 0.15.1\n"
    f"INFO 03-17 11:29:48 [utils.py:238] non-default args: {{'model_tag': '{LLAMA}', 'model': '{LLAMA}', "
    "'tensor_parallel_size': 4, 'kv_cache_dtype': 'fp8'}\n"
)


@pytest.mark.parametrize(
    ("name", "content", "version"),
    [
        ("config.yaml", CONFIG, ""), ("compose.yaml", COMPOSE.format(model=LLAMA), "0.15.1"),
        ("k8s.yml", KUBERNETES.format(model=LLAMA), "0.15.1"), ("log.txt", LOG, "0.15.1"),
    ],
)  # fmt: skip
def test_files_that_start_vllm_agree_with_its_command(
    tmp_path: Path, name: str, content: str, version: str
) -> None:
    command = f"vllm serve {LLAMA} --tensor-parallel-size 4 --kv-cache-dtype fp8"
    own = started(tmp_path, command, **{"version": version} if version else {})
    # with the engine in the file, given, or as a fallback
    for read in (started(tmp_path, content, name), started(tmp_path, content, name, engine="vllm")):
        assert dataclasses.replace(read, warnings=()) == dataclasses.replace(own, warnings=())
    (tmp_path / name).write_text(content)
    read = read_engine_arguments(tmp_path / name, {"gpu": "h100"}, engine="vllm")
    assert dataclasses.replace(read, warnings=()) == dataclasses.replace(own, warnings=())
    assert [NEWEST in warning for warning in own.warnings] == [True] * (not version)
    if name == "config.yaml":
        assert "it is vllm, the only one with these flags" in started(tmp_path, content, name).warnings[0]


RAY = """
kind: RayService
spec:
  serveConfigV2: |
    applications:
    - args:
        llm_configs:
        - model_loading_config: {{model_id: mine, model_source: {model}}}
          accelerator_type: H100
          engine_kwargs: {{tensor_parallel_size: 4, kv_cache_dtype: fp8}}
"""
KAITO = """
kind: Workspace
resource: {{instanceType: standard_nd96isr_h100_v5}}
inference: {{preset: {{name: {model}}}, config: c}}
---
kind: ConfigMap
data:
  inference_config.yaml: |
    vllm: {{tensor-parallel-size: 4, kv-cache-dtype: fp8}}
"""
KSERVE = """
kind: InferenceService
spec: {{predictor: {{model: {{modelFormat: {{name: huggingface}}, args: [--model_name=m, "--model_id={model}",
  --tensor-parallel-size=4, --kv-cache-dtype=fp8]}}}}}}
---
kind: LLMInferenceServiceConfig
"""
LLM_SERVICE = """
kind: LLMInferenceService
spec:
  model: {{uri: "hf://{model}", name: m}}
  parallelism: {{tensor: 4}}
  template:
    containers: [{{name: main, env: [{{name: VLLM_ADDITIONAL_ARGS, value: --kv-cache-dtype fp8}}]}}]
"""
LLM_D = """
modelArtifacts: {{uri: "hf://{model}", name: m}}
decode:
  parallelism: {{tensor: 4, data: 1}}
  containers: [{{name: vllm, image: "ghcr.io/llm-d/llm-d-cuda:v0.5.0", modelCommand: vllmServe,
    args: [--kv-cache-dtype=fp8]}}]
prefill: {{create: false}}
"""
DYNAMO = """
kind: DynamoGraphDeployment
spec:
  components:
  - name: Frontend
    podTemplate: {{spec: {{containers: [{{name: main, args: [python3 -m dynamo.frontend]}}]}}}}
  - name: worker
    podTemplate:
      spec:
        containers:
        - {{name: main, env: [{{name: M, value: {model}}}], command: [/bin/sh, -c],
            args: ["python3 -m dynamo.vllm --model $(M) -tp 4 --kv-cache-dtype fp8"]}}
"""
DOCUMENTS = {
    "ray": RAY,
    "kaito": KAITO,
    "kserve": KSERVE,
    "llmisvc": LLM_SERVICE,
    "llmd": LLM_D,
    "dynamo": DYNAMO,
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_documents_that_start_vllm_agree_with_its_command(tmp_path: Path, kind: str) -> None:
    own = started(tmp_path, f"vllm serve {LLAMA} -tp 4 --kv-cache-dtype fp8", version="0.15.1")
    read = started(tmp_path, DOCUMENTS[kind].format(model=LLAMA), "a.yaml", version="0.15.1")
    assert read == own


def test_what_a_document_lacks_is_named(tmp_path: Path) -> None:
    nothing = "apiVersion: v1\nkind: Service\nspec: {}\n"
    sharing = "prefill: {create: true}"
    no_gpu = RAY.replace("accelerator_type: H100", "").format(model=LLAMA)
    for content, given, words in (
        (nothing, {}, "'Service' without an engine: expected a container that starts one, or Ray Serve LLM"),
        (KAITO.format(model=""), {}, "does not name the model; add inference.preset.name of kaito or give"),
        (no_gpu, {"gpu": None}, "does not name the gpu; add accelerator_type of Ray Serve LLM or give --gpu"),
        (LLM_D.format(model=LLAMA).replace("prefill: {create: false}", sharing), {}, "by separate engines"),
        ("a: " + "[" * 99 + "]" * 99, {}, "more than 64 nested"),
        ("a: &a {b: 1}\n" + "".join(f"c{i}: {{<<: *a}}\n" for i in range(40)), {}, "or merged ones"),
        ("a: " + "1:" * 60 + "1", {}, "a number of more than 100 digits"),
        (RAY.format(model=LLAMA) + "x: [" + "1," * 100_001 + "]", {}, "more than 100,000 values"),
    ):
        with pytest.raises(FastroofError) as error:
            started(tmp_path, content, "a.yaml", **given)
        assert words in str(error.value)
    other = KAITO.replace("nd96isr_h100", "nc80adis_h100").format(model=LLAMA)
    assert "kaito is h100_nvl; h100 is used" in " ".join(started(tmp_path, other, "a.yaml").warnings)


def test_flags_that_change_steps_keep_runs_from_fits(tmp_path: Path) -> None:
    for flags, changing in (
        ("--cpu-offload-gb 0 --decode-context-parallel-size 1", ()),
        ("--cpu-offload-gb 8 -dcp 2 --enforce-eager", ("--cpu-offload-gb", "-dcp", "--enforce-eager")),
    ):
        assert started(tmp_path, f"vllm serve {LLAMA} {flags}").changing == changing


def test_a_synthetic_acceptance_length_is_read(tmp_path: Path) -> None:
    drafts: dict[str, Any] = {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
    }
    drafts["synthetic_acceptance_length"] = 2.8
    command = f"vllm serve {LLAMA} --speculative-config '{json.dumps(drafts)}'"
    engine = started(tmp_path, command, version="0.33.0")
    assert (engine.accepted, engine.warnings) == (2.8, ())
    with pytest.raises(TableError, match=r"accepted is 2\.8 in .* and 2 in the options"):
        started(tmp_path, command, accepted="2")


def test_an_ambiguous_engine_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(
        TableError, match="does not name the engine; add it to the file or give --engine vllm"
    ):
        started(tmp_path, f"model = '{LLAMA}'\ntp-size = 4", "a.toml")
    own = started(tmp_path, f"model = '{LLAMA}'\ntp-size = 4", "a.toml", engine="trtllm")
    assert (own.engine, own.layout) == ("trtllm", Layout(4))
    two = COMPOSE.format(model=LLAMA).replace("postgres:16", "vllm/vllm-openai:v0.11.0")
    with pytest.raises(TableError, match="starts 2 engines; give the command line of one"):
        started(tmp_path, two, "a.yaml")


def test_a_dotted_flag_names_its_engine(tmp_path: Path) -> None:
    flags = {"model": LLAMA, "version": "0.15.1", "compilation-config": {"mode": 3}}
    assert started(tmp_path, json.dumps(flags), "engine_args.json").engine == "vllm"


def test_a_file_that_a_flag_names_is_read_too(tmp_path: Path) -> None:
    command = f"trtllm-serve {LLAMA} --tp_size 2 --extra_llm_api_options /code/more.yaml"
    with pytest.raises(
        TableError, match=r"/code/more\.yaml has more flags and was not found; put it next to"
    ):
        started(tmp_path, command)
    (tmp_path / "more.yaml").write_text("kv_cache_config: {dtype: fp8}\nenable_chunked_prefill: true\n")
    engine = started(tmp_path, command)
    assert (engine.kv_dtype, engine.profile.scheduling.chunked_prefill) == ("fp8", True)
    assert [NEWEST in warning for warning in engine.warnings] == [True]
    (tmp_path / "more.yaml").write_text("speculative_config: {decoding_type: MTP}\n")
    with pytest.raises(TableError, match="speculative decoding: the number of draft tokens is missing"):
        started(tmp_path, command)
    (tmp_path / "more.yaml").write_text(
        "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 2}\n"
    )
    assert started(tmp_path, command).drafts == DraftFlags(2, "mtp")


STARTS = {
    "vllm": "vllm serve",
    "sglang": "python -m sglang.launch_server --model",
    "trtllm": "trtllm-serve",
}
SMALL = "meta-llama/Llama-3.2-1B"
MTP_OF_VLLM = (
    f"vllm serve {LLAMA} --speculative-config.method mtp --speculative-config.num_speculative_tokens 3"
)


@pytest.mark.parametrize(
    ("engine", "flags", "drafts"),
    [
        ("vllm", "--speculative-config.method mtp --speculative-config.num_speculative_tokens 3", (3, "mtp")),
        ("vllm", '-sc \'{"method": "ngram", "num_speculative_tokens": 4}\'', (4, "none")),
        ("vllm", "--spec-method eagle3 --spec-model x/y --spec-tokens 2", (2, "mtp")),
        (
            "vllm",
            f'--speculative-config \'{{"model": "{SMALL}", "num_speculative_tokens": 5, '
            '"draft_tensor_parallel_size": 2}\'',
            (5, SMALL, 2),
        ),
        (
            "sglang",
            "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 4",
            (3, "mtp"),
        ),
        ("sglang", "--speculative-algorithm NGRAM --speculative-num-draft-tokens 9", (8, "none")),
        (
            "sglang",
            f"--speculative-algorithm STANDALONE --speculative-draft-model-path {SMALL} "
            "--speculative-num-steps 2",
            (2, SMALL),
        ),
    ],
)
def test_drafts_are_read_from_flags(
    tmp_path: Path, engine: str, flags: str, drafts: tuple[int, str, int]
) -> None:
    found = started(tmp_path, f"{STARTS[engine]} {LLAMA} {flags}").drafts
    assert found is not None
    assert (found.num_draft_tokens, found.draft, found.tp) == (*drafts, 0)[:3]
    assert [words.partition(": ")[2][:27] for words in found.notes] == (
        ["its EAGLE drafter is timed a"[:27]] if "eagle3" in flags else []
    )


def test_options_name_drafts_that_no_flag_names(tmp_path: Path) -> None:
    given = {"num_draft_tokens": 3, "accepted": "auto", "draft": "mtp"}
    found = started(tmp_path, f"vllm serve {LLAMA}", **given)
    assert (found.drafts, found.accepted) == (DraftFlags(3, "mtp"), "auto")
    assert started(tmp_path, f"vllm serve {LLAMA}", num_draft_tokens=3, accepted="0.8,0.5,0.2").accepted == (
        0.8, 0.5, 0.2,
    )  # fmt: skip
    # an option sets what flags cannot
    unknown = f"vllm serve {LLAMA} --spec-method medusa --spec-tokens 3"
    with pytest.raises(TableError, match="drafts by medusa are not modelled; give --draft"):
        started(tmp_path, unknown)
    assert started(tmp_path, unknown, draft="mtp").drafts == DraftFlags(3, "mtp")
    with pytest.raises(TableError, match=r"num_draft_tokens is 3 in .* and 4 in the options"):
        started(tmp_path, f"vllm serve {LLAMA} --spec-method mtp --spec-tokens 3", num_draft_tokens=4)
    (note,) = started(tmp_path, f"{MTP_OF_VLLM} --speculative-config.quantization fp8").drafts.notes
    assert "flags of drafts that are not modelled: quantization" in note
    of_model = {"num_draft_tokens": 3, "draft": f"{SMALL},tp=2"}
    assert started(tmp_path, f"vllm serve {LLAMA}", **of_model).drafts == DraftFlags(3, SMALL, 2)
    with pytest.raises(TableError, match="takes tp=, as MODEL,tp=2; got 'dtype=fp8'"):
        started(tmp_path, f"vllm serve {LLAMA}", num_draft_tokens=3, draft=f"{SMALL},dtype=fp8")
    with pytest.raises(TableError, match="accepted needs num_draft_tokens"):
        started(tmp_path, f"vllm serve {LLAMA}", accepted="2.5")
    with pytest.raises(FastroofError, match="accepted needs a number, several with commas, or auto"):
        started(tmp_path, f"vllm serve {LLAMA}", num_draft_tokens=3, accepted="much")


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("vllm", "--speculative-config.method mtp"),
        ("vllm", "--speculative_config.method=mtp"),
        ("vllm", '-sc \'{"method": "mtp"}\''),
        ("vllm", "-sc '{}'"),
        ("vllm", "-sc '[3]'"),
        ("vllm", "--spec-tokens 3"),
        ("vllm", "--speculative-config"),
        ("vllm", "--num-speculative-tokens 3"),
        ("vllm", "--spec-method mtp --spec-tokens 0"),
        ("vllm", "--spec-method dflash --spec-tokens 3"),
        ("sglang", "--speculative-algorithm EAGLE"),
        ("sglang", "--speculative-num-steps 3"),
        ("sglang", "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-adaptive"),
        ("sglang", "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 4"),
        ("sglang", "--speculative-algorithm EAGLE --speculative-num-draft-tokens 1"),
        ("trtllm", "--speculative_config.decoding_type MTP"),
    ],
)
def test_a_speculative_run_is_never_taken_for_a_plain_one(tmp_path: Path, engine: str, flags: str) -> None:
    with pytest.raises(TableError, match=r"serve.txt: speculative decoding"):
        started(tmp_path, f"{STARTS[engine]} {LLAMA} {flags}")
    # whatever the engine is, also where nothing names it
    flag = flags.replace("=", " ").split()[0].lstrip("-")
    for document in ({flag: "mtp"}, {"more": 1, flag.partition(".")[0]: {"method": "mtp"}}):
        with pytest.raises(TableError, match="speculative decoding"):
            started(tmp_path, json.dumps({"model": LLAMA, **document}), "a.json")
    none = "--speculative-config null" if engine == "vllm" else ""
    (warning,) = started(tmp_path, f"{STARTS[engine]} {LLAMA} {none}").warnings
    assert NEWEST in warning


@pytest.mark.parametrize(
    ("words", "chunks", "seqs"),
    [
        ("--enable-chunked-prefill", True, 64),
        ("--enable-chunked-prefill True", True, 64),
        ("--enable-chunked-prefill False", False, 64),
        ("--no-enable-chunked-prefill", False, 64),
        ("--no-enable-chunked-prefill false", True, 64),
    ],
)
def test_a_switch_may_have_a_value(tmp_path: Path, words: str, chunks: bool, seqs: int) -> None:
    engine = started(tmp_path, f"vllm serve {LLAMA} {words} --max-num-seqs {seqs}", version="0.15.1")
    schedule = engine.profile.scheduling
    assert (schedule.chunked_prefill, schedule.max_num_seqs) == (chunks, seqs)
    assert engine.warnings == ()


def test_a_word_after_a_switch_is_not_its_value(tmp_path: Path) -> None:
    """Any other word after a switch is overlooked: only a truth value belongs to it."""
    engine = started(tmp_path, f"vllm serve {LLAMA} --enable-chunked-prefill 0.5 --max-num-seqs 64")
    assert engine.profile.scheduling.chunked_prefill


def test_a_custom_dtype(tmp_path: Path) -> None:
    command = f"vllm serve {LLAMA}"
    assert started(tmp_path, command, dtype="auto").dtype == "bf16"
    assert started(tmp_path, command, dtype="fp8").dtype == "fp8"
    with pytest.raises(TableError, match=r"dtype must be auto or one of bf16, .*, got 'int3'"):
        started(tmp_path, command, dtype="int3")


def test_a_refusal_of_a_long_value_is_short(tmp_path: Path) -> None:
    options = {"engine": "vllm", "model": LLAMA, "tp": 2, "kv_dtype": list(range(5000))}
    with pytest.raises(TableError) as error:
        started(tmp_path, json.dumps(options), "a.json")
    assert "'[0, 1, 2, 3, " in str(error.value)
    assert len(str(error.value).replace(str(tmp_path), "")) < 400


def test_runs_without_a_version_are_taken_as_the_newest_with_a_warning(tmp_path: Path) -> None:
    engine = started(tmp_path, f"vllm serve {LLAMA}")
    assert (engine.version, engine.profile.name) == ("", "vllm")
    (words,) = engine.warnings
    assert "does not name the version of vllm: the newest is assumed, profile vllm >=0.33 (not " in words
    assert started(tmp_path, f"vllm serve {LLAMA}", version="0.11.2").warnings == ()


SGLANG = f"python -m sglang.launch_server --model-path {LLAMA} --tp 4"


@pytest.mark.parametrize(
    ("flags", "version", "is_captured", "has_pauses"),
    [
        ("", "0.5.9", False, True),
        ("", "0.5.14", True, True),
        ("--enable-piecewise-cuda-graph", "0.5.9", True, True),
        ("--disable-piecewise-cuda-graph", "0.5.14", False, True),
        ("--disable-cuda-graph", "0.5.14", False, True),
        ("--cuda-graph-backend-prefill disabled", "0.5.18", False, True),
        ("--cuda-graph-backend-prefill breakable --enable-lora", "0.5.16", True, True),
        ("--enable-lora", "0.5.14", False, True),
        ("--lora-paths a=b", "0.5.14", False, True),
        ("--enable-lora", "0.5.18", True, True),
        ("--enable-hierarchical-cache", "0.5.14", False, True),
        ("--cpu-offload-gb 0", "0.5.14", True, True),
        ("--cpu-offload-gb 8", "0.5.14", False, True),
        ("--disaggregation-mode prefill", "0.5.14", False, True),
        ("--disaggregation-mode null --moe-a2a-backend none", "0.5.14", True, True),
        ("--moe-a2a-backend deepep", "0.5.14", False, True),
        ("--speculative-algorithm EAGLE --speculative-num-draft-tokens 4", "0.5.14", False, True),
        ("--enable-flashinfer-allreduce-fusion", "0.5.14", True, False),
    ],
)
def test_flags_of_sglang_decide_what_its_host_launches(
    tmp_path: Path, flags: str, version: str, is_captured: bool, has_pauses: bool
) -> None:
    profile = started(tmp_path, f"{SGLANG} {flags}", version=version).profile
    graphs = [one for one in profile.kernels.prefill_graphs if not one.is_optional]
    assert (bool(graphs), profile.costs.kernel_us > 0.0) == (is_captured, has_pauses)
    assert profile.scheduling.async_scheduling


@pytest.mark.parametrize(
    ("flags", "overlaps"),
    [("", False), ("--disable-radix-cache", True), ("--mamba-scheduler-strategy extra_buffer", True)],
)
def test_flags_of_sglang_decide_whether_steps_of_states_overlap(
    tmp_path: Path, flags: str, overlaps: bool
) -> None:
    profile = started(tmp_path, f"{SGLANG} {flags}", version="0.5.9").profile
    hybrid = profile.of_plan("Qwen3NextForCausalLM", load_gpu("h100"), has_states=True)
    assert hybrid.scheduling.async_scheduling == overlaps


def test_partly_modelled_flags_of_sglang_are_named_too(tmp_path: Path) -> None:
    engine = started(tmp_path, f"{SGLANG} --disable-cuda-graph --disable-overlap-schedule", version="0.5.14")
    (words,) = engine.warnings
    assert words.endswith("not modelled: --disable-cuda-graph")
    assert not engine.profile.scheduling.async_scheduling
    assert not engine.profile.scheduling.hides_host
    with pytest.raises(
        TableError, match=r"prefill graphs 'eager' are unknown; valid are disabled, breakable"
    ):
        started(tmp_path, f"{SGLANG} --cuda-graph-backend-prefill eager")


def test_flags_that_are_not_represented_are_named(tmp_path: Path) -> None:
    command = f"vllm serve {LLAMA} --frobnicate 3 --enforce-eager --dtype float16"
    engine = started(tmp_path, command, version="1.0")
    unknown, overlooked, half = engine.warnings
    assert unknown.endswith("ignored: --frobnicate")
    assert overlooked.endswith("not modelled: --enforce-eager")
    assert "float16" in half


@pytest.mark.parametrize(
    ("command", "given", "words"),
    [
        (f"vllm serve {LLAMA} -tp 4 --tensor-parallel-size 8", {}, "tp is 4 in"),
        (f"vllm serve {LLAMA} -tp 4", {"tp": 8}, "tp is 4 in"),
        (f"vllm serve {LLAMA}", {"engine": "sglang"}, "engine is vllm in"),
        (f"vllm serve {LLAMA} --model other", {}, "model is"),
        (f"vllm serve {LLAMA} -tp four", {}, "tp must be a whole number"),
        (f"vllm serve {LLAMA} -tp", {}, "-tp needs a value"),
        (f"vllm serve {LLAMA} --kv-cache-dtype int3", {}, "'int3' is not modelled"),
        (f"vllm serve {LLAMA} --dtype float32", {}, "'float32' is not modelled"),
        (f"vllm serve {LLAMA} --quantization magic", {}, "quantization 'magic'"),
        (f"vllm serve {LLAMA} --speculative-config {{}}", {}, "speculative decoding"),
        ("vllm serve --port 80", {}, "does not name the model"),
        (f"ollama run {LLAMA}", {}, "no engine command"),
        (f"vllm serve {LLAMA} 'x", {}, "not a command line"),
        (f"vllm serve {LLAMA} && trtllm-serve {LLAMA}", {}, "starts trtllm and vllm"),
        ("python -m sglang.launch_server --model-path x --tp 8 --dp 3 --enable-dp-attention", {}, ""),
        (f"vllm serve {LLAMA}", {"speed": 3}, "'speed' is not a setting"),
        ("", {}, "no engine command"),
    ],
)
def test_contradictory_and_missing_values_are_refused(
    tmp_path: Path, command: str, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(FastroofError) as error:
        started(tmp_path, command, **given)
    assert words in str(error.value)


def test_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"vllm serve {LLAMA}")
    with pytest.raises(TableError, match="give --gpu h100"):
        read_engine_arguments(tmp_path / "a.txt")
