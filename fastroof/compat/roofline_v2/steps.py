"""Roofline V2's step times, for lists of steps and for CSR arrays of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.checks import is_number, is_whole_number, shown, whole_number
from fastroof.compat.roofline_v2.tables import RooflineV2Tables, decode_at, nearest_attention, prefill_mfu
from fastroof.compiled import compat_roofline_v2 as loops
from fastroof.errors import BatchError, FastroofError, GpuError, ModelError, PlanError
from fastroof.run.batch import check_offsets, int_vector
from fastroof.units import TB, TFLOP, US_PER_S

LARGEST: Final = 2**31
"""Maximum of sizes."""

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")
NO_EXPERTS: Final = (
    "roofline V2 has no experts: a layer is seven dense GEMMs, all of whose weights every step reads"
)


@dataclass(frozen=True)
class ModelSizes:
    """The model sizes that roofline V2 reads; head_dim is always hidden_size / num_heads."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    bytes_per_param: float

    @property
    def head_dim(self) -> int:
        """Width of one head, regardless of a config's head_dim."""
        return self.hidden_size // self.num_heads

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        """(k, n) of the GEMMs of a layer: q and o, k and v, gate and up, down."""
        h, kv = self.hidden_size, self.num_kv_heads * self.head_dim
        return (h, h), (h, kv), (h, self.intermediate_size), (self.intermediate_size, h)

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's seven GEMMs."""
        q, k, gate, down = (k * n for k, n in self.gemms)
        return 2 * q + 2 * k + 2 * gate + down

    @property
    def weight_bytes(self) -> float:
        """Weight bytes of all layers, without embeddings and LM head."""
        return float(self.num_layers * self.layer_weights * self.bytes_per_param)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Read a model_config dict."""
        keys = _Keys("model_config", config)
        for name in EXPERTS:
            if keys.config.get(name):
                keys.wrong.append(f"{name} is {shown(keys.config[name], 20)}: {NO_EXPERTS}")
        layers = keys.integer("num_hidden_layers")
        hidden = keys.integer("hidden_size")
        heads = keys.integer("num_attention_heads")
        kv_heads = keys.integer("num_key_value_heads", default=heads)
        ff = keys.integer("intermediate_size", default=4 * hidden)
        width = keys.number("bytes_per_param", above=0.0)
        if not keys.wrong and hidden % heads:
            keys.wrong.append(
                f"hidden_size must be a multiple of num_attention_heads, got {hidden} and {heads}"
            )
        keys.refuse(ModelError)
        return cls(layers, hidden, heads, kv_heads, ff, width)


@dataclass(frozen=True)
class Hardware:
    """The GPU constants that roofline V2 reads."""

    peak_flops_per_s: float
    peak_bytes_per_s: float
    bandwidth_factor: float
    layer_overhead_us: float

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Achieved share of the peak bandwidth, B/s."""
        return self.peak_bytes_per_s * self.bandwidth_factor

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Hardware:
        """Read a hardware dict."""
        keys = _Keys("hardware", config)
        peak = keys.number("TFlopsPeak", above=0.0) * TFLOP
        bandwidth = keys.number("BwPeakTBs", above=0.0) * TB
        # 0 means: not given
        factor = keys.number("bwEfficiencyFactor", default=0.0) or 1.0
        overhead = keys.number("perLayerOverhead", default=0.0)
        keys.refuse(GpuError)
        return cls(peak, bandwidth, factor, overhead)


def checked_tp(tp: Any) -> int:
    """Return a checked tensor-parallel size."""
    checked = whole_number("tp", tp, error=PlanError)
    if checked > LARGEST:
        raise PlanError(f"tp must be at most 2**31, got {shown(checked)}")
    return checked


def refuse_infinite(*times: Floats) -> None:
    """Reject constants that yield infinite step times."""
    if not all(np.isfinite(one).all() for one in times):
        raise PlanError("model_config or hardware yields infinite step times: check the units")


