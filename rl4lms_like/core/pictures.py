r"""Pictures of prompts: where they are stored, how they are read, and numbers that identify them.

    cell of a table     "photos/1.png"   b"\x89PNG..."   "data:image/png;base64,..."   {"bytes": ..., "path": ...}
    Picture             path or contents of the image file; nothing is decoded, so that many fit into the memory
    picture.open()      RGB image of PIL: upright, transparent pixels on white
    picture.number      63-bit hash of the contents: equal in all processes and runs

PIL is imported where an image is decoded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import mimetypes
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import DataPoolError, RL4LMsLikeError, import_extra
from rl4lms_like.system.regular_files import read_small
from rl4lms_like.system.wording import excerpt, shown

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""PIL's names of the formats that are read. Others may start programs (EPS), or need more packages (HEIC, SVG)."""

LARGEST_FILE = 2**26
"""Bytes of the largest image file that is read (64 MiB)."""
MOST_PIXELS = 2**26
"""Pixels of the largest image that is decoded: 192 MiB as RGB."""

_DATA_URL = re.compile(r"data:(?P<media>[^;,]*)(?P<parameters>[^,]*),(?P<payload>.*)", re.DOTALL | re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Picture:
    """Picture of a prompt, which is read and decoded where it is used.

    Args:
        path: the image file; None if `contents` has the picture.
        contents: bytes of an image file; None if `path` has the picture.
    """

    path: Path | None = None
    contents: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, cell: Any, folder: Path | None = None) -> Picture:
        """Return the picture that a cell of a table stands for; a file is not opened yet.

        Args:
            cell: path of an image file, bytes of one, `data:` URL, image of PIL, or a mapping with `bytes` or `path`,
                as `datasets` stores images.
            folder: folder of relative paths, usually that of the data file; None = the working directory.

        Raises:
            DataPoolError: the cell has none of these, or an address of another machine.
        """
        # `datasets` fills in one of both keys, or both for an image that it has copied from a file.
        if isinstance(cell, Mapping):
            if "sampling_rate" in cell:
                raise DataPoolError("expected an image, got audio, which is not supported")
            cell = cell.get("bytes") or cell.get("path") or cell

        if isinstance(cell, str | os.PathLike) and os.fspath(cell):
            text = str(cell)
            if text[:5].lower() == "data:":
                return cls(contents=_of_data_url(text))
            if _SCHEME.match(text):
                raise DataPoolError(f"{excerpt(text)} is an address, which is not downloaded; give a local file")
            media = mimetypes.guess_type(text)[0] or ""
            if media.startswith(("audio/", "video/")):
                raise DataPoolError(f"expected an image, got {excerpt(text)} ({media}), which is not supported")
            path = with_home(text)
            return cls(path if folder is None else folder / path)  # `folder / path` is `path` if that is absolute
        if isinstance(cell, bytes | bytearray | memoryview) and len(cell):
            return cls(contents=bytes(cell))
        if _is_pil_image(cell):
            return cls(contents=_as_ppm(cell))
        raise DataPoolError(f"expected a path, bytes or a `data:` URL of an image file, got {shown(cell)}")

    @property
    def name(self) -> str:
        """Description for messages: the path, or the size of the contents."""
        if self.path is None:
            return f"an image of {len(self.contents or b'')} bytes"
        path = str(self.path)
        return path if len(path) <= 300 else f"{path[:300]}..."  # a cell with another kind of text is a long path

    def read(self) -> bytes:
        """Return the bytes of the image file.

        Raises:
            DataPoolError: the file cannot be read, is larger than `LARGEST_FILE`, or is another one than that whose
                `number` was computed.
        """
        contents = self.contents
        if contents is None:
            contents = self._of_file()
        elif len(contents) > LARGEST_FILE:
            raise DataPoolError(f"{self.name} is larger than {LARGEST_FILE} bytes, and is not read")

        # Episodes are stored with the number only, so the pixels behind a number must stay the same.
        known = self.__dict__.get("number")
        if known is not None and known != _number(contents):
            raise DataPoolError(f"{self.name} has changed since it was first read")
        return contents

    def _of_file(self) -> bytes:
        assert self.path is not None
        try:
            return read_small(self.path, LARGEST_FILE)
        except RL4LMsLikeError as error:  # a pipe or a device, or too large
            raise DataPoolError(str(error)) from None
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            reason = getattr(error, "strerror", None) or error
            raise DataPoolError(f"cannot read the image {self.name}: {reason}") from error

    @cached_property
    def number(self) -> int:
        """Positive 63-bit number of the file's contents, computed once.

        Raises:
            DataPoolError: the file cannot be read.
        """
        return _number(self.read())

    def open(self) -> Image:
        """Return the picture as an RGB image of PIL: turned as its EXIF data say, transparent pixels on white.

        Raises:
            DataPoolError: it cannot be read, is damaged or animated, or has more than `MOST_PIXELS`.
            MissingExtraError: pillow is not installed.
        """
        pil_image = _pil("Image")
        contents = self.read()
        try:
            with pil_image.open(io.BytesIO(contents), formats=FORMATS) as image:
                # `open` has read the header only. MPO is a JPEG with a preview, which is ignored.
                width, height = image.size
                if width * height > MOST_PIXELS:
                    raise DataPoolError(f"{self.name} has {width} x {height} pixels, at most {MOST_PIXELS} are decoded")
                if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                    raise DataPoolError(f"{self.name} has {image.n_frames} frames; animations are not supported")
                return _upright_rgb(image)
        except pil_image.DecompressionBombError as error:
            raise DataPoolError(f"{self.name} has too many pixels, at most {MOST_PIXELS} are decoded") from error
        except pil_image.UnidentifiedImageError as error:
            formats = ", ".join(FORMATS)
            raise DataPoolError(f"{self.name} is not an image of a known format ({formats})") from error
        except DataPoolError:
            raise
        except Exception as error:  # PIL's readers raise errors of many classes for damaged files
            raise DataPoolError(f"{self.name} is damaged: {error or type(error).__name__}") from error

    def png_url(self) -> str:
        """Return the opened picture as a `data:` URL, without loss. Errors as `open`."""
        return _url(self.open(), "PNG")

    def thumbnail_url(self, side: int = 96) -> str:
        """Return the `data:` URL of a JPEG of at most `side` x `side` pixels. Errors as `open`."""
        image = self.open()
        image.thumbnail((side, side))
        return _url(image, "JPEG")


