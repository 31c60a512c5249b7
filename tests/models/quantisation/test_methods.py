"""Every way of quantising a checkpoint: which modules it puts into which format, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from fastroof.errors import ModelError, UnsupportedModelError
from fastroof.models import LayerGroup, LayerKind, ModelSpec
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.mlp import GatedMlp
from fastroof.models.quantisation import quantisation_of, quantised

ATTENTION = GroupedQueryAttention(32, 8, 128)
DENSE = LayerKind(ATTENTION, GatedMlp(8192))
EXPERTS = LayerKind(ATTENTION, RoutedExperts(64, 8, 1024, 2048), "experts")
ALL_DENSE = ("qkv", "o", "gate_up", "down")
ALL_EXPERTS = ("qkv", "o", "experts", "shared_gate_up", "shared_down")

FLOAT8 = {"num_bits": 8, "type": "float"}
INT8 = {"num_bits": 8, "type": "int"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16}


def model(*kinds: LayerKind) -> ModelSpec:
    groups = tuple(LayerGroup(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))
    return ModelSpec("m", "MForCausalLM", 4096, 32000, False, 8192, "bfloat16", groups)


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


METHODS = {
    "fp8 dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8", 0.0),
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", 0.0),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block", 4 / 128**2),
    "fp8 rows": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8", 0.0),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        "int4_wo",
        2.5 / 128,
    ),
    "gptq 4": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, "int4_wo", 2.5 / 32),
    "gptq 8": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8_wo", 0.0),
    "w4a16": (compressed(INT4, None), "int4_wo", 2 / 128),
    "w4a8": (compressed(INT4, FLOAT8), "w4afp8", 2 / 128),
    "w8a8 fp8": (compressed(FLOAT8 | {"strategy": "channel"}, FLOAT8), "fp8", 0.0),
    "w8a8 fp8 blocks": (
        compressed(FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}, FLOAT8),
        "fp8_block",
        4 / 128**2,
    ),
    "w8a8 int8": (compressed(INT8, INT8), "int8", 0.0),
    "nvfp4": (compressed(FLOAT4, FLOAT4), "nvfp4", 0.0),
    "nvfp4 weights": (compressed(FLOAT4, None), "nvfp4_wo", 0.0),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 0.0),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "nvfp4", 0.0),
    "modelopt int4": ({"quant_algo": "W4A16_AWQ", "group_size": 128}, "int4_wo", 2 / 128),
    "modelopt w4a8": ({"quant_algo": "W4A8_AWQ", "group_size": 128}, "w4afp8", 2 / 128),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_puts_all_modules_but_the_head_into_its_format(method):
    config, dtype, scale_bytes = METHODS[method]
    made = quantised(model(DENSE, EXPERTS), config)
    assert made.checkpoint.dtype == dtype
    assert made.checkpoint.head_dtype == "bf16"
    assert dict(made.checkpoint.scale_bytes).get(dtype, 0.0) == pytest.approx(scale_bytes)
    assert [dict(kind.formats) for kind in made.kinds] == [
        dict.fromkeys(ALL_DENSE, dtype),
        dict.fromkeys(ALL_EXPERTS, dtype),
    ]


def test_the_two_kinds_of_fp8_differ_by_block_size_alone():
    base = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    tensor = quantised(model(DENSE), base).checkpoint
    block = quantised(model(DENSE), base | {"weight_block_size": [128, 128]}).checkpoint
    assert (tensor.dtype, block.dtype) == ("fp8", "fp8_block")
    assert tensor.method == "fp8, one scale per tensor, dynamic"
    assert block.method == "fp8, blocks of 128 x 128, dynamic"


def test_mxfp4_is_of_experts_alone():
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    made = quantised(model(EXPERTS), config)
    assert made.kinds[0].formats == (("experts", "mxfp4"),)
    assert made.checkpoint.dtype == "mxfp4"


def test_layers_that_are_excluded_become_a_kind_of_their_own():
    config = {
        "quant_method": "fp8",
        "ignored_layers": ["model.layers.0.mlp.down_proj", "model.layers.2", "lm_head"],
    }
    made = quantised(model(DENSE, DENSE, DENSE, DENSE), config)
    assert [(group.count, dict(group.kind.formats)) for group in made.layers] == [
        (1, dict.fromkeys(("qkv", "o", "gate_up"), "fp8")),
        (2, dict.fromkeys(ALL_DENSE, "fp8")),
        (1, {}),
    ]
    assert len({kind.name for kind in made.kinds}) == 3


def test_layers_are_taken_in_the_order_of_the_model():
    kinds = [DENSE, EXPERTS, DENSE, EXPERTS]
    config = {"quant_method": "fp8", "ignored_layers": ["model.layers.1.self_attn"]}
    made = quantised(model(*kinds), config, layer_kinds=kinds)
    counts = {group.kind.name: group.count for group in made.layers}
    assert counts == {"dense": 2, "experts, fp8 experts shared_gate_up shared_down": 1, "experts, fp8": 1}


def test_expressions_and_globs_exclude_modules():
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"]
    made = quantised(model(DENSE, EXPERTS), compressed(INT4, None, ignore=ignore))
    assert [kind.formats for kind in made.kinds] == [(), (("experts", "int4_wo"),)]
    globs = {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.0*", "*.mlp.shared_expert.*"]}
    made = quantised(model(DENSE, EXPERTS), globs)
    assert [dict(kind.formats) for kind in made.kinds] == [
        {},
        dict.fromkeys(("qkv", "o", "experts"), "nvfp4"),
    ]


@pytest.mark.parametrize("stack", ["model.", "model.language_model.", "language_model.model.", ""])
def test_a_wrapped_model_quantises_the_same_modules(stack):
    config = {"quant_algo": "FP8", "exclude_modules": [f"{stack}layers.1.self_attn*", f"{stack}layers.1.mlp"]}
    made = quantised(model(DENSE, DENSE), config)
    assert [len(kind.formats) for kind in made.kinds] == [4, 0]


def test_a_router_that_is_excluded_takes_no_projection_with_it():
    config = {"quant_method": "fp8", "modules_to_not_convert": ["gate", "e_score_correction_bias"]}
    made = quantised(model(DENSE, EXPERTS), config)
    assert [len(kind.formats) for kind in made.kinds] == [len(ALL_DENSE), len(ALL_EXPERTS)]


def test_modules_that_are_listed_one_by_one_have_their_own_format():
    config = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "quantized_layers": {
            "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        },
    }
    made = quantised(model(EXPERTS), None, {"quantization": config})
    assert made.kinds[0].formats == (("qkv", "fp8"), ("experts", "nvfp4"))
    assert made.checkpoint.dtype == "nvfp4"
    assert made.checkpoint.kv_dtype == "fp8"
    assert made.checkpoint.head_dtype == "nvfp4_wo"


def test_groups_that_list_modules_come_before_one_of_all():
    config = compressed(FLOAT4, FLOAT4)
    config["config_groups"]["group_1"] = {
        "weights": FLOAT8,
        "input_activations": FLOAT8,
        "targets": ["re:.*self_attn.*"],
    }
    made = quantised(model(DENSE), config)
    assert dict(made.kinds[0].formats) == {"qkv": "fp8", "o": "fp8", "gate_up": "nvfp4", "down": "nvfp4"}


def test_gptq_has_rules_by_expression_and_may_quantise_the_head():
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "lm_head": True,
        "dynamic": {r"-:.*\.self_attn\..*": {}, r"+:.*down_proj": {"bits": 8}},
    }
    made = quantised(model(DENSE), config)
    assert dict(made.kinds[0].formats) == {"gate_up": "int4_wo", "down": "int8_wo"}
    assert made.checkpoint.head_dtype == "int4_wo"


@pytest.mark.parametrize("scheme", [FLOAT8, "FP8"])
def test_a_cache_in_fp8(scheme):
    assert quantised(
        model(DENSE), compressed(FLOAT8, FLOAT8, kv_cache_scheme=scheme)
    ).checkpoint.kv_dtype == ("fp8")


def test_a_cache_alone():
    made = quantised(model(DENSE), {"quant_algo": None, "kv_cache_quant_algo": "FP8"})
    assert (made.checkpoint.dtype, made.checkpoint.kv_dtype) == ("bf16", "fp8")
    assert made.kinds[0].formats == ()


def test_modelopts_own_file_counts_more_than_the_copy_in_a_config():
    own = {"quantization": {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": "FP8"}}
    config = {"quant_algo": "NVFP4", "quant_method": "modelopt"}
    assert quantised(model(DENSE), config, own).checkpoint.dtype == "nvfp4_wo"
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert quantised(model(DENSE), fp8, own).checkpoint.dtype == "fp8_block"


def test_a_model_that_is_not_quantised_is_itself():
    spec = model(DENSE)
    assert quantised(spec, None) is spec
    assert quantisation_of({"quantization_config": None, "text_config": {}}) is None


def test_a_family_may_have_names_of_its_own():
    config = {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.0.mlp*"]}
    names = {"experts": ("experts",)}
    made = quantised(model(EXPERTS), config, module_names=names)
    assert dict(made.kinds[0].formats) == dict.fromkeys(("qkv", "o", "experts"), "nvfp4")


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes.*int4_wo"),
        ({"quant_method": "fp9"}, "quant_method 'fp9' is not one of"),
        ({"bits": 4}, "quant_method is missing"),
        ({"quant_method": "fp8", "weight_block_size": [1, 32]}, "blocks of 128 x 128"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size must be two"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "dynamic"),
        ({"quant_method": "fp8", "activation_scheme": "lazy"}, "activation_scheme"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers must be a list"),
        ({"quant_method": "fp8", "ignored_layers": ["re:("]}, "not a regular expression"),
        ({"quant_method": "fp8", "ignored_layers": ["re:(a+)+b"]}, "repeats a repetition"),
        ({"quant_method": "fp8", "ignored_layers": ["re:" + ".*" * 9 + "x"]}, "more than 5 repetitions"),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers"]}, "applies to no module"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "weights in 3 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 100}, "group_size must be one of"),
        ({"quant_method": "gptq", "bits": "4"}, "field bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["-:a"]}, "field dynamic"),
        (compressed(INT4, INT8), "int4 with inputs in int8"),
        (compressed(FLOAT8, None), "float8 with inputs in 16 bits"),
        (compressed(FLOAT8, FLOAT8, kv_cache_scheme={"num_bits": 8, "type": "int"}), "KV cache is in INT8"),
        (compressed(FLOAT8, FLOAT8, sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "config_groups"),
        ({"quant_algo": "MXFP6"}, "quant_algo 'MXFP6' has no measured kernels"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, "quantized_layers"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "must be 16"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, "kv_dtype="),
    ],
)
def test_unmeasured_formats_are_refused_with_the_field(config, what):
    with pytest.raises(ModelError, match=what) as refused:
        quantised(model(DENSE, EXPERTS), config)
    assert str(refused.value).startswith("model config: quantization_config")


def test_what_is_known_but_not_measured_is_unsupported():
    with pytest.raises(UnsupportedModelError):
        quantised(model(DENSE), {"quant_method": "bitsandbytes"})


def test_kinds_of_layers_that_do_not_fit_the_model_are_refused():
    with pytest.raises(ModelError, match="got 1 layer kinds, expected 2"):
        quantised(model(DENSE, DENSE), {"quant_method": "fp8"}, layer_kinds=[DENSE])


@pytest.mark.parametrize(
    ("method", "is_static"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, True),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, False),
        ({"quant_algo": "FP8"}, True),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, False),
        (compressed(FLOAT8, FLOAT8 | {"dynamic": False}), True),
        (compressed(FLOAT8, FLOAT8 | {"dynamic": True}), False),
        (compressed(FLOAT4, FLOAT4 | {"dynamic": "local"}), False),
    ],
)
def test_scales_of_fp8_inputs_are_known_or_looked_for(method, is_static):
    assert quantised(model(DENSE), method).checkpoint.static_scales is is_static
