"""How arguments act that a reward and the metric of the same id both have, where no model is loaded."""

from __future__ import annotations

from rl4lms_like.data_pools import DATA_POOLS
from tests.arguments.seen import Acts, Silent, Texts, pairs
from tests.catalogue import Places

Rows = dict[str, dict[str, Acts | Silent]]

ANSWERS = pairs(
    ("Which?", ["the cat"], "The Cat"),
    ("Which?", ["the cat"], "the  cat"),
    ("Which?", ["the cat"], "the cat."),
    ("Which?", ["the cat"], "cat"),
    ("Which?", ["cat"], "it is cat"),
)
NUMBERS = pairs(
    ("How many?", ["100"], "105"),
    ("How many?", ["0.1"], "0.4"),
    ("How many?", ["0.5"], "50%"),
    ("How many?", ["7"], "the answer is 7 of 9"),
)


def questions(places: Places) -> Texts:
    """Answers to a question of reasoning-gym: one among other words, which its scorers pay for."""
    samples = DATA_POOLS.get(
        "reasoning_gym", {"split": "train", **places.questions(dataset="gcd", config=None)}
    ).samples[:3]
    return Texts(samples, [f"{sample.references[0]} or more" for sample in samples])


_SENTENCES = pairs(
    ("Tell.", ["The cats were sad. The film was bad."], "The film was bad. The cat was sad."),
    ("Tell.", ["One cat sleeps."], "one cat slept"),
)

SHARED: Rows = {
    "increasing_numbers": {"min_tokens": Acts(40)},
    "sentiment": {"include_prompt": Acts(False, texts=pairs(("A terrible film.", [], "I love it")))},
    "rouge": {
        "use_single_ref": Acts(
            False, without=["use_single_ref"], texts=pairs(("Say it:", ["a film", "the film was"], "the film was good"))
        )
    },
    "rouge_l_max": {
        "max_n": Silent("has no effect"),
        "limit_length": Acts(False, others={"length_limit": 3}),
        "length_limit": Acts(3),
        "length_limit_type": Acts("bytes", others={"length_limit": 5}),
        "apply_avg": Silent("has no effect"),
        "apply_best": Silent("has no effect"),
        "stemming": Acts(False, texts=_SENTENCES),
        "alpha": Acts(0.9),
        "weight_factor": Acts(2.0),
        "ensure_compatibility": Acts(False, texts=_SENTENCES),
    },
    "sacre_bleu": {
        "smooth_method": Acts("floor"),
        "smooth_value": Acts(0.5, others={"smooth_method": "floor"}),
        "force": Silent("has no effect"),
        "lowercase": Acts(True),
        "tokenize": Acts("char"),
        "use_effective_order": Acts(True, texts=pairs(("Say it:", ["a good film"], "a good film"))),
    },
    "exact_match": {
        "ignore_case": Acts(False, texts=ANSWERS),
        "ignore_whitespace": Acts(False, texts=ANSWERS),
        "ignore_punctuation": Acts(True, texts=ANSWERS),
        "ignore_articles": Acts(True, texts=ANSWERS),
        "extract": Acts(r"is (\w+)", texts=ANSWERS),
    },
    "math_equal": {
        "rel_tol": Acts(0.1, texts=NUMBERS),
        "abs_tol": Acts(0.5, texts=NUMBERS),
        "percent": Acts("ignored", texts=NUMBERS),
        "extract": Acts("answer is ([^ ]+)", texts=NUMBERS),
    },
    "reasoning_gym": {
        "strict": Acts(False, texts=questions),
        "extract": Acts(r"is (\w+)", texts=ANSWERS),
    },
    "regex": {
        "pattern": Acts("good"),
        "group": Acts(1, others={"pattern": "(long)|good"}),
        "match": Acts("fullmatch", others={"pattern": "[a-z ]+"}),
        "flags": Acts(["ignorecase"], others={"pattern": "THE"}),
        "invert": Acts(True),
    },
}
