"""``fastroof models``: the models known by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import typer

from fastroof.cli.options import Json
from fastroof.cli.output import print_json, print_table

__all__ = ["register"]

EPILOG: Final = """\b
JSON: a list with one object a model, its sizes (name, architecture, num_layers, hidden, intermediate,
num_q_heads, num_kv_heads, head_dim, vocab, tie_embeddings, qkv_bias, o_bias, mlp_bias, qk_norm,
sliding_window, max_position, torch_dtype) and num_parameters.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("models", epilog=EPILOG)(models)


def models(as_json: Json = False) -> None:
    """List the models known by name.

    --model also takes the Hugging Face id of one of them, or the path of any config.json of these families.
    """
    from fastroof import load_model, model_names
    from fastroof.models import DenseModel

    specs = [DenseModel.of(load_model(name)) for name in model_names()]
    if as_json:
        print_json([{**asdict(spec), "num_parameters": spec.num_parameters} for spec in specs])
        return
    columns = (
        "model", "parameters", "layers", "hidden", "MLP width", "heads (Q-KV-dim)", "vocabulary",
        "max context",
    )  # fmt: skip
    rows = [
        (
            spec.name,
            f"{spec.num_parameters / 1e9:.1f} B",
            str(spec.num_layers),
            str(spec.hidden),
            str(spec.intermediate),
            f"{spec.num_q_heads}-{spec.num_kv_heads}-{spec.head_dim}",
            f"{spec.vocab:,}",
            f"{spec.max_position:,}",
        )
        for spec in specs
    ]
    print_table(columns, rows, left=("model",))
