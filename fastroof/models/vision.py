"""The vision encoder before a text model: its sizes, and the calls that encode an image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from fastroof.checks import is_whole_number, shown
from fastroof.errors import ModelError
from fastroof.models.hf import Fields
from fastroof.operators.calls import AllReduce, Elementwise, Gemm, RowOperator
from fastroof.units import ACTIVATION_BYTES

LONGEST_RATIO = 200
"""Maximum aspect ratio of an image."""


class ImagePieces(NamedTuple):
    """Patches of one image that an encoder processes, and tokens that the text model receives."""

    pieces: int
    patches: int
    tokens: int


def _grid(width: int, height: int, patch: int, merge: int) -> ImagePieces:
    """Return the patches and tokens of an image whose sides are whole numbers of merged patches."""
    tokens = (width // (patch * merge)) * (height // (patch * merge))
    return ImagePieces(1, tokens * merge**2, tokens)


@dataclass(frozen=True)
class AreaLimits:
    """Resize the sides to multiples of a merged patch, then to within an area (Qwen-VL, MiniMax-M3)."""

    least_pixels: int
    most_pixels: int

    def pieces(self, width: int, height: int, patch: int, merge: int) -> ImagePieces:
        """Return the patches and tokens of an image of these sides (pixels)."""
        side = patch * merge
        wide, high = (max(side, round(length / side) * side) for length in (width, height))
        if wide * high > self.most_pixels:
            shrunk = math.sqrt(width * height / self.most_pixels)
            wide, high = (max(side, int(length / shrunk / side) * side) for length in (width, height))
        elif wide * high < self.least_pixels:
            grown = math.sqrt(self.least_pixels / (width * height))
            wide, high = (math.ceil(length * grown / side) * side for length in (width, height))
        return _grid(wide, high, patch, merge)


@dataclass(frozen=True)
class PatchLimits:
    """Keep the size, shrink to a maximum number of patches, pad to whole merged patches (Kimi)."""

    most_patches: int
    most_on_a_side: int = 512

    def pieces(self, width: int, height: int, patch: int, merge: int) -> ImagePieces:
        """Return the patches and tokens of an image of these sides (pixels)."""
        longest = self.most_on_a_side * patch
        area = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(self.most_patches / area), longest / width, longest / height)
        wide, high = (min(max(1, int(length * scale)), longest) for length in (width, height))
        side = patch * merge
        return _grid(-(-wide // side) * side, -(-high // side) * side, patch, merge)


@dataclass(frozen=True)
class FilledTokens:
    """Resize to the maximum number of tokens, with sides of whole merged patches (Gemma 4)."""

    most_tokens: int

    def pieces(self, width: int, height: int, patch: int, merge: int) -> ImagePieces:
        """Return the patches and tokens of an image of these sides (pixels)."""
        side = patch * merge
        scale = math.sqrt(self.most_tokens * side**2 / (width * height))
        wide, high = (int(scale * length / side) for length in (width, height))
        if not wide:
            wide, high = 1, min(height // width, self.most_tokens)
        elif not high:
            wide, high = min(width // height, self.most_tokens), 1
        return _grid(wide * side, high * side, patch, merge)


@dataclass(frozen=True)
class OneSize:
    """Resize every image to one square (Gemma 3)."""

    side: int

    def pieces(self, width: int, height: int, patch: int, merge: int) -> ImagePieces:
        """Return the patches and tokens of any image."""
        return _grid(self.side, self.side, patch, merge)


@dataclass(frozen=True)
class Tiles:
    """Cut into square tiles, plus one tile of the whole image if there are several (Llama 4)."""

    side: int
    most_tiles: int = 16

    def pieces(self, width: int, height: int, patch: int, merge: int) -> ImagePieces:
        """Return the patches and tokens of an image of these sides (pixels)."""
        grids = [
            (across, down)
            for across in range(1, self.most_tiles + 1)
            for down in range(1, self.most_tiles // across + 1)
        ]

        def scale(grid: tuple[int, int]) -> float:
            return min(grid[0] * self.side / width, grid[1] * self.side / height)

        enlarging = [grid for grid in grids if scale(grid) >= 1.0]
        target = min(map(scale, enlarging)) if enlarging else max(map(scale, grids))
        tiles = min(across * down for across, down in grids if scale((across, down)) == target)
        pieces = tiles if tiles == 1 else tiles + 1
        of_tile = _grid(self.side, self.side, patch, merge)
        return ImagePieces(pieces, of_tile.patches, pieces * of_tile.tokens)


Resizing = AreaLimits | PatchLimits | FilledTokens | OneSize | Tiles


def resizing_of(wrapper: Fields, image_size: int | None) -> Resizing | None:
    """Return how images are resized before a wrapper's encoder; None if unknown."""
    name = wrapper.text("model_type") or ""
    if name.startswith(("qwen3_vl", "qwen3_5")):
        return AreaLimits(256**2, 4096**2)
    if name in ("qwen2_vl", "qwen2_5_vl"):
        return AreaLimits(4 * 28**2, 16384 * 28**2)
    if name == "minimax_m3_vl":
        return AreaLimits(4 * 28**2, 576 * 28**2)
    if name in ("kimi_k25", "kimi_k3"):
        return PatchLimits(16384 if name == "kimi_k25" else 65536)
    if name == "gemma4":
        return FilledTokens(wrapper.size_or("vision_soft_tokens_per_image", 280))
    if image_size is None:
        return None
    if name == "gemma3":
        return OneSize(image_size)
    return Tiles(image_size) if name == "llama4" else None


