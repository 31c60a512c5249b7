"""Which formats' blocks of latent attention a plan takes whole, as they were measured, and which by parts."""

from __future__ import annotations

from typing import Final

from fastroof.plan.options import PlanOptions
from fastroof.tables import Tables

__all__ = ["whole_blocks"]

BLOCKS: Final = ("mla_module_decode", "mla_module_prefill")
PARTS: Final = ("mla_decode", "mla_prefill", "mla_bmm")


def whole_blocks(options: PlanOptions, tables: Tables | None) -> tuple[str, ...]:
    """Formats of projections whose blocks are taken whole.

    Where the engine's profile says whole, those of which blocks over prompts and decodes were measured with
    the plan's cache and found sound: the engine's own, or another's that stand for them. Where no parts were
    measured, whatever formats blocks have.

    Parameters
    ----------
    options : PlanOptions
        Checked, and of a model.
    tables : Tables or None
        In the engine's order; None for the datasheet model, which knows parts alone.

    Returns
    -------
    tuple of str
        Sorted.

    Notes
    -----
    vLLM 0.24.0's blocks of decodes hold 35 to 60 us of host time on five GPUs. On public runs of Kimi-K2.5
    with vLLM, TPOT of the kernels alone is off by 18 % on H200 (45 runs) and 38 % on B300 (22) with them, by
    5.5 and 7.4 % with the parts, and by 4.5 and 6.2 % with TensorRT-LLM's blocks in their place. Beside a
    cache in fp8 on Hopper the parts are farther off: there SGLang's kernel takes three times its own one for
    bf16 (64 sequences of 2,048).
    """
    if tables is None or not all(name in tables.measured.tables for name in BLOCKS):
        return ()
    if not all(name in tables.measured.tables for name in PARTS):
        formats = ({str(key[0]) for key in tables.every_key(name)} for name in BLOCKS)
    elif options.runtime.kernels.latent_attention == "whole":
        formats = (_sound_formats(tables, name, options.kv_dtype) for name in BLOCKS)
    else:
        return ()
    return tuple(sorted(set.intersection(*formats)))


def _sound_formats(tables: Tables, operator: str, kv_dtype: str) -> set[str]:
    """Formats of which some source has sound blocks with a cache."""
    found = set()
    for table in tables.candidates(operator):
        keys = [key for key in tables.keys_of(table) if key[1] == kv_dtype]
        found |= {str(key[0]) for key in tables.sound_keys(table, keys)}
    return found
