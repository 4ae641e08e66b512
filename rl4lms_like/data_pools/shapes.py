"""Questions about drawn shapes, a task for vision models that needs no download.

    color       What colour is the shape?      red, green, blue, yellow, purple or black
    count       How many shapes are there?     1 to 4
    position    Where is the shape?            left, right, top or bottom

The split of a picture depends on what is drawn alone, so a held-out picture never occurs in training, whatever the seed
and the number of samples are.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from annotated_types import Interval, MinLen

from rl4lms_like.core.pictures import PLACE, Picture
from rl4lms_like.core.sample import Preference, Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.splits import names_of
from rl4lms_like.system.errors import import_extra, require_extra

if TYPE_CHECKING:
    from PIL.Image import Image

QuestionName: TypeAlias = Literal["color", "count", "position"]

QUESTIONS: Mapping[QuestionName, str] = {
    "color": "What colour is the shape?",
    "count": "How many shapes are there?",
    "position": "Where is the shape?",
}

COLORS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 40),
    "purple": (150, 50, 180),
    "black": (20, 20, 20),
}
BACKGROUND = (235, 235, 235)

POSITIONS = {"left": (1, 3), "right": (5, 3), "top": (3, 1), "bottom": (3, 5)}
"""Answer -> centre of the shape, in sixths of the width and of the height."""

MOST_SHAPES = 4

ANSWERS: Mapping[QuestionName, Sequence[str]] = {
    "color": sorted(COLORS),
    "count": [str(n) for n in range(1, MOST_SHAPES + 1)],
    "position": sorted(POSITIONS),
}
"""All answers to a question."""

_KINDS = ("circle", "square", "triangle")
_CELLS = ((1, 1), (3, 1), (5, 1), (1, 3), (3, 3), (5, 3), (1, 5), (3, 5), (5, 5))
"""Centres of the nine cells of a picture, in sixths of its width and height. Each cell has at most one shape."""

_HELD_OUT_FRACTION = 10
"""`val` and `test` each get one picture in 10."""


class Shapes(TextGenPool):
    """Drawings of shapes with a question, whose answer of one word is the reference."""

    @classmethod
    def require(cls, needed_by: str, **args: Any) -> None:
        """Check that pillow is installed."""
        require_extra("PIL", extra="vision", needed_by=needed_by)

    @classmethod
    def prepare(
        cls,
        split: str,
        questions: Annotated[Sequence[QuestionName], MinLen(1)] = ("color",),
        n_train: Annotated[int, Interval(ge=0, le=100_000)] = 2000,
        n_eval: Annotated[int, Interval(ge=0, le=10_000)] = 200,
        seed: int = 0,
        side: Annotated[int, Interval(ge=32, le=512)] = 56,
        constant: bool = False,
        preferences: bool = False,
    ) -> Shapes:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            questions: one or more of `color`, `count` and `position`; each sample has one of them, drawn at random.
            n_train: number of samples of `train`.
            n_eval: number of samples of `val` and of `test`.
            seed: seed of questions and pictures. A smaller number of samples gives the first of a larger one.
            side: width and height of a picture, in pixels.
            constant: show the same empty picture with every question. A model that answers better than by chance
                with it does not need the pictures.
            preferences: each sample also has a wrong answer, drawn at random, that is not preferred.
        """
        names_of(split)
        # Two generators, so that pictures and questions are the same with and without wrong answers.
        rng = random.Random(f"{seed}-{split}-shapes")
        rng_of_wrong = random.Random(f"{seed}-{split}-wrong")
        empty = Picture.of(Drawing(side, ()).image()) if constant else None
        samples: list[Sample] = []
        for index in range(n_train if split == "train" else n_eval):
            # Drawn until it is one of this split.
            question = rng.choice(questions)
            drawing, answer = _drawn(rng, question, side)
            while drawing.split != split:
                drawing, answer = _drawn(rng, question, side)

            # The empty picture does not show the answer, which is that of the drawing.
            fields: dict[str, Any] = {
                "id": f"{split}_{index}",
                "prompt_or_input_text": f"{PLACE}{QUESTIONS[question]}",
                "references": [answer],
                "meta_data": {"question": question},
                "images": (empty or Picture.of(drawing.image()),),
            }
            if preferences:
                wrong = rng_of_wrong.choice([other for other in ANSWERS[question] if other != answer])
                samples.append(Preference(**fields, rejected=wrong))
            else:
                samples.append(Sample(**fields))
        return cls(samples)


@dataclass(frozen=True)
class Shape:
    """Shape of a drawing: its kind, colour, centre and radius in pixels."""

    kind: str
    color: str
    x: int
    y: int
    radius: int


@dataclass(frozen=True)
class Drawing:
    """Shapes on a square of `side` x `side` pixels."""

    side: int
    shapes: tuple[Shape, ...]

    @property
    def split(self) -> str:
        """Split of the drawing, which depends on its shapes only."""
        # crc32 and not `hash`, which differs from process to process.
        bucket = zlib.crc32(repr(self).encode()) % _HELD_OUT_FRACTION
        return {0: "val", 1: "test"}.get(bucket, "train")

    def image(self) -> Image:
        """Draw the shapes."""
        pil_image = import_extra("PIL.Image", extra="vision", needed_by="the data pool 'shapes'")
        pil_draw = import_extra("PIL.ImageDraw", extra="vision", needed_by="the data pool 'shapes'")
        image: Image = pil_image.new("RGB", (self.side, self.side), BACKGROUND)
        canvas = pil_draw.Draw(image)
        for shape in self.shapes:
            x, y, r = shape.x, shape.y, shape.radius
            color = COLORS[shape.color]
            if shape.kind == "circle":
                canvas.ellipse((x - r, y - r, x + r, y + r), fill=color)
            elif shape.kind == "square":
                canvas.rectangle((x - r, y - r, x + r, y + r), fill=color)
            else:
                canvas.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=color)
        return image


def _drawn(rng: random.Random, question: QuestionName, side: int) -> tuple[Drawing, str]:
    """Return a random drawing for a question, and the answer."""
    color = rng.choice(sorted(COLORS))
    answer = color
    centres = [rng.choice(_CELLS)]
    if question == "count":
        n_shapes = rng.randint(1, MOST_SHAPES)
        answer = str(n_shapes)
        centres = rng.sample(_CELLS, n_shapes)
    elif question == "position":
        answer = rng.choice(sorted(POSITIONS))
        centres = [POSITIONS[answer]]

    # A shape stays within its cell, a third of the side, and keeps a pixel to the shapes of others: centre and radius
    # vary within it.
    shapes = []
    for column, row in centres:
        radius = rng.randint(side // 9, side // 7)
        space = side // 6 - radius - 1
        x = column * side // 6 + rng.randint(-space, space)
        y = row * side // 6 + rng.randint(-space, space)
        shapes.append(Shape(rng.choice(_KINDS), color, x, y, radius))
    return Drawing(side, tuple(shapes)), answer
