"""Why a method's component differs from fastroof's: the known cause of each, as data."""

from __future__ import annotations

from typing import Final

from fastroof.compat.compare_steps import COMPONENTS, Difference, MethodTime

REPORTED_FROM: Final = 0.1
"""Differences from this share of fastroof's time on are reported."""

_NO_LM_HEAD: Final = "no LM head"
_NO_NORMS: Final = "no norms, rotary embedding, KV write or activation"
_CLASS: Final = "one efficiency and launch time for every kernel of a class"

CAUSES: Final = {
    "roofline_v1": {
        "linear": "one fitted MFU for every GEMM of a phase",
        "attention": "a fixed share of the peak, without measured kernels",
        "communication": "no all-reduce",
        "lm_head": _NO_LM_HEAD,
        "elementwise": _NO_NORMS,
        "memory": "the bytes of the whole step, at a fixed share of the bandwidth",
    },
    "roofline_v2": {
        "linear": "unfused, unsplit GEMMs over tp, at interpolated MFUs, with a floor of their bytes",
        "attention": "interpolated MFUs of the nearest measured heads; a prefill's square / 1.8",
        "communication": "no all-reduce",
        "lm_head": _NO_LM_HEAD,
        "elementwise": _NO_NORMS,
        "memory": "the bytes of the whole step, if they take longer than its FLOPs",
        "overhead": "100 us a layer over tp; the engine `kernels` has none",
    },
    "infersim": {
        "linear": "MFUs of the row below to 3 decimals, or a default; 1,024 GFLOP/s in a TFLOP/s",
        "experts": "even routing at one row's MFU, or a default; all of a GPU's experts are read; no router",
        "attention": "MFUs of one row to 3 decimals, or a default, with a floor of its KV; causal work / 1.8",
        "communication": "bytes at the link's rate without launches; one all-reduce a layer, and an exchange",
        "lm_head": _NO_LM_HEAD,
        "elementwise": _NO_NORMS,
        "overhead": "5 ms a decode step and 30 ms a prefill; the engine `kernels` has none",
    },
    "datasheet": dict.fromkeys(
        ("linear", "experts", "attention", "communication", "lm_head", "elementwise"), _CLASS
    ),
}  # fmt: skip
"""The cause of each method's difference, by component."""


def differences(own: MethodTime, other: MethodTime) -> list[Difference]:
    """Return the components in which a method differs from fastroof by more than 10 %."""
    apart_us = {name: other.components_us[name] - own.components_us[name] for name in COMPONENTS}
    return [
        Difference(other.method, name, us, CAUSES[other.method].get(name, "unexplained"))
        for name, us in apart_us.items()
        if abs(us) > REPORTED_FROM * own.components_us[name]
    ]
