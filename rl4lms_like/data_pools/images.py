"""Pictures in the columns and messages of a table, checked when the table is read.

A picture that cannot be read would stop a run when its prompt is drawn, perhaps after hours. So each file is read and
decoded when the pool is prepared, and one error lists all that are wrong, with row and column. The same picture in many
rows is checked once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rl4lms_like.core.pictures import PLACE, Picture, images_of_messages, messages_with_places, text_with_places
from rl4lms_like.core.sample import Message, response_text
from rl4lms_like.data_pools.tables import cell
from rl4lms_like.system.errors import DataPoolError, require_extra

Prompt: TypeAlias = "str | list[Message]"

MOST_SHOWN = 20
"""Errors that a message lists; of the others, it has the number."""


class PictureColumns:
    """Reader of the pictures in the rows of a table.

    Args:
        names: one or more columns with pictures; None if there are none.
        folder: folder of relative paths; None = the working directory.

    Raises:
        MissingExtraError: pillow is not installed.
    """

    def __init__(self, names: str | Sequence[str] | None, folder: Path | None) -> None:
        self.names = [names] if isinstance(names, str) else list(names or ())
        self.folder = folder
        self.errors: list[str] = []
        self._results: dict[Picture, Picture | DataPoolError] = {}  # of each picture's check

        if self.names:
            require_extra("PIL", extra="vision", needed_by="image_column")

    def illustrated(
        self, prompt: Prompt, responses: Sequence[str], row: Mapping[str, Any], where: str, *, column: str
    ) -> tuple[Prompt, tuple[Picture, ...]] | None:
        """Return the prompt of a row with a place for each of its pictures, and the pictures.

        Args:
            prompt: a text or messages, whose parts may have pictures.
            responses: those of the row.
            row: the cells by columns.
            where: file and line of the row.
            column: column of the prompt.

        Returns:
            None if a picture cannot be read, or the places are others; `raise_errors` reports it.
        """
        n_errors = len(self.errors)
        images = self._pictures(prompt, row, where, column)
        if len(self.errors) > n_errors:
            return None

        # One place for each picture; an image part of a message is a place, too.
        try:
            if isinstance(prompt, str):
                prompt = text_with_places(prompt, len(images))
                texts = [prompt]
            else:
                prompt = messages_with_places(prompt, len(images))
                texts = [message.get("content") or "" for message in prompt]
        except DataPoolError as error:
            hint = "" if self.names or images else "; set image_column"
            self.errors.append(f"{where}: {error}{hint}")
            return None

        # In a table without pictures, the mark is a text like any other.
        if self.names or images:
            self._check_marks(texts, responses, where, has_images=bool(images))
        return (prompt, images) if len(self.errors) == n_errors else None

    def _check_marks(self, texts: Sequence[str], responses: Sequence[str], where: str, *, has_images: bool) -> None:
        """Record an error if the texts of a prompt without pictures, or a response, have the mark of a picture."""
        if not has_images and any(PLACE in text for text in texts):
            self.errors.append(f"{where}: the prompt has a place for an image ({PLACE}), but there is none")
        if any(PLACE in response for response in responses):
            self.errors.append(f"{where}: a response has a place for an image ({PLACE}), which only prompts may have")

    def _pictures(self, prompt: Prompt, row: Mapping[str, Any], where: str, column: str) -> tuple[Picture, ...]:
        """Return the pictures of a row in order, without those that are wrong; arguments as in `illustrated`."""
        of_columns = self._pictures_of_columns(row, where)
        if isinstance(prompt, str):
            return of_columns

        of_messages = self._pictures_of_messages(prompt, f"{where}, column {column!r}")
        if of_columns and of_messages:
            self.errors.append(
                f"{where}: images are in the messages and in image_column; their order is unknown, keep one of both"
            )
        return of_columns or of_messages

    def _pictures_of_columns(self, row: Mapping[str, Any], where: str) -> tuple[Picture, ...]:
        """Return the pictures in the columns of a row in order, without those that are wrong."""
        pictures: list[Picture] = []
        for name in self.names:
            try:
                value = cell(row, name, where)
            except DataPoolError as error:  # has the location
                self.errors.append(str(error))
                continue

            # One picture, several, or none; an empty cell of a CSV file is an empty text.
            entries = value if isinstance(value, list | tuple) else [value]
            if value is None or value == "":
                entries = []
            for entry in entries:
                try:
                    pictures.append(self._checked(Picture.of(entry, self.folder)))
                except DataPoolError as error:
                    self.errors.append(f"{where}, column {name!r}: {error}")
        return tuple(pictures)

    def _pictures_of_messages(self, messages: Sequence[Message], where: str) -> tuple[Picture, ...]:
        """Return the pictures within messages in order, without those that are wrong."""
        pictures: list[Picture] = []
        for message, image in images_of_messages(messages):
            try:
                pictures.append(self._checked(Picture.of(image, self.folder)))
            except DataPoolError as error:
                self.errors.append(f"{where}, {message}: {error}")

        return tuple(pictures)

    def _checked(self, picture: Picture) -> Picture:
        """Return the equal picture that has been checked before, else this one after its check."""
        if picture not in self._results:
            try:
                picture.check()
                _ = picture.number  # computed once for all rows
                self._results[picture] = picture
            except DataPoolError as error:
                self._results[picture] = error

        # A picture that is wrong is an error in each of its rows.
        result = self._results[picture]
        if isinstance(result, DataPoolError):
            raise result
        return result

    def raise_errors(self) -> None:
        """Raise all recorded errors in one.

        Raises:
            DataPoolError: there are any.
        """
        if not self.errors:
            return

        lines = self.errors[:MOST_SHOWN]
        if len(self.errors) > MOST_SHOWN:
            lines.append(f"... and {len(self.errors) - MOST_SHOWN:,} more")
        if len(lines) == 1:
            raise DataPoolError(lines[0])
        raise DataPoolError("\n  ".join([f"{len(self.errors):,} errors in images and their places:", *lines]))


def response_without_places(messages: Sequence[Message], where: str) -> tuple[str, dict[str, Message | list[Message]]]:
    """Return the text of a response and the entry of `response_messages`, as `response_text`.

    Raises:
        DataPoolError: it has an image.
    """
    if any(isinstance(message.get("content"), list) for message in messages):
        raise DataPoolError(f"{where}: a response has a place for an image, which only prompts may have")
    return response_text(messages)
