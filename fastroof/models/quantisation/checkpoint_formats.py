"""A model as its checkpoint stores it: the format of each module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fastroof.errors import ModelError
from fastroof.file_access import is_file
from fastroof.models.execution import Checkpoint, Formats
from fastroof.models.hf import CONFIG_FILE, Fields, read_config
from fastroof.models.layers import LayerGroup, LayerKind
from fastroof.models.layout import Layout
from fastroof.models.quantisation.methods import read_quantisation
from fastroof.models.quantisation.scheme import (
    HEAD_NAMES,
    MODULE_NAMES,
    Group,
    ModuleNames,
    Quantisation,
    layer_module_names,
)
from fastroof.models.spec import ModelSpec

QUANTISATION_KEYS: Final = ("quantization_config", "compression_config")
"""Fields of a config.json that describe how its weights are stored."""

EXPERT_DTYPE: Final = "expert_dtype"
"""Field next to it with the format of experts only, in DeepSeek-V4's files."""

_HF_QUANT_FILE: Final = "hf_quant_config.json"


def quantisation_of(config: Mapping[str, Any], where: str = "model config") -> Mapping[str, Any] | None:
    """Return the quantisation field of a config.json, or of its text model.

    Parameters
    ----------
    config : mapping
        Contents of a config.json.
    where : str
        Name of the file in errors.

    Returns
    -------
    mapping or None
        The field, including the experts' entries next to it; None if it is missing or null.

    Raises
    ------
    ModelError
        If it is not a JSON object.

    Examples
    --------
    >>> quantisation_of({"text_config": {"quantization_config": {"quant_method": "fp8"}}})
    {'quant_method': 'fp8'}
    """
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, Mapping) else {}):
        for key in QUANTISATION_KEYS:
            quantisation = holder.get(key)
            if quantisation is None:
                continue
            if not isinstance(quantisation, Mapping):
                raise ModelError(f"{where}: field {key} must be an object, got {quantisation!r}")
            return {**{key: holder[key] for key in (EXPERT_DTYPE,) if key in holder}, **quantisation}
    return None


def read_hf_quant(config_path: Path) -> Mapping[str, Any] | None:
    """Read hf_quant_config.json, which ModelOpt writes next to a config.json.

    Parameters
    ----------
    config_path : Path
        The config.json; a prefix of its name is a prefix of the other's too.

    Returns
    -------
    mapping or None
        Contents; None if the file does not exist.

    Raises
    ------
    ModelError
        If it cannot be read or is not a JSON object.
    """
    if not config_path.name.endswith(CONFIG_FILE):
        return None
    separate = config_path.with_name(config_path.name.removesuffix(CONFIG_FILE) + _HF_QUANT_FILE)
    return read_config(separate) if is_file(separate) else None


def quantised(
    spec: ModelSpec,
    quantisation: Mapping[str, Any] | None,
    hf_quant: Mapping[str, Any] | None = None,
    *,
    layer_kinds: Sequence[LayerKind] | None = None,
    module_names: ModuleNames | None = None,
    where: str = "model config",
) -> ModelSpec:
    """Return a model with the formats of its checkpoint.

    Call it last: ``quantised(spec, quantisation_of(config), hf_quant, layer_kinds=kinds)``.

    Parameters
    ----------
    spec : ModelSpec
        The model, unquantised.
    quantisation : mapping or None
        Its ``quantization_config``, see :func:`quantisation_of`.
    hf_quant : mapping, optional
        Contents of the hf_quant_config.json next to it, which takes precedence for ModelOpt
        checkpoints: ModelOpt writes it itself.
    layer_kinds : sequence of LayerKind, optional
        The kind of every layer in the model's order; by default the kinds of ``spec.layers``, group
        by group. Layers that differ only in format become separate kinds.
    module_names : mapping, optional
        Module names that differ from
        :data:`fastroof.models.quantisation.scheme.MODULE_NAMES`, by the role of their call, without the
        layer's prefix: ``{"experts": ("experts",)}``; an empty tuple: never quantised.
    where : str
        Name of the file in errors.

    Returns
    -------
    ModelSpec
        The model with ``checkpoint`` and formatted kinds; unchanged if the checkpoint is not quantised.

    Raises
    ------
    UnsupportedModelError
        If no kernel was measured for its quantisation.
    ModelError
        If a field has an unknown value, or no module is quantised.
    """
    read = _read(quantisation, hf_quant, where)
    if read is None:
        return spec
    kinds = layer_kinds
    if kinds is None:
        kinds = [group.kind for group in spec.layers for _ in range(group.count)]
    elif len(kinds) != spec.num_layers:
        raise ModelError(f"{spec.name}: got {len(kinds)} layer kinds, expected {spec.num_layers}")
    names = {**MODULE_NAMES, **(module_names or {})}
    formats_of = _FormatsOf(read, names, spec)
    formats = [formats_of.layer(number, kind) for number, kind in enumerate(kinds)]
    head = formats_of.head()
    weights = formats_of.weights
    if read.groups and not weights:
        raise ModelError(f"{where}: quantization_config: {read.method} applies to no module of {spec.name}")
    dtype = max(weights, key=lambda stored: (weights[stored], stored), default="bf16")
    checkpoint = Checkpoint(
        dtype,
        read.kv_dtype,
        read.method,
        head,
        tuple(sorted(formats_of.scale_bytes.items())),
        formats_of.static_scales == {True},
    )
    return replace(spec, layers=_grouped(kinds, formats), checkpoint=checkpoint)


