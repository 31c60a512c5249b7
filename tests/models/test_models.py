"""Models: presets, Hugging Face configurations, what is refused and why, and tensor parallelism."""

from __future__ import annotations

import ast
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastroof.errors import ModelError, PlanError, UnsupportedModelError
from fastroof.models import DenseModel, Layout, ModelSpec, load_model
from fastroof.models.dense import DenseShard
from fastroof.models.experts import RoutedExperts
from fastroof.models.load import published_checkpoint
from fastroof.models.named import preset_config
from tests.reference.shards import changed, shard

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared"
REFERENCE = SHARED / "reference"

# Weights of the published checkpoints.
PARAMETERS = {
    "codellama-34b": 33_743_970_304,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo": 12_247_782_400,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "yi-34b": 34_388_917_248,
}


def llama(**changes: Any) -> dict[str, Any]:
    """Return a small valid llama configuration with some fields changed; ``...`` removes a field."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        **changes,
    }
    return {key: value for key, value in config.items() if value is not ...}


def family(model_type: str, **changes: Any) -> dict[str, Any]:
    architectures = {"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    named = [f"{architectures[model_type]}ForCausalLM"]
    return llama(**{"model_type": model_type, "architectures": named, "sliding_window": None, **changes})


def tensors(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Naive reference for the parameter count: every tensor of a checkpoint with its shape."""
    m = DenseModel.of(model)
    q, kv = m.num_q_heads * m.head_dim, m.num_kv_heads * m.head_dim
    found: dict[str, tuple[int, ...]] = {"embed_tokens": (m.vocab, m.hidden), "norm": (m.hidden,)}
    if not m.tie_embeddings:
        found["lm_head"] = (m.vocab, m.hidden)
    for i in range(m.num_layers):
        found[f"{i}.q"], found[f"{i}.k"], found[f"{i}.v"] = (q, m.hidden), (kv, m.hidden), (kv, m.hidden)
        found[f"{i}.o"] = (m.hidden, q)
        if m.qkv_bias:
            found[f"{i}.q.bias"], found[f"{i}.k.bias"], found[f"{i}.v.bias"] = (q,), (kv,), (kv,)
        if m.o_bias:
            found[f"{i}.o.bias"] = (m.hidden,)
        if m.qk_norm:
            found[f"{i}.q_norm"], found[f"{i}.k_norm"] = (m.head_dim,), (m.head_dim,)
        for name in ("gate", "up"):
            found[f"{i}.{name}"] = (m.intermediate, m.hidden)
            if m.mlp_bias:
                found[f"{i}.{name}.bias"] = (m.intermediate,)
        found[f"{i}.down"] = (m.hidden, m.intermediate)
        if m.mlp_bias:
            found[f"{i}.down.bias"] = (m.hidden,)
        found[f"{i}.input_norm"], found[f"{i}.post_norm"] = (m.hidden,), (m.hidden,)
    return found


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_preset_has_the_weights_of_the_checkpoint(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.num_parameters == PARAMETERS[name]
    assert model.num_parameters == sum(math.prod(shape) for shape in tensors(model).values())


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": 96},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32},
    ],
)
def test_parameters_of_variants_are_those_of_their_tensors(changes: dict[str, Any]) -> None:
    model = load_model(llama(**changes))
    assert model.num_parameters == sum(math.prod(shape) for shape in tensors(model).values())
    assert model.num_parameters != load_model(llama()).num_parameters


