"""Columns with images: paths, bytes and URLs of tables become pictures with places; all that is wrong is one error."""

from __future__ import annotations

import base64
import csv
import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from rl4lms_like.config.load import parse_config
from rl4lms_like.core import pictures
from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.files import CsvPool, JsonlPool
from rl4lms_like.data_pools.hf_dataset import HfDatasetPool
from rl4lms_like.data_pools.images import MOST_SHOWN
from rl4lms_like.data_pools.preferences import PreferencePool
from rl4lms_like.system.errors import DataPoolError, MissingExtraError
from tests.config_errors import raises_at
from tests.configs import run_blocks

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def png(color: str = "red", side: int = 4) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (side, side), COLORS[color]).save(stream, "PNG")
    return stream.getvalue()


def url(color: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(color)).decode()}"


def color_of(picture: Picture) -> str:
    pixel = picture.open().getpixel((0, 0))
    return next(name for name, value in COLORS.items() if value == pixel)


def colors_of(sample) -> list[str]:
    return [color_of(picture) for picture in sample.images]


@pytest.fixture
def folder(tmp_path):
    """A folder with a picture of each colour in `photos/`."""
    (tmp_path / "photos").mkdir()
    for color in COLORS:
        (tmp_path / "photos" / f"{color}.png").write_bytes(png(color))
    return tmp_path


def write_jsonl(folder, rows, name="rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def read_jsonl(folder, rows, **args):
    """Samples of JSON lines with the columns `q` and `image`."""
    columns = {"prompt_column": "q", "image_column": "image"} | args
    return JsonlPool.prepare("train", data_files={"train": write_jsonl(folder, rows)}, **columns).samples


ROWS = [{"q": f"What is {index}?", "image": f"photos/{color}.png"} for index, color in enumerate(COLORS)]

# ---- each kind of table ----------------------------------------------------------------------------------------------


def test_paths_are_relative_to_the_data_file_and_pictures_come_first(folder, monkeypatch):
    monkeypatch.chdir("/")
    samples = read_jsonl(folder, ROWS)
    assert [colors_of(sample) for sample in samples] == [["red"], ["green"], ["blue"]]
    assert samples[1].prompt_or_input_text == "<image>What is 1?"
    prefixed = read_jsonl(folder, ROWS, prompt_prefix="Look: ", prompt_suffix=" Answer:")
    assert prefixed[1].prompt_or_input_text == "<image>Look: What is 1? Answer:"


def test_absolute_paths_urls_and_several_columns_are_read(folder):
    rows = [{"q": "Why?", "image": str(folder / "photos" / "red.png"), "more": [url("blue"), "photos/green.png"]}]
    (sample,) = read_jsonl(folder, rows, image_column=["more", "image"])
    assert colors_of(sample) == ["blue", "green", "red"]
    assert sample.prompt_or_input_text == "<image><image><image>Why?"


def test_csv_has_paths_and_an_empty_cell_is_no_image(folder):
    with (folder / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("q", "image"), ("Why?", "photos/red.png"), ("So?", "")])
    args = {"prompt_column": "q", "image_column": "image"}
    first, second = CsvPool.prepare("train", data_files={"train": str(folder / "rows.csv")}, **args).samples
    assert colors_of(first) == ["red"] and second.images == () and second.prompt_or_input_text == "So?"


@pytest.mark.parametrize("kind", ["bytes", "struct"])
def test_parquet_has_bytes_or_the_mappings_of_datasets(folder, kind):
    import pyarrow
    from pyarrow import parquet

    cell = png("blue") if kind == "bytes" else {"bytes": png("blue"), "path": "gone.png"}
    parquet.write_table(pyarrow.table({"q": ["Why?"], "image": [cell]}), folder / "rows.parquet")
    args = {"prompt_column": "q", "image_column": "image"}
    (sample,) = JsonlPool.prepare("train", data_files={"train": str(folder / "rows.parquet")}, **args).samples
    assert colors_of(sample) == ["blue"]


