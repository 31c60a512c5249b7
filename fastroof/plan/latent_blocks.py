"""Which formats' blocks of latent attention a plan takes whole, as they were measured, and which by parts."""

from __future__ import annotations

from typing import Final

from fastroof.plan.options import PlanOptions
from fastroof.tables import Tables

__all__ = ["whole_blocks"]

BLOCKS: Final = ("mla_module_decode", "mla_module_prefill")
PARTS: Final = ("mla_decode", "mla_prefill", "mla_bmm")


def whole_blocks(options: PlanOptions, tables: Tables | None) -> tuple[str, ...]:
    """Formats of projections whose blocks are taken whole."""
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
