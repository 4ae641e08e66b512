"""What rewards and policies see of an episode, field by field (RL4LMs' meaning)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rl4lms_like.core.observation import KEYS, Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards.call import score_transition
from rl4lms_like.rewards.sentiment import SentimentReward
from rl4lms_like.testing import models
from tests.tokenizer_families import CAUSAL

PAD = 0
SAMPLE = Sample("s", "The film", ["A joy.", "A bore."], {"topic": 3})


def observe(tokenizer, n_actions, *, start=None, prompt_length=6, context_length=4, actions=(50, 51, 52, 53)):
    layout = TextLayout(tokenizer, prompt_length, context_length, start)
    prompt_ids = layout.encode(SAMPLE.prompt_or_input_text)
    return Observation(SAMPLE, prompt_ids, np.array(actions), n_actions, layout)


def padded(ids, length):
    return [PAD] * (length - len(ids)) + list(ids), [0] * (length - len(ids)) + [1] * len(ids)


@pytest.mark.parametrize("start", [None, 9])
@pytest.mark.parametrize("n_actions", [0, 1, 3, 4])
def test_arrays_are_left_padded_joined_and_masked(tiny_tokenizer, n_actions, start):
    observation = observe(tiny_tokenizer, n_actions, start=start)
    prompt = tiny_tokenizer("The film")["input_ids"]
    context = (([] if start is None else [start]) + [50, 51, 52, 53][:n_actions])[-4:]  # at T the start falls out
    for key, ids, length in zip(KEYS, (prompt, context, prompt + context), (6, 4, 10), strict=True):
        expected_ids, expected_mask = padded(ids, length)
        assert observation.arrays[f"{key}_encoded_pt"].tolist() == expected_ids
        assert observation.arrays[f"{key}_attention_mask_pt"].tolist() == expected_mask
    assert all(array.dtype == np.int64 for array in observation.arrays.values())


def test_tensors_have_a_batch_dimension_and_are_copies(tiny_tokenizer):
    observation = observe(tiny_tokenizer, 2)
    for name, array in observation.arrays.items():
        tensor = getattr(observation, name)
        assert tensor.dtype == torch.int64 and tensor.tolist() == [array.tolist()]
        tensor.fill_(7)
        assert getattr(observation, name).tolist() == [array.tolist()] and 7 not in array


def test_texts(tiny_tokenizer):
    ids = tiny_tokenizer(" was good<eos>")["input_ids"]
    observation = observe(tiny_tokenizer, len(ids), actions=ids, context_length=16)
    assert observation.prompt_or_input_text == "The film"
    assert observation.context_text == " was good"  # special tokens are left out
    assert observation.target_or_reference_texts == ["A joy.", "A bore."]
    assert observation.meta_info == {"topic": 3}
    assert observation.action_history == tiny_tokenizer.convert_ids_to_tokens(ids)
    assert observe(tiny_tokenizer, 0).context_text == ""


def test_the_context_starts_empty_also_where_the_tokenizer_adds_special_tokens():
    tokenizer = models.make_tokenizer(append_eos=True)  # RL4LMs put this EOS between prompt and response (D-11)
    assert tokenizer("")["input_ids"] == [tokenizer.eos_token_id]
    assert observe(tokenizer, 0).arrays["context_attention_mask_pt"].tolist() == [0, 0, 0, 0]


def test_the_prompt_text_is_whole_even_where_its_ids_are_cut():
    tokenizer = models.make_tokenizer(append_eos=True)
    text = "Count with me: 0 1 2 3 4"
    whole = tokenizer(text)["input_ids"]
    for side, expected in (("left", whole[-4:]), ("right", [*whole[:3], tokenizer.eos_token_id])):
        layout = TextLayout(tokenizer, 4, 4, prompt_truncation_side=side, is_encoder_decoder=True)
        assert layout.encode(text).tolist() == expected
    observation = Observation.init_from_sample(Sample("s", text), tokenizer, 4, 4, "left")
    assert observation.prompt_or_input_text == text and len(observation.prompt_ids) == 4


def test_update_gives_the_next_observation_and_keeps_this_one(tiny_tokenizer):
    first = Observation.init_from_sample(SAMPLE, tiny_tokenizer, 6, 4, "left", 9, {"other": 1})
    second = first.update(50, tiny_tokenizer)
    assert (first.n_actions, second.n_actions) == (0, 1)
    assert second.action_ids.tolist() == [50] and second.meta_info == {"other": 1}
    assert second.arrays["context_encoded_pt"].tolist() == [0, 0, 9, 50]
    assert first.arrays["context_encoded_pt"].tolist() == [0, 0, 0, 9]


def test_observations_of_an_episode_share_one_array_and_cannot_change_it(tiny_tokenizer):
    last = observe(tiny_tokenizer, 4)
    for n_actions in range(5):
        part = last.after(n_actions)
        assert part.action_ids.tolist() == [50, 51, 52, 53][:n_actions]
        assert np.shares_memory(part.action_ids, last.action_ids) or not n_actions
    for array in (last.action_ids, last.prompt_ids):
        with pytest.raises(ValueError):
            array[0] = 0


def test_to_dict_is_fresh_every_time(tiny_tokenizer):
    observation = observe(tiny_tokenizer, 2)
    observation.to_dict()["input_encoded_pt"][:] = 7
    assert 7 not in observation.to_dict()["input_encoded_pt"]


def test_the_fill_is_pad_or_end_or_zero(tiny_tokenizer):
    layout = TextLayout(models.make_tokenizer(), 4, 4)
    assert layout.pad_token_id == 0
    layout.tokenizer.pad_token = None
    assert layout.pad_token_id == layout.tokenizer.eos_token_id == 1
    layout.tokenizer.eos_token = None
    assert layout.pad_token_id == 0


def test_encoding_many_equals_encoding_each(tiny_tokenizer):
    layout = TextLayout(tiny_tokenizer, 5, 4)
    texts = ["", "a", "Nobody knew, and nobody asked!"]
    for together, text in zip(layout.encode_all(texts), texts, strict=True):
        np.testing.assert_array_equal(together, layout.encode(text))


def test_encoding_keeps_a_limit_that_the_tokenizer_had():
    tokenizer = models.make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    before = dict(tokenizer.backend_tokenizer.truncation)
    TextLayout(tokenizer, 5, 4).encode("Nobody knew, and nobody asked!")
    assert tokenizer.backend_tokenizer.truncation == before


def test_a_sample_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SAMPLE.id = "other"


@pytest.mark.parametrize("kind", ["byte-level", "llama", "metaspace always"])
def test_prompt_and_response_of_any_tokenizer_are_the_whole_text(kind):
    tokenizer = CAUSAL[kind]()
    for prompt, response in [("The film was", " good"), ("def f():\n", "    return 1\n"), ("2+2=", "4")]:
        layout = TextLayout(tokenizer, 32, 32)
        prompt_ids = layout.encode(prompt)
        ids = np.array(layout.continuations.ids([prompt], [response])[0])
        observation = Observation(Sample("s", prompt), prompt_ids, ids, len(ids), layout)
        assert observation.prompt_or_input_text + observation.context_text == prompt + response
        if "film" in prompt:
            assert score_transition(SentimentReward(), observation.after(0), int(ids[-1]), observation, True) > 0.4


def test_the_response_of_an_encoder_decoder_does_not_continue_its_prompt():
    tokenizer = CAUSAL["llama"]()
    ids = np.array(tokenizer("good", add_special_tokens=False)["input_ids"])
    for settings in ({"context_start_token": 0}, {"is_encoder_decoder": True}):
        layout = TextLayout(tokenizer, 32, 32, **settings)
        assert Observation(SAMPLE, layout.encode("The film"), ids, len(ids), layout).context_text == "good"
