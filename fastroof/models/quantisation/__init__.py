"""Quantised checkpoints: the format of each module of a model."""

from __future__ import annotations

from fastroof.models.quantisation.checkpoint_formats import (
    QUANTISATION_KEYS,
    quantisation_of,
    quantised,
    read_hf_quant,
)

__all__ = ["QUANTISATION_KEYS", "quantisation_of", "quantised", "read_hf_quant"]
