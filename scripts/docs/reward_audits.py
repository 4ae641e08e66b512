"""Write docs/reward_audit.md: the findings of `check --reward` on all rewards of the catalogue that need no model.

python -m scripts.docs.reward_audits docs/reward_audit.md        with NLTK_DATA, if the word lists are elsewhere

The findings are explained in `rl4lms_like.rewards.EXPLAINED_FINDINGS`, which the catalogue prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.audit import KINDS, AuditedReward, audit_reward
from rl4lms_like.rewards.probes import Probes
from rl4lms_like.testing.models import make_tokenizer

TEXTS = (
    Sample("film", "The film was", ["a joy from start to finish."]),
    Sample("sum", "Is 30 + 12 equal to 42?", ["42"]),
    Sample("museum", "On 1998-03-12 the museum", ["bought 34 very old paintings."]),
)
NUMBERS = (Sample("numbers", "Count on: 0 1 2", ["3 4 5 6 7 8 9 10 11 12"]),)
DATES = (Sample("museum", "The museum opened on", ["2004-05-17, a rainy day."]),)
CONCEPTS = tuple(
    Sample(concepts, f"generate a sentence with: {concepts}.", [sentence], {"concepts": concepts.split()})
    for concepts, sentence in (
        ("dog run field", "A brown dog runs across the wide field."),
        ("boat lake row", "Two men row a boat over the lake."),
    )
)
ROWS = (("Year", "Film", "Role"), ("2001", "The Long Road", "Frederic"), ("2004", "Silent Hills", "Anna"))
SENTENCES = ("In 2001, the actor was Frederic in The Long Road.", "In 2004, she played Anna in Silent Hills.")
TABLES = tuple(
    Sample(f"row_{row}", f"Describe row {row}.", [sentence], {
        "raw_table": {
            "table": [[{"value": cell, "is_header": cells is ROWS[0]} for cell in cells] for cells in ROWS],
            "highlighted_cells": [[row, column] for column in range(3)],
            "table_page_title": "Filmography",
            "table_section_title": "Films",
            "sentence_annotations": [{"final_sentence": sentence}],
        }
    })
    for row, sentence in enumerate(SENTENCES, start=1)
)  # fmt: skip

OPINIONS = (
    Sample("great", "A wonderful cast made it", ["great fun for us"]),
    Sample("bad", "The wonderful, brilliant cast was", ["bad"]),
)

AUDITED: list[tuple[str, dict[str, Any], Sequence[Sample]]] = [
    ("increasing_numbers", {"min_tokens": 20}, TEXTS[:2] + NUMBERS),
    ("increasing_numbers", {"min_tokens": 20}, TEXTS),
    ("sentences_with_dates", {}, TEXTS[:2] + DATES),
    ("sentences_with_dates", {}, CONCEPTS),
    ("sentiment", {"include_prompt": False}, TEXTS),
    ("sentiment", {"include_prompt": False}, NUMBERS),
    ("sentiment", {}, OPINIONS),
    ("meteor", {}, TEXTS),
    ("rouge", {"rouge_type": "rouge1"}, TEXTS),
    ("rouge", {"rouge_type": "rougeL"}, TEXTS),
    ("rouge_combined", {}, TEXTS),
    ("rouge_l_max", {}, TEXTS),
    ("bleu", {}, TEXTS),
    ("sacre_bleu", {}, TEXTS),
    ("sacre_bleu", {"use_effective_order": True}, TEXTS),
    ("ter", {}, TEXTS),
    ("chrf", {}, TEXTS),
    ("parent", {}, TABLES),
    ("spider", {"spice_coeff": 0.0, "cider_coeff": 1.0}, TEXTS),
    ("common_gen_repeat_penalty", {}, CONCEPTS),
    ("common_gen_repeat_penalty_batched", {}, CONCEPTS),
    ("exact_match", {}, TEXTS),
    ("exact_match", {"ignore_whitespace": False}, TEXTS),
    ("math_equal", {}, TEXTS),
    ("reasoning_gym", {}, TEXTS),
    ("regex", {"pattern": r"\d\d"}, TEXTS),
    ("regex", {"pattern": r"\d+", "match": "fullmatch"}, TEXTS),
    ("length_penalty", {"max_length": 10}, TEXTS),
    ("soft_overlong", {"max_length": 64, "cache": 16}, TEXTS),
    ("repetition_penalty", {"ngram_size": 3}, TEXTS),
]
"""Id, arguments and samples of each audit."""

NOT_AUDITED = {
    "combine": "its parts are audited",
    "learned_reward": "depends on the model",
    "reward_model": "depends on the model",
    "bert_score": "depends on the model",
    "bleurt": "depends on the model",
    "intent_accuracy": "depends on the model; its METEOR is that of `meteor`",
    "common_gen_preference_model": "depends on the model; its METEOR is that of `meteor`",
    "python": "depends on the function",
    "object": "depends on the object",
    "environment": "depends on the environment",
    "process_reward": "depends on the model",
    "step_function": "depends on the function",
    "http": "depends on the server",
    "llm_judge": "depends on the server",
}
"""Id -> reason."""

_OPENING = """\
# Audit of the rewards

