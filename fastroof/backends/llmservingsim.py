"""A plan's times as a profile of LLMServingSim: CSV files of each layer's latency, whole nanoseconds.

The simulator reads a folder of measured layers and needs no more than that to simulate a GPU::

    <perf>/<hardware>/<model>/<variant>/meta.yaml
    <perf>/<hardware>/<model>/<variant>/tp<N>/dense.csv          layer,tokens,time_us
    <perf>/<hardware>/<model>/<variant>/tp<N>/per_sequence.csv   layer,sequences,time_us
    <perf>/<hardware>/<model>/<variant>/tp<N>/attention.csv      layer,prefill_chunk,prefill_key,kv_prefill,
                                                                 n_decode,kv_decode,decode_q_len,time_us

Its own profiler writes these files below ``profiler/perf``. A step is ``embedding``, then every layer's
``layernorm``, ``qkv_proj``, ``qk_norm``, ``rotary_emb``, ``attention``, ``o_proj``, ``layernorm``,
``gate_up_proj``, ``act_fn`` and ``down_proj``, then ``final_layernorm``, ``lm_head`` and ``sampler``:
each is looked up by itself, linearly between the rows of its axes, and their integer nanoseconds add up.
A decode's ``kv_decode`` is its context without the new token; prompts of c tokens after k are one
``prefill_chunk`` of sum(c) at ``prefill_key`` = sum(c (k + c/2)) / sum(c).

Layers within a window are timed in it as the mean of the decodes would be: the files have one length for all,
and the simulator's KV cache is of whole sequences, more than such layers keep.

Release 1.1.0, and the source up to the summer of 2026, read the column ``kv_prefill`` instead: the contexts
of all prompts of the step, summed, so that several prompts are one of all their tokens after all their
contexts. Files have both columns. The release alone draws its lines of attention over logarithms:
``release="1.1"`` has more rows for that.

Version 1.0.0 reads another format, which is not written.

Sources: casys-kaist/LLMServingSim, serving/core/trace_generator.py and serving/core/utils.py at
0d3de681adbd9c515fc378e94e3e625b6e250dad; the first was run at release 1.1.0 and at 5daddb2;
profiler/core/attention_shape.py at 8d7b3d89fc07c4cce9918face131dba7e2f4857e; docs/docs/profiler,
output-bundle.md at 11b96ae1ee5c339d40f8d9ba7b2052d8ef2ace0d and adding-hardware.md at
0d21a01cd28182f06ae4925c1fff2854fa142fe1 (bundles that another program makes).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.atomic_files import whole_folder, write_errors
from fastroof.backends.plan_facts import check_dense
from fastroof.checks import one_of
from fastroof.compiled import steps
from fastroof.compiled.grids import AxisSlots, open_block
from fastroof.documents import yaml_text
from fastroof.errors import BackendError
from fastroof.models.named import PRESETS
from fastroof.operators.calls import AllReduce, Role, Rows
from fastroof.run import StepBatch
from fastroof.units import NS_PER_US

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


LAYERS: Final[dict[str, tuple[Role, ...]]] = {
    "embedding": ("embedding",),
    "layernorm": ("attention_norm",),
    "qkv_proj": ("qkv_quantise", "qkv"),
    "qk_norm": ("qk_norm",),
    "rotary_emb": ("rope",),
    "o_proj": ("o_quantise", "o"),
    "gate_up_proj": ("gate_up_quantise", "gate_up"),
    "act_fn": ("activation",),
    "down_proj": ("down_quantise", "down"),
    "final_layernorm": ("final_norm",),
    "lm_head": ("lm_head",),
}
"""The simulator's layers, and the roles of the plan's calls that one call of each runs.

