"""A stand-in for the SGLang simulator's predictors, which no package index has.

Written for these tests after sgl-project/sglang, tools/sglang-simulator/src/sglang_simulator: batches and
predictors as in time_predictor/base.py at 2f070b1, the sklearn-compatible predictor with its 18 features as
in time_predictor/ml.py at bb346ef, how the hooked scheduler makes a batch of SGLang's and what it does with
its predictor as in simulation/sglang/scheduler.py at c1c5d7b and 0b61083, and simulation/manager/config.py
at 2f070b1; with their names, fields, units and formulas, and none of their code. Left out: models and
accelerators, the other predictors and options, everything that needs SGLang itself, and joblib, whose `load`
reads a pickle as `pickle.load` does.
"""

import json
import math
import os
import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass
class ScheduleRequest:
    extend_length: int = 0
    past_kv_length: int = 0


@dataclass
class ScheduleBatch:
    reqs: list[ScheduleRequest] = field(default_factory=list)

    def request_info(self):
        return [[r.extend_length, r.past_kv_length] for r in self.reqs]

    def is_empty(self):
        return not self.reqs


def prepared_batch(extend_lens, prefix_lens):
    """Contexts as test/test_predictor_contract.py of pull request 36069 at 3ec08c4 has them."""
    pairs = zip(extend_lens, prefix_lens, strict=True)
    return ScheduleBatch([ScheduleRequest(new, past) for new, past in pairs])


def extend_batch(extend_lens, prefix_lens):
    """SGLang's modes EXTEND and MIXED: output_ids of a decode hold the token that goes through the model."""
    return prepared_batch(
        extend_lens,
        [past + (new == 1 and past > 0) for new, past in zip(extend_lens, prefix_lens, strict=True)],
    )


def decode_batch(prompts, outputs):
    """SGLang's mode DECODE: prefix_indices end at the last prefill, output_ids hold the new token."""
    return ScheduleBatch([ScheduleRequest(1, p + n) for p, n in zip(prompts, outputs, strict=True)])


class InferTimePredictor(ABC):
    @abstractmethod
    def predict_infer_time(self, batch):
        """Seconds."""

    def get_metrics(self):
        return {}

    def reset_metrics(self):
        return None


class MLTimePredictor(InferTimePredictor):
    # fmt: off
    FEATURE_NAMES = (
        "batch_size", "sum_extend", "max_extend", "min_extend", "sum_past", "max_past", "min_past",
        "sum_extend_x_past", "sum_extend_squared", "sum_past_squared", "sum_attn_flops",
        "sum_extend_x_max_past", "log1p_sum_past", "log1p_sum_attn_flops", "batch_size_x_sum_extend",
        "max_past_minus_min_past", "is_decode", "is_prefill",
    )
    # fmt: on

    def __init__(self, database_path, latency_scale=1.0):
        with open(database_path, "rb") as file:
            bundle = pickle.load(file)
        assert list(bundle["features"]) == list(self.FEATURE_NAMES)
        assert callable(bundle["model"].predict)
        self._model = bundle["model"]
        self._latency_scale = float(latency_scale)

    def predict_infer_time(self, batch):
        if batch.is_empty():
            return 0.0
        return float(self._model.predict([features_of(batch)])[0]) * self._latency_scale


def features_of(batch):
    new = [r.extend_length for r in batch.reqs]
    past = [r.past_kv_length for r in batch.reqs]
    pairs = batch.request_info()
    attended = sum(e * (p + e / 2) for e, p in pairs)
    return [
        len(pairs),
        sum(new),
        max(new),
        min(new),
        sum(past),
        max(past),
        min(past),
        sum(e * p for e, p in pairs),
        sum(e * e for e in new),
        sum(p * p for p in past),
        attended,
        sum(new) * max(past),
        math.log1p(sum(past)),
        math.log1p(attended),
        len(pairs) * sum(new),
        max(past) - min(past),
        int(max(new) == 1),
        int(max(new) > 1),
    ]


class ConfigManager:
    """The file that SGLANG_SIMULATOR_CONFIG_PATH names, read once."""

    _raw_config = None

    @classmethod
    def reset_config_cache(cls):
        cls._raw_config = None

    @classmethod
    def get_inference_time_predictor(cls, model, hw, sched_config):
        if cls._raw_config is None:
            with open(os.environ["SGLANG_SIMULATOR_CONFIG_PATH"]) as file:
                cls._raw_config = json.load(file)
        chosen = cls._raw_config.get("predictor", {})
        if chosen.get("name") != "ml":
            raise ValueError(f"Unknown predictor name: {chosen.get('name')}")
        return MLTimePredictor(chosen.get("database_path"), chosen.get("latency_scale", 1.0))


class C_SchedulerHook:
    """What is wrapped around SGLang's Scheduler when that class is made."""

    INFERENCE_PREDICTOR: InferTimePredictor = None

    @classmethod
    def hook(cls, target):
        own_init, own_run_batch = target.__init__, target.run_batch

        def wrapped_init(self, *args, **kwargs):
            own_init(self, *args, **kwargs)
            made = ConfigManager.get_inference_time_predictor(None, None, None)
            C_SchedulerHook.INFERENCE_PREDICTOR = made

        def wrapped_run_batch(self, batch):
            result = own_run_batch(self, batch)
            if not batch.is_empty():
                self.step_s = float(C_SchedulerHook.INFERENCE_PREDICTOR.predict_infer_time(batch))
            return result

        target.__init__ = wrapped_init
        target.run_batch = wrapped_run_batch


class Scheduler:
    """Of SGLang's, that a hook finds these two methods."""

    step_s = None

    def __init__(self, server_args):
        self.server_args = server_args

    def run_batch(self, batch):
        return None


C_SchedulerHook.hook(Scheduler)