@pytest.mark.parametrize("several", [False, True])
def test_a_saved_dataset_gives_the_stored_bytes(folder, several):
    image = [str(folder / "photos" / "red.png"), str(folder / "photos" / "blue.png")]
    cell = image if several else image[0]
    feature = datasets.List(datasets.Image()) if several else datasets.Image()
    features = datasets.Features({"q": datasets.Value("string"), "image": feature})
    table = datasets.Dataset.from_dict({"q": ["Why?"] * 3, "image": [cell] * 3}, features=features)
    datasets.DatasetDict(train=table).save_to_disk(str(folder / "saved"))
    args = {"prompt_column": "q", "image_column": "image", "split_names": {"train": "train"}}
    samples = HfDatasetPool.prepare("train", str(folder / "saved"), **args).samples
    assert [colors_of(sample) for sample in samples] == [["red", "blue"] if several else ["red"]] * 3

    # The number is that of the file, not of pixels that `datasets` has decoded.
    assert samples[0].images[0].number == Picture.of(image[0]).number


def test_a_dataset_of_files_has_paths_relative_to_them(folder):
    file = write_jsonl(folder, ROWS)
    args = {"prompt_column": "q", "image_column": "image", "split_names": {"train": "train"}}
    samples = HfDatasetPool.prepare("train", "json", data_files={"train": file}, **args).samples
    assert [colors_of(sample) for sample in samples] == [["red"], ["green"], ["blue"]]

    # The file of each split has a folder of its own.
    (folder / "elsewhere").mkdir()
    write_jsonl(folder / "elsewhere", [])
    files = {"val": str(folder / "elsewhere" / "rows.jsonl"), "train": file}
    (folder / "elsewhere" / "rows.jsonl").write_text(json.dumps({"q": "Why?", "image": "../photos/red.png"}) + "\n")
    args["split_names"] = {"train": "train", "val": "val"}
    read = {split: HfDatasetPool.prepare(split, "json", data_files=files, **args).samples for split in ("train", "val")}
    assert read["train"][0].images == samples[0].images
    assert colors_of(read["val"][0]) == ["red"]


def test_preferences_of_texts_and_of_messages_have_images(folder):
    rows = [
        {"prompt": "Which?", "chosen": " red", "rejected": " blue", "image": "photos/red.png"},
        {
            "chosen": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Red."}],
            "rejected": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Blue."}],
            "image": "photos/red.png",
        },
    ]
    file = write_jsonl(folder, rows)
    text, chat = PreferencePool.prepare("train", data_files={"train": file}, image_column="image").samples
    assert colors_of(text) == colors_of(chat) == ["red"]
    assert text.prompt_or_input_text == "<image>Which?" and (text.chosen, text.rejected) == (" red", " blue")
    assert chat.messages == [{"role": "user", "content": "<image>Which?"}] and chat.chosen == "Red."


def test_a_published_format_has_images_too(folder):
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "Red."}]
    file = write_jsonl(folder, [{"conversations": turns, "image": "photos/red.png"}])
    (sample,) = JsonlPool.prepare("train", data_files={"train": file}, image_column="image").samples
    assert sample.messages == [{"role": "user", "content": "<image>\nWhat is it?"}]
    assert colors_of(sample) == ["red"] and sample.references == ["Red."]


def test_messages_with_parts_keep_the_places(folder):
    parts = [{"type": "text", "text": "Is "}, {"type": "image", "text": None}, {"type": "text", "text": " like this: "}]
    rows = [{"q": [{"role": "user", "content": [*parts, {"type": "image"}]}], "image": ["photos/red.png", url("blue")]}]
    (sample,) = read_jsonl(folder, rows)
    assert sample.messages == [{"role": "user", "content": "Is <image> like this: <image>"}]
    assert colors_of(sample) == ["red", "blue"]


