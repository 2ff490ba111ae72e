"""Batches of images, made by a model's own image processor.

Shapes: B images in a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import MissingDependencyError, TaskError
from quantizer.tasks.inputs import Batch, FileInputs
from quantizer.utils.signatures import signature_of

_INPUT, _MASK = "pixel_values", "pixel_mask"
_BYTES, _WORDS = 2**8 - 1, 2**16 - 1
"""The largest values of 8 and 16 bits."""
_ORIENTATION, _TURNED = 0x0112, 5
"""The tag of EXIF for the orientation, and the first of its values that swaps width and height."""
_ASPECTS = ((96, 64), (64, 96))
"""Width and height of two test images, which a processor must resize to one size."""
_STRIDE = 32
"""The usual step of backbones in pixels, of which padded sizes are multiples."""

logger = logging.getLogger(__name__)


class ImageInputs(FileInputs):
    """The batches of an image model; the same for the float model, a proxy and an engine.

    A processor that keeps the proportions of images makes several sizes. A copy of it then pads them to a square with a
    mask if the model takes one, else it resizes them to a square.

    Attributes:
        names: the names of the inputs.
        processor: the image processor, or its copy that makes one size.
        size: channels, height and width of each processed image.
    """

    def __init__(self, model: torch.nn.Module, processor: Any) -> None:
        kind, parameters = type(model).__name__, signature_of(model.forward).parameters
        if _INPUT not in parameters:
            raise TaskError(f"{kind} has no input {_INPUT!r}: expected a model of images")
        self.names: tuple[str, ...] = (_INPUT,)
        self.processor = processor
        sizes = self._sizes()
        if len(sizes) > 1:
            self.processor, is_padded = _to_a_square(processor, masked=_MASK in parameters)
            self.names = (_INPUT, _MASK) if is_padded else self.names
            sizes = self._sizes()
        if len(sizes) > 1:
            raise TaskError(
                f"{type(processor).__name__} returns images of several sizes ({sizes[0]} and {sizes[1]}), which cannot "
                "form a batch: set height and width as its size, or do_center_crop, in preprocessor_config.json"
            )
        self.size: tuple[int, ...] = tuple(sizes[0])
        if self.processor is not processor:
            _, height, width = self.size
            words = "padded to {}, with a mask" if _MASK in self.names else "stretched to {}; {} another size"
            logger.warning(
                "%s makes images of several sizes, but an engine takes one: they are %s",
                type(processor).__name__,
                words.format(f"{height} x {width}", "set height and width in preprocessor_config.json for"),
            )
        try:
            with torch.no_grad():
                model(**{**self.random(1, None), _INPUT: torch.zeros(1, *self.size)})
        except (RuntimeError, ValueError) as error:
            raise TaskError(
                f"{kind} does not accept images of the shape {list(self.size)} from its image processor "
                f"({_first_line(error)}): set the size that it was trained for in preprocessor_config.json"
            ) from error

    def _sizes(self) -> list[list[int]]:
        """Return the distinct shapes of the processed test images, without the batch axis."""
        images = [require_pillow().new("RGB", aspect) for aspect in _ASPECTS]
        shapes = [list(self._processed([image], "new images")[_INPUT].shape[1:]) for image in images]
        return shapes[:1] if shapes[0] == shapes[1] else shapes

    def batch(self, paths: Sequence[Path]) -> Batch:
        """Return one batch [B x channels x height x width], read from files."""
        return self._processed([read_image(path) for path in paths], f"{paths[0]} and {len(paths) - 1} more")

    def check(self, paths: Sequence[Path]) -> None:
        """Open each file and read its header, without its pixels."""
        for path in paths:
            with _opened(path):
                pass

    def random(self, batch_size: int, sequence: int | None, seed: int = 0) -> Batch:
        """Return normal noise without padding; images have no tokens, so ``sequence`` has no effect."""
        noise = torch.randn(batch_size, *self.size, generator=torch.Generator().manual_seed(seed))
        mask = torch.ones(batch_size, *self.size[1:], dtype=torch.int64)
        return {name: {_INPUT: noise, _MASK: mask}[name] for name in self.names}

    def _processed(self, images: list[Any], which: str) -> Batch:
        try:
            processed = self.processor(images, return_tensors="pt")
        except (RuntimeError, TypeError, ValueError) as error:
            raise TaskError(
                f"{type(self.processor).__name__} refused {which}: {_first_line(error)}; check preprocessor_config.json"
            ) from error
        for name in self.names:
            if name not in processed:
                raise TaskError(f"{type(self.processor).__name__} returns {', '.join(processed)}, expected {name!r}")
        return {name: processed[name] for name in self.names}


def _to_a_square(processor: Any, *, masked: bool) -> tuple[Any, bool]:
    """Return a copy of a processor that makes squares, and whether it pads images to them.

    Unknown settings are left as they are, so the copy may still make several sizes.
    """
    square = deepcopy(processor)
    size = getattr(processor, "size", None) or {}
    shortest, longest = size.get("shortest_edge"), size.get("longest_edge")
    if masked and longest and getattr(processor, "do_pad", False):
        # A long side is rounded, and may exceed the limit by some pixels.
        side = (longest // _STRIDE + 1) * _STRIDE
        square.pad_size = {"height": side, "width": side}
        return square, True
    if shortest:
        square.size = {"height": shortest, "width": shortest}
    # Of processors for depth.
    if getattr(processor, "keep_aspect_ratio", False):
        square.keep_aspect_ratio = False
    return square, False


def read_image(path: Path) -> Any:
    """Return an image as 8-bit RGB: turned by its EXIF orientation, 16-bit values scaled, transparency dropped.

    Raises:
        TaskError: the file does not exist, is not a complete image, or has values of an unknown range.
        MissingDependencyError: Pillow is not installed.
    """
    require_pillow()
    from PIL import ImageOps

    with _opened(path) as file:
        return _of_bytes(ImageOps.exif_transpose(file), file.format).convert("RGB")


def read_mask(path: Path) -> Any:
    """Return the class number of each pixel of an image of numbers or of a palette, int64 [H x W]."""
    with _opened(path) as file:
        if file.mode not in ("L", "P", "1", "I", "I;16"):
            raise ValueError(f"its pixels are {file.mode}, expected one number each, as of a grey image or a palette")
        return np.asarray(file).astype(np.int64)


def read_depths(path: Path) -> npt.NDArray[np.float64]:
    """Return the distance at each pixel [H x W] of a grey image or ``.npy`` array; 0 and infinity become NaN."""
    if path.suffix.lower() == ".npy":
        try:
            values = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise TaskError(
                f"{path} cannot be read as an array ({_first_line(error)}): repair it, or remove it from the data"
            ) from error
        if not isinstance(values, np.ndarray) or values.ndim != 2 or values.dtype.kind not in "fiu":
            description = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else "several arrays"
            raise TaskError(f"{path} holds {description}, expected numbers [height x width]")
        values = values.astype(np.float64)
    else:
        with _opened(path) as file:
            if file.mode not in ("L", "I", "I;16", "F"):
                raise ValueError(f"its pixels are {file.mode}, expected one distance each, as of a grey image")
            values = np.asarray(file).astype(np.float64)
    depths: npt.NDArray[np.float64] = np.where(np.isfinite(values) & (values != 0), values, np.nan)
    return depths


def read_size(path: Path) -> tuple[int, int]:
    """Return width and height of an image in pixels after its EXIF rotation; see ``read_image``."""
    with _opened(path) as file:
        width, height = file.size
        return (height, width) if file.getexif().get(_ORIENTATION, 1) >= _TURNED else (width, height)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open an image file without reading its pixels; errors in the block become a ``TaskError`` that names the file."""
    pillow = require_pillow()
    try:
        with pillow.open(path) as file:
            _require_pixels(file.size, pillow.MAX_IMAGE_PIXELS)
            yield file
    # Pillow raises SyntaxError for a broken PNG, and DecompressionBombError for an image of twice too many pixels.
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise TaskError(
            f"{path} cannot be read as an image ({_first_line(error)}): repair the file, or remove it from the data"
        ) from error


def _require_pixels(size: tuple[int, int], most: int | None) -> None:
    """Raise if an image exceeds Pillow's limit of pixels: a small file of one colour may take gigabytes."""
    width, height = size
    if most is not None and width * height > most:
        raise ValueError(
            f"it has {width} x {height} pixels, and the limit is {most / 1e6:.0f} million: make it smaller, or raise "
            "PIL.Image.MAX_IMAGE_PIXELS in Python"
        )


def _of_bytes(image: Any, kind: str | None) -> Any:
    """Return an image with 16-bit values scaled to 8 bits, since Pillow would clip them at 255."""
    if image.mode == "F" or (image.mode == "I" and kind != "PNG"):
        pixel_type = "floats" if image.mode == "F" else "whole numbers of 32 bits"
        raise ValueError(f"its pixels are {pixel_type}, whose range is unknown: save it with 8 or 16 bits")
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image).astype(np.int64)
    return require_pillow().fromarray(((values * _BYTES + _WORDS // 2) // _WORDS).astype(np.uint8))


def require_pillow() -> Any:
    """Return the module ``PIL.Image``."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingDependencyError("pillow", "hf") from error
    return Image


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