@pytest.mark.parametrize(
    ("given", "preset"),
    [
        ("LLAMA-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("Qwen/Qwen2.5-32B-Instruct", "qwen2.5-32b"),
        ("codellama/CodeLlama-34b-Instruct-hf", "codellama-34b"),
    ],
)
def test_hugging_face_ids_name_presets(given: str, preset: str) -> None:
    assert load_model(given) == load_model(preset)


def test_an_unknown_model_suggests_the_closest() -> None:
    with pytest.raises(ModelError, match="unknown model 'lama-2-7b'; did you mean llama-2-7b, "):
        load_model("lama-2-7b")
    # v0.1 has a sliding window and another vocabulary, so it is a preset of its own
    assert load_model("mistralai/Mistral-7B-v0.1").window == 4096


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("qwen3-5b", "did you mean qwen3-.*or give the path of a config.json"),
        ("qwen3-235b", "did you mean qwen3-235b-a22b, qwen3-235b-a22b-"),
        ("mixtral-8x9b", "did you mean mixtral-8x7b, mixtral-8x22b"),
        ("meta-llama/Llama-3.1-9B-Instruct", "did you mean llama-3.1-8b, llama-3.1-70b, "),
        ("openai/gpt-oss-240b", "did you mean gpt-oss-20b, gpt-oss-120b"),
        ("meta-llama/Llama-4-Behemoth", "did you mean llama-4-"),
        ("Mistral-Large", "did you mean mistral-7b"),
        ("nvidia/Nemotron-3-Super-12B", "did you mean nemotron-3-super-120b-a12b"),
        ("Qwen/Qwen3.5-28B", "did you mean qwen3.5-27b, "),
        # layers of Llama, whatever they were trained on
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-9B", "did you mean deepseek-r1-distill-llama-8b, "),
        # the error of a hub id has the address of its file
        (
            "nobody/Nothing-1B",
            r"or save https://huggingface.co/nobody/Nothing-1B/resolve/main/config.json as "
            r"Nothing-1B/config.json and give Nothing-1B \(--model Nothing-1B\)",
        ),
    ],
)
def test_an_unknown_model_of_a_known_family_names_what_is_missing(given: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(given)


def downloaded(hub: Path, hf_id: str, config: dict[str, Any], revision: str = "main") -> Path:
    """Files of an id as the hub's client stores them."""
    folder, commit = hub / f"models--{hf_id.replace('/', '--')}", "0123456789abcdef" * 2 + "01234567"
    blob, snapshot = folder / "blobs" / "abc", folder / "snapshots" / commit
    for made in (blob.parent, snapshot, folder / "refs"):
        made.mkdir(parents=True)
    blob.write_text(json.dumps(config), "utf-8")
    (snapshot / "config.json").symlink_to(blob)
    (folder / "refs" / revision).write_text(commit, "utf-8")
    return folder


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_an_id_that_was_downloaded_loads(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    config = {**preset_config("qwen3-8b"), "num_hidden_layers": 3}
    folder = downloaded(tmp_path / below, "nobody/Own-8B", config)
    model = load_model("nobody/Own-8B")
    assert (model.name, model.num_layers) == ("Own-8B", 3)
    assert load_model("nobody/Own-8B", name="x").name == "x"
    assert published_checkpoint("nobody/Own-8B", "bf16").name == "nobody/Own-8B"
    # a preset comes first, and other ids stay unknown
    downloaded(tmp_path / below, "Qwen/Qwen3-8B", config)
    assert load_model("Qwen/Qwen3-8B").num_layers == 36
    with pytest.raises(ModelError, match="unknown model 'nobody/Other-8B'"):
        load_model("nobody/Other-8B")
    # what is no revision leads nowhere
    for text in ("", "main", "../../../etc", "0" * 40):
        (folder / "refs" / "main").write_text(text, "utf-8")
        with pytest.raises(ModelError, match="unknown model 'nobody/Own-8B'"):
            load_model("nobody/Own-8B")


def test_a_downloaded_file_is_named_in_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    downloaded(tmp_path, "nobody/Odd", {**preset_config("qwen3-8b"), "hidden_size": 0})
    with pytest.raises(ModelError, match=r"snapshots.*config\.json: field hidden_size must be"):
        load_model("nobody/Odd")
    downloaded(tmp_path, "nobody/Branch", preset_config("qwen3-8b"), revision="dev")
    with pytest.raises(ModelError, match="unknown model"):
        load_model("nobody/Branch")


@pytest.mark.parametrize("name", ["", "\0", "x" * 5000, "../gpt"])
def test_odd_names_are_model_errors(name: str) -> None:
    with pytest.raises(ModelError, match="unknown model"):
        load_model(name)


@pytest.mark.parametrize("value", [None, 7, b"llama", ["llama-2-7b"]])
def test_invalid_names_raise_a_model_error(value: Any) -> None:
    with pytest.raises(ModelError, match="a name, a path or a mapping, got"):
        load_model(value)


def test_file_folder_and_mapping_load_alike(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama()))
    model = load_model(folder)
    assert model.name == "tiny-llama"
    assert model == load_model(folder / "config.json") == load_model(str(folder))
    assert load_model(llama(), name="tiny-llama") == model
    assert load_model(folder, name="other").name == "other"
    assert load_model(llama(_name_or_path="org/tiny")).name == "org/tiny"
    assert load_model(llama()).name == "LlamaForCausalLM"
    loose = tmp_path / "tiny.json"
    loose.write_bytes(b"\xef\xbb\xbf" + json.dumps(llama()).encode())
    assert load_model(loose).name == "tiny"
    assert DenseModel.of(model) == DenseModel(
        name="tiny-llama",
        architecture="LlamaForCausalLM",
        num_layers=4,
        hidden=512,
        intermediate=1024,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=64,
        vocab=1000,
        tie_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        max_position=8192,
        torch_dtype="bfloat16",
    )


def test_family_defaults() -> None:
    def load(config: dict[str, Any]) -> DenseModel:
        return DenseModel.of(load_model(config))

    qwen2 = load(family("qwen2"))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert not load(family("qwen2", attention_bias=False)).qkv_bias
    qwen3 = load(family("qwen3"))
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)
    assert load(family("qwen3", head_dim=None)).head_dim == 64
    assert load(llama(num_key_value_heads=...)).num_kv_heads == 8
    assert load(family("mistral", num_key_value_heads=None)).num_kv_heads == 8
    assert load(llama(model_type=...)).architecture == "LlamaForCausalLM"
    assert load(llama(torch_dtype=..., dtype="torch.float16")).torch_dtype == "float16"
    assert load(llama(torch_dtype=...)).torch_dtype is None


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (llama(), None),
        (llama(sliding_window=512), 512),
        (family("mistral"), None),
        (family("mistral", sliding_window=4096), 4096),
        (family("mistral", sliding_window=...), 4096),
        (family("mistral", sliding_window=8192), None),
        (family("mistral", sliding_window=131072), None),
        (family("qwen2", sliding_window=4096, use_sliding_window=False), None),
        (family("qwen2", sliding_window=4096), None),
        (family("qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=0), 4096),
        (family("qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=4), None),
        (family("qwen2", sliding_window=4096, use_sliding_window=True), None),
        (family("qwen3", layer_types=["full_attention"] * 4), None),
        (family("mistral", sliding_window=512, layer_types=["sliding_attention"] * 4), 512),
    ],
)
def test_sliding_window(config: dict[str, Any], window: int | None) -> None:
    assert load_model(config).window == window


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (llama(num_experts=8), "num_experts 8 means experts, which llama models do not have"),
        (llama(num_local_experts=8), "num_local_experts 8 means experts"),
        (llama(n_routed_experts=64), "n_routed_experts 64 means experts"),
        (llama(kv_lora_rank=512), "kv_lora_rank 512 means latent attention, which llama models do not"),
        (llama(index_topk=2048), "sparse attention"),
        (llama(full_attention_interval=4), "full_attention_interval 4 means linear attention, which llama"),
        (llama(layer_types=["linear_attention"] * 4), "layer_types linear_attention means linear attention"),
        (llama(layer_types=["hyena"] * 4), "hybrid attention operator .layer_types hyena"),
        (llama(attention_chunk_size=8192), "chunked attention"),
        (llama(model_type="gpt2"), "model_type 'gpt2' is not supported .`fastroof models"),
        (
            llama(model_type=..., architectures=["GPT2LMHeadModel"]),
            "GPT2LMHeadModel is not supported .`fastroof models",
        ),
        (llama(model_type="qwen9"), "model_type 'qwen9' is not supported; did you mean qwen3, "),
        (llama(architectures=["LlamaForSequenceClassification"]), "is not LlamaForCausalLM"),
        (llama(vision_config={}), "multimodal .vision_config"),
    ],
)
def test_what_a_plan_cannot_represent_is_named(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(config)


def test_zero_experts_make_a_dense_model() -> None:
    assert load_model(llama(num_experts=0, num_local_experts=None)) == load_model(llama())


REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


@pytest.mark.parametrize("field", REQUIRED)
@pytest.mark.parametrize("value", [..., None, "64", 0, -8, True, 64.0, [64], 2**31, float("nan")])
def test_a_malformed_size_names_the_field_and_the_file(field: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(llama(**{field: value})))
    with pytest.raises(ModelError, match=rf"field {field} ") as error:
        load_model(path)
    assert str(error.value).startswith(str(path))
    assert not isinstance(error.value, UnsupportedModelError)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (llama(num_key_value_heads=3), "num_attention_heads 8 does not divide by num_key_value_heads 3"),
        (llama(num_key_value_heads=16), "num_attention_heads 8 does not divide by num_key_value_heads 16"),
        (llama(num_key_value_heads="2"), "field num_key_value_heads must be a whole number"),
        (llama(num_key_value_heads=0), "field num_key_value_heads must be a whole number"),
        (family("mistral", num_key_value_heads=...), "field num_key_value_heads is missing"),
        (llama(hidden_size=510), "no head_dim, and hidden_size 510 does not divide by num_attention_heads 8"),
        (llama(head_dim=0), "field head_dim must be a whole number"),
        (llama(head_dim="128"), "field head_dim must be a whole number"),
        (llama(tie_word_embeddings="no"), "field tie_word_embeddings must be true or false, got 'no'"),
        (llama(attention_bias=1), "field attention_bias must be true or false, got 1"),
        (llama(mlp_bias=0), "field mlp_bias must be true or false, got 0"),
        (llama(torch_dtype=16), "field torch_dtype must be text, got 16"),
        (llama(model_type=["llama"]), "field model_type must be text"),
        (llama(architectures="LlamaForCausalLM"), "field architectures must be a list of names"),
        (
            llama(model_type=..., architectures=...),
            "field model_type is missing, and there are no architectures",
        ),
        (family("mistral", sliding_window="4096"), "field sliding_window must be a whole number"),
        (family("mistral", sliding_window=0), "field sliding_window must be a whole number"),
        (family("qwen2", use_sliding_window="yes"), "field use_sliding_window must be true or false"),
        (family("qwen2", max_window_layers="28"), "field max_window_layers must be a whole number"),
        (family("qwen3", layer_types=["full_attention"] * 3), "layer_types has 3 layers"),
        (family("qwen3", layer_types="full_attention"), "field layer_types must be a list of names"),
        (family("qwen3", layer_types=["sliding_attention"] * 4), "no sliding_window is set"),
        ({}, "field model_type is missing"),
    ],
)
def test_a_malformed_field_is_named(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as error:
        load_model(config)
    assert not isinstance(error.value, UnsupportedModelError)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "more than 64 nested lists"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"[1, 2]", "must hold a JSON object, got list"),
        (b"null", "must hold a JSON object, got NoneType"),
    ],
)
def test_a_file_that_is_not_a_config(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=complaint) as error:
        load_model(path)
    assert str(path) in str(error.value)


