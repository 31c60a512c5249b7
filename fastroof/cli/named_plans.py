"""Plans named on a command line: ``llama-3.1-70b,tp=4,dtype=fp8``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from fastroof.acceptance import MTP
from fastroof.cli.options import GPU_NAMES
from fastroof.cli.output import Progress, shown_progress
from fastroof.default_runtime import DEFAULT_RUNTIME
from fastroof.errors import BatchError, GpuError, PlanError, TableError
from fastroof.file_access import exists, is_folder, matches

if TYPE_CHECKING:
    from fastroof import GpuSpec, SpeculativeDecoding, StepPlan, Tables
    from fastroof.load import MeasuredTables


DEFAULT_GPU: Final = "h100"


def gpu_and_tables(gpu: str | None, tables: str | None, source: str | None) -> tuple[GpuSpec, Tables | None]:
    """Return the GPU and its measured tables; None where nothing was measured on it."""
    from fastroof import load_gpu, load_tables
    from fastroof.load.by_name import table_folders

    spec = load_gpu(gpu or DEFAULT_GPU)
    if tables is not None:
        loaded = tables_of(tables, gpu and spec.name, source)
        return (loaded.gpu if gpu is None else spec), loaded
    own = _own_folder(gpu or DEFAULT_GPU)
    if own is None:
        fetch_tables(spec.name)
    folders = table_folders(spec.name) if own is None else matches(own, "*/provenance.toml")
    if folders:
        return spec, load_tables(spec.name if own is None else own, source=parse_source(source))
    if source is not None:
        raise TableError(f"{spec.name} has no measured tables, so no source {source!r}; leave out --source")
    return spec, None


def tables_of(name: str, gpu: str | None = None, source: str | None = None) -> Tables:
    """Load tables by the name of a GPU, or from a folder."""
    from fastroof import load_gpu, load_tables

    if not _is_path(name) and _own_folder(name) is None:
        fetch_tables(name)
        return load_tables(load_gpu(name).name, gpu=gpu, source=parse_source(source))
    return load_tables(_folders(name)[0], gpu=gpu, source=parse_source(source))


def fetch_tables(gpu: str) -> None:
    """Bring in what a package measured on a GPU, where that was not done, and show how far it is."""
    from fastroof import load_gpu
    from fastroof.load.by_name import ensure_imported

    with import_progress(gpu) as progress, suppress(TableError):
        ensure_imported(load_gpu(gpu).name, progress=progress)


@contextmanager
def import_progress(gpu: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show how far an import is, from the first file on: most often there is none to be made."""
    with ExitStack() as shown:
        tell: list[Progress] = []

        def progress(done: int, total: int, file: str) -> None:
            if not tell:
                words = f"converting the tables of {gpu}"
                tell.append(shown.enter_context(shown_progress(words, "files", quiet=False)))
            tell[0](done, total)

        yield progress


def parse_source(text: str | None) -> str | dict[str, str] | None:
    """Read the name of a source, or ``OPERATOR=SOURCE,...`` of those that are not the default's."""
    if text is None or "=" not in text:
        return text
    sources: dict[str, str] = {}
    for pair in text.split(","):
        operator, equals, name = (part.strip() for part in pair.partition("="))
        if not (operator and equals and name) or operator in sources:
            raise TableError(
                f"--source {text} is neither a source nor OPERATOR=SOURCE,... of different operators"
            )
        sources[operator] = name
    return sources


def _is_path(name: str) -> bool:
    path = Path(name)
    return is_folder(path) or path.name != name


def _own_folder(gpu: str) -> Path | None:
    """Return the folder of a gpu.toml that ``--gpu`` names by its path; None for a GPU's name."""
    from fastroof import gpu_names, load_gpu

    path = Path(gpu)
    if not exists(path):
        return None
    spec = load_gpu(gpu)
    if spec.name in gpu_names() and load_gpu(spec.name) == spec:
        return None
    return path if is_folder(path) else path.parent


def _folders(name: str, fetch: bool = True) -> tuple[Path, ...]:
    """Folders of sources that a GPU's name or a path means."""
    from fastroof import load_gpu
    from fastroof.load.by_name import table_folders

    if _is_path(name):
        return (Path(name),)
    own = _own_folder(name)
    if own is not None:
        return (own,)
    if fetch:
        fetch_tables(name)
    return table_folders(load_gpu(name).name)


