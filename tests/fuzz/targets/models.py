"""config.json of every family, as files and as the mappings that they hold."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from random import Random
from typing import Any

from fastroof.models import Layout, load_model
from fastroof.models.execution import Execution
from fastroof.models.named import PRESETS, preset_config
from tests.fuzz.mutators import mutated_tree
from tests.fuzz.target import Target, TextFiles, Wrong
from tests.models.quantisation.test_methods import METHODS
from tests.models.test_families import CASES


def answers(file: Any) -> None:
    """Load a model, and read all that a plan reads of it."""
    model = load_model(file)
    if not 0 < model.active_parameters <= model.num_parameters:
        raise Wrong(f"{model.active_parameters} of {model.num_parameters} parameters are active")
    if not model.num_layers == sum(group.count for group in model.layers) > 0:
        raise Wrong("layers are not those of its kinds")
    if model.kv_bytes_per_token(Layout(), "bf16") < 0:
        raise Wrong("a token takes less than no bytes")
    for kind in model.kinds:
        if kind.activation_width(model.hidden, Layout()) < 0:
            raise Wrong("activations are narrower than nothing")
        kind.calls(model.hidden, Layout(), Execution())
    if hash(model) != hash(copy.deepcopy(model)):
        raise Wrong("equal models have several hashes")


def valid_files() -> list[Any]:
    return [*(copy.deepcopy(file) for file, _, _ in CASES.values()), *map(preset_config, PRESETS)]


class Configs(Target):
    """Mappings, as ``load_model`` takes them, written as JSON."""

    name = "model.config"
    suffix = ".json"
    ci_cases = 1500

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.files = valid_files()
        self.methods = [method for method, _, _ in METHODS.values()]

    def case(self, random: Random) -> bytes:
        config = mutated_tree(random.choice(self.files), random, self.files)
        if isinstance(config, dict) and random.random() < 0.05:
            config = {**config, "text_config": random.choice(self.files)}
        if random.random() < 0.2:
            method = mutated_tree(random.choice(self.methods), random, self.methods)
            config = {**random.choice(self.files), "quantization_config": method}
        return json.dumps(config).encode()

    def check(self, case: bytes) -> None:
        answers(json.loads(case))


class ConfigFiles(TextFiles):
    """Files, which may be no JSON."""

    name = "model.file"
    suffix = ".json"
    ci_cases = 400

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.texts = [json.dumps(file, indent=1).encode() for file in valid_files()]

    def read(self) -> None:
        answers(self.path)


TARGETS = [Configs, ConfigFiles]