def test_missing_files(tmp_path: Path) -> None:
    for given in (tmp_path / "nothing", tmp_path, str(tmp_path / "config.json")):
        with pytest.raises(ModelError, match=r"does not exist; give a config\.json"):
            load_model(given)


def test_a_spec_changed_by_hand_is_checked_too() -> None:
    model = load_model("llama-2-7b")
    assert changed(model, num_layers=1).num_parameters < model.num_parameters
    with pytest.raises(ModelError, match="num_layers must be a whole number of at least 1, got 0"):
        changed(model, num_layers=0)
    with pytest.raises(ModelError, match="32 query heads do not divide by 5 KV heads"):
        changed(model, num_kv_heads=5)
    assert pickle.loads(pickle.dumps(model)) == model
    assert len({model, load_model("llama-2-7b")}) == 1


SCOUT = "llama-4-scout-17b-16e-instruct-fp8-dynamic"
V2_LITE = "deepseek-v2-lite"
LOADED = {
    "deepseek_v3.2": "deepseek-v3.2",
    "glm-5.2-fp8": "glm-5-fp8",
    "codellama-34b-instruct-hf": "codellama-34b",
    "llama-2-7b-hf": "llama-2-7b",
    "llama-3.1-70b-instruct": "llama-3.1-70b",
    "llama-3.1-8b-instruct": "llama-3.1-8b",
    "mistral-nemo-instruct-2407": "mistral-nemo",
    "qwen2.5-7b-instruct": "qwen2.5-7b",
    "qwen3-14b": "qwen3-14b",
    "yi-34b": "yi-34b",
    "qwen3-8B": "qwen3-8b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-30B-A3B": "qwen3-30b-a3b",
    "qwen3-235B-A22B": "qwen3-235b-a22b",
    "deepseek_v3": "deepseek-v3",
    "qwen3-next-80B-A3B": "qwen3-next-80b-a3b",
    "qwen3.5-122B-A10B": "qwen3.5-122b-a10b-fp8",
    "qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
}


