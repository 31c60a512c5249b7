"""A stand-in for Vidur's source tree, which no package index has: its interface, and a small simulator.

Written for these tests after microsoft/vidur, with its names, fields, units and formulas and none of its
code: vidur/entities, vidur/types/execution_time_predictor_type.py, vidur/scheduler and
vidur/execution_time_predictor/base_execution_time_predictor.py at 82f0840, vidur/utils/base_registry.py at
e26eb8f, vidur/config/config.py at 8afeaf0, vidur/config/flat_dataclass.py at e7d4261,
vidur/config/model_config.py at 86e0a99.

Left out: profiling, the trained predictors and their data, request generators, metrics and plots, every
replica scheduler but Sarathi's, global schedulers (there is one replica), pipeline stages in the simulator,
checks of states that a simulation never reaches.
"""