class TableSet(NamedTuple):
    """Tables that are loaded together: one source, or one GPU of a published tree."""

    folder: Path
    gpu: str | None
    source: str | None

    def load(self) -> MeasuredTables:
        """Read them."""
        from fastroof.load import load_measured

        return load_measured(self.folder, gpu=self.gpu, source=self.source)

    def place(self, operator: str) -> tuple[int, str]:
        """Where the source stands among those that have an operator: the least serves it."""
        from fastroof.load.own import list_sources

        if self.source is None:
            return (0, "")
        rank = next(s.rank(operator) for s in list_sources(self.folder) if s.name == self.source)
        return (rank, self.source)


def table_sets(
    name: str, gpu: str | None = None, source: str | None = None, *, fetch: bool = True
) -> list[TableSet]:
    """List everything that can be loaded from a GPU's name or a folder, one source at a time."""
    from fastroof import load_gpu
    from fastroof.load.by_name import missing_tables
    from fastroof.load.own import list_sources
    from fastroof.load.trees import is_tree

    folders = _folders(name, fetch)
    if not folders:
        raise TableError(missing_tables(load_gpu(name).name))
    if not folders[0].is_dir():
        raise TableError(f"{name} is not a folder: give a GPU's name or a folder of measured tables")
    if is_tree(folders[0]):
        return [TableSet(folders[0], one, None) for one in ([gpu] if gpu else _gpus_of_tree(folders[0]))]
    several = sorted(path.parent for path in folders[0].glob("*/gpu.toml"))
    if gpu is not None and several:
        several = [path for path in several if path.name == gpu]
        if not several:
            raise TableError(f"{folders[0]} has no folder of gpu {gpu!r}")
    places = [place for place in several if any(place.glob("*/provenance.toml"))] if several else folders
    sets = [TableSet(place, None, one.name) for place in places for one in list_sources(place)]
    if source is None:
        return sets
    named = [one for one in sets if one.source == source]
    if not named:
        names = ", ".join(dict.fromkeys(str(one.source) for one in sets))
        raise TableError(f"{folders[0]} has no source {source!r}; its sources are {names}")
    return named


def _gpus_of_tree(folder: Path) -> list[str | None]:
    """GPUs that folders of a tree are named after; None, the tree's own GPU, where that is one or unknown."""
    from fastroof import load_gpu

    gpus = set()
    for path in folder.rglob("*"):
        if path.is_dir():
            with suppress(GpuError):
                gpus.add(load_gpu(path.name).name)
    return [*sorted(gpus)] if len(gpus) > 1 else [None]


PLANS_HELP: Final = f"""\b
A plan is MODEL[,KEY=VALUE...]: a preset or the path of a config.json, then any of name, gpu, tp, dtype,
kv_dtype, runtime, method, max_tokens, max_seqs. Without a name it is called after its model and what
differs from the defaults, as llama-3.1-70b-tp4-fp8; without runtime it has that of {DEFAULT_RUNTIME}.
pp, cp, dp, ep, moe_tp, routing and exchange split it; eplb=yes (with num_slots), wide_experts=yes and
two_batch_overlap=yes say how its experts run.
"""

PlansArgument = Annotated[
    list[str], typer.Argument(metavar="PLAN...", help="MODEL[,KEY=VALUE...], as llama-3.1-70b,tp=4.")
]
GpuOption = Annotated[
    str | None,
    typer.Option(*GPU_NAMES, help="GPU of plans that name none, or path of a gpu.toml.  [default: h100]"),
]

_WORDS: Final = ("dtype", "kv_dtype", "runtime", "method", "routing", "exchange")
_SPLIT: Final = ("pp", "cp", "dp", "ep", "moe_tp")
_NUMBERS: Final = ("tp", *_SPLIT, "num_slots", "max_tokens", "max_seqs")
_FLAGS: Final = ("wide_experts", "eplb", "two_batch_overlap")
_SAID: Final = (("experts", "wide"), ("num_slots", "slots"), ("two_batch_overlap", "two-batches"))
_UNNAMED: Final = ("bf16", DEFAULT_RUNTIME, "roofline")


def named_plans(
    texts: Sequence[str],
    gpu: str | None = None,
    tables: str | None = None,
    source: str | None = None,
    runtime: str = DEFAULT_RUNTIME,
) -> dict[str, StepPlan]:
    """Compile the plans of a command line, by name, in order."""
    from fastroof import compile_plan

    if not texts:
        raise PlanError("no plan was named: llama-3.1-70b,tp=4 is one")
    measured: dict[str | None, Any] = {}
    plans: dict[str, StepPlan] = {}
    for text in texts:
        model, name, of_gpu, options = _read(text)
        of_gpu = of_gpu or gpu
        if of_gpu not in measured:
            measured[of_gpu] = gpu_and_tables(of_gpu, tables, source)
        spec, of_tables = measured[of_gpu]
        plan = compile_plan(model, spec, of_tables, **{"runtime": runtime, **options})
        name = name or _name_of(plan)
        if name in plans:
            raise PlanError(f"two plans are called {name!r}: {text},name=... gives one of them another name")
        plans[name] = plan
    return plans


