"""Plain English: texts and names have none of the phrases that .github/STYLE.md replaces."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
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
SPOKEN = {
    r"told|tells?|said|says?": "prints, reports, returns, shows",
    r"asks": "queries, requires",
    r"[Nn]obody": "none, no user, no request",
    r"[Ww]hole files": "written atomically",
    r"the net|spoil(?:s|ed|t)?": "the fuzzer, mutate",
}
"""Replaced in prose of tests and benchmarks: their comments, docstrings and messages."""
NAMED = {
    r"told|tells?|said|says?": "message, output, reported",
    r"asks?|asked": "wanted, args, call",
    r"lent|loans?|lenders?": "donor",
    r"nobody|somebody|of_others": "other_user, unmeasured",
    r"beside": "with, next_to",
    r"ones_own": "custom",
    r"in_the_mean|give_or_take": "mean",
    r"(?:is|are)_none": "invalid",
    r"(?:is|are)_no(?!_(?:more|less|worse|\w+er)_than)": "is_not, invalid",
    r"would_do|would_rather|may_be_had|(?:is|are)_to_be": "valid, must",
    r"written_whole|whole_or_not": "written_atomically",
}
"""Replaced in names that tests and benchmarks define."""
GLOSSARY = CHECKOUT / ".github" / "STYLE.md"  # it quotes them


class Table:
    """Phrases and what to write instead."""

    def __init__(self, phrases: dict[str, str], before: str = r"\b", after: str = r"\b") -> None:
        self.instead = list(phrases.values())
        self.phrase = re.compile("|".join(f"({before}(?:{phrase}){after})" for phrase in phrases))

    def findings(self, path: Path, line: int, text: str) -> list[str]:
        return [
            f"{path.relative_to(CHECKOUT)}:{line + text[: match.start()].count(chr(10))}: {match.group()!r}: "
            f"write {self.instead[(match.lastindex or 1) - 1]}"
            for match in self.phrase.finditer(text)
        ]


TEXT, PROSE = Table(REPLACED), Table(REPLACED | SPOKEN)
NAME = Table(NAMED, "(?:^|_)", "(?:_|$)")


@functools.cache
def texts() -> list[Path]:
    folders = ("fastroof", "kernels_bench", "benchmarks", ".github", "bench_data")
    sources = [path for folder in folders for path in (CHECKOUT / folder).rglob("*") if path.is_file()]
    readmes = [path for path in sources if path.suffix in (".py", ".md", ".html", ".js")]
    own = [path for path in readmes if path != GLOSSARY and not {"vendored", "plotly"} & set(path.parts)]
    return sorted([CHECKOUT / "README.md", *own])


@functools.cache
def modules() -> list[Path]:
    return sorted(path for folder in ("tests", "benchmarks") for path in (CHECKOUT / folder).rglob("*.py"))


def by_folder(paths: list[Path]) -> pytest.MarkDecorator:
    folders = sorted({path.parent for path in paths})
    return pytest.mark.parametrize("folder", folders, ids=lambda f: str(f.relative_to(CHECKOUT)))


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments, docstrings and messages of errors with their line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assert(msg=ast.expr() as spoken) | ast.Raise(exc=ast.Call() as spoken):
                pass
            case ast.Expr(ast.Constant(str()) as spoken):
                pass
            case _:
                continue
        for part in ast.walk(spoken):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.lineno, part.value


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the names that a module defines, in lower case, with their line."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.arg(arg=name) | ast.alias(asname=str(name)):
                pass
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                pass
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        yield node.lineno, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@by_folder(texts())
def test_no_replaced_phrase_is_left(folder: Path) -> None:
    read = [path for path in texts() if path.parent == folder]
    found = [one for path in read for one in TEXT.findings(path, 1, path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@by_folder(modules())
def test_tests_and_benchmarks_have_plain_names_and_prose(folder: Path) -> None:
    found = []
    for path in modules():
        if path.parent == folder:
            source = path.read_text(encoding="utf-8")
            found += [one for named in names(source) for one in NAME.findings(path, *named)]
            if PROSE.phrase.search(source):
                found += [one for spoken in prose(source) for one in PROSE.findings(path, *spoken)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["a plan of one's own", "a step of decodes", "in the mean, 3 us", "8 would do"]
)
def test_a_replaced_phrase_is_found(text: str) -> None:
    assert TEXT.phrase.search(text)


def test_prose_and_names_are_found() -> None:
    source = """
def test_what_is_no_plan_is_told(asked, basked, is_no_longer_than):
    'Nobody asks.'
    same = 'it says'  # as the file says
    assert same is None, f'{asked} is none'
    raise ValueError('would do')
"""
    spoken = {line for line, text in prose(source) if PROSE.phrase.search(text)}
    assert spoken == {3, 4, 5, 6}
    refused = [name for _, name in names(source) if NAME.phrase.search(name)]
    assert refused == ["test_what_is_no_plan_is_told", "asked"]


WORDS = r"told|tells|said|says|asked|asks|lent|lends?|loans?|lenders?|fed_back"
"""Parts of identifiers that name no quantity; other parts of the dialect (seen, kept, whole) may be apt."""
VAGUE = Table({WORDS: "the name of the quantity"}, "(?:^|_)", "(?:_|$)")
LEFT = re.compile(
    r"fastroof/(backends/serve|ui)/.* _?asked"
    r"|.* (asked_seqs|asked_speculation|drafts_said)"
)


def test_no_identifier_of_the_product_is_a_word_without_a_quantity() -> None:
    found = []
    for path in texts():
        source = path.read_text(encoding="utf-8") if path.suffix == ".py" else ""
        if re.search(WORDS, source, re.IGNORECASE):  # parsing takes long
            place = path.relative_to(CHECKOUT).as_posix()
            named = [one for one in names(source) if not LEFT.fullmatch(f"{place} {one[1]}")]
            found += [one for line_name in named for one in VAGUE.findings(path, *line_name)]
    assert not found, "\n".join(found)
