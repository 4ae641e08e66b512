"""Pictures: what a cell may hold, how images become RGB, the number that identifies them, and what is refused."""

from __future__ import annotations

import base64
import io
import os
import pickle
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from rl4lms_like.core import pictures
from rl4lms_like.core.pictures import PLACE, Picture, messages_with_places, number_of, text_with_places, with_parts
from rl4lms_like.core.sample import Sample
from rl4lms_like.system.errors import DataPoolError

RED, BLUE = (255, 0, 0), (0, 0, 255)


def encoded(image: Image.Image, file_format: str = "PNG", **options) -> bytes:
    """Return an image as the bytes of a file."""
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def plain(color=RED, size=(4, 2)) -> bytes:
    """Return a PNG of one colour."""
    return encoded(Image.new("RGB", size, color))


def pixels(picture: Picture) -> np.ndarray:
    """Return the pixels of an opened picture: [height, width, 3]."""
    image = picture.open()
    assert image.mode == "RGB"
    return np.asarray(image)


def huge_header(width: int, height: int) -> bytes:
    """Return a PNG whose header promises these pixels, with hardly any content."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


# ---- what a cell may hold --------------------------------------------------------------------------------------------


def test_each_kind_of_cell_gives_the_same_pixels(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "red.png").write_bytes(plain())
    url = f"data:image/png;base64,{base64.b64encode(plain()).decode()}"
    relative = "photos/red.png"
    cells = [relative, tmp_path / relative, plain(), bytearray(plain()), url, Image.new("RGB", (4, 2), RED)]
    cells += [{"bytes": plain(), "path": "gone.png"}, {"bytes": None, "path": relative}]
    for cell in cells:
        picture = Picture.of(cell, tmp_path)
        assert np.array_equal(pixels(picture), np.full((2, 4, 3), RED)), cell


def test_a_relative_path_without_a_folder_is_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(plain())
    monkeypatch.chdir(tmp_path)
    assert Picture.of("a.png").open().size == (4, 2)


# ---- how images become RGB -------------------------------------------------------------------------------------------


def test_images_are_turned_as_their_exif_data_say():
    image = Image.new("RGB", (4, 2), RED)
    image.paste(BLUE, (0, 0, 1, 2))  # left column
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by 90 degrees: the left column becomes the top row
    turned = pixels(Picture.of(encoded(image, exif=exif)))
    assert turned.shape == (4, 2, 3)
    assert (turned[0] == BLUE).all() and (turned[1:] == RED).all()

    # The same for an image of PIL, whose EXIF data are not among its pixels.
    opened = Image.open(io.BytesIO(encoded(image, exif=exif)))
    assert np.array_equal(pixels(Picture.of(opened)), turned)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white_and_half_transparent_ones_half_white(mode):
    image = Image.new("RGBA", (3, 1), (0, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    if mode != "P":
        image.putpixel((2, 0), (0, 0, 0, 127))
    converted = image.convert(mode)
    stored = encoded(converted) if mode != "P" else encoded(image.quantize(4))
    row = pixels(Picture.of(stored))[0]
    assert row[0].tolist() == [0, 0, 0] and row[1].tolist() == [255, 255, 255]
    assert mode == "P" or row[2].tolist() == [128, 128, 128]


def test_grey_and_palette_images_keep_their_colours():
    grey = Image.new("L", (2, 1), 100)
    assert pixels(Picture.of(encoded(grey)))[0].tolist() == [[100] * 3] * 2
    palette = Image.new("RGB", (2, 1), RED).quantize(2)
    assert palette.mode == "P" and pixels(Picture.of(encoded(palette)))[0].tolist() == [list(RED)] * 2
    bilevel = Image.new("1", (2, 1), 1)
    assert pixels(Picture.of(encoded(bilevel)))[0].tolist() == [[255] * 3] * 2


def test_grey_of_16_bits_is_scaled_and_not_cut_off():
    deep = Image.fromarray(np.array([[0, 257, 25700, 65535]], dtype=np.uint16))
    assert pixels(Picture.of(encoded(deep)))[0, :, 0].tolist() == [0, 1, 100, 255]


def test_a_jpeg_in_cmyk_is_read():
    assert pixels(Picture.of(encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG"))).min() > 250


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "TIFF"])
def test_the_size_is_that_of_the_opened_picture(orientation, file_format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Picture.of(encoded(Image.new("RGB", (40, 20), RED), file_format, exif=exif))
    assert picture.size == picture.open().size


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_the_contents_in_every_process(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(plain())
    number = Picture.of(file).number
    assert number == Picture.of(plain()).number != Picture.of(plain(BLUE)).number
    assert 0 < number < 2**63
    command = f"from rl4lms_like.core.pictures import Picture; print(Picture.of({str(file)!r}).number)"
    output = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=os.curdir)
    assert int(output.stdout) == number


def test_a_check_accepts_what_can_be_opened_and_finds_a_jpeg_without_its_end():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for image in (noise, noise.convert("CMYK")):
        jpeg = encoded(image, "JPEG")
        Picture.of(jpeg).check()
        with pytest.raises(DataPoolError, match="damaged"):
            Picture.of(jpeg[:-200]).check()
    Picture.of(encoded(noise.convert("RGBA"))).check()


def test_the_number_of_several_pictures_depends_on_their_order():
    red, blue = Picture.of(plain(RED)), Picture.of(plain(BLUE))
    numbers = {number_of([red]), number_of([blue]), number_of([red, blue]), number_of([blue, red]), number_of([])}
    assert len(numbers) == 5 and number_of([]) == 0
    assert number_of(iter([red, blue])) == number_of([red, blue])


def test_a_number_is_computed_once_and_survives_pickling(tmp_path, monkeypatch):
    file = tmp_path / "a.png"
    file.write_bytes(plain())
    picture = Picture.of(file)
    number = picture.number
    copy = pickle.loads(pickle.dumps(picture))
    file.unlink()
    assert picture.number == copy.number == number


def test_a_file_that_changes_after_its_number_was_computed_is_an_error(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(plain(RED))
    picture = Picture.of(file)
    assert picture.open().getpixel((0, 0)) == RED
    number = picture.number
    file.write_bytes(plain(BLUE))
    with pytest.raises(DataPoolError, match="has changed"):
        picture.open()
    assert picture.number == number


def test_an_image_of_pil_has_the_number_of_its_pixels():
    image = Image.new("RGB", (4, 2), RED)
    assert Picture.of(image).number == Picture.of(image.convert("RGBA")).number
    assert Picture.of(image).number != Picture.of(image.resize((2, 4))).number


def test_samples_with_equal_texts_and_other_pictures_are_other_prompts():
    red, blue = (Sample("a", "What?", images=(Picture.of(plain(color)),)) for color in (RED, BLUE))
    assert red.identity == Sample("b", "What?", images=(Picture.of(plain(RED)),)).identity
    assert len({red.identity, blue.identity, Sample("a", "What?").identity}) == 3
    assert Sample("a", "What?").identity == "What?"


# ---- places in prompts -----------------------------------------------------------------------------------------------


def test_pictures_without_a_place_come_first():
    assert text_with_places("Why?", 2) == "<image><image>Why?"
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}
    assert messages_with_places([system, user, user], 1) == [system, {"role": "user", "content": "<image>Why?"}, user]


def test_places_are_kept_where_they_are_and_parts_become_marks():
    assert text_with_places("Is <image> like <image>?", 2) == "Is <image> like <image>?"
    parts = [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": " red?"}]
    messages = [{"role": "user", "content": parts}]
    assert messages_with_places(messages, 1) == [{"role": "user", "content": "Is <image> red?"}]
    assert with_parts(messages_with_places(messages, 1)) == messages
    assert Sample.of_messages("a", messages, images=(Picture.of(plain()),)).prompt_or_input_text == "Is <image> red?"


def test_without_pictures_the_mark_in_a_text_is_a_text_and_a_part_is_an_error():
    assert text_with_places(f"Write {PLACE}.", 0) == f"Write {PLACE}."
    assert messages_with_places([{"role": "user", "content": PLACE}], 0) == [{"role": "user", "content": PLACE}]
    with pytest.raises(DataPoolError, match="1 place"):
        Sample.of_messages("a", [{"role": "user", "content": [{"type": "image"}]}])


def test_another_number_of_places_than_pictures_is_refused():
    user = {"role": "user", "content": "Is <image> like <image>?"}
    for prompt, n_images in ((user["content"], 1), (user["content"], 3)):
        with pytest.raises(DataPoolError, match=f"2 places.*{n_images} images"):
            text_with_places(prompt, n_images)
        with pytest.raises(DataPoolError, match=f"2 places.*{n_images} images"):
            messages_with_places([user], n_images)
    with pytest.raises(DataPoolError, match="no message of the user"):
        messages_with_places([{"role": "system", "content": "Be brief."}], 1)


# ---- addresses for servers and reports -------------------------------------------------------------------------------


def test_urls_have_the_picture_and_thumbnails_are_small():
    noise = np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)
    picture = Picture.of(Image.fromarray(noise))
    assert np.array_equal(pixels(Picture.of(picture.png_url())), noise)
    assert picture.thumbnail().startswith(b"\xff\xd8")
    assert Picture.of(picture.thumbnail()).open().size == (64, 96)
    assert Picture.of(Picture.of(plain()).thumbnail()).open().size == Picture.of(plain()).open().size


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "GIF", "TIFF", "BMP", "PPM", "WEBP"])
def test_a_cell_gives_a_picture_with_the_same_number(file_format, tmp_path, monkeypatch):
    contents = encoded(Image.new("RGB", (4, 2), RED), file_format)
    picture = Picture.of(contents)
    assert Picture.of(picture.cell()) == picture
    (tmp_path / "a.png").write_bytes(contents)
    monkeypatch.chdir(tmp_path)
    cell = Picture.of("a.png").cell()
    assert cell == str(tmp_path / "a.png") and Picture.of(cell).number == picture.number


# ---- what is refused -------------------------------------------------------------------------------------------------

ANIMATED = encoded(Image.new("RGB", (2, 2)), "GIF", save_all=True, append_images=[Image.new("RGB", (2, 2), RED)])
UNREADABLE_CELLS = {
    "a number": 7,
    "true": True,
    "an empty text": "",
    "empty bytes": b"",
    "a list": ["a.png"],
    "a mapping without picture": {"bytes": None, "path": None},
    "a mapping of something else": {"image": "a.png"},
    "audio": {"array": [0.0], "sampling_rate": 16000, "path": None},
    "a sound file": "a.wav",
    "a stored sound": {"bytes": b"RIFF", "path": "a.mp3"},
    "a video file": "clips/a.mp4",
    "http": "http://example.org/a.png",
    "https": "HTTPS://example.org/a.png",
    "a bucket": "s3://bucket/a.png",
    "a file address": "file:///data/a.png",
    "a URL of text": "data:text/plain;base64,YQ==",
    "a URL of audio": "data:audio/wav;base64,YQ==",
    "a URL without base64": "data:image/svg+xml,<svg/>",
    "a URL with bad base64": "data:image/png;base64,a?b",
    "an empty URL": "data:image/png;base64,",
    "a URL without content": "data:image/png",
}
BAD_CONTENTS = {
    "text": b"colour: red",
    "one byte": b"\x89",
    "a PNG cut off": plain(size=(64, 64))[:60],
    "a PNG with a wrong checksum": plain().replace(b"IDAT", b"IDAX"),
    "a JPEG cut off": encoded(Image.new("RGB", (64, 64), RED), "JPEG")[:300],
    "an animation": ANIMATED,
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n",
    "PDF": b"%PDF-1.7\n",
    "a decompression bomb": huge_header(60000, 60000),
    "more pixels than are decoded": huge_header(8193, 8192),
    "a header alone": huge_header(8, 8),
    "integers of 32 bits": encoded(Image.new("I", (2, 2)), "TIFF"),
    "floating-point numbers": encoded(Image.new("F", (2, 2)), "TIFF"),
}


@pytest.mark.parametrize("kind", UNREADABLE_CELLS)
def test_a_cell_without_a_local_picture_is_refused(kind, tmp_path):
    with pytest.raises(DataPoolError):
        Picture.of(UNREADABLE_CELLS[kind], tmp_path)


@pytest.mark.parametrize("kind", BAD_CONTENTS)
def test_contents_that_are_no_image_are_refused(kind):
    for action in (Picture.open, Picture.check):
        with pytest.raises(DataPoolError):
            action(Picture.of(BAD_CONTENTS[kind]))


def test_sound_and_video_files_are_named():
    for contents, kind in ((b"RIFF\0\0\0\0WAVEfmt ", "audio"), (b"\0\0\0\x18ftypmp42", "video")):
        with pytest.raises(DataPoolError, match=kind):
            Picture.of(contents).open()


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for name in ("missing.png", "pipe.png", "folder.png", "a\0.png", "x" * 5000):
        with pytest.raises(DataPoolError, match=name[:10]):
            _ = Picture.of(name, tmp_path).number
    (tmp_path / "large.png").write_bytes(plain())
    monkeypatch.setattr(pictures, "LARGEST_FILE", 10)
    for cell in ("large.png", plain()):
        with pytest.raises(DataPoolError, match="10 bytes"):
            _ = Picture.of(cell, tmp_path).number


def test_samples_need_no_pil():
    command = (
        "import sys, rl4lms_like, rl4lms_like.core.sample, rl4lms_like.data_pools.files; print('PIL' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert output.stdout == "False\n"
