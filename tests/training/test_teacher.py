"""Runs of `opd` from a config: what is refused of a teacher, and where it counts."""

import copy

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.testing import models
from tests.config_errors import raises_at


@pytest.fixture
def distilling(tiny_config, tmp_path, tiny_tokenizer):
    """A run with a teacher, and a function that saves another one."""

    def with_teacher(model, tokenizer=tiny_tokenizer):
        tiny_config["alg"]["policy"]["args"]["teacher_model"] = str(
            models.save_model(tmp_path / "teacher", model, tokenizer)
        )
        return parse_config(tiny_config)

    tiny_config["alg"] |= {"id": "opd", "args": {"n_steps": 4}, "kl_div": {"coeff": 1.0}}
    tiny_config["alg"]["policy"]["args"].pop("critic", None)
    return with_teacher


def test_a_teacher_with_another_tokenizer_or_of_another_family_is_refused(distilling, tiny_tokenizer):
    other = copy.deepcopy(tiny_tokenizer)
    other.add_tokens(["another"])
    for model, tokenizer in (
        (models.make_causal_lm("gpt2", other), other),
        (models.make_seq2seq_lm("t5", tiny_tokenizer), tiny_tokenizer),
    ):
        with raises_at("alg.policy.args.teacher_model"):
            assemble(distilling(model, tokenizer))


def test_the_teacher_counts_in_the_memory_estimate(distilling, tiny_tokenizer):
    model = models.make_causal_lm("gpt2", tiny_tokenizer, n_layers=3)
    parts = estimate_memory(distilling(model)).parts
    assert parts["teacher weights"] == 4 * sum(parameter.numel() for parameter in model.parameters())
