r"""Pictures of prompts: where they are stored, how they are read, and numbers that identify them.

    cell of a table     "photos/1.png"   b"\x89PNG..."   "data:image/png;base64,..."   {"bytes": ..., "path": ...}
    Picture             path or contents of the image file; nothing is decoded, so that many fit into the memory
    picture.open()      RGB image of PIL: upright, transparent pixels on white
    picture.number      63-bit hash of the contents: equal in all processes and runs

The texts of a prompt have the mark `<image>` at the place of each picture:

    row       {"question": "What colour is it?", "image": "a.png"}
    prompt    <image>What colour is it?

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

PLACE = "<image>"
"""Mark at the place of a picture in the texts of a prompt."""

KEYS_OF_PARTS = {"image": ("image", "url", "path"), "image_url": ("image_url",)}
"""Type of a part of a message that stands for an image -> keys that may have the image."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""PIL's names of the formats that are read. Others may start programs (EPS), or need more packages (HEIC, SVG)."""

LARGEST_FILE = 2**26
"""Bytes of the largest image file that is read (64 MiB)."""
MOST_PIXELS = 2**26
"""Pixels of the largest image that is decoded: 192 MiB as RGB."""

_ORIENTATION = 0x0112
"""EXIF tag; its values from 5 to 8 are turns by a quarter."""

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
            cell: a picture, path of an image file, bytes of one, `data:` URL, image of PIL, or a mapping with `bytes`
                or `path`, as `datasets` stores images.
            folder: folder of relative paths, usually that of the data file; None = the working directory.

        Raises:
            DataPoolError: the cell has none of these, or an address of another machine.
        """
        if isinstance(cell, Picture):
            return cell

        # `datasets` fills in one of both keys, or both for an image that it has copied from a file.
        if isinstance(cell, Mapping):
            if "sampling_rate" in cell:
                raise DataPoolError("expected an image, got audio, which is not supported")
            _refuse_media(str(cell.get("path")))
            cell = cell.get("bytes") or cell.get("path") or cell

        if isinstance(cell, str | os.PathLike) and os.fspath(cell):
            text = str(cell)
            if text[:5].lower() == "data:":
                return cls(contents=_of_data_url(text))
            if _SCHEME.match(text):
                raise DataPoolError(f"{excerpt(text)} is an address, which is not downloaded; give a local file")
            _refuse_media(text)
            path = with_home(text)
            return cls(path if folder is None else folder / path)  # `folder / path` is `path` if that is absolute
        if isinstance(cell, bytes | bytearray | memoryview) and len(cell):
            return cls(contents=bytes(cell))
        if is_pil_image(cell):
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
        with self._decoding() as image:
            return _upright_rgb(image)

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height of the opened picture, in pixels; the file is read and decoded once. Errors as `open`."""
        with self._decoding() as image:
            # A JPEG is decoded at an eighth of its size: all of its bytes are read, in a fraction of the time.
            width, height = image.size
            image.draft(None, (width // 8, height // 8))
            image.load()
            _refuse_deep(image)

            # `open` turns the picture.
            is_quarter_turned = image.getexif().get(_ORIENTATION, 1) >= 5
            return (height, width) if is_quarter_turned else (width, height)

    def check(self) -> None:
        """Read and decode the picture, so that what is wrong with it is known before it is needed. Errors as `open`."""
        _ = self.size

    @contextmanager
    def _decoding(self) -> Iterator[Image]:
        """Open the image file in PIL; errors of the block are attributed to the picture. Errors as `open`."""
        pil_image = _pil("Image")
        contents = self.read()
        try:
            with pil_image.open(io.BytesIO(contents), formats=FORMATS) as image:
                # Only the header has been read. MPO is a JPEG with a preview, which is ignored.
                width, height = image.size
                if width * height > MOST_PIXELS:
                    raise DataPoolError(f"{self.name} has {width} x {height} pixels, at most {MOST_PIXELS} are decoded")
                if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                    raise DataPoolError(f"{self.name} has {image.n_frames} frames; animations are not supported")
                yield image
        except pil_image.DecompressionBombError as error:
            raise DataPoolError(f"{self.name} has too many pixels, at most {MOST_PIXELS} are decoded") from error
        except pil_image.UnidentifiedImageError as error:
            kind = _media_of(contents) or f"not an image of a known format ({', '.join(FORMATS)})"
            raise DataPoolError(f"{self.name} is {kind}") from error
        except DataPoolError:
            raise
        except Exception as error:  # PIL's readers raise errors of many classes for damaged files
            raise DataPoolError(f"{self.name} is damaged: {error or type(error).__name__}") from error

    def cell(self) -> str:
        """Return the value for a cell of a table in text form: the absolute path, or a `data:` URL of the contents.

        `Picture.of` makes an equal picture of it, with the same number. Errors as `open`.
        """
        if self.path is not None:
            return str(self.path.absolute())
        with self._decoding() as image:
            media = _pil("Image").MIME[image.format]
        return f"data:{media};base64,{base64.b64encode(self.read()).decode()}"

    def png_url(self) -> str:
        """Return the opened picture as the `data:` URL of a PNG, without loss. Errors as `open`."""
        return f"data:image/png;base64,{base64.b64encode(self.png()).decode()}"

    def png(self) -> bytes:
        """Return the opened picture as a PNG file, without loss. Errors as `open`."""
        stream = io.BytesIO()
        self.open().save(stream, "PNG")
        return stream.getvalue()

    def thumbnail(self, side: int = 96) -> bytes:
        """Return a JPEG file of at most `side` x `side` pixels. Errors as `open`."""
        image = self.open()
        image.thumbnail((side, side))
        stream = io.BytesIO()
        image.save(stream, "JPEG")
        return stream.getvalue()


def identity_of(prompt: str, images: Sequence[Picture]) -> str:
    """Return a text that is equal for prompts with the same text and the same pictures, and only for those.

    It is the prompt's text, if there are no pictures.
    """
    return f"{prompt}\0{number_of(images)}" if images else prompt


def number_of(images: Iterable[Picture]) -> int:
    """Return a positive 63-bit number of all pictures of a prompt in their order; 0 without pictures.

    Raises:
        DataPoolError: a file cannot be read.
    """
    numbers = [picture.number for picture in images]
    return _number(struct.pack(f">{len(numbers)}Q", *numbers)) if numbers else 0


def text_with_places(text: str, n_images: int) -> str:
    """Return the text of a prompt with `<image>` once for each picture; at the beginning, if it has no place.

    Raises:
        DataPoolError: there are places, but not as many as pictures.

    Examples:
        >>> text_with_places("What are they?", 2)
        '<image><image>What are they?'
    """
    # Without pictures, it is a text like any other.
    if not n_images:
        return text
    if PLACE not in text:
        return PLACE * n_images + text
    _require_places(text.count(PLACE), n_images)
    return text


def messages_with_places(messages: Sequence[dict[str, Any]], n_images: int) -> list[dict[str, Any]]:
    """Return messages with `<image>` once for each picture; without a place, in the first message of the user.

    Contents that are lists of parts, such as `{"type": "image"}`, become texts.

    Raises:
        DataPoolError: there are places, but not as many as pictures; the user has no message; or a part of a content is
            neither a text nor an image.

    Examples:
        >>> messages_with_places([{"role": "user", "content": [{"type": "text", "text": "Is "}, {"type": "image"}]}], 1)
        [{'role': 'user', 'content': 'Is <image>'}]
    """
    n_parts = 0
    n_places = 0
    converted = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [checked_part(part) for part in content]
            n_parts += sum(part["type"] != "text" for part in parts)
            message = {**message, "content": "".join(part.get("text", PLACE) for part in parts)}
        n_places += (message.get("content") or "").count(PLACE)
        converted.append(message)

    # Without pictures, the mark in a text is a text like any other; a part of a message is a place.
    if not n_images:
        _require_places(n_parts, 0)
        return converted
    if n_places:
        _require_places(n_places, n_images)
        return converted

    # No place is marked.
    for index, message in enumerate(converted):
        if message["role"] == "user":
            converted[index] = {**message, "content": PLACE * n_images + (message.get("content") or "")}
            return converted
    raise DataPoolError(f"no message of the user has a place for the images; mark it with {PLACE}")


def images_of_messages(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Return the images within messages, as `Picture.of` reads them, each with the name of its message.

    They are in parts of the contents: {"type": "image_url", "image_url": {"url": ...}}, as OpenAI's API has them, or
    {"type": "image", "image": ...}, also with `url` or `path`.

    Raises:
        DataPoolError: a part is neither a text nor an image.

    Examples:
        >>> images_of_messages([{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "image"}]}])
        [('message 1', 'a.png')]
    """
    images = []
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            image = image_of_part(checked_part(part))
            if image is not None:
                images.append((f"message {number}", image))
    return images


def checked_part(part: Any) -> dict[str, Any]:
    """Return a part of a message without keys that have no value, which tables fill in.

    Raises:
        DataPoolError: it is neither a text nor an image, nor the place of one.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("audio", "input_audio", "video"):
        raise DataPoolError(f"a part is {kind}, which is not supported")
    if kind != "text" and kind not in KEYS_OF_PARTS:
        raise DataPoolError(f"expected parts of the type text, image or image_url, got {shown(part)}")

    # A text may have more keys, such as `cache_control`. Those of an image, such as `max_pixels`, would have no effect.
    filled = {key: value for key, value in part.items() if value is not None}
    is_text = kind == "text" and isinstance(filled.get("text"), str)
    is_place = filled == {"type": "image"}
    is_image = len(filled) == 2 and image_of_part(filled) is not None
    if not (is_text or is_place or is_image):
        raise DataPoolError(
            f"expected {{'type': 'text', 'text': ...}}, {{'type': 'image_url', 'image_url': {{'url': ...}}}}, "
            f"{{'type': 'image', 'image': ...}}, or {{'type': 'image'}} for an image of image_column; got {shown(part)}"
        )
    return {"type": "text", "text": filled["text"]} if is_text else filled


def image_of_part(part: Mapping[str, Any]) -> Any:
    """Return the image that a part of a message has; None for a text, and for the place of an image in a column."""
    for key in KEYS_OF_PARTS.get(part["type"], ()):
        image = part.get(key)
        # OpenAI's API has a mapping, in which `detail` is the resolution for its own models.
        if isinstance(image, Mapping) and "url" in image:
            image = image["url"]
        if image is not None:
            return image
    return None


def _require_places(n_places: int, n_images: int) -> None:
    if n_places != n_images:
        places = "1 place" if n_places == 1 else f"{n_places} places"
        raise DataPoolError(f"the prompt has {places} for an image ({PLACE}), and there are {n_images} images")


def with_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts, as chat templates of vision models read them.

    Examples:
        >>> with_parts([{"role": "user", "content": "<image>Why?"}])
        [{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'Why?'}]}]
    """
    converted = []
    for message in messages:
        if message.get("content") is None:  # it has tool calls only
            converted.append(message)
            continue
        parts: list[dict[str, str]] = []
        for number, text in enumerate(message["content"].split(PLACE)):
            if number > 0:
                parts.append({"type": "image"})
            if text:
                parts.append({"type": "text", "text": text})
        converted.append({**message, "content": parts})
    return converted


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


def is_pil_image(cell: Any) -> bool:
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

    # PIL cuts values above 255 off when it converts greyscale of 16 bits, which would make nearly all of it white.
    if turned.mode.startswith("I;16"):
        turned = turned.point(lambda value: value / 257).convert("L")
    _refuse_deep(turned)

    # PIL would make transparent pixels black, or give them the colour that is stored below them.
    if turned.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in turned.info:
        layer = turned.convert("RGBA")
        ground = _pil("Image").new("RGBA", layer.size, "white")
        ground.alpha_composite(layer)
        turned = ground
    return turned.convert("RGB")


def _refuse_media(path: str) -> None:
    """Raise a `DataPoolError` for the name of a sound or video file."""
    media = mimetypes.guess_type(path)[0] or ""
    if media.startswith(("audio/", "video/")):
        raise DataPoolError(f"expected an image, got {excerpt(path)} ({media}), which is not supported")


def _refuse_deep(image: Image) -> None:
    # Of integers of 32 bits and of floating-point numbers, the range is unknown.
    if image.mode in ("I", "F"):
        raise DataPoolError(f"the image has pixels of 32 bits (mode {image.mode}); convert it to 8 or 16 bits")


def _media_of(contents: bytes) -> str | None:
    """Return the kind of a sound or video file by its first bytes; None for other files."""
    if contents[:3] == b"ID3" or contents[:4] in (b"OggS", b"fLaC") or contents[8:12] == b"WAVE":
        return "audio, which is not supported"
    if contents[:4] == b"\x1aE\xdf\xa3" or contents[8:12] == b"AVI " or contents[4:11] in (b"ftypiso", b"ftypmp4"):
        return "a video, which is not supported"
    return None
