"""Stand-in, see the package: prints what would simulate."""

from .execution_time_predictor import ExecutionTimePredictorRegistry
from .types import ExecutionTimePredictorType


def main():
    print(ExecutionTimePredictorRegistry.get_class(ExecutionTimePredictorType.DUMMY).__name__)
