"""A hook of mkdocs: the site has the catalogue of all components as a page, which is in no file."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from rl4lms_like.catalogue import page

PAGE = "catalogue.md"


def on_files(files: Files, config: Any) -> Files:
    """Add the catalogue to the files of the site."""
    files.append(File.generated(config, PAGE, content=page()))
    return files