PARTS = {
    "a data URL": lambda _: {"type": "image_url", "image_url": {"url": url("blue"), "detail": "low"}, "text": None},
    "a path": lambda _: {"type": "image_url", "image_url": {"url": "photos/blue.png"}},
    "a URL as a text": lambda _: {"type": "image_url", "image_url": url("blue")},
    "an absolute path": lambda folder: {"type": "image", "path": str(folder / "photos" / "blue.png")},
    "an image": lambda _: {"type": "image", "image": "photos/blue.png", "image_url": None},
    "a URL of an image": lambda _: {"type": "image", "url": url("blue")},
}


@pytest.mark.parametrize("kind", PARTS)
def test_messages_have_images_of_their_own(kind, folder, monkeypatch):
    monkeypatch.chdir("/")
    part = {"type": "image_url", "image_url": {"url": "photos/red.png"}}
    second = {"role": "user", "content": [PARTS[kind](folder), {"type": "text", "text": "And this?"}]}
    answer = {"role": "assistant", "content": "Red."}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Is "}, part]}, answer, second]
    (sample,) = read_jsonl(folder, [{"q": messages}], image_column=None)
    contents = [message["content"] for message in sample.messages]
    assert contents == ["Is <image>", "Red.", "<image>And this?"] and colors_of(sample) == ["red", "blue"]

    # A sample that is made in Python, with paths of the working directory.
    monkeypatch.chdir(folder)
    made = Sample.of_messages("0", messages)
    assert made.messages == sample.messages and colors_of(made) == ["red", "blue"]


def test_messages_of_the_published_format_and_of_pairs_have_images_of_their_own(folder):
    question = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "photos/red.png"}}]}
    answers = [{"role": "assistant", "content": text} for text in ("Red.", "Blue.")]
    file = write_jsonl(folder, [{"messages": [question, answers[0]]}])
    (sample,) = JsonlPool.prepare("train", data_files={"train": file}).samples
    assert sample.messages == [{"role": "user", "content": "<image>"}] and sample.references == ["Red."]
    pair = {"chosen": [question, answers[0]], "rejected": [question, answers[1]]}
    (both,) = PreferencePool.prepare("train", data_files={"train": write_jsonl(folder, [pair])}).samples
    assert colors_of(sample) == colors_of(both) == ["red"] and (both.chosen, both.rejected) == ("Red.", "Blue.")


def test_parts_without_images_are_one_text(folder):
    rows = [{"q": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}]
    (sample,) = read_jsonl(folder, rows, image_column=None)
    assert sample.messages == [{"role": "user", "content": "ab"}]


def test_without_an_image_column_the_mark_is_a_text(folder):
    (sample,) = read_jsonl(folder, [{"q": "Close the tag <image>."}], image_column=None)
    assert sample.prompt_or_input_text == "Close the tag <image>." and sample.images == ()


def test_the_same_picture_of_many_rows_is_read_once(folder, monkeypatch):
    n_checks = []
    check = Picture.check
    monkeypatch.setattr(Picture, "check", lambda picture: (n_checks.append(1), check(picture))[1])
    samples = read_jsonl(folder, [{"q": f"{index}?", "image": "photos/red.png"} for index in range(50)])
    assert len(n_checks) == 1 and all(sample.images[0] is samples[0].images[0] for sample in samples)


# ---- what is wrong ---------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "Why?"}
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


def with_image(address: str) -> dict:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}