``layernorm`` runs twice a layer, before attention and before the MLP: the two operators are equal. The KV
write is part of ``attention``, what the engine adds to a step and its sequences is the ``sampler``.
"""

LEAST_NS: Final = 1

_SHORT: Final = 127
"""A context so short that its attention is a small part of a step."""

Release = Literal["1.1", "unreleased"]


class Bundle(NamedTuple):
    """What was written.

    Attributes
    ----------
    folder : Path
        The variant's folder: meta.yaml and one folder a tensor-parallel size.
    rows : int
        Rows of its CSV files.
    """

    folder: Path
    rows: int


class _Prompts(NamedTuple):
    """Prompts that share a step, as the simulator keys them."""

    key: float
    requests: tuple[tuple[int, int], ...]

    @property
    def kv_prefill(self) -> int:
        """Their contexts; of several prompts without any, a negative number, which no reader asks for."""
        return sum(context for _, context in self.requests) or 1 - len(self.requests)


def export_llmservingsim(
    plans: StepPlan | Sequence[StepPlan],
    output: str | Path,
    *,
    hardware: str | None = None,
    model: str | None = None,
    variant: str | None = None,
    release: Release = "unreleased",
) -> Bundle:
    """Write plans of one model as a profile that LLMServingSim simulates, whole or not at all.

    Parameters
    ----------
    plans : StepPlan or sequence of StepPlan
        One a tensor-parallel size, otherwise alike. Their ``max_num_batched_tokens`` and ``max_num_seqs`` are
        the largest step that the simulator looks up without extrapolating.
    output : str or Path
        The simulator's ``profiler/perf`` folder; made if missing.
    hardware : str, optional
        What cluster configurations call the GPU; by default its name in capitals.
    model : str, optional
        Which of the simulator's ``configs/model`` it is: ``meta-llama/Llama-3.1-8B``. By default the
        preset's first Hugging Face name.
    variant : str, optional
        The precision's folder. The simulator asks for the one that the checkpoint's config names, so by
        default it is written that way: ``bf16``, ``fp8``, ``fp8-kvfp8``.
    release : str
        Which reader it is for: ``"1.1"`` or ``"unreleased"``.

    Returns
    -------
    Bundle
        The variant's folder, and how many rows it holds.

    Raises
    ------
    BackendError
        If the plans are of several models, or two of one size; of experts, layers of several kinds or ranks,
        which a profile has no place for; if the release is neither, or the folder exists or is not writable.

    Notes
    -----
    Times are written in us with three decimals, so that what the simulator reads are whole nanoseconds.
    Axes hold the nodes between which the plan is linear, and more for prompts, for which it is quadratic.
    :func:`left_out` lists what the format has no place for.
    """
    one_of("release", release, get_args(Release), BackendError)
    listed = checked_plans(plans)
    names = folder_names(listed[0], hardware, model)
    names["variant"] = variant if variant is not None else _variant(listed[0])
    output = Path(output)
    with profile_folder(output, names) as building:
        (building / "meta.yaml").write_text(_meta(listed, names), "utf-8")
        rows = sum(_write_tables(plan, building / f"tp{plan.tp}", release) for plan in listed)
    return Bundle(output.joinpath(*names.values()), rows)


def folder_names(plan: StepPlan, hardware: str | None, model: str | None) -> dict[str, str]:
    """Return the simulator's default names of a plan's GPU and model."""
    hardware = plan.gpu.name.upper() if hardware is None else hardware
    model = PRESETS.get(plan.model.name, (plan.model.name,))[0] if model is None else model
    return {"hardware": hardware, "model": model}


@contextlib.contextmanager
def profile_folder(output: Path, names: Mapping[str, str]) -> Iterator[Path]:
    """Give a folder to write to, which becomes ``output``/name/name/... when all is written, or nothing."""
    for name, value in names.items():
        if not all(part and part not in (".", "..") for part in value.split("/")):
            raise BackendError(f"{name} becomes a folder below {output}, so {value!r} will not do")
    folder = output.joinpath(*names.values())
    if folder.exists():
        raise BackendError(f"{folder} exists: remove it, or name another {' or '.join(names)}")
    with write_errors(str(folder), BackendError), whole_folder(folder) as unfinished:
        yield unfinished


def left_out(plan: StepPlan) -> tuple[str, ...]:
    """Say what of a step the simulator does not find in the bundle, a sentence each.

    Examples
    --------
    >>> import fastroof
    >>> tables = fastroof.load_tables("h100")
    >>> left_out(fastroof.compile_plan("llama-3.1-8b", "h100", tables, engine="kernels"))
    ()
    """
    if any(isinstance(curve.operator, AllReduce) for curve in plan.row_curves):
        return ("all-reduces: the simulator times them by its network model",)
    return ()


def checked_plans(plans: StepPlan | Sequence[StepPlan]) -> tuple[StepPlan, ...]:
    """Return plans of one bundle, which differ only in tp, by tp."""
    listed = tuple(plans) if isinstance(plans, Sequence) else (plans,)
    if not listed:
        raise BackendError("a bundle needs a plan at least")
    for plan in listed:
        check_dense(plan, "LLMServingSim's profile")
    for plan in listed[1:]:
        if _what_is_shared(plan) != _what_is_shared(listed[0]):
            raise BackendError(f"plans of one bundle may differ only in tp: {plan!r} is not {listed[0]!r}")
    sizes = [plan.tp for plan in listed]
    if len(set(sizes)) < len(sizes):
        raise BackendError(f"a bundle holds one plan a tp, got tp {', '.join(map(str, sizes))}")
    return tuple(sorted(listed, key=lambda plan: plan.tp))


def _what_is_shared(plan: StepPlan) -> tuple[object, ...]:
    return (
        plan.model, plan.gpu.name, plan.dtype, plan.kv_dtype, plan.profile, plan.method,
        plan.max_num_batched_tokens, plan.max_num_seqs, plan.tables_hash,
    )  # fmt: skip


def _variant(plan: StepPlan) -> str:
    """How the simulator names a checkpoint's precision: its weights, then its KV cache if quantised."""
    weights = plan.dtype.partition("_")[0]
    return weights if plan.kv_dtype == "bf16" else f"{weights}-kv{plan.kv_dtype}"


