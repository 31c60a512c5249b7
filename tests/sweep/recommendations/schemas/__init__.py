"""Schemas of the objects in manifests, by release: what of them manifests use, closed to all other fields.

``kubernetes-RELEASE.json`` is written from Kubernetes' own definitions by ``python -m`` of this package.
``dynamo-RELEASE.json`` has what the kubebuilder markers of the operator's Go types require, of which its CRD
is made; a pod in it is one of Kubernetes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

HERE = Path(__file__).parent


@cache
def _validators() -> dict[tuple[str, str], jsonschema.protocols.Validator]:
    files = [json.loads(path.read_text("utf-8")) for path in HERE.glob("*.json")]
    shared = {"$defs": {name: one for file in files for name, one in file.get("$defs", {}).items()}}
    kinds = [one for file in files for one in file["kinds"]]
    return {
        (one["apiVersion"], one["kind"]): jsonschema.Draft202012Validator(shared | one["schema"])
        for one in kinds
    }


def check_object(value: dict[str, Any]) -> None:
    """Assert that an object is one that the schema of its kind takes."""
    _validators()[value["apiVersion"], value["kind"]].validate(value)