class _Keys:
    """Values of a dict, with all of their problems collected."""

    def __init__(self, name: str, config: Any) -> None:
        self.name = name
        self.given = config
        self.config: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
        self.wrong: list[str] = []

    def integer(self, key: str, default: int | None = None) -> int:
        def fits(value: Any) -> bool:
            return is_whole_number(value, most=LARGEST)

        return int(self._value(key, default, fits, "a whole number of at least 1 and at most 2**31"))

    def number(self, key: str, above: float | None = None, default: float | None = None) -> float:
        def read(value: Any) -> bool:
            return is_number(value) and bool(value >= 0.0 if above is None else value > above)

        need = "a finite number of at least 0" if above is None else f"a finite number above {above:g}"
        return float(self._value(key, default, read, need))

    def _value(self, key: str, default: Any, fits: Callable[[Any], bool], need: str) -> Any:
        value = self.config.get(key)
        if default is not None and (value is None or (is_number(value) and value == 0)):
            return default
        if value is not None and fits(value):
            return value
        given = "it is missing" if key not in self.config else f"got {shown(value)}"
        self.wrong.append(f"{key} must be {need}, {given}")
        return 1

    def refuse(self, error: type[FastroofError]) -> None:
        if not isinstance(self.given, Mapping):
            raise error(f"{self.name} must be a dict, got {shown(self.given)}")
        if self.wrong:
            raise error(f"{self.name}: {'; '.join(self.wrong)}")


COMPONENTS = ("prefill_compute_s", "prefill_memory_s", "decode_compute_s", "decode_memory_s")
"""Names of a step's component seconds."""

FLOOR_US = 1.0


@dataclass(frozen=True, eq=False)
class StepRequests:
    """Requests of many steps as CSR arrays: the fastest input of :func:`step_us`.

    Step i prefills requests ``prefill_offsets[i]:prefill_offsets[i + 1]`` and decodes requests
    ``decode_offsets[i]:decode_offsets[i + 1]``. int64 arrays are used without a copy, others are converted.

    Parameters
    ----------
    prefill_progress, prefill_new_tokens : array_like of int, shape (prefill requests,)
        Tokens that were processed before (at least 0), and new tokens (at least 1).
    prefill_offsets : array_like of int, shape (steps + 1,)
        Start of each step's prefill requests; nondecreasing from 0 to their number.
    decode_progress : array_like of int, shape (decode requests,)
        Tokens that were processed before, at least 0.
    decode_offsets : array_like of int, shape (steps + 1,)
        Start of each step's decode requests.

    Raises
    ------
    BatchError
        If the arrays are not one-dimensional integers of matching lengths.

    Examples
    --------
    >>> StepRequests([], [], [0, 0, 0], [1000, 2000, 4096], [0, 2, 3]).num_steps
    2
    """

    prefill_progress: Longs
    prefill_new_tokens: Longs
    prefill_offsets: Longs
    decode_progress: Longs
    decode_offsets: Longs

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, _integers(name, getattr(self, name)))
        if len(self.prefill_progress) != len(self.prefill_new_tokens):
            raise BatchError(
                f"prefill_progress has {len(self.prefill_progress)} requests, "
                f"prefill_new_tokens {len(self.prefill_new_tokens)}"
            )
        check_offsets("prefill_offsets", self.prefill_offsets, len(self.prefill_progress))
        check_offsets("decode_offsets", self.decode_offsets, len(self.decode_progress))
        if len(self.prefill_offsets) != len(self.decode_offsets):
            raise BatchError(
                f"prefill_offsets have {len(self.prefill_offsets) - 1} steps, "
                f"decode_offsets {len(self.decode_offsets) - 1}"
            )

    @classmethod
    def from_steps(cls, steps: Iterable[tuple[Sequence[tuple[int, int]], Sequence[int]]]) -> StepRequests:
        """Build from one (prefill requests [(progress, new_tokens)], decode requests [progress]) per step.

        Raises
        ------
        BatchError
            If a step has another form.

        Examples
        --------
        >>> StepRequests.from_steps([([(0, 512)], [1000, 2000])]).decode_progress.tolist()
        [1000, 2000]
        """
        prefills: list[list[Any]] = []
        decodes: list[list[Any]] = []
        try:
            listed = list(steps)
        except TypeError:
            raise BatchError(f"steps must be a list, got {shown(steps)}") from None
        for at, step in enumerate(listed):
            try:
                prefill, decode = step
                prefills.append([(progress, new) for progress, new in prefill])
                decodes.append(list(decode))
            except (TypeError, ValueError):
                raise BatchError(
                    f"step {at} must be ([(progress, new_tokens), ...], [progress, ...]), got {shown(step)}"
                ) from None
        requests = [request for step in prefills for request in step]
        return cls(
            _integers("prefill progress", [progress for progress, _ in requests]),
            _integers("prefill new_tokens", [new for _, new in requests]),
            np.cumsum([0, *map(len, prefills)]),
            _integers("decode progress", [progress for step in decodes for progress in step]),
            np.cumsum([0, *map(len, decodes)]),
        )

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.decode_offsets) - 1

    def __len__(self) -> int:
        return self.num_steps


