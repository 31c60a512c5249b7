"""``fastroof models``: the models known by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Final

import typer

from fastroof.cli.model_support import print_support
from fastroof.cli.options import GPU_NAMES, Json
from fastroof.cli.output import print_json, print_table
from fastroof.errors import PlanError

__all__ = ["register"]

EPILOG: Final = """\b
JSON: a list with one object a model, its sizes (name, architecture, num_layers, hidden, intermediate,
num_q_heads, num_kv_heads, head_dim, vocab, tie_embeddings, qkv_bias, o_bias, mlp_bias, qk_norm,
sliding_window, max_position, torch_dtype) and num_parameters. With --support one object a model, GPU,
engine, format and layout: model, gpu, engine, dtype, tp, pp, dp, ep, moe_tp, status (measured, borrowed,
modelled or refused), why.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("models", epilog=EPILOG)(models)


def models(
    support: Annotated[
        bool, typer.Option("--support", help="Say what is measured, borrowed, modelled or refused.")
    ] = False,
    model: Annotated[
        list[str] | None, typer.Option(help="With --support: only this preset or config.json; repeatable.")
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(*GPU_NAMES, help="With --support: only this GPU; repeatable.  [default: with tables]"),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="With --support: as this runtime has it; repeatable.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="With --support: only this format, or auto; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models known by name, or what plans of them are made of.

    --model also takes the Hugging Face id of one of them, or the path of any config.json of these families.
    """
    if support:
        print_support(model or (), gpu or (), engine or (), dtype or (), as_json)
        return
    if model or gpu or engine or dtype:
        raise PlanError("--model, --gpu, --engine and --dtype choose what --support shows; give it too")
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
