"""`causal_perplexity` is transformers' published recipe for models with a fixed number of positions, as in RL4LMs."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.perplexity import strided_perplexity
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from rl4lms_like.testing.checkers import check_metric

KEY = "fluency_metrics/perplexity"


def recipe(model, ids, stride, max_length):
    """The recipe, with the model's own loss: the last `stride` tokens of each window have labels."""
    encoded, losses = torch.tensor([ids]), []
    for start in range(0, len(ids), stride):
        begin, end = max(start + stride - max_length, 0), min(start + stride, len(ids))
        window = encoded[:, begin:end]
        labels = window.clone()
        labels[:, : -(end - start)] = -100
        with torch.no_grad():
            losses.append(model(window, labels=labels).loss * (end - start))
    return float(torch.exp(torch.stack(losses).sum() / end))


def references(shared_dir, n):
    lines = (shared_dir / "data/commongen/commongen.dev.jsonl").read_text().splitlines()[:n]
    return [json.loads(line)["scene"] for line in lines]


@pytest.mark.parametrize(("family", "stride"), [("gpt2", 16), ("gpt2", 64), ("llama", 24), ("opt", 100)])
def test_it_equals_the_recipe_on_real_references(shared_dir, tiny_gpt2_dir, tiny_tokenizer, family, stride):
    """The families' configs name their positions `n_positions` and `max_position_embeddings`."""
    model = models.make_causal_lm(family, tiny_tokenizer, n_positions=64, scale=5.0)
    texts = references(shared_dir, 60)
    assert sum(map(len, texts)) >= 200
    metric = METRICS.get("causal_perplexity", {"stride": stride, "tokenizer_id": str(tiny_gpt2_dir)})
    n = len(texts)
    result = metric.compute([""] * n, [""] * n, texts, None, model, "val")
    joined = tiny_tokenizer("\n\n".join(text for each in texts for text in each))["input_ids"]
    expected = recipe(model, joined, min(stride, 64), 64)
    assert result[KEY][0] is None
    assert result[KEY][1] == pytest.approx(expected, rel=1e-4)


def test_a_real_model_finds_stories_easier_than_salad(shared_dir):
    folder = shared_dir / "models/stories260K"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)("Once upon a time, there was a little girl named Lily. " * 3)[
        "input_ids"
    ]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).tolist()
    story, salad = (strided_perplexity(model, text, stride=16, window=48) for text in (ids, [ids[i] for i in order]))
    assert story < 10 < 50 < salad
    assert story == pytest.approx(recipe(model, ids, 16, 48), rel=1e-4)


@pytest.fixture
def build(tiny_gpt2_dir):
    return lambda **args: METRICS.get("causal_perplexity", {"stride": 8, "tokenizer_id": str(tiny_gpt2_dir), **args})


@pytest.fixture
def model(tiny_tokenizer):
    return models.make_causal_lm("gpt2", tiny_tokenizer)


def test_it_does_not_see_the_responses(build, model):
    """D-42: it is of the model; `reference_perplexity` is of what it writes."""
    values = {build().compute(["p"], [text], [["a reference."]], None, model, "val")[KEY][1] for text in ("", "b c d")}
    assert len(values) == 1
    other = build().compute(["p"], [""], [["another one"]], None, model, "val")[KEY][1]
    assert other not in values


def test_the_model_is_left_as_it_was(build, model):
    model.train()
    model.transformer.h[0].eval()
    value = build().compute(["p"], [""], [["a reference."]], None, model, "val")[KEY][1]
    assert model.training and not model.transformer.h[0].training and not model.transformer.h[0].mlp.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert build().compute(["p"], [""], [["a reference."]], None, model.eval(), "val")[KEY][1] == value


def test_text_from_meta_data(build, model):
    by_meta = build(use_text_from_meta_data=True).compute(
        ["p", "q"], ["", ""], [["x"], ["y"]], [{"reference": "one"}, {"reference": "two"}], model, "val"
    )
    assert by_meta == build().compute(["p", "q"], ["", ""], [["one"], ["two"]], None, model, "val")
    for metas in (None, [None], [{"reference": ["one"]}]):
        with pytest.raises(ValueError):
            build(use_text_from_meta_data=True).compute(["p"], [""], [["x"]], metas, model, "val")


def test_nothing_is_said_of_the_train_split(build, model):
    assert build().compute(["p"], [""], [["a reference."]], None, model, "train") == {}


@pytest.mark.parametrize("texts", [[], [""], ["a"]])
def test_without_two_tokens_it_is_not_defined(build, model, texts):
    assert math.isnan(build().compute(["p"], [""], [texts], None, model, "val")[KEY][1])


def test_windows_of_a_model_without_positions_have_a_limit(build, tiny_tokenizer):
    t5 = models.make_seq2seq_lm("t5", tiny_tokenizer)
    with pytest.raises(ValueError):
        build().compute(["p"], [""], [["x"]], None, t5, "val")
    from transformers import AutoConfig
    from transformers import AutoModelForCausalLM as Auto

    size = {"hidden_size": 16, "n_head": 2, "n_layer": 1, "vocab_size": len(tiny_tokenizer)}
    bloom = Auto.from_config(AutoConfig.for_model("bloom", **size)).eval()
    ids = tiny_tokenizer("a reference of some words. " * 40)["input_ids"]
    value = build(stride=64).compute(["p"], [""], [["a reference of some words. " * 40]], None, bloom, "val")[KEY][1]
    assert value == pytest.approx(recipe(bloom, ids, 64, 2048), rel=1e-4)


def test_a_window_of_ones_own(build, model, tiny_tokenizer):
    text = "a reference of some words. " * 10
    value = build(max_length=20).compute(["p"], [""], [[text]], None, model, "val")[KEY][1]
    assert value == pytest.approx(recipe(model, tiny_tokenizer(text)["input_ids"], 8, 20), rel=1e-4)


def test_what_it_cannot_be_computed_of_is_said(build, model, tmp_path):
    with pytest.raises(ValueError):
        build().compute(["p"], [""], [["x"]], None, None, "val")
    with pytest.raises(ModelError):
        METRICS.get("causal_perplexity", {"stride": 8, "tokenizer_id": str(tmp_path / "nowhere")})
    larger = models.save_model(tmp_path / "larger", model, models.make_tokenizer(["zebra quartz " * 9] * 9, 400))
    metric = METRICS.get("causal_perplexity", {"stride": 8, "tokenizer_id": str(larger)})
    model.resize_token_embeddings(258)
    with pytest.raises(ValueError):
        metric.compute(["p"], [""], [["zebra quartz zebra quartz"]], None, model, "val")


def test_it_passes_the_checker(build, model):
    check_metric(build(), model=model)


def test_adapters_around_the_model_are_read_with_it(build, model):
    """New adapters change nothing; the policy's model is such a wrapper where `peft` is asked for."""
    from peft import LoraConfig, get_peft_model

    plain = build().compute(["p"], [""], [["a reference."]], None, model, "val")
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True))
    assert build().compute(["p"], [""], [["a reference."]], None, wrapped.train(), "val") == plain
    assert wrapped.training
