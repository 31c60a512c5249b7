"""Writes the wheel's bill of materials (CycloneDX): what it holds of others, and what it is tested with.

Made from provenance.toml of measured sources and of shipped programs, and from the pinned requirements, so it
is made again where one of them changes; ``--check`` fails if it is not what they say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

from cyclonedx.model import ExternalReference, ExternalReferenceType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

CHECKOUT = Path(__file__).resolve().parents[1]
SBOM = CHECKOUT / ".ci/fastroof.cdx.json"
RUNTIME = CHECKOUT / ".ci/requirements/runtime.txt"


def bill() -> str:
    """Return the bill of materials, as JSON without a time or a random number, to be compared."""
    bom = Bom(components=[*data_sources(), *shipped_programs(), *requirements()])
    bom.metadata.component = Component(
        name="fastroof",
        type=ComponentType.LIBRARY,
        bom_ref="fastroof",
        licenses=[LicenseExpression("Apache-2.0 AND MIT")],
        purl=PackageURL("pypi", None, "fastroof"),
    )
    bom.register_dependency(bom.metadata.component, bom.components)
    told = json.loads(JsonV1Dot6(bom).output_as_string())
    del told["serialNumber"], told["metadata"]["timestamp"]
    return json.dumps(told, indent=1) + "\n"


def data_sources() -> list[Component]:
    """Packages whose measurements were converted into bench_data, each once."""
    places = defaultdict(list)
    for path in sorted((CHECKOUT / "bench_data").glob("*/*/provenance.toml")):
        told = tomllib.loads(path.read_text("utf-8"))
        if "package" in told:
            key = (told["package"], told["package_version"], told["licence"], told["copyright"], told["url"])
            places[key].append(path.parent.relative_to(CHECKOUT).as_posix())
    return [
        Component(
            name=name,
            version=version,
            type=ComponentType.DATA,
            bom_ref=f"data:{name}@{version}",
            licenses=[DisjunctiveLicense(id=licence)],
            copyright=owner,
            description="measured kernels, converted into fastroof/bench_data",
            purl=PackageURL("pypi", None, name, version),
            external_references=[ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(url))],
            properties=[Property(name="fastroof:folder", value=f"fastroof/{folder}") for folder in folders],
        )
        for (name, version, licence, owner, url), folders in sorted(places.items())
    ]


def shipped_programs() -> list[Component]:
    """Programs of others that are in the wheel as they were released: what its pages draw with."""
    components = []
    for path in sorted((CHECKOUT / "fastroof").rglob("provenance.toml")):
        told = tomllib.loads(path.read_text("utf-8"))
        if "package" not in told:  # the files of a new GPU
            continue
        name, version = told["package"], told["package_version"]
        folder = path.parent.relative_to(CHECKOUT).as_posix()
        components.append(
            Component(
                name=name,
                version=version,
                type=ComponentType.LIBRARY,
                bom_ref=f"shipped:{name}@{version}",
                licenses=[DisjunctiveLicense(id=told["licence"])],
                copyright=told["copyright"],
                description="in the wheel as it was released: draws the charts of pages",
                purl=PackageURL("npm", None, name, version),
                external_references=[
                    ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(told["url"]))
                ],
                properties=[
                    Property(name=f"fastroof:sha256 {folder}/{file}", value=digest)
                    for file, digest in told["files"].items()
                ],
            )
        )
    return components


def requirements() -> list[Component]:
    """What fastroof imports, none of which is in the wheel, in the versions that it is tested with."""
    told = []
    for name, version, rest in re.findall(r"^([\w.-]+)==(\S+)(.*)", RUNTIME.read_text("utf-8"), re.M):
        marker = rest.strip(" \\;")
        properties = [Property(name="fastroof:part", value="tested with, not in the wheel")]
        if marker:
            properties.append(Property(name="fastroof:environment", value=marker))
        told.append(
            Component(
                name=name,
                version=version,
                type=ComponentType.LIBRARY,
                bom_ref=f"{name}@{version}",
                purl=PackageURL("pypi", None, name, version),
                properties=properties,
            )
        )
    return told


def main() -> int:
    """Write the bill, or say whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where it would change")
    current = bill()
    if parser.parse_args().check:
        if not SBOM.is_file() or SBOM.read_text("utf-8") != current:
            print(f"{SBOM.name} is not what provenance.toml and the pins say: run .ci/sbom.py")
            return 1
        print(f"{SBOM.name} is current")
        return 0
    SBOM.write_text(current, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
