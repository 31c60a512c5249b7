"""Stand-in, see the package: enumerations."""

from enum import IntEnum


class ExecutionTimePredictorType(IntEnum):
    DUMMY = 1
    RANDOM_FORREST = 2
    LINEAR_REGRESSION = 3


class ClusterType(IntEnum):
    MONOLITHIC = 1
    PREFILL = 2
    DECODE_ATTN = 3
    DECODE_FFN = 4
    DECODE = 5
    TRANS = 6
