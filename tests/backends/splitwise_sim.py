"""A stand-in of splitwise-sim's performance model: reads a table, and times batches by their tokens."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

READ = (
    *("model", "hardware", "tensor_parallel"),
    *("prompt_size", "batch_size", "token_size", "prompt_time", "token_time"),
)


class Instance(NamedTuple):
    model: str
    hardware: str
    tensor_parallel: int


class PromptTask(NamedTuple):
    prompt_size: int


class TokenTask(NamedTuple):
    context: int


class DatabasePerformanceModel:
    """Lines between medians of rows that have as many tokens, and beyond the first and last two."""

    def __init__(self, db_path):
        lines: dict[Any, dict[int, list[tuple[float, float]]]] = {}
        with Path(db_path).open(newline="") as file:
            for row in csv.DictReader(file):
                kept = {name: row[name] for name in READ}
                key = Instance(kept["model"], kept["hardware"], int(kept["tensor_parallel"]))
                tokens = int(kept["prompt_size"]) * int(kept["batch_size"])
                times = float(kept["prompt_time"]) / 1000, float(kept["token_time"]) / 1000
                lines.setdefault(key, {}).setdefault(tokens, []).append(times)
        self.lines = {
            key: (sorted(of), *([median(t[i] for t in of[x]) for x in sorted(of)] for i in (0, 1)))
            for key, of in lines.items()
        }

    def get_iteration_duration(self, batch, instance, *args, **kwargs):
        """Seconds of a batch."""
        prompts = [task.prompt_size for task in batch if isinstance(task, PromptTask)]
        decodes = len(batch) - len(prompts)
        x, prompt_s, token_s = self.lines[instance]
        y = prompt_s if prompts else token_s
        tokens = sum(prompts) + decodes
        at = int(np.clip(np.searchsorted(x, tokens), 1, len(x) - 1))
        slope = (y[at] - y[at - 1]) / (x[at] - x[at - 1])
        return (y[at - 1] + slope * (tokens - x[at - 1])) * (1.1 if prompts and decodes else 1.0)
