"""Roofline V2's model and hardware dicts, checked key by key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.checks import is_number, is_whole_number, shown, whole_number
from fastroof.errors import FastroofError, GpuError, ModelError, PlanError
from fastroof.units import TB, TFLOP

__all__ = ["NO_EXPERTS", "Hardware", "ModelSizes", "checked_tp", "refuse_infinite"]


LARGEST: Final = 2**31
"""Of sizes."""

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")
NO_EXPERTS: Final = (
    "rooflines V1 and V2 have no experts: a layer is seven dense GEMMs, all of whose weights every step reads"
)


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that roofline V2 reads; head_dim is always hidden_size / num_heads."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    bytes_per_param: float

    @property
    def head_dim(self) -> int:
        """Width of one head, whatever a config's own head_dim says."""
        return self.hidden_size // self.num_heads

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        """(k, n) of the GEMMs of a layer: q and o, k and v, gate and up, down."""
        h, kv = self.hidden_size, self.num_kv_heads * self.head_dim
        return (h, h), (h, kv), (h, self.intermediate_size), (self.intermediate_size, h)

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's seven GEMMs."""
        q, k, gate, down = (k * n for k, n in self.gemms)
        return 2 * q + 2 * k + 2 * gate + down

    @property
    def weight_bytes(self) -> float:
        """Weights of all layers, without embeddings and LM head."""
        return float(self.num_layers * self.layer_weights * self.bytes_per_param)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Read a model_config dict."""
        keys = _Keys("model_config", config)
        for name in EXPERTS:
            if keys.config.get(name):
                keys.wrong.append(f"{name} is {shown(keys.config[name], 20)}: {NO_EXPERTS}")
        layers = keys.integer("num_hidden_layers")
        hidden = keys.integer("hidden_size")
        heads = keys.integer("num_attention_heads")
        kv_heads = keys.integer("num_key_value_heads", default=heads)
        ff = keys.integer("intermediate_size", default=4 * hidden)
        width = keys.number("bytes_per_param", above=0.0)
        if not keys.wrong and hidden % heads:
            keys.wrong.append(
                f"hidden_size must be a multiple of num_attention_heads, got {hidden} and {heads}"
            )
        keys.refuse(ModelError)
        return cls(layers, hidden, heads, kv_heads, ff, width)


@dataclass(frozen=True)
class Hardware:
    """What roofline V2 reads of a GPU."""

    peak_flops_per_s: float
    peak_bytes_per_s: float
    bandwidth_factor: float
    layer_overhead_us: float

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """What is reached of the peak bandwidth."""
        return self.peak_bytes_per_s * self.bandwidth_factor

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Hardware:
        """Read a hardware dict."""
        keys = _Keys("hardware", config)
        peak = keys.number("TFlopsPeak", above=0.0) * TFLOP
        bandwidth = keys.number("BwPeakTBs", above=0.0) * TB
        # 0 means: not given
        factor = keys.number("bwEfficiencyFactor", default=0.0) or 1.0
        overhead = keys.number("perLayerOverhead", default=0.0)
        keys.refuse(GpuError)
        return cls(peak, bandwidth, factor, overhead)


def checked_tp(tp: Any) -> int:
    """Check a tensor-parallel size."""
    checked = whole_number("tp", tp, error=PlanError)
    if checked > LARGEST:
        raise PlanError(f"tp must be at most 2**31, got {shown(checked)}")
    return checked


def refuse_infinite(*times: Floats) -> None:
    """Refuse constants with which steps take no finite time."""
    if not all(np.isfinite(one).all() for one in times):
        raise PlanError(
            "model_config, hardware or what is fitted leaves steps no finite time: check their units"
        )


class _Keys:
    """Values of a dict, and what is wrong with them: all of it is told at once."""

    def __init__(self, name: str, config: Any) -> None:
        self.name = name
        self.given = config
        self.config: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
        self.wrong: list[str] = []

    def integer(self, key: str, default: int | None = None) -> int:
        def fits(value: Any) -> bool:
            return is_whole_number(value, most=LARGEST)

        return int(self._value(key, default, fits, "a whole number of at least 1 and at most 2**31"))

    def number(self, key: str, above: float | None = None, default: float | None = None) -> float:
        def read(value: Any) -> bool:
            return is_number(value) and bool(value >= 0.0 if above is None else value > above)

        need = "a finite number of at least 0" if above is None else f"a finite number above {above:g}"
        return float(self._value(key, default, read, need))

    def _value(self, key: str, default: Any, fits: Callable[[Any], bool], need: str) -> Any:
        value = self.config.get(key)
        if default is not None and (value is None or (is_number(value) and value == 0)):
            return default
        if value is not None and fits(value):
            return value
        given = "it is missing" if key not in self.config else f"got {shown(value)}"
        self.wrong.append(f"{key} must be {need}, {given}")
        return 1

    def refuse(self, error: type[FastroofError]) -> None:
        if not isinstance(self.given, Mapping):
            raise error(f"{self.name} must be a dict, got {shown(self.given)}")
        if self.wrong:
            raise error(f"{self.name}: {'; '.join(self.wrong)}")
