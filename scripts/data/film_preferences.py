"""Write pairs of film opinions with the same beginning: praise is preferred to blame.

python -m scripts.data.film_preferences task_configs/preferences/film_preferences.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from rl4lms_like.data_pools.film_opinions import write

N_PAIRS = 600
SENTENCES = {"chosen": ("good_view", "good_close"), "rejected": ("bad_view", "bad_close")}


def film_preferences(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Return `n` pairs with different prompts, from the grammar of the pool `film_opinions`."""
    rng, pairs = random.Random(f"{seed}-preferences"), {}
    while len(pairs) < n:
        prompt = write("scene", rng)
        texts = {column: [write(symbol, rng) for symbol in symbols] for column, symbols in SENTENCES.items()}
        responses = {column: f"and {view[0].lower()}{view[1:]}. {close}." for column, (view, close) in texts.items()}
        pairs.setdefault(prompt, {"prompt": prompt, **responses})
    return list(pairs.values())


if __name__ == "__main__":
    lines = [json.dumps(pair) + "\n" for pair in film_preferences(N_PAIRS)]
    Path(sys.argv[1]).write_text("".join(lines), encoding="utf-8")