def shared_configs() -> dict[str, Path]:
    if not REFERENCE.is_dir():
        pytest.skip("no shared reference data beside the checkout")
    found = {path.parent.name: path for path in REFERENCE.glob("model_configs/*/config.json")}
    found |= {
        path.name.removesuffix("_config.json"): path for path in REFERENCE.glob("hf_configs/*_config.json")
    }
    return found


def test_every_shared_config_is_expected() -> None:
    assert set(shared_configs()) == set(LOADED) | {SCOUT, V2_LITE}


def test_latent_queries_may_be_missing() -> None:
    model = load_model(shared_configs()[V2_LITE])
    # its card: 15.7 B of weights, 2.4 of them active, which leaves out the embedding and more
    assert round(model.num_parameters / 1e9, 1) == 15.7
    assert 2.4e9 <= model.active_parameters - model.vocab * model.hidden < 2.5e9
    assert model.kv_bytes_per_token(Layout(), "bf16") == 27 * 576 * 2
    weights = model.kinds[0].linear_weights(model.hidden, Layout())
    assert weights["q_down"] == 2048 * 576
    assert weights["q_up"] == 2048 * 16 * 192


def test_a_quantised_wrapper_loads_as_its_text_model() -> None:
    model = load_model(shared_configs()[SCOUT])
    assert [(group.kind.name, group.count) for group in model.layers] == [
        ("moe chunked", 36),
        ("moe full", 12),
    ]
    assert model.checkpoint.dtype == "fp8"
    assert all(dict(kind.formats)["experts"] == "fp8" for kind in model.kinds)


