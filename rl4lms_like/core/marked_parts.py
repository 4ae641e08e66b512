"""Parts of documentation pages that are made from the code, between two comments of the page.

<!-- settings -->
the part
<!-- end of settings -->
"""

from __future__ import annotations


def with_part(page: str, name: str, part: str) -> str:
    """Return a page with another part of this name.

    Args:
        page: Markdown.
        name: in the comments before and after the part.
        part: whole lines.

    Raises:
        ValueError: the page has no such comments.
    """
    begin = f"<!-- {name} -->\n"
    start = page.index(begin) + len(begin)
    end = page.index(f"<!-- end of {name} -->", start)
    return page[:start] + part + page[end:]
