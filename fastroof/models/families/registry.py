"""All model families by the ``model_type`` of their files: the modules of this package with ``FAMILIES``.

A new file needs no registration elsewhere.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from fastroof.errors import UnsupportedModelError
from fastroof.models import families as package
from fastroof.models.families.family import Family
from fastroof.models.hf import Fields


def _every_family() -> tuple[Family, ...]:
    names = (m.name for m in pkgutil.iter_modules(package.__path__) if not __name__.endswith(f".{m.name}"))
    modules = (importlib.import_module(f"{package.__name__}.{name}") for name in names)
    families = [family for module in modules for family in getattr(module, "FAMILIES", ())]
    return tuple(sorted(families, key=lambda family: family.name))


FAMILIES: Final = _every_family()
"""All families, in the order of their names."""

REFUSALS: Final[Mapping[str, str]] = MappingProxyType(
    {family.name: family.refusal for family in FAMILIES if family.refusal}
)
"""Why no file of a family loads yet, by its name."""

MODEL_TYPES: Final[Mapping[str, Family]] = MappingProxyType(
    dict(sorted((model_type, family) for family in FAMILIES for model_type in family.classes))
)
"""Supported ``model_type`` values and their families."""


FLAT_WRAPPERS: Final = frozenset(name for family in FAMILIES for name in family.flat_wrappers)
"""Model types whose files hold the text model's fields next to ``vision_config``."""


def _closest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message: up to three known names like an unknown one, the closest first."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""


def family_of(fields: Fields) -> tuple[Family, str]:
    """Return the family of a config.json, and the class as which it is served."""
    model_type, architectures = fields.text("model_type"), fields.texts("architectures")
    if model_type is None and architectures:
        model_types = (t for t, f in MODEL_TYPES.items() if set(f.classes[t]).intersection(architectures))
        model_type = next(model_types, None)
        if model_type is None:
            served = sorted({name for f in FAMILIES for names in f.classes.values() for name in names})
            raise UnsupportedModelError(
                f"{fields.where} has no plan yet: architectures {', '.join(architectures)} is not "
                f"supported{_closest(architectures[0], served)} (`fastroof models --support` lists what is)"
            )
    if model_type is None:
        raise fields.error("field model_type is missing, and there are no architectures")
    family = MODEL_TYPES.get(model_type)
    if family is None:
        text = fields.text_model()
        if text is not fields and text.text("model_type") in MODEL_TYPES:
            family, _ = family_of(text)
            return family, architectures[0] if architectures else family_of(text)[1]
        raise UnsupportedModelError(
            f"{fields.where} has no plan yet: model_type {model_type!r} is not supported"
            f"{_closest(model_type, MODEL_TYPES)} (`fastroof models --support` lists what is)"
        )
    classes = family.classes[model_type]
    if architectures and not set(classes).intersection(architectures):
        raise UnsupportedModelError(
            f"{fields.where} has no plan yet: architectures {', '.join(architectures)} is not "
            f"{' or '.join(classes)}"
        )
    return family, next((name for name in architectures or () if name in classes), classes[0])
