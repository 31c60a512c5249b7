"""Random inputs, never zeros: kernels run up to 13 % faster on zeros, and zeros hide wrong indexing.

Also fp8 with a scale for each block, as checkpoints of DeepSeek, Qwen3 and MiniMax hold their weights: one
float32 for 128 x 128 elements of a weight, one for 128 elements of a row of an activation.
"""

from __future__ import annotations

from typing import Any, Final

from kernels_bench.providers.device import E4M3, Device, Fp8, torch_dtype


class InputMaker:
    """Makes tensors on a device from one seed."""

    def __init__(self, device: Device, seed: int) -> None:
        import torch

        self._torch = torch
        self.device = device
        # meta tensors hold no numbers, so there is nothing to seed.
        self._generator = None
        if device.name != "meta":
            self._generator = torch.Generator(device.name).manual_seed(seed % 2**63)

    def normal(self, *shape: int, dtype: str = "bf16") -> Any:
        """Return a tensor of normally distributed numbers; fp8 ones are rounded from bf16."""
        if dtype == "fp8":
            return self.normal(*shape).to(getattr(self._torch, self.device.fp8.name))
        empty = self._torch.empty(shape, dtype=torch_dtype(dtype), device=self.device.name)
        return empty.normal_(generator=self._generator)

    def poisoned(self, *shape: int, dtype: str = "bf16") -> Any:
        """Return an output full of NaN, so that an element which is not written shows."""
        if dtype == "fp8":
            # fill_ has no fp8; 0x7f is e4m3's NaN.
            bits = self._torch.full(shape, 0x7F, dtype=self._torch.uint8, device=self.device.name)
            return bits.view(torch_dtype("fp8"))
        return self._torch.full(shape, float("nan"), dtype=torch_dtype(dtype), device=self.device.name)

    def quantised(self, rows: int, columns: int) -> tuple[Any, Any]:
        """Return fp8 numbers and the float32 scale, of shape (1,), that makes them normal again."""
        values = self.normal(rows, columns)
        # In bf16: a float32 copy of a large weight would take four times the room of the result.
        name, largest = self.device.fp8
        scale = values.abs().amax().reshape(1).float() / largest
        divided = (values / scale.to(values.dtype)).clamp_(-largest, largest)
        return divided.to(getattr(self._torch, name)), scale

    def constant(self, value: float) -> Any:
        """Return a float32 number of shape (1,)."""
        return self._torch.full((1,), value, dtype=self._torch.float32, device=self.device.name)

    def indices(self, values: Any, dtype: str = "int32") -> Any:
        """Return integers on the device."""
        return self._torch.as_tensor(values, dtype=getattr(self._torch, dtype), device=self.device.name)


SCALE_BLOCK: Final = 128
TINY: Final = 1e-12
"""Scale of a block of zeros."""


def quantise_blocks(values: Any, block_rows: int, fp8: Fp8 = E4M3) -> tuple[Any, Any]:
    """Quantise with a scale a block."""
    import torch

    rows, columns = values.shape[-2:]
    tall, wide = -(-rows // block_rows), -(-columns // SCALE_BLOCK)
    missing = (0, wide * SCALE_BLOCK - columns, 0, tall * block_rows - rows)
    padded = torch.nn.functional.pad(values, missing) if any(missing) else values
    blocks = padded.unflatten(-1, (wide, SCALE_BLOCK)).unflatten(-3, (tall, block_rows))
    scale = blocks.abs().amax(dim=(-3, -1)).float().clamp_min(TINY) / fp8.largest
    # In bf16: a float32 copy of a large weight would take four times the room of the result.
    divided = blocks / scale.to(values.dtype)[..., :, None, :, None]
    quantised = divided.clamp_(-fp8.largest, fp8.largest).to(getattr(torch, fp8.name))
    quantised = quantised.flatten(-2, -1).flatten(-3, -2)
    return quantised[..., :rows, :columns].contiguous(), scale


def spread_scales(scale: Any, block_rows: int, rows: int, columns: int) -> Any:
    """Repeat the scale of each block for its elements."""
    tall = scale.repeat_interleave(block_rows, dim=-2)[..., :rows, :]
    return tall.repeat_interleave(SCALE_BLOCK, dim=-1)[..., :columns]
