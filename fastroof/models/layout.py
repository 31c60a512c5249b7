"""Layouts: how a model is split over GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastroof.checks import is_whole_number, shown, whole_number
from fastroof.errors import ModelError, PlanError
from fastroof.models.execution import Execution
from fastroof.operators.calls import Elementwise, Gemm, Role, RowOperator
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES

TP_SIZES: Final = (1, 2, 4, 8)
"""Tensor-parallel sizes on one node: the default of sweeps and searches."""

ALL_TP_SIZES: Final = (*TP_SIZES, 16, 32, 64)
"""All valid tensor-parallel sizes: also beyond a node, or within a rack behind one NVLink switch."""

SIZES_OF_TP: Final = ", ".join(map(str, ALL_TP_SIZES))


MOST_GPUS: Final = 2**16
"""Maximum of every size of a layout."""


@dataclass(frozen=True)
class Layout:
    """How a model is split over the GPUs of one replica.

    Attributes
    ----------
    tp : int
        GPUs that share each layer's attention and dense MLP.
    pp : int
        Pipeline stages: layers one after another on groups of GPUs.
    dp : int
        Ranks of attention data parallelism; batch sizes are those of one rank.
    ep : int
        Groups of experts, each on separate GPUs.
    moe_tp : int
        GPUs that share each expert; None stands for ``tp x dp x cp / ep``.
    cp : int
        GPUs that share the new tokens of each prompt (prefill context parallelism); each has a full cache.

    Raises
    ------
    PlanError
        If a size is below 1, or ``tp x dp x cp`` is not ``moe_tp x ep``: the same GPUs run attention and
        experts.

    Examples
    --------
    >>> Layout(tp=2, dp=4, ep=8).moe_tp
    1
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    moe_tp: int = None  # type: ignore[assignment]  # a layout that is made has one
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep", "cp"):
            if not is_whole_number(getattr(self, name), 1, MOST_GPUS):
                sizes = f"a whole number from 1 to {MOST_GPUS:,}"
                valid = f"one of {SIZES_OF_TP}" if name == "tp" else sizes
                raise PlanError(f"{name} must be {valid}, got {shown(getattr(self, name))}")
            object.__setattr__(self, name, int(getattr(self, name)))
        ranks = self.stage_gpus
        if self.moe_tp is None and ranks % self.ep == 0:
            object.__setattr__(self, "moe_tp", ranks // self.ep)
        elif self.moe_tp is not None and not is_whole_number(self.moe_tp, 1, MOST_GPUS**2):
            raise PlanError(f"moe_tp must be a whole number of at least 1, or None, got {shown(self.moe_tp)}")
        if self.moe_tp is None or self.moe_tp * self.ep != ranks:
            cp = f" x cp {self.cp}" if self.cp > 1 else ""
            raise PlanError(
                f"tp {self.tp} x dp {self.dp}{cp} is {ranks} GPUs per stage, which ep {self.ep}"
                f"{'' if self.moe_tp is None else f' x moe_tp {self.moe_tp}'} does not fill: "
                f"tp x dp{' x cp' if cp else ''} must be moe_tp x ep"
            )

    @property
    def world_size(self) -> int:
        """Number of GPUs of the replica."""
        return self.stage_gpus * self.pp

    @property
    def stage_gpus(self) -> int:
        """Number of GPUs of a pipeline stage."""
        return self.tp * self.dp * self.cp

    @property
    def sharers(self) -> int:
        """Number of GPUs that have the same tokens of a decode step."""
        return self.tp * self.cp

    @property
    def of_prompts(self) -> Layout:
        """Return the layout of prefill steps: GPUs that share a prompt have separate tokens, like ranks."""
        return self if self.cp == 1 else Layout(self.tp, self.pp, self.dp * self.cp, self.ep, self.moe_tp)

    @property
    def batches_in_flight(self) -> int:
        """Number of batches that the GPUs process concurrently: one per rank and pipeline stage."""
        return self.pp * self.dp

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": self.dp, "ep": self.ep}
        if self.ep > 1 and self.moe_tp > 1:
            sizes["moe_tp"] = self.moe_tp
        return split_words(sizes)


def split_words(row: Mapping[str, int]) -> str:
    """Return the layout of a result row as text: its tp, and other sizes above 1."""
    others = {name: row.get(name, 1) for name in ("pp", "cp", "dp", "ep", "moe_tp")}
    return ", ".join([f"tp {row['tp']}", *(f"{name} {size}" for name, size in others.items() if size > 1)])


def copies_words(row: Mapping[str, Any]) -> str:
    """Return the copies or workers of a result row as text: ``4 x tp 2``, ``1 prefill + 3 decode x tp 2``."""
    split = split_words(row)
    if row["mode"] == "aggregated":
        return f"{row['replicas']} x {split}"
    return f"{row['prefill_workers']} prefill + {row['decode_workers']} decode x {split}"


def check_sizes(part: Any, *names: str) -> None:
    """Raise ModelError unless those attributes are whole numbers of at least 1."""
    for name in names:
        whole_number(name, getattr(part, name), error=ModelError)


def linear_calls(role: Role, quantise: Role, n: int, k: int, execution: Execution) -> list[RowOperator]:
    """Return one linear layer of n outputs and k inputs, preceded by a quantise kernel if it has one."""
    dtype = execution.kernel(role)
    gemm = Gemm(role, role, 1, n, k, dtype)
    if dtype not in execution.quantise_inputs:
        return [gemm]
    row_bytes = k * (ACTIVATION_BYTES + DTYPE_BYTES["fp8"])
    return [Elementwise(quantise, f"{role} quantise", 1, row_bytes), gemm]
