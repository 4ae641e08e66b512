"""A hook of mkdocs: the site has the files outside of docs/ that its pages link to, so that every link works in both.

The README is the home page of the site; other pages of the repository are in `PAGES`. A linked source file or folder
becomes a page under `source/`, which shows it as it is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "tests/robustness/README.md": "robustness.md",
}
"""File of the repository -> page of the site."""

SOURCES = "source/"
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
PICTURES = (".png", ".svg")
LANGUAGES = {".py": "python", ".yml": "yaml", ".json": "json"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository, and the sources that any page links to."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))

    linked: set[str] = set()
    for file in files.documentation_pages():
        linked |= {path for _, path in _links(file.content_string, file.src_uri)}
    outside_of_docs = {path for path in linked if not path.startswith("docs/")}
    for path in sorted(outside_of_docs - PAGES.keys()):
        if path.endswith(PICTURES):
            files.append(File.generated(config, _page_of(path), abs_src_path=str(ROOT / path)))
        else:
            files.append(File.generated(config, _page_of(path), content=_source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Replace the paths of the repository in the links of a page by those of the site."""
    uri = page.file.src_uri
    if uri.startswith(SOURCES):
        return markdown
    paths = dict(_links(markdown, uri))
    folder = posixpath.dirname(uri)

    def of_site(link: re.Match[str]) -> str:
        path = paths.get(link[0])
        return link[0] if path is None else posixpath.relpath(_page_of(path), folder or ".")

    return LINK.sub(of_site, markdown)


def _links(markdown: str, page: str) -> Iterator[tuple[str, str]]:
    """Yield the links of a page to files, each with its path in the repository."""
    path_of_page = f"docs/{page}"
    for path, page_of_path in PAGES.items():
        if page == page_of_path:
            path_of_page = path

    for link in LINK.findall(markdown):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path_of_page), link))
        if ":" not in link and not path.startswith("..") and (ROOT / path).exists():
            yield link, path


def _page_of(path: str) -> str:
    """Return the path within the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, SOURCES + path + ("" if path.endswith(PICTURES) else ".md"))


def _source_page(path: str) -> str:
    """Return a page with the content of a file, or with the names of the files of a folder."""
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# `{path}`\n\n"
    if (ROOT / path).is_dir():
        names = sorted(file.name for file in (ROOT / path).iterdir() if not file.name.startswith((".", "__")))
        return head + "".join(f"* `{name}`\n" for name in names)
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"{head}``````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n``````\n"
