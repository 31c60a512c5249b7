"""Plain English: none of the phrases that .github/STYLE.md replaces is in texts that people read."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
REPLACED = {
    r"one's own": "your own, custom",
    r"in the mean": "mean, on average",
    r"would do": "valid, use X instead",
    r"(?<!there )(?:is|are) none": "is not an X, is invalid",
    r"[Bb]eside (?:it|them)": "next to it, compared with it",
    r"where (?:there (?:is|are) none|nobody)": "if missing, by default",
    r"written whole": "written atomically",
    r"lent|loans?|lenders?": "donor",
    r"[Ss]omebody(?:'s)?": "the user, another program",
    r"would rather|may be had|(?:is|are) to be": "prefers, is available, must be",
    r"[Ss]teps? of decodes": "decode step",
    r"give or take": "±",
    r"what there should be": "metric to maximize",
}
PHRASE = re.compile("|".join(rf"(?P<p{i}>\b(?:{phrase})\b)" for i, phrase in enumerate(REPLACED)))
GLOSSARY = CHECKOUT / ".github" / "STYLE.md"  # it quotes them


@functools.cache
def texts() -> list[Path]:
    folders = ("fastroof", "kernels_bench", "benchmarks", ".github", "bench_data")
    sources = [path for folder in folders for path in (CHECKOUT / folder).rglob("*") if path.is_file()]
    readmes = [path for path in sources if path.suffix in (".py", ".md", ".html", ".js")]
    own = [path for path in readmes if path != GLOSSARY and not {"vendored", "plotly"} & set(path.parts)]
    return sorted([CHECKOUT / "README.md", *own])


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in texts()}), ids=lambda f: str(f.relative_to(CHECKOUT))
)
def test_no_replaced_phrase_is_left(folder: Path) -> None:
    found = []
    for path in texts():
        if path.parent != folder:
            continue
        # a phrase may be broken over two lines, of a comment or of adjacent strings
        for match in PHRASE.finditer(text := path.read_text(encoding="utf-8")):
            line = text.count("\n", 0, match.start()) + 1
            instead = list(REPLACED.values())[int(match.lastgroup[1:])]  # type: ignore[index]
            found.append(f"{path.relative_to(CHECKOUT)}:{line}: {match.group()!r}: write {instead}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["a plan of one's own", "a step of decodes", "in the mean, 3 us", "8 would do"]
)
def test_a_replaced_phrase_is_found(text: str) -> None:
    assert PHRASE.search(text)


WORDS = r"(?:told|tells|said|says|asked|asks|lent|lends?|loans?|lenders?|fed_back)"
"""Parts of identifiers that name no quantity; other parts of the dialect (seen, kept, whole) may be apt."""
SPOKEN = re.compile(rf"(?:^|_){WORDS}(?:_|$)")
MAYBE = re.compile(rf"{WORDS}\w*\)?(?: *[=:,(\]]| in )")
LEFT = {"ASKED", "asked_seqs", "asked_speculation", "drafts_said"}
UNREAD = ("fastroof/backends/serve/", "fastroof/ui/", "fastroof/cli/size.py", "benchmarks/soak_")


def test_no_identifier_of_the_product_is_a_word_that_says_nothing() -> None:
    found = []
    for path in texts():
        place = path.relative_to(CHECKOUT).as_posix()
        if path.suffix != ".py" or place.startswith(UNREAD):
            continue
        text = path.read_text(encoding="utf-8")
        if not MAYBE.search(text):
            continue  # most files: parsing takes long
        for node in ast.walk(ast.parse(text)):
            name = getattr(node, "name", None) or getattr(node, "arg", None)
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.id if isinstance(node, ast.Name) else node.attr
            if isinstance(name, str) and name not in LEFT and SPOKEN.search(name.lower()):
                found.append(f"{place}:{node.lineno}: {name}")
    assert not found, "\n".join(found)
