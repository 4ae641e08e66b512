"""Runs with texts so long that rotary positions, and so log-probs, would depend on other texts of their batch."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.offline.assemble_supervised import assemble_supervised
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.preview import preview
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.config_errors import raises_at
from tests.offline.preferences.preference_runs import blocks as preference_blocks
from tests.offline.preferences.preference_runs import written
from tests.offline.supervised.test_trainer import six_steps

ASSEMBLE = {"supervised": assemble_supervised, "dpo": assemble_preferences, "reward_model": assemble_preferences}
ROPES = {
    "longrope": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
}
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def check(config):
    """Check a config as the command does."""
    return "".join(preview(config))


def n_tokens(row):
    """Return the length of an example, or of the longer text of a pair."""
    if "input_ids" in row:
        return len(row["input_ids"])
    return len(row["prompt"]) + max(len(response) for response in row["responses"])


@pytest.fixture
def model_of(tmp_path, tiny_tokenizer):
    """Make a model whose texts are independent of their batch up to a length."""

    def make(rope, limit):
        fields = {"rope_parameters": dict(ROPES[rope]), "max_position_embeddings": 256, **SIZE}
        fields |= {"vocab_size": len(tiny_tokenizer), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
        if rope == "longrope":
            fields["original_max_position_embeddings"] = limit
        else:
            fields["rope_parameters"]["original_max_position_embeddings"] = limit
        name = "phi3" if rope == "longrope" else "llama"
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields))
        return models.save_model(tmp_path / f"{name}_{limit}", model, tiny_tokenizer)

    return make


@pytest.mark.parametrize("rope", ROPES)
def test_rl_runs_are_refused_by_the_lengths_of_their_config(rope, model_of, tiny_config):
    for limit, accepts in ((24, True), (23, False)):  # prompts of 16 tokens and responses of 8
        folder = str(model_of(rope, limit))
        tiny_config["tokenizer"]["model_name"] = tiny_config["alg"]["policy"]["args"]["model_name"] = folder
        if accepts:
            assemble(parse_config(tiny_config))
            continue
        for build in (assemble, check):
            with raises_at("env.args", mentions=f"within {limit} tokens"):
                build(parse_config(tiny_config))


def test_responses_of_evaluations_count_too(model_of, tiny_config):
    folder = str(model_of("longrope", 24))
    tiny_config["tokenizer"]["model_name"] = tiny_config["alg"]["policy"]["args"]["model_name"] = folder
    tiny_config["train_evaluation"]["generation_kwargs"] = {"do_sample": False, "max_new_tokens": 8}
    assemble(parse_config(tiny_config))
    tiny_config["train_evaluation"]["generation_kwargs"]["max_new_tokens"] = 9
    with raises_at("env.args", mentions="25 tokens"):
        assemble(parse_config(tiny_config))


def test_a_reference_with_such_positions_is_refused(model_of, tiny_config, tmp_path, tiny_gpt2_dir):
    tiny_config["alg"]["policy"]["args"]["reference_model"] = str(model_of("longrope", 20))
    with raises_at("env.args", mentions="the reference"):
        assemble(parse_config(tiny_config))
    mapping = preference_blocks("dpo", tiny_gpt2_dir, written(tmp_path))
    mapping["alg"]["args"]["reference_model"] = str(model_of("longrope", 20))
    for build in (assemble_preferences, check):
        with raises_at("alg.args.reference_model", mentions="within 20 tokens"):
            build(parse_config(mapping))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("id", ASSEMBLE)
def test_offline_runs_are_refused_by_the_lengths_of_their_texts(id, rope, model_of, tmp_path):
    def mapping_of(folder):
        if id == "supervised":
            return six_steps("causal", folder)
        return preference_blocks(id, folder, written(tmp_path))

    # The longest text that this run trains on, and the longest that it may generate.
    run = ASSEMBLE[id](parse_config(mapping_of(model_of(rope, 256))))
    longest = max(n_tokens(row) for of_split in run.examples.values() for row in of_split.rows)
    if run.generator is not None:
        prompts = [run.tokenizer(sample.prompt_or_input_text)["input_ids"] for sample in run.samples["val"]]
        longest = max(longest, max(map(len, prompts)) + 8)

    ASSEMBLE[id](parse_config(mapping_of(model_of(rope, longest))))
    for build in (ASSEMBLE[id], check):
        with raises_at("alg.model_name", mentions=f"{longest} tokens"):
            build(parse_config(mapping_of(model_of(rope, longest - 1))))


@pytest.mark.parametrize(
    ("family", "vocabularies"),
    [
        ("fsmt", {"src_vocab_size": 300, "tgt_vocab_size": 320, "langs": ["en", "de"]}),
        ("marian", {"vocab_size": 320, "decoder_vocab_size": 340, "share_encoder_decoder_embeddings": False}),
    ],
)
def test_models_with_two_vocabularies_are_refused(family, vocabularies, tmp_path, tiny_seq2seq_config):
    """Ids of one vocabulary are out of the range of the other."""
    tokenizer = models.make_tokenizer(append_eos=True)
    size = {"d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 1, "pad_token_id": 0}
    for side in ("encoder", "decoder"):
        size |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **size, **vocabularies))
    folder = str(models.save_model(tmp_path / family, model, tokenizer))
    with pytest.raises(ModelError, match=rf"{family}.*one vocabulary"):
        assemble_supervised(parse_config(six_steps("seq2seq", folder)))
    tiny_seq2seq_config["tokenizer"]["model_name"] = folder
    tiny_seq2seq_config["alg"]["policy"]["args"]["model_name"] = folder
    with pytest.raises(ModelError, match=rf"{family}.*one vocabulary"):
        assemble(parse_config(tiny_seq2seq_config))
