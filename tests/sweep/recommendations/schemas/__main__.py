"""``python -m tests.sweep.recommendations.schemas DEFINITIONS RELEASE MANIFEST ..``: store what is used.

DEFINITIONS is ``_definitions.json`` of a release's strict schemas in the wheel of kubernetes-validate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.sweep.recommendations.schemas import HERE

DEFINITIONS, RELEASE, *MANIFESTS = sys.argv[1:]
KNOWN = json.loads(Path(DEFINITIONS).read_text("utf-8"))["$defs"]
KEPT = (
    "type",
    "enum",
    "oneOf",
    "format",
    "pattern",
    "minimum",
    "maximum",
    "additionalProperties",
    "required",
)
POD = "io.k8s.api.core.v1.PodTemplateSpec"


def pruned(schema: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """Return the part of a schema that some values use; one of pods is stored once."""
    if name := schema.get("$ref", "").rpartition("/")[2]:
        return {"$ref": "#/$defs/pod"} if name == POD else pruned(KNOWN[name], values)
    kept = {name: schema[name] for name in KEPT if name in schema}
    if "properties" in schema:
        names = sorted({name for value in values for name in value})
        given = {name: [value[name] for value in values if name in value] for name in names}
        kept["properties"] = {name: pruned(schema["properties"][name], given[name]) for name in names}
        kept["additionalProperties"] = False
    elif "$ref" in schema.get("additionalProperties", {}):
        inner = [one for value in values for one in value.values()]
        kept["additionalProperties"] = pruned(schema["additionalProperties"], inner)
    if "items" in schema:
        kept["items"] = pruned(schema["items"], [one for value in values for one in value])
    return kept


kinds: list[dict[str, Any]] = []
objects = [one for path in MANIFESTS for one in yaml.safe_load_all(Path(path).read_text("utf-8")) if one]
for definition in KNOWN.values():
    for kind in definition.get("x-kubernetes-group-version-kind", ()):
        called = {"apiVersion": f"{kind['group']}/{kind['version']}".lstrip("/"), "kind": kind["kind"]}
        if found := [one for one in objects if called.items() <= one.items()]:
            kinds.append({**called, "schema": pruned(definition, found)})
pods = [one["spec"]["template"] for one in objects if "template" in one.get("spec", {})]
pods += [each["podTemplate"] for one in objects for each in one.get("spec", {}).get("components", ())]
stored = {
    "source": f"kubernetes-validate {RELEASE}: kubernetes-json-schema, v{RELEASE}-local-strict",
    "licence": "Apache-2.0",
    "kinds": kinds,
    "$defs": {"pod": pruned(KNOWN[POD], pods)},
}
(HERE / f"kubernetes-{RELEASE}.json").write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
