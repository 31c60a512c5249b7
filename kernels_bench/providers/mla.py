"""MLA decode: inputs and reference for every provider."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kernels_bench.protocol import Point
from kernels_bench.providers import references
from kernels_bench.providers.attention import CHECKED_HEADS, batch_of
from kernels_bench.providers.device import Device
from kernels_bench.providers.paging import PagedBatch
from kernels_bench.providers.random_inputs import InputMaker
from kernels_bench.providers.rotating import RotatingCalls, count_sets, sample

MLA_PAGE_SIZE: Final = 64
"""Tokens a page, but for vLLM's FA3, which takes vLLM's default."""
MLA_QUERY_WIDTH: Final = 128 + 64
"""Width of an MLA head before absorption, which scores are scaled by: DeepSeek's 128 + 64."""


@dataclass(frozen=True)
class MlaSets:
    """Input sets of one MLA decode point."""

    # Sequences of one new token each.
    batch: PagedBatch
    # Absorbed queries of shape (sets, sequences, heads, latent), their rotary part, and the output, of the
    # shape of ``q_nope``.
    q_nope: Any
    q_pe: Any
    out: Any
    # Pages of shape (sets, pages, page_size, width).
    latent: Any
    rope: Any
    rotated_bytes: int


def mla_sets(
    point: Point,
    device: Device,
    seed: int,
    max_bytes: int,
    dtype: str = "bf16",
    *,
    page_size: int = MLA_PAGE_SIZE,
    packed: bool = False,
) -> MlaSets:
    """Make input sets of an MLA decode; ``packed`` puts a token's rotary part next to its latent one."""
    values = point.values
    heads, latent, rope = (int(values[n]) for n in ("num_q_heads", "kv_lora_rank", "rope_dim"))
    batch = PagedBatch.make(*batch_of(point), seed, page_size)
    b, pages, page = batch.num_sequences, batch.num_pages, batch.page_size
    element_bytes = 4 if dtype == "fp32" else 2
    set_bytes = element_bytes * (pages * page * (latent + rope) + b * heads * (2 * latent + rope))
    sets = count_sets(set_bytes, device.rotated_bytes, max_bytes)
    make = InputMaker(device, seed)
    if packed:
        pool = make.normal(sets, pages, page, latent + rope, dtype=dtype)
        latent_pages, rope_pages = pool.split([latent, rope], dim=-1)
    else:
        latent_pages = make.normal(sets, pages, page, latent, dtype=dtype)
        rope_pages = make.normal(sets, pages, page, rope, dtype=dtype)
    return MlaSets(
        batch=batch,
        q_nope=make.normal(sets, b, heads, latent, dtype=dtype),
        q_pe=make.normal(sets, b, heads, rope, dtype=dtype),
        out=make.poisoned(sets, b, heads, latent, dtype=dtype),
        latent=latent_pages,
        rope=rope_pages,
        rotated_bytes=sets * set_bytes,
    )


def prepare_mla(
    sets: MlaSets, kernel: str, attend: Callable[[Any, Any, Any, Any, Any], None], query_width: int, seed: int
) -> RotatingCalls:
    """Bind an MLA kernel to its sets and to what is checked of it."""
    import torch

    batch = sets.batch
    chosen = [
        (int(sequence), int(head))
        for sequence in sample(batch.num_sequences, 3, seed)
        for head in sample(int(sets.q_nope.shape[2]), CHECKED_HEADS, seed + 1)
    ]

    def launch(index: int) -> None:
        attend(sets.q_nope[index], sets.q_pe[index], sets.latent[index], sets.rope[index], sets.out[index])

    def read(index: int) -> Any:
        return torch.stack([sets.out[index, sequence, head] for sequence, head in chosen])

    def expect(index: int) -> Any:
        expected = []
        for sequence, head in chosen:
            pages = torch.as_tensor(batch.pages_of(sequence), dtype=torch.int64, device=sets.latent.device)
            kv_len = int(batch.kv_lens[sequence])
            latent = sets.latent[index][pages].flatten(0, 1)[:kv_len]
            k = torch.cat((latent, sets.rope[index][pages].flatten(0, 1)[:kv_len]), dim=1)
            q = torch.cat((sets.q_nope[index, sequence, head], sets.q_pe[index, sequence, head]))[None]
            last = torch.tensor([kv_len - 1], device=k.device)
            expected.append(references.attention_rows(q, k, latent, last, 1.0 / math.sqrt(query_width)))
        return torch.cat(expected)

    num_sets = int(sets.q_nope.shape[0])
    return RotatingCalls(kernel, num_sets, sets.rotated_bytes, launch, read, expect)
