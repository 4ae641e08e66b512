"""Gradients of objectives on preferences with packed rows are those with padded ones."""

from __future__ import annotations

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.testing.models import make_causal_lm, save_model
from tests.offline.preferences.preference_runs import blocks, written
from tests.offline.preferences.test_losses import gradient
from tests.policies.test_packing import shapes_of_passes

UNEVEN = [
    {"prompt": "It was" + " very" * (i % 3), "chosen": "good" * (1 + i**2 % 9), "rejected": "bad" * (1 + i % 4)}
    for i in range(12)
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tiny_tokenizer):
    return save_model(
        tmp_path_factory.mktemp("llama"), make_causal_lm("llama", tiny_tokenizer, scale=3.0), tiny_tokenizer
    )


def assembled(id, model, folder, *, packing, **training_args):
    mapping = blocks(id, model, written(folder, UNEVEN), **training_args)
    mapping["alg"]["packing"] = packing
    made = assemble_preferences(parse_config(mapping))
    made.objective.prepare(folder, made.examples)
    made.model.train()  # as in a step; there is no dropout
    return made


@pytest.mark.parametrize("id", ["kto", "dpo", "reward_model"])
def test_gradients_are_those_of_padded_rows(id, tmp_path, llama):
    """With gradient checkpointing, no prompt is computed once; responses of `kto` have prompts of their own."""
    options = {} if id == "kto" else {"gradient_checkpointing": True}
    padded = assembled(id, llama, tmp_path, packing=None, **options)
    packed = assembled(id, llama, tmp_path, packing="auto", **options)
    rows = padded.examples["train"].rows
    expected = gradient(padded.objective, [rows])

    shapes = shapes_of_passes(packed.model, lambda: gradient(packed.objective, [packed.examples["train"].rows]))
    assert len(shapes) >= 1 and all(n < 2 * len(UNEVEN) for n, _ in shapes)
    for parts in ([rows], [rows[:5], rows[5:]]):
        packed_gradient = gradient(packed.objective, parts)
        for name, of_padded in expected.items():
            difference = float((packed_gradient[name] - of_padded).norm())
            assert difference <= 2e-6 * max(float(of_padded.norm()), 1e-3), name


def test_pairs_that_share_their_prompt_are_not_packed(tmp_path, llama):
    packed = assembled("dpo", llama, tmp_path, packing="auto")
    packed.model.eval()  # as a step without dropout computes them
    batch = packed.objective.collate(packed.examples["train"].rows)
    shapes = shapes_of_passes(packed.model, lambda: packed.objective.scores(batch))
    assert [n for n, _ in shapes] == [12, 24]  # prompts, responses
