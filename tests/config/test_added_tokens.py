"""Checkpoints with the tokens of a chat format: which rows they have, when they are written, what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from rl4lms_like.config.added_tokens import CONTENT, with_created_models
from rl4lms_like.config.load import parse_config
from rl4lms_like.policies.loading import load_model
from rl4lms_like.policies.routing import balancing_coefficient
from rl4lms_like.small_models.embedded import cache_folder
from rl4lms_like.system.errors import ConfigError
from rl4lms_like.testing import models
from rl4lms_like.training.inputs import build_tokenizer
from tests.chat_models import CHATML, PLAIN
from tests.config_errors import raises_at
from tests.configs import run_blocks, supervised_blocks
from tests.expert_models import save_experts

TOKENS = ["<|im_start|>", "<|im_end|>"]
AUTO = {"causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}


def saved(folder, family="gpt2", *, n_rows=320):
    """Save a base model with 320 tokens and `n_rows` rows."""
    make = models.make_seq2seq_lm if family in models.SEQ2SEQ_FAMILIES else models.make_causal_lm
    tokenizer = models.make_tokenizer(append_eos=family in models.SEQ2SEQ_FAMILIES)
    model = make(family, tokenizer)
    if n_rows != 320:
        model.resize_token_embeddings(n_rows, mean_resizing=False)
    return models.save_model(folder, model, tokenizer)


def config_of(model, kind="causal", *, tokenizer=None, alg=None, **keys):
    blocks = supervised_blocks()
    blocks["tokenizer"] = {"model_name": str(tokenizer or model), "chat_template": "chatml", **keys}
    blocks["alg"] |= {"model_type": kind, "model_name": str(model), **(alg or {})}
    return parse_config(blocks)


def written():
    """Return the folders of the cache."""
    return sorted(cache_folder(CONTENT).glob("*"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path / "cache"))


def test_a_mixture_of_experts_keeps_its_balancing_loss(tmp_path):
    tokenizer = models.make_tokenizer()
    base = save_experts(tmp_path / "base", "mixtral", tokenizer, output_router_logits=True, router_aux_loss_coef=0.3)
    model, _ = load_model(AutoModelForCausalLM, with_created_models(config_of(base)).alg.model_name)
    assert balancing_coefficient(model) == 0.3


@pytest.mark.parametrize(
    ("family", "n_rows"), [("gpt2", 320), ("llama", 320), ("gpt2", 350), ("t5", 320), ("bart", 321)]
)
def test_new_rows_are_the_mean_of_the_used_ones_and_nothing_else_changes(family, n_rows, tmp_path):
    kind = "seq2seq" if family in models.SEQ2SEQ_FAMILIES else "causal"
    base = saved(tmp_path / "base", family, n_rows=n_rows)
    if family == "bart":
        model = AUTO[kind].from_pretrained(base)
        model.final_logits_bias.copy_(torch.arange(float(n_rows)))
        model.save_pretrained(base)
    folder = with_created_models(config_of(base, kind)).alg.model_name
    before, after = (AUTO[kind].from_pretrained(name).state_dict() for name in (base, folder))
    assert before.keys() == after.keys()
    n_grown = 0
    for name, weight in before.items():
        if weight.shape[:1] == (n_rows,) or name == "final_logits_bias":
            rows, new = (weight.T, after[name].T) if name == "final_logits_bias" else (weight, after[name])
            n_grown += 1
            assert torch.equal(new[:320], rows[:320])
            assert torch.allclose(new[320:322], rows[:320].mean(dim=0).expand(2, -1), atol=1e-6, rtol=1e-6)
            assert len(new) == max(n_rows, 322) and torch.equal(new[322:], rows[322:])
        else:
            assert torch.equal(weight, after[name]), name
    assert n_grown >= 2  # embeddings and output layer, under their own names also if they are tied

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(TOKENS) == [320, 321] and tokenizer.chat_template
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert ends == ([1, 321] if kind == "causal" else 1)


def test_a_checkpoint_is_written_once_and_keeps_its_precision(tmp_path, capsys):
    base = saved(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base).to(torch.bfloat16).save_pretrained(base)
    first = with_created_models(config_of(base))
    assert with_created_models(first) == first and with_created_models(config_of(base)) == first
    assert len(written()) == 1 and capsys.readouterr().err.count("writing") == 1
    assert AutoModelForCausalLM.from_pretrained(first.alg.model_name).dtype == torch.bfloat16

    # Another folder for other weights, the same one for a copy.
    copy = saved(tmp_path / "copy")
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(copy)
    assert with_created_models(config_of(copy)) == first
    saved(tmp_path / "other", "llama")
    assert with_created_models(config_of(tmp_path / "other")).alg.model_name != first.alg.model_name


def test_a_model_that_has_the_tokens_is_used_as_it_is(tmp_path):
    base = saved(tmp_path / "base")
    grown = with_created_models(config_of(base)).alg.model_name

    # An earlier stage's model, with the tokenizer of the base in the config: the model's own has the tokens.
    config = with_created_models(config_of(grown, tokenizer=base))
    assert (config.alg.model_name, config.tokenizer.model_name) == (grown, grown)
    config = with_created_models(config_of(grown))
    assert (config.alg.model_name, config.tokenizer.model_name) == (grown, grown)
    assert len(written()) == 1
    config = with_created_models(config_of(grown, add_tokens=["<think>"]))
    assert build_tokenizer(config.tokenizer).convert_tokens_to_ids([*TOKENS, "<think>"]) == [320, 321, 322]


def test_a_tokenizer_that_has_them_already_makes_the_model_larger(tmp_path):
    base = saved(tmp_path / "base")
    tokenizer = models.make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<other>", *TOKENS]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = with_created_models(config_of(base, tokenizer=tmp_path / "tokenizer"))
    assert load_model(AutoModelForCausalLM, config.alg.model_name)[0].config.vocab_size == 323
    assert build_tokenizer(config.tokenizer).convert_tokens_to_ids(["<other>", *TOKENS]) == [320, 321, 322]


def test_adapters_train_the_rows_of_all_named_tokens(tmp_path):
    base = saved(tmp_path / "base")
    peft = {"r": 2, "trainable_token_indices": [7]}
    config = with_created_models(config_of(base, alg={"peft": peft}, add_tokens=["<think>", "a"]))
    a = models.make_tokenizer().convert_tokens_to_ids("a")
    assert config.alg.peft["trainable_token_indices"] == sorted([7, a, 320, 321, 322])

    # A byte-level vocabulary has this token under another spelling.
    config = with_created_models(config_of(base, alg={"peft": {"r": 2}}, add_tokens=["\x12"]))
    (control,) = models.make_tokenizer()("\x12", add_special_tokens=False)["input_ids"]
    assert config.alg.peft["trainable_token_indices"] == sorted([control, 320, 321])

    # Of RL runs, all networks get the tokens.
    blocks = run_blocks()
    blocks["tokenizer"] = {"model_name": str(base), "chat_template": "chatml"}
    critic = saved(tmp_path / "critic", "llama")
    blocks["alg"]["policy"]["args"] |= {"model_name": str(base), "peft": {"r": 2}, "reference_model": str(base)}
    blocks["alg"]["policy"]["args"]["critic_model"] = str(critic)
    args = with_created_models(parse_config(blocks)).alg.policy.args
    assert args["peft"]["trainable_token_indices"] == [320, 321]
    assert args["reference_model"] == args["model_name"] != args["critic_model"]
    assert load_model(AutoModelForCausalLM, args["critic_model"])[0].config.vocab_size == 322


def test_a_token_that_is_one_unknown_token_is_added(tmp_path):
    tokenizer = models.make_word_tokenizer(["user", "assistant"])
    base = models.save_model(tmp_path / "base", models.make_causal_lm("gpt2", tokenizer), tokenizer)
    config = with_created_models(config_of(base, alg={"peft": {"r": 2}}))
    assert config.alg.peft["trainable_token_indices"] == [5, 6]
    assert AutoTokenizer.from_pretrained(config.alg.model_name).convert_tokens_to_ids(TOKENS) == [5, 6]

    # Neither is it the token that ends a turn.
    for text, mentioned in (("<|im_end|>", "add_tokens"), ("~", "no response would end")):
        (tmp_path / "template.jinja").write_text(
            f"{{% for m in messages %}}{{{{ m['content'] }}}} {text} {{% endfor %}}"
        )
        with raises_at("tokenizer.chat_template", mentions=mentioned):
            build_tokenizer(config_of(base, chat_template=str(tmp_path / "template.jinja")).tokenizer)


def test_a_pretrained_critic_is_used_as_it_is(tmp_path):
    base = saved(tmp_path / "base")
    grown = with_created_models(config_of(base)).alg.model_name
    AutoModelForCausalLM.from_pretrained(grown).save_pretrained(tmp_path / "critic")  # without a tokenizer
    blocks = run_blocks()
    blocks["tokenizer"] = {"model_name": str(base), "chat_template": "chatml"}
    blocks["alg"]["policy"]["args"] |= {"model_name": str(base), "critic_model": str(tmp_path / "critic")}
    args = with_created_models(parse_config(blocks)).alg.policy.args
    assert (args["model_name"], args["critic_model"]) == (grown, str(tmp_path / "critic"))


def test_the_tokenizer_of_another_model_is_refused(tmp_path):
    base = saved(tmp_path / "base")
    models.make_word_tokenizer(["a", "b"]).save_pretrained(tmp_path / "other")
    with raises_at("tokenizer.model_name", mentions=str(base)):
        with_created_models(config_of(base, tokenizer=tmp_path / "other"))


@pytest.mark.parametrize("template", [CHATML.replace("{{ bos_token }}", ""), PLAIN])
def test_a_template_whose_markers_are_no_tokens_is_refused_with_the_way_out(template, tmp_path):
    base = saved(tmp_path / "base")
    (tmp_path / "template.jinja").write_text(template)
    config = config_of(base, chat_template=str(tmp_path / "template.jinja"))
    with raises_at("tokenizer.chat_template", mentions="tokenizer.add_tokens"):
        build_tokenizer(config.tokenizer)
    with raises_at("tokenizer.chat_template", mentions=json.dumps(TOKENS) if template != PLAIN else "chatml"):
        build_tokenizer(config.tokenizer)
    if template == PLAIN:
        return
    config = with_created_models(config_of(base, chat_template=str(tmp_path / "template.jinja"), add_tokens=TOKENS))
    assert build_tokenizer(config.tokenizer).chat_template == template
    assert GenerationConfig.from_pretrained(config.alg.model_name).eos_token_id == [1, 321]


def test_tokens_that_cannot_be_are_found_in_the_file():
    with raises_at("tokenizer.add_tokens.1", "tokenizer.add_tokens.2"):
        config_of("gpt2", add_tokens=["<a>", "", " b"])
    with pytest.raises(ConfigError):
        config_of("gpt2", add_tokens="<a>")