def plans_words(plans: Mapping[str, StepPlan]) -> str:
    """Say what plans are called, and whose runtime they have."""
    return ", ".join(f"{name} (runtime {plan.runtime})" for name, plan in plans.items())


def _read(text: str) -> tuple[str, str | None, str | None, dict[str, Any]]:
    model, *pairs = text.split(",")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not value or key not in ("name", "gpu", *_WORDS, *_NUMBERS, *_FLAGS):
            keys = ", ".join(("name", "gpu", *_NUMBERS, *_WORDS, *_FLAGS))
            raise PlanError(f"{text!r}: {pair!r} is not KEY=VALUE, where KEY is one of {keys}")
        if key in options:
            raise PlanError(f"{text!r} gives {key} twice")
        if key in _NUMBERS:
            if not value.isascii() or not value.isdigit():
                raise PlanError(f"{text!r}: {key} needs a whole number, got {value!r}")
            options[key] = int(value)
        elif key in _FLAGS:
            if value not in ("yes", "no"):
                raise PlanError(f"{text!r}: {key} is yes or no, got {value!r}")
            options[key] = value == "yes"
        else:
            options[key] = value
    if not model or "=" in model:
        raise PlanError(f"{text!r} starts with no model: llama-3.1-70b,tp=4 is a plan")
    return model, options.pop("name", None), options.pop("gpu", None), options


def _name_of(plan: StepPlan) -> str:
    """Call a plan after its model and what differs from the defaults."""
    parts = [plan.model.name]
    if plan.tp > 1:
        parts.append(f"tp{plan.tp}")
    layout = plan.layout
    sizes = {"pp": layout.pp, "cp": layout.cp, "dp": layout.dp, "ep": layout.ep}
    parts += [f"{size}{count}" for size, count in sizes.items() if count > 1]
    split = plan.describe()
    parts += [f"{word}{split[key] if key == 'num_slots' else ''}" for key, word in _SAID if key in split]
    parts += ["eplb"] if str(split.get("routing", "")).endswith("_eplb") else []
    if plan.kv_dtype != "bf16":
        parts.append(f"{plan.dtype}-kv-{plan.kv_dtype}")
    elif plan.dtype != "bf16":
        parts.append(plan.dtype)
    parts += [word for word in (plan.runtime, plan.method) if word not in _UNNAMED]
    return "-".join(parts)


NumDraftTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens that are drafted for a request before each step.")
]
Accepted = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS", help="Mean tokens that a step says of a request; or rates by position, as 0.8,0.5."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="PLAN", help="What drafts: mtp, or MODEL[,tp=1,dtype=bf16].  [default: takes no time]"
    ),
]
PrefixHit = Annotated[
    float | None, typer.Option(metavar="SHARE", help="Share of a prompt that is found in the prefix cache.")
]


def asked_speculation(
    num_draft_tokens: int | None,
    accepted: str | None,
    draft: str | None,
    places: tuple[str | None, str | None, str | None],
    runtime: str,
    **options: Any,
) -> SpeculativeDecoding | None:
    """Read the options of speculative decoding."""
    if num_draft_tokens is None:
        spare = [name for name, value in (("--accepted", accepted), ("--draft", draft)) if value is not None]
        if spare:
            raise BatchError(
                f"--num-draft-tokens is missing, without which there is no {' and '.join(spare)}"
            )
        return None
    if accepted is None:
        raise BatchError("--num-draft-tokens needs --accepted too: how many tokens a step says in the mean")
    from fastroof import SpeculativeDecoding

    drafter: StepPlan | str | None = draft
    if draft is not None and draft != MTP:
        # SELF

        said = {part.partition("=")[0] for part in draft.split(",")[1:]}
        others = [f"{name}={value}" for name, value in options.items() if name not in said]
        (drafter,) = named_plans([",".join([draft, *others])], *places, runtime=runtime).values()
    try:
        rates = [float(rate) for rate in accepted.split(",")]
    except ValueError:
        raise BatchError(f"--accepted needs a number, or several with commas, got {accepted!r}") from None
    return SpeculativeDecoding(num_draft_tokens, rates[0] if len(rates) == 1 else tuple(rates), drafter)