def stored(image: Image.Image, file_format: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


FILES = {
    "text.png": b"red",
    "empty.png": b"",
    "cut.png": stored(NOISE, "PNG")[:2000],
    "cut.jpg": stored(NOISE, "JPEG")[:-500],
    "cut.webp": stored(NOISE, "WEBP")[:300],
    "cut.bmp": stored(NOISE, "BMP")[:500],
    "moving.gif": stored(NOISE.convert("P"), "GIF", save_all=True, append_images=[Image.new("P", (64, 64))]),
    "moving.webp": stored(NOISE, "WEBP", save_all=True, append_images=[Image.new("RGB", (64, 64))]),
    "pages.tiff": stored(NOISE, "TIFF", save_all=True, append_images=[Image.new("RGB", (64, 64))]),
    "drawing.svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "program.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n",
    "float.tiff": stored(Image.new("F", (2, 2)), "TIFF"),
    "sound.png": b"RIFF\0\0\0\0WAVEfmt ",
}
BROKEN = {
    **{name: {"image": name} for name in FILES},
    "a missing file": {"image": "photos/gone.png"},
    "a folder": {"image": "photos"},
    "a null character": {"image": "a\0b.png"},
    "the second of two": {"image": ["photos/red.png", "photos/gone.png"]},
    "a number": {"image": 7},
    "a truth value": {"image": True},
    "an empty text in a list": {"image": [""]},
    "a list in a list": {"image": [["photos/red.png"]]},
    "a mapping without picture": {"image": {"bytes": None, "path": None}},
    "audio": {"image": {"array": [0.0], "sampling_rate": 16000}},
    "a sound file": {"image": "a.flac"},
    "a video file": {"image": "a.mp4"},
    "an address": {"image": "https://example.org/a.png"},
    "a URL of text": {"image": "data:text/plain;base64,YQ=="},
    "a URL of a broken picture": {"image": "data:image/png;base64,YQ=="},
    "bad base64": {"image": "data:image/png;base64,?"},
    "no such column": {"picture": "photos/red.png"},
    "two places for one picture": {"q": "Is <image> <image>?", "image": "photos/red.png"},
    "one place for two pictures": {"q": "Is <image>?", "image": ["photos/red.png", "photos/blue.png"]},
    "a place without picture": {"q": "Is <image>?", "image": None},
    "a place in an answer": {"image": "photos/red.png", "a": "<image>"},
    "no message of the user": {"q": [{"role": "system", "content": "Be brief."}], "image": "photos/red.png"},
    "an address in a message": {"q": [with_image("http://example.org/a.png")], "image": None},
    "a missing file in a message": {"q": [USER, with_image("photos/gone.png")], "image": None},
    "audio in a message": {"q": [with_image("data:audio/wav;base64,YQ==")], "image": None},
    "an image in a message and a column": {"q": [with_image("photos/red.png")], "image": "photos/red.png"},
    "a part too many": {"q": [{**USER, "content": [{"type": "image"}, {"type": "image"}]}], "image": "photos/red.png"},
}


def row(**cells):
    defaults = {"q": "Why?", "a": "So."}
    return defaults | cells


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_image_or_place_is_named_by_row_and_column(kind, folder):
    for name, contents in FILES.items():
        (folder / name).write_bytes(contents)
    cells = BROKEN[kind]
    with pytest.raises(DataPoolError, match=r"rows\.jsonl, line 2") as error:
        read_jsonl(folder, [row(image="photos/red.png"), row(**cells)], reference_column="a")
    assert "line 1" not in str(error.value)
    if not {"q", "a"} & set(cells):  # of the others, the places are wrong and not the image
        assert "column 'image'" in str(error.value)


def test_all_errors_are_in_one_message(folder):
    rows = [row(image="photos/red.png"), row(image="gone.png"), row(image=[7, "lost.png"]), row(q="<image>", image=[])]
    with pytest.raises(DataPoolError) as error:
        read_jsonl(folder, rows)
    message = str(error.value)
    assert message.startswith("4 errors") and all(f"line {line}" in message for line in (2, 3, 4))
    assert "gone.png" in message and "lost.png" in message and "line 1" not in message


def test_of_many_errors_the_first_are_listed_and_the_others_counted(folder):
    with pytest.raises(DataPoolError) as error:
        read_jsonl(folder, [row(image=f"gone_{index}.png") for index in range(1500)])
    message = str(error.value)
    assert message.startswith("1,500 errors") and message.endswith(f"and {1500 - MOST_SHOWN:,} more")
    assert message.count("\n") == MOST_SHOWN + 1


def test_broken_pairs_are_one_error_too(folder):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "image": name} for name in ("gone.png", "lost.png")]
    rows.append({"prompt": "a", "chosen": "<image>", "rejected": "c", "image": "photos/red.png"})
    with pytest.raises(DataPoolError, match=r"(?s)3 errors.*line 1.*gone.*line 2.*lost.*line 3.*response"):
        PreferencePool.prepare("train", data_files={"train": write_jsonl(folder, rows)}, image_column="image")