def _meta(plans: Sequence[StepPlan], names: dict[str, str]) -> str:
    """What the simulator reads of a bundle besides its tables: the largest step, and no skew correction."""
    plan = plans[0]
    comment = (
        f"# {plan.model.name} on {plan.gpu.title}, {plan.dtype} weights, {plan.kv_dtype} KV cache, "
        f"engine {plan.engine}\n"
    )
    return comment + yaml_text(
        {
            "profiler_version": f"fastroof {plan.version}",
            "vllm_version": "n/a",
            "gpu": plan.gpu.title,
            **names,
            "tp_degrees": [p.tp for p in plans],
            "tables_sha256": plan.tables_hash,
            "engine_effective": {
                "max_num_batched_tokens": plan.max_num_batched_tokens,
                "max_num_seqs": plan.max_num_seqs,
            },
            # decodes of several lengths count as their mean: without a fit a reader may take its own constant
            "skew_fit": {"enabled": True, "alpha_default": 0.0},
        }
    )


def _write_tables(plan: StepPlan, folder: Path, release: Release) -> int:
    folder.mkdir()
    by_attention = "layer,prefill_chunk,prefill_key,kv_prefill,n_decode,kv_decode,decode_q_len,time_us"
    tables = (
        ("dense.csv", "layer,tokens,time_us", _row_layers(plan, "tokens")),
        ("per_sequence.csv", "layer,sequences,time_us", _row_layers(plan, "sequences")),
        ("attention.csv", by_attention, _attention_rows(plan, release)),
    )
    return sum(write_rows(folder / name, header, rows) for name, header, rows in tables)


def write_rows(path: Path, header: str, rows: Iterable[str]) -> int:
    """Write a CSV file, and count its rows."""
    lines = [header, *rows]
    path.write_text("\n".join(lines) + "\n", "ascii")
    return len(lines) - 1


def _time(latency_us: float) -> str:
    """A time in us that is a whole number of ns: the reader takes less than one for one."""
    whole_ns = max(round(latency_us * NS_PER_US), LEAST_NS)
    return f"{whole_ns // NS_PER_US}.{whole_ns % NS_PER_US:03d}"


def _row_layers(plan: StepPlan, rows: Rows) -> Iterator[str]:
    """Return rows of layers that depend only on the tokens, or only on the sequences."""
    curves = {curve.operator.role: curve for curve in plan.row_curves if curve.operator.rows == rows}
    last = plan.max_num_batched_tokens if rows == "tokens" else plan.max_num_seqs
    for layer, roles in LAYERS.items():
        parts = [curves[role] for role in roles if role in curves]
        if parts:
            nodes = _nodes(np.concatenate([part.axis for part in parts]), 1, last)
            latency_us = sum(np.interp(nodes, part.axis, part.value) for part in parts)
            yield from (
                f"{layer},{n},{_time(t)}" for n, t in zip(nodes, np.atleast_1d(latency_us), strict=True)
            )
    if rows == "sequences":
        added_us, sequence_us = plan.arena[[steps.STEP_US, steps.SEQUENCE_US]].tolist()
        for n in _nodes(np.zeros(0), 1, last):
            yield f"sampler,{n},{_time(added_us + sequence_us * n)}"


