"""How many patches and tokens an image is: what the preprocessors of multimodal models do to its size.

A config.json has an encoder's patches; how an image is resized beforehand stands in the processors that
checkpoints bring, and here, by the ``model_type`` of their wrapper, with the limits of the published ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fastroof.errors import ModelError
from fastroof.models.hf import Fields

__all__ = [
    "AreaLimits",
    "FilledTokens",
    "ImagePieces",
    "OneSize",
    "PatchLimits",
    "Resizing",
    "Tiles",
    "resizing_of",
]

LONGEST_RATIO = 200
"""Sides of an image at most, the longer over the shorter."""


class ImagePieces(NamedTuple):
    """What an encoder gets of one image, and what the text model gets of it."""

    pieces: int
    patches: int
    tokens: int


def _grid(width: int, height: int, patch: int, merge: int) -> ImagePieces:
    """Patches and tokens of an image whose sides are whole numbers of merged patches."""
    tokens = (width // (patch * merge)) * (height // (patch * merge))
    return ImagePieces(1, tokens * merge**2, tokens)


@dataclass(frozen=True)
class AreaLimits:
    """Sides to the nearest multiple of a merged patch, then to within an area (Qwen-VL, MiniMax-M3)."""

    least_pixels: int
    most_pixels: int

    def pieces(self, width: int, height: int, patch: int, merge: int) -> ImagePieces:
        """Patches and tokens of an image of these sides, pixels."""
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
    """As it is, shrunk to so many patches at most, padded to whole merged patches (Kimi)."""

    most_patches: int
    most_on_a_side: int = 512

    def pieces(self, width: int, height: int, patch: int, merge: int) -> ImagePieces:
        """Patches and tokens of an image of these sides, pixels."""
        longest = self.most_on_a_side * patch
        area = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(self.most_patches / area), longest / width, longest / height)
        wide, high = (min(max(1, int(length * scale)), longest) for length in (width, height))
        side = patch * merge
        return _grid(-(-wide // side) * side, -(-high // side) * side, patch, merge)


@dataclass(frozen=True)
class FilledTokens:
    """Resized to as many tokens as there may be, its sides whole merged patches (Gemma 4)."""

    most_tokens: int

    def pieces(self, width: int, height: int, patch: int, merge: int) -> ImagePieces:
        """Patches and tokens of an image of these sides, pixels."""
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
    """Resized to one square, whatever it was (Gemma 3)."""

    side: int

    def pieces(self, width: int, height: int, patch: int, merge: int) -> ImagePieces:
        """Patches and tokens of any image."""
        return _grid(self.side, self.side, patch, merge)


@dataclass(frozen=True)
class Tiles:
    """Cut into square tiles, with one of the whole image beside them where there are several (Llama 4)."""

    side: int
    most_tiles: int = 16

    def pieces(self, width: int, height: int, patch: int, merge: int) -> ImagePieces:
        """Patches and tokens of an image of these sides, pixels."""
        grids = [
            (across, down)
            for across in range(1, self.most_tiles + 1)
            for down in range(1, self.most_tiles // across + 1)
        ]

        def scale(grid: tuple[int, int]) -> float:
            return min(grid[0] * self.side / width, grid[1] * self.side / height)

        enlarging = [grid for grid in grids if scale(grid) >= 1.0]
        wanted = min(map(scale, enlarging)) if enlarging else max(map(scale, grids))
        tiles = min(across * down for across, down in grids if scale((across, down)) == wanted)
        pieces = tiles if tiles == 1 else tiles + 1
        of_tile = _grid(self.side, self.side, patch, merge)
        return ImagePieces(pieces, of_tile.patches, pieces * of_tile.tokens)


Resizing = AreaLimits | PatchLimits | FilledTokens | OneSize | Tiles


def resizing_of(wrapper: Fields, image_size: int | None) -> Resizing | None:
    """Return what becomes of images before a wrapper's encoder; None where that is not known."""
    name = wrapper.text("model_type") or ""
    if name.startswith(("qwen3_vl", "qwen3_5")):
        return AreaLimits(256**2, 4096**2)
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
    """Raise ModelError where an image is no image, or longer than processors take."""
    if not all(type(side) is int and side > 0 for side in (width, height)):
        raise ModelError(f"an image is (width, height) in pixels, of at least 1, got ({width!r}, {height!r})")
    if max(width, height) > LONGEST_RATIO * min(width, height):
        raise ModelError(f"an image of {width} x {height}: sides may differ {LONGEST_RATIO} times at most")
