"""Texts that scores of overlap must not stumble over, each with its references."""

from __future__ import annotations

_LONG = [f"cat {index} went to {index % 7} houses, and slept." for index in range(300)]

EXTREME_PAIRS: list[tuple[str, list[str]]] = [
    ("", ["a reference", "another one"]),
    ("a text", [""]),
    ("", [""]),
    ("   \n\n ", ["a\nb"]),
    ("...!", ["?!"]),
    ("你好 世界 😀 مرحبا hello", ["你好 世界 😀 مرحبا hello there"]),
    ("我喜欢猫和狗。", ["我喜欢狗和猫。", "猫"]),
    ("Γειά σου Κόσμε, привет мир", ["привет, мир", "Γειά σου"]),
    ("The cat sat on the mat today.", ["The cat sat on the mat today."]),
    ("The same cannot be said.\nIndeed.", ["The same cannot be said.\nIndeed."]),
    (
        "One line here. And the second, it went.\nA third line",
        ["The second went here.\n\nOne line. Third lines", "other words", "A third line\nOne"],
    ),
    (" ".join(_LONG), [" ".join(_LONG[20:])]),
]
"""Empty, blank, punctuation alone, other scripts, equal texts, several lines, thousands of words."""