def pictures_of(cell: Any, folder: Path | None = None) -> tuple[Picture, ...]:
    """Return the pictures in a cell: none for null, one, or those of a list. Arguments and errors as `Picture.of`."""
    if cell is None:
        return ()
    cells = cell if isinstance(cell, list | tuple) else [cell]
    return tuple(Picture.of(entry, folder) for entry in cells)


def number_of(images: Iterable[Picture]) -> int:
    """Return a positive 63-bit number of all pictures of a prompt in their order; 0 without pictures.

    Raises:
        DataPoolError: a file cannot be read.
    """
    numbers = [picture.number for picture in images]
    return _number(struct.pack(f">{len(numbers)}Q", *numbers)) if numbers else 0


def _number(contents: bytes) -> int:
    """Return the first 63 bits of a SHA-256; 0, which means no picture, becomes 1."""
    return int.from_bytes(hashlib.sha256(contents).digest()[:8], "big") >> 1 or 1


def _of_data_url(url: str) -> bytes:
    match = _DATA_URL.fullmatch(url)
    if match is None or not match["parameters"].lower().endswith(";base64"):
        raise DataPoolError(f"{excerpt(url)} is not a `data:` URL in base64")
    if match["media"] and not match["media"].lower().startswith("image/"):
        raise DataPoolError(f"{excerpt(url)} is not an image but {match['media']}, which is not supported")
    try:
        contents = base64.b64decode("".join(match["payload"].split()), validate=True)
    except binascii.Error as error:
        raise DataPoolError(f"{excerpt(url)} is not valid base64: {error}") from error
    if not contents:
        raise DataPoolError(f"{excerpt(url)} is empty")
    return contents


def _pil(module: str) -> ModuleType:
    """Import a module of PIL."""
    return import_extra(f"PIL.{module}", extra="vision", needed_by="reading images")


def _is_pil_image(cell: Any) -> bool:
    """Return True for an image of PIL, without importing it: where there is one, it has been imported."""
    return any(parent.__module__ == "PIL.Image" for parent in type(cell).__mro__)


def _as_ppm(image: Image) -> bytes:
    """Return an image of PIL as the bytes of a file.

    The pixels are not compressed: what a compressor writes, and with it the number, depends on its version.
    """
    stream = io.BytesIO()
    try:
        _upright_rgb(image).save(stream, "PPM")
    except Exception as error:  # of an image whose file is damaged: it is read here
        raise DataPoolError(f"{shown(image)} is damaged: {error or type(error).__name__}") from error
    return stream.getvalue()


def _upright_rgb(image: Image) -> Image:
    """Return an 8-bit RGB image, turned as its EXIF data say; transparent pixels become white."""
    turned = _pil("ImageOps").exif_transpose(image)

    # PIL cuts values above 255 off when it converts greyscale of 16 bits, which would make nearly all of it white. Of
    # integers of 32 bits and of floating-point numbers, the range is unknown.
    if turned.mode.startswith("I;16"):
        turned = turned.point(lambda value: value / 257).convert("L")
    elif turned.mode in ("I", "F"):
        raise DataPoolError(f"the image has pixels of 32 bits (mode {turned.mode}); convert it to 8 or 16 bits")

    # PIL would make transparent pixels black, or give them the colour that is stored below them.
    if turned.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in turned.info:
        layer = turned.convert("RGBA")
        ground = _pil("Image").new("RGBA", layer.size, "white")
        ground.alpha_composite(layer)
        turned = ground
    return turned.convert("RGB")


def _url(image: Image, file_format: str) -> str:
    stream = io.BytesIO()
    image.save(stream, file_format)
    return f"data:image/{file_format.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"
