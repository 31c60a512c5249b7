"""fp8 with a scale for each block, as the checkpoints of DeepSeek, Qwen3 and MiniMax hold their weights.

A weight has one float32 scale for 128 x 128 elements, an activation one for 128 elements of a row.
"""

from __future__ import annotations

from typing import Any, Final

from kernels_bench.providers.device import FP8_MAX, torch_dtype

SCALE_BLOCK: Final = 128
TINY: Final = 1e-12
"""Scale of a block of zeros."""


def quantise_blocks(values: Any, block_rows: int) -> tuple[Any, Any]:
    """Quantise with a scale a block."""
    import torch

    rows, columns = values.shape[-2:]
    tall, wide = -(-rows // block_rows), -(-columns // SCALE_BLOCK)
    missing = (0, wide * SCALE_BLOCK - columns, 0, tall * block_rows - rows)
    padded = torch.nn.functional.pad(values, missing) if any(missing) else values
    blocks = padded.unflatten(-1, (wide, SCALE_BLOCK)).unflatten(-3, (tall, block_rows))
    scale = blocks.abs().amax(dim=(-3, -1)).float().clamp_min(TINY) / FP8_MAX
    # In bf16: a float32 copy of a large weight would take four times the room of the result.
    divided = blocks / scale.to(values.dtype)[..., :, None, :, None]
    quantised = divided.clamp_(-FP8_MAX, FP8_MAX).to(torch_dtype("fp8")).flatten(-2, -1).flatten(-3, -2)
    return quantised[..., :rows, :columns].contiguous(), scale


def spread_scales(scale: Any, block_rows: int, rows: int, columns: int) -> Any:
    """Repeat the scale of each block for its elements."""
    tall = scale.repeat_interleave(block_rows, dim=-2)[..., :rows, :]
    return tall.repeat_interleave(SCALE_BLOCK, dim=-1)[..., :columns]
