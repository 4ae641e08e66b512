"""The penalty for saying concepts or instruction back."""

from __future__ import annotations

import pytest

from rl4lms_like.rewards.common_gen import concepts_in_a_row, repeat_penalty

PROMPT = "generate a sentence with: dog Run field."


@pytest.mark.parametrize(
    ("text", "penalty"),
    [
        ("A dog runs in the field.", 0),
        ("the DOG RUN FIELD again", -1),
        ("Generate a sentence with: dog", -1),
        ("I generate dogs", -1),
        ("a sentence about a dog", -1),
        ("dog run", 0),
        ("", 0),
    ],
)
def test_what_is_repeated_costs_one(text, penalty):
    assert repeat_penalty(PROMPT, text) == penalty


def test_a_prompt_of_another_form_has_its_concepts_in_the_meta_data():
    assert concepts_in_a_row("summarize: dog run", {"concepts": ["dog", "run"]}) == "dog run"
    assert repeat_penalty("summarize: dog run", "a dog run", {"concepts": ["dog", "run"]}) == -1
    assert repeat_penalty("use: dog run.", "a dog run", prefix="use: ") == -1


@pytest.mark.parametrize("prompt", ["summarize: dog run", "generate a sentence with: ", ""])
def test_without_concepts_the_message_has_the_way_out(prompt):
    with pytest.raises(ValueError):
        repeat_penalty(prompt, "a dog")