def _read(
    quantisation: Mapping[str, Any] | None, hf_quant: Mapping[str, Any] | None, where: str
) -> Quantisation | None:
    separate = None if hf_quant is None else _hf_quant(hf_quant, where)
    if quantisation is None:
        return None if separate is None else read_quantisation(separate)
    method_fields = Fields(quantisation, f"{where}: quantization_config")
    method = method_fields.text("quant_method")
    if separate is None or (method is not None and not method.casefold().startswith("modelopt")):
        return read_quantisation(method_fields)
    return read_quantisation(separate)


def _hf_quant(hf_quant: Mapping[str, Any], where: str) -> Fields:
    where = f"{where}: hf_quant_config.json"
    quantisation = hf_quant.get("quantization")
    if not isinstance(quantisation, Mapping):
        raise ModelError(f"{where}: field quantization must be an object, got {quantisation!r}")
    return Fields({"quant_method": "modelopt", **quantisation}, where)


class _FormatsOf:
    """Formats of the modules of a model, and how many weights each has."""

    def __init__(self, quantisation: Quantisation, names: ModuleNames, spec: ModelSpec) -> None:
        self._quantisation, self._names, self._spec = quantisation, names, spec
        patterns = (quantisation.excluded, *(group.targets for group in quantisation.groups))
        self._differs_by_layer = any(p is not None and p.differs_by_layer for p in patterns)
        self._of_kind: dict[LayerKind, list[tuple[str, Group, int]]] = {}
        self.weights: dict[str, int] = {}
        self.scale_bytes: dict[str, float] = {}
        self.static_scales: set[bool] = set()

    def layer(self, number: int, kind: LayerKind) -> Formats:
        groups = self._of_kind.get(kind)
        if groups is None:
            groups = [
                (role, group, weights)
                for role, weights in kind.linear_weights(self._spec.hidden, Layout()).items()
                if (group := self._group_of(number, role)) is not None
            ]
            if not self._differs_by_layer:
                self._of_kind[kind] = groups
        for _, group, weights in groups:
            self._count(group, weights)
        return tuple((role, group.dtype) for role, group, _ in groups)

    def _group_of(self, number: int, role: str) -> Group | None:
        if role not in self._names:
            raise ModelError(f"{self._spec.name}: the module of {role} has no name; give it in module_names")
        names = self._names[role]
        return self._group(role, layer_module_names(number, names)) if names else None

    def head(self) -> str:
        # engines leave the head in bf16 unless it is named: it is not one of their linear layers
        group = self._group("lm_head", HEAD_NAMES)
        if group is None or group.targets is None:
            return "bf16"
        self._count(group, 0)
        return group.dtype

    def _count(self, group: Group, weights: int) -> None:
        self.weights[group.dtype] = self.weights.get(group.dtype, 0) + weights
        if group.dtype == "fp8":
            self.static_scales.add(group.static_scales)
        known = self.scale_bytes.get(group.dtype, 0.0)
        if group.scale_bytes > known:
            self.scale_bytes[group.dtype] = group.scale_bytes

    def _group(self, role: str, names: Sequence[str]) -> Group | None:
        if self._quantisation.excluded.name_any(names):
            return None
        for group in self._quantisation.groups:
            if (not group.roles or role in group.roles) and (
                group.targets is None or group.targets.name_any(names)
            ):
                return group
        return None


def _grouped(kinds: Sequence[LayerKind], formats: Sequence[Formats]) -> tuple[LayerGroup, ...]:
    """Group layers by kind and formats in order; a kind with several formats is named by them too."""
    counts: dict[tuple[LayerKind, Formats], int] = {}
    for layer in zip(kinds, formats, strict=True):
        counts[layer] = counts.get(layer, 0) + 1
    groups = []
    names = [kind.name for kind, _ in counts]
    for kind, own in counts:
        name = kind.name
        if names.count(name) > 1:
            name = f"{name}, {_formats_text(kind, own)}"
        groups.append((replace(kind, formats=own, name=name), counts[kind, own]))
    kind_names = [kind.name for kind, _ in groups]
    return tuple(
        LayerGroup(
            kind if kind_names.count(kind.name) == 1 else replace(kind, name=f"{kind.name} {number}"), count
        )
        for number, (kind, count) in enumerate(groups, 1)
    )


def _formats_text(kind: LayerKind, formats: Formats) -> str:
    stored = dict(formats)
    if not stored:
        return "bf16"
    if len(set(stored.values())) == 1:
        dtype = next(iter(stored.values()))
        modules = kind.linear_weights(1, Layout())
        return dtype if len(stored) == len(modules) else f"{dtype} {' '.join(stored)}"
    return " ".join(f"{role} {dtype}" for role, dtype in formats)
