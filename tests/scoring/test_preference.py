"""The preference model: good or bad, as a T5 says at its first step."""

from __future__ import annotations

import cloudpickle
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from rl4lms_like.rewards.preference import CommonGenPrefRM, n_missing
from rl4lms_like.system.errors import MissingResourceError, ModelError
from rl4lms_like.testing.models import make_seq2seq_lm, make_tokenizer, save_model
from tests.texts import texts

TEXTS = ["A man drives a car.", "", "the event is a man", "Привет, 世界", "car " * 100]


def scorer(model_name=None, weights=None, batch_size=2, dtype="float32", **options):
    return CommonGenPrefRM(
        device="cpu", batch_size=batch_size, model_name=model_name, weights=weights, dtype=dtype, **options
    )


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_it_is_the_softmax_of_two_words_at_the_decoders_first_step(tiny_t5_dir, batch_size):
    tokenizer = AutoTokenizer.from_pretrained(tiny_t5_dir)
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_t5_dir).eval()
    good, bad = (tokenizer(word)["input_ids"][0] for word in ("good", "bad"))
    expected = []
    for text in TEXTS:
        encoded = tokenizer(text, return_tensors="pt")
        with torch.no_grad():  # RL4LMs' call: any labels, of which only the first step is read
            logits = model(**encoded, labels=tokenizer("x", return_tensors="pt")["input_ids"]).logits[0, 0]
        expected.append(float(torch.stack([logits[good], logits[bad]]).softmax(0)[0]))
    got = scorer(str(tiny_t5_dir), batch_size=batch_size).probabilities(TEXTS)
    assert got == pytest.approx(expected, abs=1e-6)
    assert max(got) - min(got) > 0.01


def test_large_logits_do_not_overflow(tmp_path):
    """D-38: RL4LMs took exponentials without care, which gives NaN."""
    tokenizer = make_tokenizer(append_eos=True)
    model = make_seq2seq_lm("t5", tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e5)
    folder = save_model(tmp_path, model, tokenizer)
    got = scorer(str(folder)).probabilities(TEXTS)
    assert all(0 <= value <= 1 for value in got)


def test_missing_concepts_lower_the_reward(tiny_t5_dir):
    model = scorer(str(tiny_t5_dir), concept_penalty_coeff=2.0)
    written, concepts = ["A Man drives", "cars"], [["man", "drive", "car"], ["car"]]
    chances = model.probabilities(written)
    rewards = model.per_text(texts(written, metas=[{"concepts": each} for each in concepts]))
    assert rewards == pytest.approx([chances[0] / (1 + 2.0), chances[1]])
    assert n_missing("A Man drives", ["man", "drive", "car"]) == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_published_weights_are_put_on_a_base(tmp_path, tiny_t5_dir, wrapped):
    """As deepspeed left them: more rows in the vocabulary than the base has, in `model_state_dict` or not."""
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_t5_dir)
    rows = len(AutoTokenizer.from_pretrained(tiny_t5_dir))
    model.resize_token_embeddings(rows + 8, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    state = model.state_dict()
    torch.save({"model_state_dict": state} if wrapped else state, tmp_path / "prefs.pt")
    tokenizer = AutoTokenizer.from_pretrained(tiny_t5_dir)
    tuned = save_model(tmp_path / "whole", model, tokenizer)
    got = scorer(str(tiny_t5_dir), str(tmp_path / "prefs.pt")).probabilities(TEXTS)
    assert got == pytest.approx(scorer(str(tuned)).probabilities(TEXTS), abs=1e-6)
    assert got != pytest.approx(scorer(str(tiny_t5_dir)).probabilities(TEXTS), abs=1e-4)


def test_weights_of_another_model_are_an_error(tmp_path, tiny_t5_dir):
    state = AutoModelForSeq2SeqLM.from_pretrained(tiny_t5_dir).state_dict()
    del state["decoder.block.0.layer.0.SelfAttention.q.weight"]
    torch.save(state, tmp_path / "prefs.pt")
    with pytest.raises(ModelError, match=r"prefs.pt' .*SelfAttention.q.weight"):
        scorer(str(tiny_t5_dir), str(tmp_path / "prefs.pt")).probabilities(["x"])


def test_a_file_of_weights_runs_no_code(tmp_path, tiny_t5_dir):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"shared.weight": Trap()}, tmp_path / "prefs.pt")
    with pytest.raises(ModelError, match=r"prefs.pt"):
        scorer(str(tiny_t5_dir), str(tmp_path / "prefs.pt")).probabilities(["x"])
    assert not (tmp_path / "ran").exists()


def test_without_weights_it_says_how_to_get_them():
    """D-38: RL4LMs downloaded them into its own package."""
    with pytest.raises(MissingResourceError) as caught:
        scorer()
    assert "curl -LO https://storage.googleapis.com" in str(caught.value)
    assert "Without a network" in str(caught.value)


def test_a_file_that_is_not_there_is_an_error_when_it_is_built(tmp_path, tiny_t5_dir):
    with pytest.raises(ModelError):
        scorer(str(tiny_t5_dir), str(tmp_path / "prefs.pt"))


def test_it_is_pickled_without_weights(tiny_t5_dir):
    model = scorer(str(tiny_t5_dir))
    before = model.probabilities(TEXTS)
    pickled = cloudpickle.dumps(model)
    assert len(pickled) < 1000
    assert cloudpickle.loads(pickled).probabilities(TEXTS) == before


def test_a_model_that_breaks_down_is_an_error_that_names_it(tiny_t5_dir):
    model = scorer(str(tiny_t5_dir), dtype="float16")
    with torch.no_grad():
        model.model.model.get_output_embeddings().weight.fill_(float("inf"))
    with pytest.raises(ModelError):
        model.probabilities(TEXTS)
