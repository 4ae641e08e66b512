"""What a run reads and writes of responses whose tokenizer decodes the beginning of a text differently."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import TokenizerConfig
from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Preference, Sample
from rl4lms_like.core.stop_strings import StopStrings
from rl4lms_like.offline.pairs import encode_pairs
from rl4lms_like.on_policy.rollout_files import read_rollout
from rl4lms_like.preview import preview
from rl4lms_like.rewards.answers import RegexReward
from rl4lms_like.rewards.call import score_transition
from rl4lms_like.run import train_config
from rl4lms_like.testing.models import make_causal_lm, save_model
from rl4lms_like.training.examples import ExampleEncoder
from rl4lms_like.training.inputs import build_tokenizer, end_tokens
from tests.config_errors import raises_at
from tests.tokenizer_families import byte_level, llama_like, with_added_tokens


def lines(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def encoder_of(tokenizer, **changes):
    arguments = {"is_encoder_decoder": False, "max_prompt_length": 32, "max_length": 64}
    return ExampleEncoder(tokenizer=tokenizer, end_token_id=tokenizer.eos_token_id, **(arguments | changes))


def test_all_texts_of_a_run_are_those_after_the_prompts(tmp_path, tiny_config):
    tokenizer = llama_like()
    folder = str(save_model(tmp_path / "llama", make_causal_lm("llama", tokenizer), tokenizer))
    tiny_config["tokenizer"]["model_name"] = folder
    tiny_config["alg"]["policy"]["args"]["model_name"] = folder
    tiny_config["env"]["n_envs"] = 32
    tiny_config["train_evaluation"] |= {"n_iters": 1, "save_rollouts": True}
    run = train_config(
        parse_config(tiny_config), base_path_to_store_results=tmp_path, experiment_name="run", quiet=True
    )

    # Rollouts: the text is what the tokens add to the decoded prompt.
    (file,) = (run / "rollouts").glob("*.safetensors")
    written = lines(file.with_suffix(".jsonl"))
    rows = []
    for batch in read_rollout(file).batches:
        episodes = batch.episodes
        for row in range(episodes.n_episodes):
            prompt = episodes.prompt_ids[row][episodes.prompt_mask[row]]
            rows.append((prompt, episodes.response_ids[row][episodes.response_mask[row]]))
    assert len(written) == len(rows)
    for line, (prompt, response) in zip(written, rows, strict=True):
        whole = tokenizer.decode(torch.cat([prompt, response]).tolist(), skip_special_tokens=True)
        assert line["prompt"] + line["response"] == whole
    assert any(line["response"].startswith(" ") for line in written)

    # Token credit of the same episodes, and predictions.
    for iteration in lines(run / "token_credit.jsonl"):
        for episode in iteration["episodes"]:
            assert "".join(episode["tokens"]) == written[episode["episode"]]["response"]
    predictions = [line for file in run.glob("**/*predictions*.json*") for line in [file.read_text(encoding="utf-8")]]
    assert any('"generated_text": " ' in text for text in predictions)


def test_responses_of_pairs_continue_their_prompts():
    tokenizer = llama_like()
    encoder = encoder_of(tokenizer, separator="")
    pairs = encode_pairs(encoder, [Preference("0", "2+2=", ["4"], rejected="    5")])
    (row,) = pairs.rows
    assert row["prompt"] == tokenizer("2+2=")["input_ids"]
    texts = [tokenizer.decode(row["prompt"] + ids, skip_special_tokens=True) for ids in row["responses"]]
    assert texts == ["2+2=4", "2+2=    5"]
    assert [ids[-1] for ids in row["responses"]] == [tokenizer.eos_token_id] * 2
    assert pairs.n_boundary == 0


@pytest.mark.parametrize("limit", [4, 32])
@pytest.mark.parametrize("side", ["left", "right"])
def test_no_prompt_of_a_causal_model_ends_with_an_end_token(side, limit):
    """Whether a tokenizer appends one changes nothing: neither prompts, whole or truncated, nor examples and pairs."""
    tokenizers = [llama_like(), llama_like(ends=True)]
    samples = [Preference(str(i), text, [" of a"], rejected=" tale") for i, text in enumerate(["The story", "It was"])]
    encoded = []
    for tokenizer in tokenizers:
        tokenizer.truncation_side = side
        layout = TextLayout(tokenizer, limit, 8, prompt_truncation_side=side)
        encoder = encoder_of(tokenizer, max_prompt_length=limit, max_length=limit + 5)
        rows = encoder.encode(samples).rows
        assert all(row["input_ids"].count(tokenizer.eos_token_id) <= 1 for row in rows)
        prompts = [ids.tolist() for ids in layout.encode_all(samples)]
        encoded.append([prompts, layout.encode("").tolist(), rows, encode_pairs(encoder, samples).rows])
    assert tokenizers[1]("The story")["input_ids"][-1] == tokenizers[1].eos_token_id
    assert encoded[0] == encoded[1]


def test_an_end_token_of_the_text_or_of_an_encoder_stays():
    tokenizer = llama_like(ends=True)
    end = tokenizer.eos_token_id
    assert TextLayout(tokenizer, 32, 8).encode("The story</s>").tolist().count(end) == 1
    assert TextLayout(tokenizer, 32, 8, is_encoder_decoder=True).encode("The story")[-1] == end
    (row,) = encoder_of(tokenizer, is_encoder_decoder=True).encode([Sample("0", "The story", ["is old"])]).rows
    assert row["input_ids"][-1] == end and row["labels"].count(end) == 1

    # Nor does a response that is written with its end get a second one.
    (row,) = encoder_of(tokenizer).encode([Sample("0", "The story", [" is old</s>"])]).rows
    assert row["labels"].count(end) == 1 and row["labels"][-1] == end


@pytest.mark.parametrize("kind", ["reinforcement", "supervised"])
def test_check_names_the_end_token_that_is_removed(kind, tmp_path, tiny_config):
    tokenizer = llama_like(ends=True)
    folder = str(save_model(tmp_path / "llama", make_causal_lm("llama", tokenizer), tokenizer))
    tiny_config["tokenizer"]["model_name"] = folder
    tiny_config["alg"]["policy"]["args"]["model_name"] = folder
    if kind == "supervised":
        training = {"num_train_epochs": 1, "per_device_train_batch_size": 2, "eval_strategy": "no"}
        tiny_config["alg"] = {
            "id": "supervised", "model_type": "causal", "model_name": folder, "training_args": training,
            "generation_kwargs": {"max_new_tokens": 4},
        }  # fmt: skip
        tiny_config["datapool"] = {"id": "film_opinions", "args": {"n_train": 4, "n_eval": 0}}
        tiny_config["train_evaluation"] = {"eval_batch_size": 4, "metrics": [{"id": "length"}]}
        del tiny_config["reward_fn"], tiny_config["env"]
    output = "".join(preview(parse_config(tiny_config)))
    assert "without the end token '</s>'" in output


def thinking_model(tmp_path):
    """A tiny model whose tokenizer marks <think> as special."""
    tokenizer = with_added_tokens(byte_level())
    return tokenizer, str(save_model(tmp_path / "thinks", make_causal_lm("gpt2", tokenizer), tokenizer))


@pytest.mark.parametrize("make", [byte_level, llama_like])
def test_kept_special_tokens_are_in_every_text(make, tmp_path):
    tokenizer = with_added_tokens(make())
    tokenizer.save_pretrained(tmp_path)
    texts = {}
    for name, kept in {"stripped": [], "kept": ["<think>"]}.items():
        tokenizer = build_tokenizer(TokenizerConfig(model_name=str(tmp_path), keep_special_tokens=kept))
        layout = pickle.loads(pickle.dumps(TextLayout(tokenizer, 32, 32)))  # as it is sent to workers
        prompt_ids = layout.encode("The film")
        ids = np.array(tokenizer("<think>so it was<tool></s>", add_special_tokens=False)["input_ids"])
        observation = Observation(Sample("s", "The film"), prompt_ids, ids, len(ids), layout)
        texts[name] = observation.context_text
        reward = score_transition(RegexReward("<think>"), observation.after(0), 0, observation, True)
        assert reward == float(name == "kept")
        stops = StopStrings(("<think>",), tokenizer)
        assert stops.n_tokens(ids.tolist(), prompt_ids.tolist()) == (1 if name == "kept" else None)
    assert "<think>" in texts["kept"] and "</s>" not in texts["kept"]
    assert texts["kept"].replace("<think>", "").split() == texts["stripped"].split()


def test_tokens_that_cannot_be_kept_are_named(tmp_path):
    tokenizer, folder = thinking_model(tmp_path)
    config = TokenizerConfig(model_name=folder, keep_special_tokens=["<think>", "<thinks>", "</s>"])
    with raises_at("tokenizer.keep_special_tokens.1", "tokenizer.keep_special_tokens.2", mentions="<thinks>"):
        build_tokenizer(config)

    tokenizer = build_tokenizer(replace(config, keep_special_tokens=["<think>"]))
    think = tokenizer.convert_tokens_to_ids("<think>")
    with raises_at("tokenizer.keep_special_tokens", mentions="<think>"):
        end_tokens(tokenizer, GPT2Config(eos_token_id=[tokenizer.eos_token_id, think]), None)


def test_check_warns_of_a_pattern_that_never_matches(tmp_path, tiny_config):
    _, folder = thinking_model(tmp_path)
    tiny_config["tokenizer"]["model_name"] = folder
    tiny_config["alg"]["policy"]["args"]["model_name"] = folder
    tiny_config["reward_fn"] = {"id": "regex", "args": {"pattern": r"<think>.*\d"}}
    assert "reward_fn.args.pattern" in "".join(preview(parse_config(tiny_config)))
    tiny_config["tokenizer"]["keep_special_tokens"] = ["<think>"]
    assert "reward_fn.args.pattern" not in "".join(preview(parse_config(tiny_config)))


def test_check_does_not_advise_to_keep_the_end_token_of_a_pattern(tmp_path, tiny_config):
    _, folder = thinking_model(tmp_path)
    tiny_config["tokenizer"]["model_name"] = folder
    tiny_config["alg"]["policy"]["args"]["model_name"] = folder
    tiny_config["reward_fn"] = {"id": "regex", "args": {"pattern": r"\d</s>"}}
    (notice,) = [line for line in "".join(preview(parse_config(tiny_config))).splitlines() if "args.pattern" in line]
    assert "always removed" in notice and "keep_special_tokens" not in notice
