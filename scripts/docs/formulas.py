"""A hook of mkdocs: LaTeX between `$$` becomes MathML in a box of its own, which browsers show without a script.

GitHub shows the same blocks by itself.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace the formulas of a page."""
    return FORMULA.sub(lambda found: f'<div class="formula">{convert(found[1], display="block")}</div>', markdown)