def check_sides(width: int, height: int) -> None:
    """Raise ModelError if the sides are invalid or their ratio exceeds the processors' limit."""
    if not all(type(side) is int and side > 0 for side in (width, height)):
        raise ModelError(f"an image must be (width, height) of at least 1 pixel, got ({width!r}, {height!r})")
    if max(width, height) > LONGEST_RATIO * min(width, height):
        raise ModelError(f"an image of {width} x {height}: the aspect ratio must be at most {LONGEST_RATIO}")


_COLOURS: Final = 3
_GATED: Final = ("gemma4_vision", "pixtral", "qwen2_5_vl", "qwen2_5_vl_vision")
_MERGED: Final = ("spatial_merge_size", "merge_size", "pooling_kernel_size", "merge_kernel_size")
_SHUFFLED: Final = ("pixel_shuffle_ratio", "downsample_ratio")
_LEAST_RATIO: Final = 0.01
_POOLED_TOKENS: Final = {"gemma3": 256}


class EncoderCalls(NamedTuple):
    """The calls of an encoder on one GPU, without attention."""

    before: tuple[RowOperator, ...]
    layer: tuple[RowOperator, ...]
    projection: tuple[RowOperator, ...]
    after: tuple[RowOperator, ...]


@dataclass(frozen=True)
class VisionEncoder:
    """Sizes of a vision encoder: a transformer over the patches of an image.

    All layers but ``full_layers`` attend within windows of ``window`` patches, if it is not 0.
    """

    num_layers: int | None
    hidden: int | None
    intermediate: int | None
    num_heads: int | None
    head_dim: int | None
    patch_size: int | None
    frames: int = 1
    merge: int = 1
    out_hidden: int | None = None
    mergers: int = 1
    is_gated: bool = False
    projection: int | None = None
    resizing: Resizing | None = None
    window: int = 0
    full_layers: int = 0

    def pieces(self, width: int, height: int) -> ImagePieces:
        """Return the patches and tokens of an image."""
        check_sides(width, height)
        if self.resizing is None or self.patch_size is None:
            raise ModelError(
                "how images are resized for this encoder is unknown; use image_us with a number of patches"
            )
        return self.resizing.pieces(width, height, self.patch_size, self.merge)

    def weights(self, tp: int) -> int:
        """Return the weights on one of ``tp`` GPUs; whole if they do not divide, 0 if sizes are unknown."""
        for split in (tp, 1):
            try:
                calls = self.calls(split)
            except ModelError:
                continue
            parts = (calls.before, calls.layer * (self.num_layers or 0), calls.projection, calls.after)
            gemms = [call for part in parts for call in part if isinstance(call, Gemm)]
            return sum(call.times * call.n * call.k for call in gemms)
        return 0

    def calls(self, tp: int) -> EncoderCalls:
        """Return the calls of one of ``tp`` GPUs."""
        sizes = ("num_layers", "hidden", "intermediate", "num_heads", "head_dim", "patch_size")
        unknown = [name for name in sizes if getattr(self, name) is None]
        if unknown:
            raise ModelError(f"vision_config does not define {', '.join(unknown)} of the vision encoder")
        hidden, width = self.hidden or 0, self.intermediate or 0
        heads, head_dim = self.num_heads or 0, self.head_dim or 0
        if heads % tp or width % tp:
            raise ModelError(
                f"a vision encoder of {heads} heads and MLPs of {width} does not divide by tp={tp}"
            )
        row_bytes = float(hidden * ACTIVATION_BYTES)
        pixels = _COLOURS * (self.patch_size or 0) ** 2 * self.frames
        up = 2 if self.is_gated else 1
        attended = heads // tp * head_dim
        sums = [] if tp == 1 else [AllReduce("attention_allreduce", "all-reduce", 2, tp, row_bytes)]
        layer: list[RowOperator] = [
            Elementwise("attention_norm", "norms", 2, 4.0 * row_bytes),
            Gemm("qkv", "qkv", 1, 3 * attended, hidden, "bf16"),
            Gemm("o", "o", 1, hidden, attended, "bf16"),
            Gemm("gate_up", "up", 1, up * width // tp, hidden, "bf16"),
            Elementwise("activation", "activation", 1, (up + 1.0) * (width // tp) * ACTIVATION_BYTES),
            Gemm("down", "down", 1, hidden, width // tp, "bf16"),
            *sums,
        ]
        projection: list[RowOperator] = []
        if self.projection is not None:
            projection = [
                Gemm("gate_up", "projection", 1, self.projection, hidden, "bf16"),
                Gemm("down", "projection out", 1, self.projection, self.projection, "bf16"),
            ]
        patches = Gemm("embedding", "patches", 1, hidden, pixels, "bf16")
        return EncoderCalls((patches,), tuple(layer), tuple(projection), self._after(hidden))

    def attended(self, image: ImagePieces) -> list[tuple[int, int, int]]:
        """Return how the layers attend to an image: layers, sequences, and patches of each."""
        layers, full = self.num_layers or 0, min(self.full_layers, self.num_layers or 0)
        whole = (full if self.window else layers, image.pieces, image.patches)
        if not self.window:
            return [whole]
        within = min(self.window, image.patches)
        return [whole, (layers - full, image.pieces * -(-image.patches // within), within)]

    @property
    def size(self) -> tuple[int, int]:
        """Layers and hidden size; 0 if unknown."""
        for name in ("num_layers", "hidden"):
            value = getattr(self, name)
            if value is not None and not is_whole_number(value):
                raise ModelError(f"vision {name} must be a whole number, got {shown(value)}")
        return self.num_layers or 0, self.hidden or 0

    def _after(self, hidden: int) -> tuple[RowOperator, ...]:
        if self.out_hidden is None:
            return ()
        merged = (self.projection or hidden) * self.merge**2
        inner = self.projection or merged
        return (
            Gemm("gate_up", "merger", self.mergers, inner, merged, "bf16"),
            Gemm("down", "merger out", self.mergers, self.out_hidden, inner, "bf16"),
        )


def vision_encoder(fields: Fields) -> VisionEncoder | None:
    """Return the encoder described by a wrapper's ``vision_config``; None without one."""
    vision = fields.part("vision_config")
    if vision is None:
        return None
    hidden = _of_tower(vision, "hidden_size")
    num_heads = vision.optional_size("num_heads", _of_tower(vision, "num_attention_heads"))
    head_dim = vision.optional_size("head_dim")
    if head_dim is None and hidden is not None and num_heads is not None:
        # Kimi-K3's heads are wider than its rows; more heads than elements are not supported
        head_dim = vision.size_or("qkv_hidden_size", hidden) // num_heads or None
    patch_size = _side(vision, "patch_size")
    # MiniMax-M3 stores both in a separate section
    merging = vision.part("img_token_compression_config") or vision
    projection = vision.optional_size("projection_dim") if merging is not vision else None
    return VisionEncoder(
        num_layers=vision.optional_size("depth", _of_tower(vision, "num_hidden_layers")),
        hidden=hidden,
        intermediate=_of_tower(vision, "intermediate_size"),
        num_heads=num_heads,
        head_dim=head_dim,
        patch_size=patch_size,
        frames=merging.size_or("temporal_patch_size", 1),
        merge=_merge(fields, merging, patch_size),
        out_hidden=vision.optional_size(
            "out_hidden_size", vision.optional_size("text_hidden_size", projection)
        ),
        mergers=1 + len(vision.numbers("deepstack_visual_indexes") or ()),
        is_gated=vision.config.get("model_type") in _GATED,
        projection=projection,
        resizing=resizing_of(fields, _side(vision, "image_size")),
        window=_window(vision, patch_size),
        full_layers=len(vision.numbers("fullatt_block_indexes") or ()),
    )


def _window(vision: Fields, patch_size: int | None) -> int:
    """Return the patches per window; 0 if all layers attend to the whole image."""
    if not (vision.has("window_size") and vision.has("fullatt_block_indexes") and patch_size):
        return 0
    return max(1, vision.size("window_size") // patch_size) ** 2


def _of_tower(vision: Fields, key: str) -> int | None:
    """Return a size, also by Kimi's name of it."""
    return vision.optional_size(key, vision.optional_size(f"vt_{key}"))


def _side(vision: Fields, key: str) -> int | None:
    """Return the pixels per side; None if missing, or if height and width differ."""
    if not isinstance(vision.config.get(key), list):
        return vision.optional_size(key)
    # InternVL: [height, width]
    sides = set(vision.numbers(key) or ())
    return sides.pop() or None if len(sides) == 1 else None


def _merge(wrapper: Fields, vision: Fields, patch_size: int | None) -> int:
    """Return the patches per side that become one token; each wrapper encodes it differently."""
    if vision.config.get("model_type") == "deepseek_v41_vision":
        return vision.size_or("downsample_ratio", 1)
    for fields in (vision, wrapper):
        for key in _MERGED:
            if fields.has(key):
                return _side(fields, key) or 1
        for key in _SHUFFLED:
            if fields.has(key):
                return _shuffled(fields, key)
    model_type = wrapper.text("model_type") or ""
    tokens = wrapper.optional_size("mm_tokens_per_image", _POOLED_TOKENS.get(model_type))
    image_size = _side(vision, "image_size")
    if tokens is None or image_size is None or patch_size is None:
        return 1
    # Gemma 3 pools every image to the same number of tokens
    return max(1, image_size // patch_size // math.isqrt(tokens))


def _shuffled(fields: Fields, key: str) -> int:
    ratio = fields.config[key]
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not _LEAST_RATIO <= ratio <= 1:
        raise fields.error(f"field {key} must be a number from {_LEAST_RATIO} to 1, got {ratio!r}")
    return round(1 / ratio)