Steps = StepRequests | Iterable[tuple[Sequence[tuple[int, int]], Sequence[int]]]
"""Steps of a step function: CSR arrays, or one (prefill requests, decode requests) per step."""


def step_us(
    tables: RooflineV2Tables,
    model_config: Mapping[str, Any],
    hardware: Mapping[str, Any],
    tp: int,
    steps: Steps,
) -> Floats:
    """Return step times as of roofline V2, before it rounds to whole microseconds.

    Parameters
    ----------
    tables : RooflineV2Tables
        Loaded tables.
    model_config : mapping
        ``num_hidden_layers``, ``hidden_size``, ``num_attention_heads``, ``bytes_per_param``; optionally
        ``intermediate_size`` (4 x hidden_size) and ``num_key_value_heads`` (num_attention_heads).
        Other keys, including ``head_dim``, are ignored.
    hardware : mapping
        ``TFlopsPeak`` (TFLOP/s), ``BwPeakTBs`` (TB/s), ``bwEfficiencyFactor`` (absent or 0: 1) and
        ``perLayerOverhead`` (us; absent: 0).
    tp : int
        Tensor-parallel size.
    steps : StepRequests, or iterable of (prefill requests, decode requests)
        Prefill requests are (progress, new_tokens), decode requests are progress; both in tokens. Lists are
        converted request by request; :class:`StepRequests` need no conversion.

    Returns
    -------
    ndarray of float64, shape (steps,)
        Microseconds, at least 1.

    Raises
    ------
    BatchError
        If a step or a request is malformed; the message names it.
    ModelError, GpuError, PlanError
        If model_config, hardware or tp is invalid; the message names every key.
    MissingTableError
        If the nearest head shape has no decode table.

    Notes
    -----
    A step is its longest component of four plus the overhead, ``perLayerOverhead * layers / tp``.
    """
    return step_parts(tables, model_config, hardware, tp, steps)[0]


def step_parts(
    tables: RooflineV2Tables,
    model_config: Mapping[str, Any],
    hardware: Mapping[str, Any],
    tp: int,
    steps: Steps,
) -> tuple[Floats, dict[str, Floats]]:
    """Return the times of :func:`step_us`, and the seconds of each of :data:`COMPONENTS`."""
    sizes, gpu = ModelSizes.from_config(model_config), Hardware.from_config(hardware)
    with np.errstate(over="ignore", invalid="ignore"):
        constants = _constants(tables, sizes, gpu, checked_tp(tp))
    batch = steps if isinstance(steps, StepRequests) else StepRequests.from_steps(steps)
    count = batch.num_steps
    seconds = (np.empty(count), np.empty(count), np.empty(count), np.empty(count))
    out = np.empty(count)
    code = loops.steps_s(
        constants,
        tables.arena,
        (batch.prefill_progress, batch.prefill_new_tokens, batch.prefill_offsets),
        (batch.decode_progress, batch.decode_offsets),
        np.empty(int(tables.arena[int(constants[loops.DECODE_AT]) + 1])),
        seconds,
        out,
    )
    if code:
        refuse_requests(batch)
    refuse_infinite(*seconds, out)
    out *= US_PER_S
    np.maximum(out, FLOOR_US, out=out)
    return out, dict(zip(COMPONENTS, seconds, strict=True))