@pytest.mark.parametrize("name", sorted(LOADED))
def test_shared_config_equals_its_preset(name: str) -> None:
    preset, config = load_model(LOADED[name]), shared_configs()[name]
    if name == "qwen3-235B-A22B":  # that of July 2025, whose context is longer
        preset = replace(preset, max_position=262144)
    if name == "glm-5.2-fp8":  # without the fields of layers that share an index
        preset = replace(preset, max_position=1048576)
    assert load_model(config, name=preset.name) == preset


def grid_models() -> dict[str, tuple[Any, ...]]:
    path = SHARED / "gpu" / "grid_estimate.py"
    if not path.is_file():
        pytest.skip("no shared measuring grid beside the checkout")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "M":
            return {name.lower(): sizes for name, sizes in ast.literal_eval(node.value).items()}
    raise AssertionError("grid_estimate.py has no table M")


def test_presets_are_the_dense_models_of_the_measured_grid() -> None:
    dense = {name: sizes[:6] for name, sizes in grid_models().items() if not sizes[6]}
    ours = {}
    for name in dense:
        m = DenseModel.of(load_model(name))
        ours[name] = (m.num_q_heads, m.num_kv_heads, m.head_dim, m.hidden, m.intermediate, m.vocab)
    assert ours == dense


def test_shards_have_the_shapes_of_the_measured_grid() -> None:
    for name, (nh, nkv, dh, hidden, ff, vocab, _) in grid_models().items():
        if name not in PARAMETERS:
            continue
        model = load_model(name)
        for tp in (1, 2, 4, 8):
            if nh % tp:
                with pytest.raises(PlanError):
                    shard(model, tp)
                continue
            kv = max(1, nkv // tp)
            assert shard(model, tp) == DenseShard(
                num_q_heads=nh // tp,
                num_kv_heads=kv,
                intermediate=ff // tp,
                vocab_rows=math.ceil(vocab / tp / 64) * 64,
                qkv_out=(nh // tp + 2 * kv) * dh,
                o_in=nh // tp * dh,
            )
            assert model.hidden == hidden


def test_shard_by_hand() -> None:
    assert shard(load_model("llama-3.1-70b"), 8) == DenseShard(
        num_q_heads=8, num_kv_heads=1, intermediate=3584, vocab_rows=16064, qkv_out=1280, o_in=1024
    )
    # Qwen3-32B: attention is wider than the model.
    assert shard(load_model("qwen3-32b"), 1).o_in == 8192


def test_kv_heads_are_replicated_where_they_are_fewer_than_gpus() -> None:
    model = load_model(llama(num_key_value_heads=2))
    assert [shard(model, tp).num_kv_heads for tp in (1, 2, 4, 8)] == [2, 1, 1, 1]
    assert shard(model, 8).qkv_out == 3 * 64


@pytest.mark.parametrize(
    ("changes", "tp", "complaint"),
    [
        ({"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 64}, 8, "28 query.*: tp=1, 2, 4"),
        ({"num_attention_heads": 24, "num_key_value_heads": 3, "head_dim": 64}, 2, "3 KV heads nei.*: tp=1"),
        ({"intermediate_size": 1026}, 4, "MLP width of 1026 does not divide by 4; valid: tp=1, 2"),
        ({"intermediate_size": 1025, "num_attention_heads": 2}, 4, "2 query heads.*; an MLP width of 1025"),
    ],
)
def test_what_does_not_divide_is_named(changes: dict[str, Any], tp: int, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        shard(load_model(llama(**changes)), tp)


@pytest.mark.parametrize("tp", [0, -1, 3, 128, True, 2.0, "2", None])
def test_tp_is_a_power_of_two(tp: Any) -> None:
    with pytest.raises(PlanError, match="tp must be one of 1, 2, 4, 8, 16, 32, 64, got"):
        shard(load_model("llama-2-7b"), tp)


@pytest.mark.parametrize("tp", [0, -1, True, 2.0, "2"])
def test_vocab_is_padded_for_whole_gpus_only(tp: Any) -> None:
    with pytest.raises(PlanError, match="tp must be a whole number of at least 1"):
        load_model("llama-2-7b").padded_vocab(tp)


def test_padded_vocab() -> None:
    model = load_model(llama(vocab_size=1000))
    assert [model.padded_vocab(tp) for tp in (1, 2, 4, 8)] == [1024, 1024, 1024, 1024]
    assert load_model(llama(vocab_size=1025)).padded_vocab(2) == 1152
    assert load_model("llama-3.1-8b").padded_vocab(8) == 128512


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        ("llama-3.1-8b", ["32-8-128"]),
        ("deepseek-v3", ["128 MLA 512+64"] * 2),
        ("glm-5", ["64 DSA 512+64"] * 2),
        ("minimax-m3", ["64-4-128", "64-4-128 MSA"]),
        ("deepseek-v4-flash", ["64 window 512", "64 CSA 512", "64 HCA 512"]),
        ("qwen3.5-27b", ["48 GDN 128x128", "24-4-256"]),
        ("kimi-k3", ["96 KDA 128x128", "96 KDA 128x128", "96 MLA 512+64"]),
        ("nemotron-3-nano-30b-a3b", ["64 SSM 64x128", "", "32-2-128"]),
    ],
)
def test_heads_of_every_kind_of_attention_are_listed(model: str, heads: list[str]) -> None:
    assert [kind.attention.heads_text for kind in load_model(model).kinds] == heads


@pytest.mark.parametrize(
    ("layout", "elements"),
    [
        # a token of 8 experts: each reads and writes the width once, and three times its own
        (Layout(), 8 * (7168 + 3 * 2048)),
        (Layout(tp=8), 8 * (7168 + 3 * 2048 // 8)),
        # tokens of all ranks arrive, and a group of experts has its share of their rows
        (Layout(dp=8, ep=8), 8 * (7168 + 3 * 2048)),
        (Layout(dp=8, ep=4), 2 * 8 * (7168 + 3 * 2048 // 2)),
        (Layout(dp=8), 8 * 8 * (7168 + 3 * 2048 // 8)),
        (Layout(dp=32, ep=32), 32 * 7168),
    ],
)
def test_the_workspace_of_experts_is_that_of_the_tokens_of_all_ranks(layout: Layout, elements: int) -> None:
    experts = RoutedExperts(num_experts=256, topk=8, intermediate=2048, shared_intermediate=2048)
    assert experts.activation_width(7168, layout) == elements


def test_wide_shared_experts_are_the_widest_kernel() -> None:
    experts = RoutedExperts(num_experts=8, topk=1, intermediate=16, shared_intermediate=4096, latent=64)
    assert experts.activation_width(512, Layout(tp=2)) == 3 * 4096 // 2
    assert experts.activation_width(512, Layout(dp=128, ep=128)) == 3 * 4096
    assert experts.activation_width(512, Layout(dp=256, ep=256)) == 256 * 64
