"""Pictures of the documentation: they show the committed results, are legible, and have text alternatives."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from scripts.docs.charts import DARK, LIGHT
from scripts.docs.pictures import PICTURES, drawn
from tests.house.test_docs import PAGES, ROOT, text_of

DRAWN = dict(drawn())
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("file", DRAWN, ids=lambda file: file.name)
def test_a_picture_is_drawn_from_the_results(file):
    assert file.read_text(encoding="utf-8") == DRAWN[file], "python -m scripts.docs.pictures draws it"


def test_every_drawn_picture_is_shown_on_a_page():
    shown = {((ROOT / page).parent / path).resolve() for page in PAGES for _, path in IMAGE.findall(text_of(page))}
    assert set(DRAWN) == set(PICTURES.iterdir()) <= shown


@pytest.mark.parametrize("file", DRAWN, ids=lambda file: file.name)
def test_a_picture_has_a_title_and_its_numbers_for_screen_readers(file):
    picture = ET.fromstring(DRAWN[file])
    texts = {element.get("id"): element.text for element in picture if element.get("id")}
    assert picture.get("role") == "img" and picture.get("aria-labelledby") == " ".join(texts)
    assert re.search(r"\d\.\d\d", texts["description"])


@pytest.mark.parametrize("file", DRAWN, ids=lambda file: file.name)
def test_the_texts_of_a_picture_are_inside_of_it(file):
    picture = ET.fromstring(DRAWN[file])
    width, height = float(picture.get("width")), float(picture.get("height"))
    for text in picture.iter(f"{SVG}text"):
        # A letter of 12 pixels is about 7.2 pixels wide in a wide font.
        length = 7.2 * len(text.text)
        x = float(text.get("x")) - length * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        assert x >= 0 and x + length <= width and 0 < float(text.get("y")) < height, text.text


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2."""
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_texts_and_lines_have_contrast_in_both_colour_schemes(colors):
    """At least 4.5, which WCAG asks of texts: the labels of lines have their colours."""
    for name in colors.keys() - {"paper", "grid"}:
        lighter, darker = sorted((luminance(colors[name]), luminance(colors["paper"])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, name


def test_every_picture_of_a_page_has_a_text_alternative():
    images = [(page, text, path) for page in PAGES for text, path in IMAGE.findall(text_of(page))]
    assert images
    assert [(page, path) for page, text, path in images if len(text.split()) < 4] == []
    assert [(page, path) for page, _, path in images if not ((ROOT / page).parent / path).is_file()] == []
    assert [page for page in PAGES if re.search(r"<img(?![^>]*\balt=\"[^\"]+\")", text_of(page))] == []
