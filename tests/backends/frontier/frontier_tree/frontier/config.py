"""Stand-in, see the package: dataclasses whose annotations are text, as PEP 563 has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass
class BaseModelConfig:
    num_layers: int = 32
    is_moe: bool = False


@dataclass
class ReplicaConfig:
    num_pipeline_stages: int = 1
    attn_tensor_parallel_size: int = 1
    attn_data_parallel_size: int = 1
    device: str = "a100"
    network_device: str = "a100_pairwise_nvlink"
    model_name: str = "meta-llama/Llama-2-7b-hf"
    model_config: Optional[BaseModelConfig] = None  # noqa: UP045

    def __post_init__(self):
        if self.model_config is None:
            self.model_config = BaseModelConfig(64 if self.model_name == "Qwen/Qwen3-32B" else 32)


@dataclass
class BaseExecutionTimePredictorConfig:
    no_cache: bool = False
    attn_decode_in_mixed_calibration_scale: Optional[float] = None  # noqa: UP045  as Frontier writes it
    enable_dummy_mode: bool = False


def resolved_options(cls):
    """Types of a config's options, evaluated in the module of the config as Frontier does."""
    import sys
    from dataclasses import fields

    names = vars(sys.modules[cls.__module__])
    return {f.name: eval(f.type, dict(names)) if isinstance(f.type, str) else f.type for f in fields(cls)}