def test_files_and_images_have_a_limit_of_size(folder, monkeypatch):
    monkeypatch.setattr(pictures, "MOST_PIXELS", 15)
    with pytest.raises(DataPoolError, match=r"line 1.*4 x 4 pixels, at most 15"):
        read_jsonl(folder, ROWS[:1])
    monkeypatch.setattr(pictures, "LARGEST_FILE", 20)
    with pytest.raises(DataPoolError, match=r"line 1.*larger than 20 bytes"):
        read_jsonl(folder, ROWS[:1])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": "photos/red.png", "max_pixels": 100}, "image_column"),
        ({"type": "image_url"}, "image_column"),
        ({"type": "input_audio", "input_audio": {}}, "not supported"),
        ({"type": "video"}, "not supported"),
        ({"type": "text"}, "got {'type': 'text'}"),
        ({"type": "text", "text": "\ud800"}, "expected text"),
        ("a", "text, image or image_url"),
    ],
)
def test_other_parts_of_messages_are_refused(folder, part, message):
    with pytest.raises(DataPoolError, match=rf"line 1.*'q'.*{message}"):
        read_jsonl(folder, [{"q": [{"role": "user", "content": [part]}], "image": "photos/red.png"}])


def test_errors_of_images_in_messages_name_row_column_and_message(folder):
    messages = [USER, with_image("https://example.org/a.png")]
    rows = [
        {"messages": [with_image("photos/red.png")]},
        {"messages": messages},
        {"messages": [with_image("gone.png")]},
    ]
    with pytest.raises(DataPoolError) as error:
        JsonlPool.prepare("train", data_files={"train": write_jsonl(folder, rows)})
    message = str(error.value)
    assert message.startswith("2 errors") and "'https://example.org/a.png' is an address" in message
    assert "line 2, column 'messages', message 2" in message and "line 3, column 'messages', message 1" in message
    with pytest.raises(DataPoolError, match="is an address"):
        Sample.of_messages("0", messages)
    with pytest.raises(DataPoolError, match="keep one of both"):
        Sample.of_messages("0", rows[0]["messages"], images=(Picture.of(png()),))


def test_a_place_needs_a_column(folder):
    with pytest.raises(DataPoolError, match="image_column"):
        read_jsonl(folder, [{"q": [{"role": "user", "content": [{"type": "image"}]}]}], image_column=None)


def test_only_prompts_have_images(folder):
    answer = {"role": "assistant", "content": [{"type": "image"}]}
    with pytest.raises(DataPoolError, match=r"line 1.*response"):
        read_jsonl(folder, [{"q": [USER, answer], "image": "photos/red.png"}], last_message_as_reference=True)
    file = write_jsonl(folder, [{"text": "a", "image": "photos/red.png"}])
    with pytest.raises(DataPoolError, match=r"image_column.*text"):
        JsonlPool.prepare("train", data_files={"train": file}, format="text", image_column="image")


def test_a_missing_pillow_names_the_extra(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="vision"):
        read_jsonl(folder, ROWS)


def test_a_config_lists_all_errors_if_the_first_row_has_one(folder):
    file = write_jsonl(folder, [row(image="gone.png"), row(image="photos/red.png"), row(image="lost.png")])
    pool = {"id": "jsonl", "args": {"path": file, "prompt_column": "q", "image_column": "image"}}
    with raises_at("datapool.args", mentions="line 3") as error:
        parse_config(run_blocks() | {"datapool": pool}, data=True)
    assert "line 1" in str(error.value) and "line 2" not in str(error.value)