def _nodes(axis: Floats, first: int, last: int) -> list[int]:
    """Return the whole numbers at and next to an axis' nodes, and both ends."""
    inside = axis[(axis >= first) & (axis <= last)]
    return sorted({first, last, *map(int, np.floor(inside)), *map(int, np.ceil(inside))})


def _attention_rows(plan: StepPlan, release: Release) -> Iterator[str]:
    """Rows of decodes, of prompts, and of both: attention is the sum of its two kernels."""
    block = open_block(plan.arena, int(plan.arena[steps.DECODE_AT]))
    longest = plan.model.max_position - 1
    most = min(plan.max_num_seqs, plan.max_num_batched_tokens)
    decodes = sorted({*_nodes(_axis(plan, block.y), 1, most), *_doublings(most)})
    contexts = sorted({*(n - 1 for n in _nodes(_axis(plan, block.x), 2, longest + 1)), longest})
    if release == "1.1":
        decodes = _finer(decodes, 3)
        contexts = [n for n in contexts if n < _SHORT] + _finer([n for n in contexts if n >= _SHORT], 3)
    decode_us = _decode_attention_us(plan, decodes, contexts)
    none = _Prompts(0.0, ((0, 0),))

    for count, some_us in zip(decodes, decode_us, strict=True):
        yield from _slice(plan, 0, count, [none], contexts, some_us[np.newaxis])
    for chunk in _chunks(plan):
        prompts = _one_prompt(plan, chunk) if release == "1.1" else _prompts(plan, chunk)
        prompts_us = _prefill_attention_us(plan, prompts)[:, np.newaxis]
        yield from _slice(plan, chunk, 0, prompts, [0], prompts_us)
        for count, some_us in zip(decodes, decode_us, strict=True):
            # decodes next to prompts may take longer than by themselves
            least_us = (
                plan.arena[steps.MIXED_KV_US] * count * (np.array(contexts) + 1) / plan.model.num_layers
            )
            # one attention call of both launches once
            more_us = np.maximum(prompts_us - plan.arena[steps.SHARED_LAUNCH_US] / plan.model.num_layers, 0.0)
            yield from _slice(plan, chunk, count, prompts, contexts, more_us + np.maximum(some_us, least_us))


def _slice(
    plan: StepPlan, chunk: int, count: int, prompts: list[_Prompts], contexts: list[int], kernels_us: Floats
) -> Iterator[str]:
    """Rows of one number of prompt tokens and of decodes: one row of ``kernels_us`` per prompt, us per layer.

    The KV write is part of a layer's attention. So is, of a step with prompts, what it lacks to the time
    that the engine's profile says it takes at least.
    """
    tokens = chunk + count
    write = next(curve for curve in plan.row_curves if curve.operator.role == "kv_write")
    layer_us = kernels_us + np.interp(tokens, write.axis, write.value)
    floor_us = float(plan.arena[steps.PREFILL_FLOOR_US]) / plan.model.num_layers
    if chunk and floor_us:
        sequences = np.array([len(prompt.requests) + count for prompt in prompts])
        step_us = others_us(plan, tokens, sequences)[:, np.newaxis] / plan.model.num_layers + kernels_us
        layer_us = layer_us + np.maximum(floor_us - step_us, 0.0)
    for prompt, times_us in zip(prompts, layer_us.tolist(), strict=True):
        for context, latency_us in zip(contexts, times_us, strict=True):
            keys = f"{prompt.key:.10g},{prompt.kv_prefill}"
            yield f"attention,{chunk},{keys},{count},{context},1,{_time(latency_us)}"


def others_us(plan: StepPlan, tokens: int | Longs, sequences: int | Longs) -> Floats:
    """Steps without their attention kernels, us, of the broadcast shape."""
    rows = {"tokens": tokens, "sequences": sequences}
    added_us, sequence_us = plan.arena[[steps.STEP_US, steps.SEQUENCE_US]].tolist()
    total_us: Floats = added_us + sequence_us * np.asarray(sequences, np.float64)
    for operator, axis, value in ((c.operator, c.axis, c.value) for c in plan.row_curves):
        total_us = total_us + operator.times * np.interp(rows[operator.rows], axis, value)
    return total_us