def _constants(tables: RooflineV2Tables, model: ModelSizes, hardware: Hardware, tp: int) -> Floats:
    """Return the constants of all steps, in the slots that the loops read."""
    shape = nearest_attention(tables, model.num_heads, model.num_kv_heads, model.head_dim)
    k, n = (np.array(sizes, np.float64) for sizes in zip(*model.gemms, strict=True))
    gemm_at = np.empty(len(k), np.int64)
    unused = np.zeros(len(k))
    pairs = (tables.gemm_k, tables.gemm_n, tables.gemm_at)
    loops.gemm_mfus(tables.arena, pairs, unused, k, n, gemm_at, unused)
    constants = np.zeros(loops.MODEL_SIZE)
    for slot, value in (
        (loops.PEAK_FLOPS_PER_S, hardware.peak_flops_per_s),
        (loops.BANDWIDTH_BYTES_PER_S, hardware.bandwidth_bytes_per_s),
        (loops.TP, tp),
        (loops.OVERHEAD_S, hardware.layer_overhead_us * model.num_layers / tp / US_PER_S),
        (loops.NUM_LAYERS, model.num_layers),
        (loops.HIDDEN_SIZE, model.hidden_size),
        (loops.NUM_HEADS, model.num_heads),
        (loops.NUM_KV_HEADS, model.num_kv_heads),
        (loops.HEAD_DIM, model.head_dim),
        (loops.BYTES_PER_PARAM, model.bytes_per_param),
        (loops.WEIGHT_BYTES, model.weight_bytes),
        (loops.DECODE_AT, decode_at(tables, shape, tp)),
    ):
        constants[slot] = value
    for first, values in (
        (loops.GEMM_K, k),
        (loops.GEMM_N, n),
        (loops.GEMM_MEMORY_S, k * n * model.bytes_per_param / hardware.bandwidth_bytes_per_s),
        (loops.GEMM_AT, gemm_at),
        (loops.BUCKET_MFU, prefill_mfu(tables, shape, loops.FIRST_BUCKET << np.arange(loops.NUM_BUCKETS))),
    ):
        constants[first : first + len(values)] = values
    return constants


def _integers(name: str, value: Any) -> Longs:
    """Return a one-dimensional int64 array, or raise an error that names the argument."""
    return np.ascontiguousarray(int_vector(name, value), np.int64)


def refuse_requests(batch: StepRequests) -> None:
    """Raise an error about the first invalid request, with the valid values."""
    # the arrays may have been modified since they were checked
    batch = StepRequests(*(getattr(batch, name) for name in batch.__dataclass_fields__))
    limit = loops.MAX_SEQUENCE
    for kind, name, values, offsets, least in (
        ("prefill", "progress", batch.prefill_progress, batch.prefill_offsets, 0),
        ("prefill", "new_tokens", batch.prefill_new_tokens, batch.prefill_offsets, 1),
        ("decode", "progress", batch.decode_progress, batch.decode_offsets, 0),
    ):
        wrong = np.flatnonzero((values < least) | (values > limit))
        if len(wrong):
            r = int(wrong[0])
            step = int(np.searchsorted(offsets, r, side="right")) - 1
            raise BatchError(
                f"{name} must be at least {least} and at most {limit}, got {values[r]} "
                f"in {kind} request {r - int(offsets[step])} of step {step}"
            )
