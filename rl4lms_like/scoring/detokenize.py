"""Moses' English detokenizer, which ToTTo's scripts apply before they score.

he said : " it 's 5 % "     ->     he said: "it's 5%"

A word is joined to the word before it, the word after it, both or neither. Quotation marks alternate between opening
and closing.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

_MARKUP = re.compile(r"<.+>")
_ENTITY = re.compile(r"&(?:bar|#124|lt|gt|bra|ket|quot|apos|#91|#93);")
_ENTITIES = {
    "&bar;": "|",
    "&#124;": "|",
    "&lt;": "<",
    "&gt;": ">",
    "&bra;": "[",
    "&ket;": "]",
    "&quot;": '"',
    "&apos;": "'",
    "&#91;": "[",
    "&#93;": "]",
}
_SPACES = re.compile(" +")
_CLOSING = frozenset(",.?!:;\\%}])")
_OPENING = frozenset("([{¿¡")
_QUOTES = frozenset("'\"„“`")
_CURLY = frozenset("„“”")
_CJK = tuple(
    (int(first, 16), int(last, 16))
    for first, last in (
        ("2E80", "A4CF"),
        ("A840", "A87F"),
        ("AC00", "D7AF"),
        ("F900", "FAFF"),
        ("FE30", "FE4F"),
        ("FF65", "FFDC"),
        ("1100", "11FF"),
        ("20000", "2FFFF"),
    )
)


def detokenize(line: str) -> str:
    """Return the line with English spacing; a line that is one piece of markup, such as `<null>`, stays unchanged.

    Args:
        line: words separated by single spaces; tabs and other white space belong to the words around them.
    """
    if not line.strip() or _MARKUP.fullmatch(line):
        return line
    text = f" {line} ".replace(" @-@ ", "-")
    words = _ENTITY.sub(lambda found: _ENTITIES[found[0]], text).replace("&amp;", "&").rstrip(" ").split(" ")
    pieces, space, previous = [], " ", ""
    quotes: Counter[str] = Counter()
    for word in words:
        leans_left, leans_right = _leanings(word, previous, quotes)
        pieces.append(word if leans_left else space + word)
        space, previous = "" if leans_right else " ", word
    return _SPACES.sub(" ", "".join(pieces)).strip(" ")


def _leanings(word: str, previous: str, quotes: Counter[str]) -> tuple[bool, bool]:
    """Return whether to omit the space before a word and the one after it; counts the quotation marks."""
    if not word:
        return False, False
    if _is_cjk(word[0]):
        return bool(previous) and _is_cjk(previous[-1]), False
    if all(character in _OPENING or unicodedata.category(character) == "Sc" for character in word):
        return False, True
    if _CLOSING.issuperset(word) or _is_contraction(word, previous):
        return True, False
    if not _QUOTES.issuperset(word):
        return False, False
    mark = '"' if _CURLY.issuperset(word) else word
    closes = quotes[mark] % 2 == 1
    if not closes and word == "'" and previous.endswith("s"):  # a possessive: the Jones' house
        return True, False
    quotes[mark] += 1
    return closes, not closes


def _is_contraction(word: str, previous: str) -> bool:
    """Return whether a word is a contraction such as `'s` after a letter, a vowel sign or a digit."""
    if len(word) < 2 or word[0] != "'" or not word[1].isalpha() or not previous:
        return False
    return previous[-1].isalpha() or previous[-1].isdecimal() or unicodedata.category(previous[-1]) == "Mc"


def _is_cjk(character: str) -> bool:
    """Return whether the character belongs to a script that is written without spaces between words."""
    return any(first <= ord(character) <= last for first, last in _CJK)