def _axis(plan: StepPlan, axis: AxisSlots) -> Floats:
    return plan.arena[axis.nodes_at : axis.nodes_at + axis.last_cell + 2]


def _doublings(last: int) -> list[int]:
    return [2**i for i in range(int(math.log2(last)) + 1)]


def _chunks(plan: StepPlan) -> list[int]:
    """Prompt tokens of a step: powers of two and the middle between them.

    A prompt of one token is a decode to the simulator. Where an engine holds steps at a floor, what lacks
    to it jumps where GEMMs do and ends where the floor does.
    """
    last = plan.max_num_batched_tokens
    doubled = _doublings(last)
    chunks = {*doubled, *(3 * n // 2 for n in doubled), last}
    floor_us = float(plan.arena[steps.PREFILL_FLOOR_US])
    if floor_us and last > 1:
        nodes = {int(n) for curve in plan.row_curves for n in curve.axis}
        above = np.flatnonzero(plan.prefill_us(np.arange(2, last + 1)) > floor_us) + 2
        chunks |= {n + 1 for n in chunks & nodes if n + 1 in nodes} | {*above[:1].tolist()}
    return sorted(n for n in chunks if 2 <= n <= last)


def _prompts(plan: StepPlan, chunk: int) -> list[_Prompts]:
    """Ways to fill a chunk, by key: many prompts, down to one, then one after a growing context."""
    shapes = []
    for count in _doublings(min(chunk // 2, plan.max_num_seqs)):
        least, more = divmod(chunk, count)
        shapes.append(((least + 1, 0),) * more + ((least, 0),) * (count - more))
    longest = plan.model.max_position - chunk
    if longest > 0:
        contexts = (*_doublings(longest), longest)
        shapes += [((chunk, context),) for context in contexts if context >= chunk // 4]
    by_key = {sum(c * (k + c / 2) for c, k in shape) / chunk: shape for shape in shapes}
    return [_Prompts(key, by_key[key]) for key in sorted(by_key)]


def _one_prompt(plan: StepPlan, chunk: int) -> list[_Prompts]:
    """A chunk after a growing context, by that context: the first stretch from 0 is linear to all readers."""
    longest = plan.model.max_position - chunk
    contexts = [0]
    if longest > 0:
        first = min(max(chunk, _SHORT), longest)
        contexts += _finer([first, *(n for n in _doublings(longest) if n > first), longest], 2)
    return [_Prompts(context + chunk / 2, ((chunk, context),)) for context in dict.fromkeys(contexts)]


def _finer(nodes: Sequence[int], per_doubling: int) -> list[int]:
    """Nodes, and whole numbers between them: as many nodes as that where they double.

    Release 1.1.0 draws lines over logarithms: what is linear comes out (ln r)^2 / 8 too slow at most between
    nodes of ratio r.
    """
    between = set(nodes)
    for lower, upper in itertools.pairwise(nodes):
        parts = max(1, round(math.log2(upper / lower) * per_doubling))
        between |= {round(lower * (upper / lower) ** (i / parts)) for i in range(1, parts)}
    return sorted(between)


def _decode_attention_us(plan: StepPlan, decodes: Sequence[int], contexts: Sequence[int]) -> Floats:
    """Decode attention of one layer, us: one row per number of decodes, one column per context."""
    times_us = np.empty((len(decodes), len(contexts)))
    for i, count in enumerate(decodes):
        new = np.ones(count * len(contexts), np.int64)
        batch = StepBatch(new, np.repeat(contexts, count), np.arange(len(contexts) + 1) * count)
        times_us[i] = plan.run(batch).components.decode_attention_us
    return times_us / plan.model.num_layers


def _prefill_attention_us(plan: StepPlan, prompts: Sequence[_Prompts]) -> Floats:
    """Prefill attention of one layer, and its share of what the engine adds to prompts, us."""
    times = plan.run(StepBatch.from_requests([prompt.requests for prompt in prompts]))
    prompts_us: Floats = times.components.prefill_attention_us + plan.arena[steps.PREFILL_US]
    return prompts_us / plan.model.num_layers
