"""The longest context of a config.json, and the warning of commands beyond it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fastroof
from fastroof import ModelError, load_model, model_names
from fastroof.cli import app
from fastroof.models.named import preset_config
from tests.command_line import good

QWEN = {**preset_config("qwen3-8b"), "max_position_embeddings": 40960}


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        ({}, 40960),
        ({"rope_scaling": None}, 40960),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 163840),
        # as Qwen's cards have it, and vLLM derives it
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
            131072,
        ),
        # as DeepSeek's files have it: the positions count the scaling already
        ({"rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 1024}}, 40960),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 102400),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 81920),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            40960,
        ),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}, 40960),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 40960),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}}, 81920),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e30}}, 2**31 - 1),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, 2**31 - 1),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 5e-324}}, 40960),
    ],
)
def test_scaling_stretches_the_positions(scaling: dict[str, Any], tokens: int) -> None:
    assert load_model({**QWEN, **scaling}).max_position == tokens


@pytest.mark.parametrize("factor", ["4", True, 0, -1.0, float("nan"), float("inf")])
def test_an_invalid_factor_is_refused(factor: Any) -> None:
    with pytest.raises(ModelError, match="rope_scaling: field factor must be a number above 0"):
        load_model({**QWEN, "rope_scaling": {"rope_type": "yarn", "factor": factor}})
    with pytest.raises(ModelError, match="field rope_scaling must be an object"):
        load_model({**QWEN, "rope_scaling": [factor]})


def test_presets_have_their_positions() -> None:
    for name in model_names():
        config = preset_config(name)
        own = config.get("text_config", config).get("max_position_embeddings")
        assert own is None or load_model(name).max_position == own


def words(*command: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, command)
    return done.exit_code, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "beyond", "within"),
    [
        (("step", "--decode"), "1x4097", "1x4096"),
        (("step", "--prefill"), "97@4000", "96@4000"),
        (("serving", "--osl", "97", "--clients", "1", "--isl"), "100,4000", "100,3999"),
        (("simulate", "--rate", "1", "--num-requests", "5", "--osl", "97", "--isl"), "4000", "3999"),
    ],
)
def test_commands_warn_in_one_line_beyond_the_context(
    command: tuple[str, ...], beyond: str, within: str
) -> None:
    first, *rest = command
    wanted = (first, "--model", "llama-2-7b", "--json", *rest)
    code, err = words(*wanted, beyond)
    assert code == 0
    assert err == (
        "fastroof: warning: a request of 4,097 tokens is longer than the context of llama-2-7b, 4,096 "
        "(max_position_embeddings, with rope scaling): engines refuse it\n"
    )
    assert words(*wanted, within) == (0, "")


@pytest.mark.slow
def test_the_scaling_of_a_config_is_what_commands_go_by(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({**preset_config("llama-2-7b"), "rope_scaling": {"type": "linear", "factor": 2.0}})
    )
    assert words("step", "--model", str(path), "--decode", "1x8192") == (0, "")
    code, err = words("step", "--model", str(path), "--decode", "1x8193")
    assert code == 0
    assert "a request of 8,193 tokens" in err


@pytest.mark.slow
def test_best_counts_what_is_beyond_the_context(h100: fastroof.Tables, tmp_path: Path) -> None:
    spec = tmp_path / "my.toml"
    spec.write_text('models = ["llama-2-7b"]\ntp = [1]\nisl = 4000\nosl = 500\nclients = 1\n')
    done = good("best", str(spec))
    assert "of 1 candidates (deployments at a load) qualifies: beyond the model's context (1)" in done
