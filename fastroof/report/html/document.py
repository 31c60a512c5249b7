"""One self-contained HTML document: a template, assets, plotly.js and data, written atomically."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, Final

from fastroof.atomic_files import check_file_place, write_output
from fastroof.errors import FastroofError

_SUFFIXES: Final = (".html", ".htm")

_ESCAPES: Final = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
"""Characters that end a script or start a comment in HTML, or end a line in JavaScript."""


def checked_page_path(output: str | Path) -> Path:
    """Return the path of a page, checked to be writable before the work starts."""
    output = Path(output)
    if output.suffix.lower() not in _SUFFIXES:
        raise FastroofError(f"output {output} must end in .html")
    check_file_place(output, f"output {output}")
    return output


def plotly_js() -> str:
    """Return plotly.js with its licence, escaped for a script element."""
    folder = resources.files("fastroof.report.html") / "plotly"
    licence = (folder / "LICENSE").read_text(encoding="utf-8")
    program = (folder / "plotly-basic.min.js").read_text(encoding="utf-8")
    # in JavaScript these occur only in strings, where the escaped spelling means the same
    safe = program.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return f"/*\n{licence}*/\n{safe}"


def embedded_json(document: Any) -> str:
    r"""Return a document as JSON, escaped for an HTML script element."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPES)


def write_page(
    output: Path,
    body: str,
    *,
    heading: str,
    subtitle: str,
    scripts: Sequence[str],
    styles: Sequence[str] = (),
    document: Any,
) -> int:
    """Fill the frame of all pages, write the page atomically, and return its size in bytes."""
    page = Template(_asset("frame.html")).substitute(
        title=html.escape(heading),
        subtitle=html.escape(subtitle),
        css="\n".join(map(_asset, ("shared/base.css", "report.css", *styles))),
        body=_asset(body),
        data=embedded_json(document),
        plotly_js=plotly_js(),
        script="\n".join(map(_script, ("shared/elements.js", "shared/look.js", "page.js", *scripts))),
    )
    content = page.encode("utf-8", "replace")
    write_output(output, content, "output")
    return len(content)


def _script(name: str) -> str:
    """Return a script as a part of the page's only one, which needs neither imports nor exports."""
    return re.sub(r"^(import .*;\n|export )", "", _asset(name), flags=re.MULTILINE)


def _asset(name: str) -> str:
    return (resources.files("fastroof.report.html") / "assets" / name).read_text(encoding="utf-8")
