"""Stand-in, see the package: dataclasses, and the command line that is made of their annotations."""

import argparse
import dataclasses
import typing
from dataclasses import dataclass, field

from .types import ExecutionTimePredictorType


def get_all_subclasses(cls):
    found = list(cls.__subclasses__())
    for subclass in cls.__subclasses__():
        found += get_all_subclasses(subclass)
    return found


@dataclass
class BasePolyConfig:
    """A config of which the command line chooses the subclass by its get_type()."""


@dataclass
class BaseModelConfig:
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    embedding_dim: int
    mlp_hidden_dim: int
    max_position_embeddings: int
    vocab_size: int
    use_gated_mlp: bool = True
    use_bias: bool = False
    use_qkv_bias: bool = False


MODELS = {
    "meta-llama/Llama-2-7b-hf": BaseModelConfig(32, 32, 32, 4096, 11008, 4096, 32768),
    "meta-llama/Meta-Llama-3-8B": BaseModelConfig(32, 32, 8, 4096, 14336, 4096, 128256),
    "meta-llama/Meta-Llama-3-70B": BaseModelConfig(80, 64, 8, 8192, 28672, 8192, 128256),
    "microsoft/phi-2": BaseModelConfig(32, 32, 32, 2560, 10240, 2048, 51200, False, True, True),
}


@dataclass
class ReplicaConfig:
    model_name: str = "meta-llama/Llama-2-7b-hf"
    num_pipeline_stages: int = 1
    tensor_parallel_size: int = 1
    device: str = "a100"

    def __post_init__(self):
        self.model_config = MODELS[self.model_name]


@dataclass
class BaseReplicaSchedulerConfig(BasePolyConfig):
    batch_size_cap: int = 128
    block_size: int = 16
    num_blocks: int = field(default=4096, metadata={"help": "Blocks of KV cache."})


@dataclass
class SarathiSchedulerConfig(BaseReplicaSchedulerConfig):
    chunk_size: int = 512

    @staticmethod
    def get_type():
        return "sarathi"


@dataclass
class MetricsConfig:
    cache_dir: str = "cache"


@dataclass
class BaseExecutionTimePredictorConfig(BasePolyConfig):
    no_cache: bool = field(default=False, metadata={"help": "Whether to cache prediction models."})
    prediction_max_batch_size: int = 128
    skip_cpu_overhead_modeling: bool = True


@dataclass
class RandomForrestExecutionTimePredictorConfig(BaseExecutionTimePredictorConfig):
    num_estimators: list[int] = field(default_factory=lambda: [250, 500, 750])

    @staticmethod
    def get_type():
        return ExecutionTimePredictorType.RANDOM_FORREST


@dataclass
class ClusterConfig:
    replica_config: ReplicaConfig = field(default_factory=ReplicaConfig)
    replica_scheduler_config: BaseReplicaSchedulerConfig = field(default_factory=SarathiSchedulerConfig)


@dataclass
class SimulationConfig:
    seed: int = 42
    cluster_config: ClusterConfig = field(default_factory=ClusterConfig)
    execution_time_predictor_config: BaseExecutionTimePredictorConfig = field(
        default_factory=RandomForrestExecutionTimePredictorConfig
    )
    metrics_config: MetricsConfig = field(default_factory=MetricsConfig)

    @classmethod
    def create_from_cli_args(cls):
        parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        _add_options(parser, cls, "", set())
        return _from_options(cls, "", vars(parser.parse_args()))


def _prefix(cls):
    """CamelCase to camel_case_, letter by letter: the prefix of a class's options."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).lstrip("_") + "_"


def _is_poly(kind):
    # only what derives from BasePolyConfig itself is a choice; what derives from a choice is an option of it
    return BasePolyConfig in getattr(kind, "__bases__", ())


def _add_options(parser, cls, prefix, seen):
    if cls in seen:
        return
    seen.add(cls)
    for f in dataclasses.fields(cls):
        if _is_poly(f.type):
            default = str(f.default_factory().get_type())
            parser.add_argument(f"--{f.name}_type", type=str, default=default, help=f.metadata.get("help"))
            for subclass in get_all_subclasses(f.type):
                _add_options(parser, subclass, _prefix(subclass), seen)
        elif dataclasses.is_dataclass(f.type):
            _add_options(parser, f.type, _prefix(f.type), seen)
        else:
            _add_option(parser, f"--{prefix}{f.name}", f)


def _add_option(parser, name, f):
    default = f.default if f.default is not dataclasses.MISSING else f.default_factory()
    how = {"type": f.type}
    if typing.get_origin(f.type) is list:
        how = {"type": typing.get_args(f.type)[0], "nargs": "+"}
    elif f.type is bool:
        how = {"action": argparse.BooleanOptionalAction}
    parser.add_argument(name, default=default, help=f.metadata.get("help"), **how)


def _from_options(cls, prefix, options):
    values = {}
    for f in dataclasses.fields(cls):
        if _is_poly(f.type):
            wanted = options[f"{f.name}_type"]
            chosen = [c for c in get_all_subclasses(f.type) if str(c.get_type()) == wanted]
            assert chosen, f"invalid type {wanted} for {f.name}_type"
            values[f.name] = _from_options(chosen[0], _prefix(chosen[0]), options)
        elif dataclasses.is_dataclass(f.type):
            values[f.name] = _from_options(f.type, _prefix(f.type), options)
        else:
            values[f.name] = options[f"{prefix}{f.name}"]
    return cls(**values)