<!-- This page is generated: python -m scripts.docs.reward_audits docs/reward_audit.md -->

`rl4lms-like check CONFIG --reward` calls the reward of a config with texts that could exploit it, made from three
samples of the data pool, and reports what it finds ([command line](cli.md#check)). A finding is not always a defect: a
penalty for long texts must accept an empty one. But it is a property that a policy will find, too.

## Kinds of findings

"As much as a reference" means: as the reference of the same sample; for a reward that does not use references, as the
best of all references. Rewards that differ by at most 5 % count as equal.

| kind | meaning |
|---|---|
"""

_TABLE = """
## The library's rewards

These are the findings on all rewards that need no model; `rl4lms-like show ID` explains those of a reward. A
reward that occurs twice has other arguments or samples. The numbers are the mean rewards of some of the texts:
references, empty texts, "the the the ...", copies of prompts, and references with 200 further words. Each of these
rewards had the same values in two calls, in reverse order, and (except `spider`, which fails for single texts here)
alone and in a batch. Times, and `slow`, depend on the machine and are not recorded.

| reward | reference | empty | repeated | prompt | long tail | findings |
|---|---|---|---|---|---|---|
"""

OF_THE_MACHINE = {"slow"}
"""Kinds of findings that are not recorded, because they depend on the machine."""

_SHOWN = ("reference", "empty", "repeated", "prompt", "long_tail")


def audits() -> list[AuditedReward]:
    """Return the audits of `AUDITED`, in its order."""
    results = []
    for id, args, samples in AUDITED:
        texts = [text for sample in samples for text in (sample.prompt_or_input_text, *sample.references)]
        layout = TextLayout(make_tokenizer(texts * 2, 800), max_prompt_length=64, max_context_length=64)
        results.append(audit_reward(REWARDS.get(id, args), Probes(samples, layout))[0])
    return results


def page(results: Sequence[AuditedReward]) -> str:
    """Return the page as Markdown."""
    kinds = "".join(f"| `{kind}` | {text} |\n" for kind, text in KINDS.items())
    rows = []
    for (id, args, _), result in zip(AUDITED, results, strict=True):
        given = ", ".join(f"`{name}: {json.dumps(value)}`" for name, value in args.items())
        cells = [f"`{id}` {given}".rstrip()]
        cells += [f"{result.rewards[name]:.2f}" for name in _SHOWN]
        cells.append(
            ", ".join(f"`{finding.kind}`" for finding in result.findings if finding.kind not in OF_THE_MACHINE)
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    others = "".join(f"* `{id}`: {reason}\n" for id, reason in NOT_AUDITED.items())
    return f"{_OPENING}{kinds}{_TABLE}{''.join(rows)}\nNot audited:\n\n{others}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(audits()), encoding="utf-8")
