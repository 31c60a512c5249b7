"""Collectives: measured points come back, and between them time follows what is sent."""

from __future__ import annotations

import numpy as np
import pytest

from fastroof.errors import LookupInputError, MissingTableError
from fastroof.operators.communication import (
    COLLECTIVE,
    _library_collective,
    allreduce_wire_bytes,
    collective_wire_bytes,
)
from tests.reference.handmade import handmade_tables

ROWS = [
    ("fp16", name, gpus, size, us)
    for name, gpus in (("all_gather", 4), ("reduce_scatter", 4), ("alltoall", 8))
    for size, us in ((1024, 10.0), (1024 + 2**20, 110.0))
]


def test_collectives_are_looked_up_by_what_each_gpu_contributes():
    tables = handmade_tables(collective=ROWS)
    sizes = np.array([1024, 1024 + 2**19, 1024 + 2**20])
    for name, gpus in (("all_gather", 4), ("reduce_scatter", 4), ("alltoall", 8)):
        answer = tables.lookup("collective", collective=name, num_gpus=gpus, message_bytes=sizes)
        assert answer.latency_us.tolist() == pytest.approx([10.0, 60.0, 110.0], rel=1e-12)
        assert answer.origin.tolist() == [0, 1, 0]
        assert np.isnan(answer.mfu).all()
    with pytest.raises(MissingTableError):
        tables.lookup("collective", collective="all_gather", num_gpus=8, message_bytes=1024)
    with pytest.raises(LookupInputError, match="collective all_gather needs num_gpus of at least 2, got 1"):
        tables.lookup("collective", collective="all_gather", num_gpus=1, message_bytes=1024)


def test_an_all_gather_and_a_reduce_scatter_are_the_halves_of_an_all_reduce():
    """For one tensor each GPU contributes a share of a gather, and all of a scatter."""
    whole, gpus = 2**20, 8
    halves = (
        collective_wire_bytes("all_gather", whole / gpus, gpus),
        collective_wire_bytes("reduce_scatter", whole, gpus),
    )
    assert halves[0] == halves[1]
    assert sum(halves) == allreduce_wire_bytes(whole, gpus)
    rows = {
        "collective": np.array(["all_gather", "alltoall"]),
        "message_bytes": np.array([whole // gpus, whole]),
        "num_gpus": np.array([gpus, gpus]),
    }
    assert COLLECTIVE.moved_bytes(rows).tolist() == [float(halves[0]), float(halves[1])]


def test_the_error_of_a_collective_is_small_at_shipped_points(h100):
    rows = h100.table("collective").columns
    some = {name: rows[name][::50] for name in ("message_bytes", "num_gpus")}
    words = {name: rows[name][::50] for name in ("collective", "dtype")}
    for i in range(len(some["num_gpus"])):
        sizes = {name: int(values[i]) for name, values in some.items()}
        keys = {name: str(values[i]) for name, values in words.items()}
        answer = h100.lookup("collective", with_error=True, **sizes, **keys)
        assert int(answer.origin) == 0
        assert 0.0 < float(answer.relative_error) < 1.0


def test_what_each_gpu_contributes_is_its_share_of_what_is_gathered():
    """The package counts elements: what all GPUs hold after an all-gather, what one has before the others."""
    names = ["all_gather", "reduce_scatter", "alltoall"]
    raw = {
        "nccl_dtype": np.array(["half"] * 3, object),
        "op_name": np.array(names, object),
        "num_gpus": np.array([8, 8, 8]),
        "message_size": np.array([4096, 4096, 4096]),
        "latency": np.array([0.01, 0.02, 0.03]),
        "kernel_source": np.array(["NCCL"] * 3, object),
    }
    rows = _library_collective(raw).columns
    assert rows["message_bytes"].tolist() == [2 * 4096 // 8, 2 * 4096, 2 * 4096]
