"""Classifiers in batches give what the model gives for each text alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rl4lms_like.scoring.classifier import Classifier, LabelProbability
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing.models import make_tokenizer, save_model
from tests.local_models import LOCAL_MODELS
from tests.texts import texts

TEXTS = [
    "the film was good",
    "",
    "a joy from start to finish and a sad story " * 3,
    "Привет, 世界",
    "1 2 3",
    "good" * 500,
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    LOCAL_MODELS["classifier"](folder)
    return str(folder)


def decoder(folder, pad_token_id):
    """A GPT-2 with two labels, of which the config may name no padding token."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    config = AutoConfig.for_model(
        "gpt2",
        vocab_size=len(tokenizer),
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        num_labels=2,
        pad_token_id=pad_token_id,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    return str(save_model(folder, AutoModelForSequenceClassification.from_config(config).eval(), tokenizer))


def alone(folder, text, **options):
    """What transformers gives for one text, cut on the left."""
    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=64, **options)
    with torch.no_grad():
        return model(**encoded).logits[0]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 100])
def test_logits_are_those_of_each_text_alone(bert, batch_size):
    expected = torch.stack([alone(bert, text) for text in TEXTS])
    assert expected.std(dim=0).min() > 0.01
    assert torch.allclose(Classifier(bert, batch_size=batch_size).logits(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize("pad_token_id", [None, 0])
@pytest.mark.parametrize("batch_size", [1, 6])
def test_decoders_without_a_padding_token_read_the_last_token(tmp_path, pad_token_id, batch_size):
    folder = decoder(tmp_path, pad_token_id)
    texts = [text for text in TEXTS if text]
    scorer = Classifier(folder, batch_size=batch_size)
    expected = torch.stack([alone(folder, text) for text in texts])
    assert torch.allclose(scorer.logits(texts), expected, atol=1e-5)
    assert scorer.model.config.pad_token_id == pad_token_id
    assert scorer.logits([""]).isfinite().all()


def test_a_text_too_long_keeps_its_end(bert):
    scorer = Classifier(bert, batch_size=2)
    long = "sad " * 300 + "the film was a joy"
    assert torch.allclose(scorer.logits([long])[0], alone(bert, "sad " * 100 + "the film was a joy"), atol=1e-5)
    assert not torch.allclose(scorer.logits([long])[0], scorer.logits(["sad " * 300])[0], atol=1e-3)


def test_pairs_are_encoded_as_pairs(bert):
    pairs = [("the film was", "good"), ("on the museum", ""), ("a", "joy " * 100)]
    got = Classifier(bert, batch_size=3).logits([a for a, _ in pairs], [b for _, b in pairs])
    tokenizer = AutoTokenizer.from_pretrained(bert, truncation_side="left")
    model = AutoModelForSequenceClassification.from_pretrained(bert).eval()
    for row, (first, second) in zip(got, pairs, strict=True):
        encoded = tokenizer([first], [second], return_tensors="pt", truncation=True)
        assert encoded["token_type_ids"].max() == 1
        with torch.no_grad():
            assert torch.allclose(row, model(**encoded).logits[0], atol=1e-5)


def test_no_texts_have_no_logits(bert):
    assert Classifier(bert, batch_size=4).logits([]).shape == (0, 2)


def test_low_precision_stays_close(bert):
    exact = Classifier(bert, batch_size=8).logits(TEXTS).softmax(1)
    coarse = Classifier(bert, batch_size=8, dtype="bfloat16").logits(TEXTS).softmax(1)
    assert coarse.dtype is torch.float32
    assert torch.allclose(exact, coarse, atol=0.05)


def test_label_probabilities_read_the_prompt_or_not(bert):
    both = LabelProbability(bert, 1).per_text(texts([" was good", ""], prompts=["the film"] * 2))
    expected = [float(alone(bert, text).softmax(0)[1]) for text in ("the film was good", "the film")]
    assert both == pytest.approx(expected, abs=1e-6)
    alone_scorer = LabelProbability(bert, 0, include_prompt_for_eval=False)
    response = alone_scorer.per_text(texts([" was good"], prompts=["the film"]))
    assert response == pytest.approx([float(alone(bert, " was good").softmax(0)[0])], abs=1e-6)


def test_labels_have_an_index_and_a_name(tmp_path):
    LOCAL_MODELS["nli"](tmp_path)
    scorer = Classifier(str(tmp_path), batch_size=1)
    assert scorer.label_index("NEUTRAL") == scorer.label_index(1) == 1
    for label in (3, -1, "neutral", None):
        with pytest.raises(ModelError):
            scorer.check_label(label)
    assert "loaded" in vars(scorer)


def test_a_label_is_checked_without_weights(tmp_path):
    LOCAL_MODELS["classifier"](tmp_path)
    scorer = Classifier(str(tmp_path), batch_size=1)
    with pytest.raises(ModelError):
        scorer.check_label(2)
    assert "loaded" not in vars(scorer)
    Classifier("of/the-hub", batch_size=1).check_label(99)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_breaks_down_is_an_error_that_names_it(tmp_path, value):
    """A comparison, `argmax` or `clip` would make a number of it."""
    LOCAL_MODELS["intents"](tmp_path)
    scorer = Classifier(str(tmp_path), batch_size=2, role="judge")
    with torch.no_grad():
        scorer.model.classifier.bias.fill_(value)
    with pytest.raises(ModelError, match=rf"'{tmp_path}' .*(nan|inf) .* 0, .* 6 "):
        scorer.logits(TEXTS)


def test_threads_do_not_disturb_each_other(tmp_path):
    """Batches of a decoder without a padding token choose one each."""
    scorer = Classifier(decoder(tmp_path, None), batch_size=3)
    texts = [text for text in TEXTS if text]
    expected = scorer.logits(texts)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(scorer.logits, [texts] * 40):
            assert torch.allclose(got, expected, atol=1e-5)


def test_a_text_that_spells_an_end_of_text_is_scored_beside_others(tmp_path):
    """Encoder-decoders of transformers want as many in each row of a batch, and policies of other tokens write them."""
    tokenizer = make_tokenizer(append_eos=True)
    size = {"d_model": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1, "d_ff": 32, "decoder_start_token_id": 0}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model("t5", vocab_size=len(tokenizer), num_labels=3, **size, **ids)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    scorer = Classifier(str(save_model(tmp_path, model, tokenizer)), batch_size=4)
    texts = ["a joy", f"the film{tokenizer.eos_token} was good", "1 2 3"]
    alone = torch.cat([scorer.logits([text]) for text in texts])
    assert torch.allclose(scorer.logits(texts), alone, atol=1e-5)
