from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from rl4lms_like.testing.models import (
    CAUSAL_FAMILIES,
    SEQ2SEQ_FAMILIES,
    make_causal_lm,
    make_seq2seq_lm,
    make_tokenizer,
    make_word_tokenizer,
    save_model,
)

TOKENIZER = make_tokenizer()
FAMILIES = [
    *((family, make_causal_lm, AutoModelForCausalLM) for family in CAUSAL_FAMILIES),
    *((family, make_seq2seq_lm, AutoModelForSeq2SeqLM) for family in SEQ2SEQ_FAMILIES),
]


def same_weights(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("family", "make", "auto_class"), FAMILIES, ids=[family for family, *_ in FAMILIES])
class TestEveryFamily:
    def test_weights_depend_on_the_seed_alone(self, family, make, auto_class):
        model = make(family, TOKENIZER, seed=1)
        torch.rand(3)
        assert same_weights(model, make(family, TOKENIZER, seed=1))
        assert not same_weights(model, make(family, TOKENIZER, seed=2))

    def test_speaks_the_tokenizers_vocabulary_in_float32(self, family, make, auto_class):
        model = make(family, TOKENIZER)
        assert model.config.vocab_size == model.get_output_embeddings().weight.shape[0] == len(TOKENIZER)
        assert model.config.eos_token_id == TOKENIZER.eos_token_id
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def test_generates_from_a_padded_batch(self, family, make, auto_class):
        prompts = TOKENIZER(
            ["Who wrote", "The film opens with"], return_tensors="pt", padding=True, padding_side="left"
        )
        generated = make(family, TOKENIZER).generate(**prompts, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        prompt_length = 1 if auto_class is AutoModelForSeq2SeqLM else prompts.input_ids.shape[1]
        assert generated.shape == (2, prompt_length + 5)

    def test_the_saved_folder_is_what_from_pretrained_reads(self, family, make, auto_class, tmp_path):
        model = make(family, TOKENIZER)
        folder = save_model(tmp_path / family, model, TOKENIZER)
        assert same_weights(model, auto_class.from_pretrained(folder))
        assert AutoTokenizer.from_pretrained(folder).get_vocab() == TOKENIZER.get_vocab()


def test_making_a_model_leaves_the_global_random_state_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    make_causal_lm("gpt2", TOKENIZER)
    assert torch.equal(torch.rand(4), expected)


def test_scale_moves_a_model_away_from_the_uniform_distribution():
    ids = TOKENIZER("Who wrote the letter?", return_tensors="pt").input_ids
    spread = [make_causal_lm("gpt2", TOKENIZER, scale=scale)(ids).logits.std().item() for scale in (1.0, 10.0)]
    assert spread[1] > 5 * spread[0]


def test_config_arguments_win_over_the_ones_made_here():
    assert make_causal_lm("gpt2", TOKENIZER, resid_pdrop=0.0).config.resid_pdrop == 0.0
    assert make_causal_lm("gpt2", TOKENIZER).config.resid_pdrop == 0.1


@pytest.mark.parametrize(
    ("make", "family", "own"),
    [
        (make_causal_lm, "gpt2", {"n_embd": 64, "n_layer": 3}),
        (make_seq2seq_lm, "t5", {"d_model": 64, "num_layers": 3}),
        (make_seq2seq_lm, "bart", {"d_model": 64, "encoder_layers": 3}),
    ],
)
def test_a_familys_own_names_win_too(make, family, own):
    config = make(family, TOKENIZER, **own).config
    assert {name: getattr(config, name) for name in own} == own


@pytest.mark.parametrize("make", [make_causal_lm, make_seq2seq_lm])
def test_an_unknown_family_is_named_beside_the_known_ones(make):
    with pytest.raises(ValueError):
        make("gpt5", TOKENIZER)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives_the_byte_level_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER(text, split_special_tokens=True).input_ids) == text


def test_append_eos_ends_texts_with_the_end_token():
    ending = make_tokenizer(append_eos=True)
    assert ending("Who?").input_ids == [*TOKENIZER("Who?").input_ids, ending.eos_token_id]


def test_a_word_tokenizer_has_its_words_and_three_special_tokens():
    numbers = make_word_tokenizer(str(number) for number in range(5))
    assert len(numbers) == 8
    assert numbers("3 1 4 9").input_ids == [6, 4, 7, numbers.unk_token_id]
    assert numbers.decode([3, 4, 7, numbers.eos_token_id], skip_special_tokens=True) == "0 1 4"
