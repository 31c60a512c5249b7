"""Stand-in, see the package: enumerations that a command line names."""

from enum import IntEnum


class BaseIntEnum(IntEnum):
    def __str__(self):
        return self.name.lower()

    @classmethod
    def from_str(cls, string):
        return cls[string.upper()]


class ExecutionTimePredictorType(BaseIntEnum):
    DUMMY = 1
    RANDOM_FORREST = 2
    LINEAR_REGRESSION = 3
