"""Attention through torch's scaled_dot_product_attention: cuDNN where it takes the shape, else flash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from kernels_bench.protocol import Point
from kernels_bench.providers.attention import contiguous_sets, prepare_attention
from kernels_bench.providers.device import Device
from kernels_bench.providers.rotating import RotatingCalls

_TITLES: Final = {"CUDNN_ATTENTION": "cuDNN", "FLASH_ATTENTION": "flash", "MATH": "math"}


def refuses_sdpa(point: Point, device: Device) -> str | None:
    """Return why SDPA cannot measure an attention point; None where it can."""
    if point.values["kv_dtype"] != "bf16":
        return f"SDPA has no {point.values['kv_dtype']} KV cache; it computes in bf16"
    if point.values.get("window", 0):
        return "SDPA has no sliding window but as a mask over all tokens; it needs vllm or flashinfer"
    if device.gfx and point.values.get("q_len", 1) not in (1, point.values["kv_len"]):
        return "SDPA's causal mask after a prefix is not measured on AMD"
    return None


def prepare_sdpa(point: Point, device: Device, seed: int, max_bytes: int) -> RotatingCalls:
    """Make contiguous inputs and find the backend that takes them."""
    sets = contiguous_sets(point, device, seed, max_bytes)
    batch_size = len(sets.kv_lens)
    q_len, kv_len = int(sets.new_tokens[0]), int(sets.kv_lens[0])
    # (batch, heads, tokens, head_dim) views of (tokens, heads, head_dim) memory
    tensors = [x.unflatten(1, (batch_size, -1)).transpose(2, 3) for x in (sets.q, sets.k, sets.v)]
    views = list(zip(*tensors, strict=True))
    backend, attend = _first_that_works(_backends(device, q_len, kv_len), views[0], q_len, kv_len)
    outputs: dict[int, Any] = {}

    def launch(index: int) -> None:
        outputs[index] = attend(*views[index])

    calls = prepare_attention(sets, "", launch, seed)
    read = calls.read

    def read_copied(index: int) -> Any:
        # The sampled elements are read from where every provider writes.
        sets.out[index].copy_(outputs[index].transpose(1, 2).flatten(0, 1))
        return read(index)

    calls.kernel = f"SDPA {backend}, {_what(point)}"
    calls.read = read_copied
    return calls


def sdpa_words(point: Point, device: Device) -> str:
    """Name the backends that are tried for a point, in their order."""
    q_len, kv_len = int(point.values.get("q_len", 1)), int(point.values["kv_len"])
    return f"SDPA {' or '.join(_TITLES[name] for name in _backends(device, q_len, kv_len))}, {_what(point)}"


def _what(point: Point) -> str:
    return "prefill" if "q_len" in point.values else "decode, contiguous KV"


def _backends(device: Device, q_len: int, kv_len: int) -> list[str]:
    if device.name != "cuda":
        return ["MATH"]
    # Lower-right causal, and one query over its past, are masks that cuDNN's op has no argument for here.
    is_square = q_len == kv_len
    has_cudnn = not device.gfx and (is_square or q_len == 1)
    return ["CUDNN_ATTENTION", "FLASH_ATTENTION"] if has_cudnn else ["FLASH_ATTENTION"]


def _first_that_works(
    backends: Sequence[str], views: tuple[Any, Any, Any], q_len: int, kv_len: int
) -> tuple[str, Callable[[Any, Any, Any], Any]]:
    from torch.nn.attention import SDPBackend

    refused = []
    for name in backends:
        backend = SDPBackend.__members__[name]

        def attend(q: Any, k: Any, v: Any, backend: Any = backend) -> Any:
            return causal_attention(q, k, v, backend)

        try:
            attend(*views)
        except RuntimeError as error:
            import torch

            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            refused.append(f"{name}: {error}")
            continue
        return _TITLES[name], attend
    raise RuntimeError(f"no SDPA backend takes {q_len} queries over {kv_len} tokens: {'; '.join(refused)}")


def causal_attention(q: Any, k: Any, v: Any, backend: Any = None) -> Any:
    """Attend from the last queries to everything before them and themselves."""
    import contextlib

    import torch.nn.functional as functional
    from torch.nn.attention import sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    q_len, kv_len = q.shape[2], k.shape[2]
    gqa = q.shape[1] != k.shape[1]
    chosen = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
    with chosen:
        if q_len == 1 or q_len == kv_len:
            # One query sees everything: no mask at all.
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=q_len == kv_len and q_len > 1, enable_gqa=gqa
            )
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=causal_lower_right(q_len, kv_len), enable_gqa=gqa
        )
