"""What a run reads and writes of responses whose tokenizer decodes the beginning of a text differently."""

from __future__ import annotations

import json

import torch

from rl4lms_like.config.run_config import parse_config
from rl4lms_like.core.sample import Preference
from rl4lms_like.offline.examples import ExampleEncoder
from rl4lms_like.offline.pairs import encode_pairs
from rl4lms_like.on_policy.rollout_files import read_rollout
from rl4lms_like.run import train_config
from rl4lms_like.testing.models import make_causal_lm, save_model
from tests.tokenizer_families import llama_like


def lines(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


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
    encoder = ExampleEncoder(
        tokenizer=tokenizer,
        is_encoder_decoder=False,
        max_prompt_length=32,
        max_length=64,
        end_token_id=tokenizer.eos_token_id,
        separator="",
    )
    pairs = encode_pairs(encoder, [Preference("0", "2+2=", ["4"], rejected="    5")])
    (row,) = pairs.rows
    assert row["prompt"] == tokenizer("2+2=")["input_ids"]
    texts = [tokenizer.decode(row["prompt"] + ids, skip_special_tokens=True) for ids in row["responses"]]
    assert texts == ["2+2=4", "2+2=    5"]
    assert [ids[-1] for ids in row["responses"]] == [tokenizer.eos_token_id] * 2
    assert pairs.n_boundary == 0
