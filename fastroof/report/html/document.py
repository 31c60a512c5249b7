"""One self-contained HTML document: a template, assets, plotly.js and data, written whole or not at all."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, Final

from fastroof.errors import FastroofError
from fastroof.whole_files import check_file_place, write_output

__all__ = ["checked_page_path", "embedded_json", "need_plotly", "write_page"]

_SUFFIXES: Final = (".html", ".htm")

_ESCAPES: Final = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
"""Signs that end a script or start a comment in HTML, or end a line in JavaScript."""


def checked_page_path(output: str | Path) -> Path:
    """Return where a page can be written to, before any time goes into what it will be.

    Raises
    ------
    FastroofError
        If it does not end in .html, or there is no place for a file.
    """
    output = Path(output)
    if output.suffix.lower() not in _SUFFIXES:
        raise FastroofError(f"output {output} must end in .html")
    check_file_place(output, f"output {output}")
    return output


def need_plotly() -> str:
    """Return the source of plotly.js, as it can stand in a script element.

    Raises
    ------
    FastroofError
        If plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "plotly":
            raise
        raise FastroofError("the report needs plotly: pip install fastroof[report]") from None
    # inside a script, where only a string could hold it, and there both spellings are one
    return str(get_plotlyjs()).replace("</script", "<\\/script").replace("<!--", "<\\!--")


def embedded_json(document: Any) -> str:
    r"""Write a JSON document that can stand in an HTML script element, whatever its texts are.

    Examples
    --------
    >>> embedded_json("</script>")
    '"\\u003c/script\\u003e"'
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPES)


def write_page(
    output: Path,
    template: str,
    *,
    heading: str,
    subtitle: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    document: Any,
) -> int:
    """Write a page.

    Parameters
    ----------
    output : Path
        The page; a file of that name is replaced when all of it is there.
    template : str
        Asset with the places of the rest.
    heading, subtitle : str
        Texts, whatever they hold.
    styles, scripts : sequence of str
        Assets, in order.
    document : dict
        The data that the scripts draw.

    Returns
    -------
    int
        Its size, B.

    Raises
    ------
    FastroofError
        If plotly is not installed, or the page cannot be written.
    """
    page = Template(_asset(template)).substitute(
        title=html.escape(heading),
        subtitle=html.escape(subtitle),
        css="\n".join(_asset(name) for name in styles),
        data=embedded_json(document),
        plotly_js=need_plotly(),
        script="\n".join(_asset(name) for name in scripts),
    )
    content = page.encode("utf-8", "replace")
    write_output(output, content, "output")
    return len(content)


def _asset(name: str) -> str:
    return (resources.files("fastroof.report.html") / "assets" / name).read_text(encoding="utf-8")
