"""Runs with masks: from the config to a folder whose model writes as it was trained to."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.inference import evaluate_run, generate_texts, responder_of
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.policies.masked import MaskedTextGenerator
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import ConfigError
from tests.config.test_run_config import OFFERED, needs_theirs
from tests.config_errors import raises_at
from tests.configs import run_blocks

NLPO_CONFIGS = [name for name in OFFERED if "nlpo" in name]
EXPLAINED = Path(__file__).parents[2] / "docs" / "metrics_explained.md"
MASKS = {"mask_type": "learned_top_p", "top_mask": 0.5, "min_tokens_to_keep": 2, "target_update_iterations": 2}


def masked(blocks):
    """A run's config with NLPO in the place of PPO."""
    blocks = copy.deepcopy(blocks)
    alg = blocks["alg"]
    alg["id"] = "nlpo"
    alg["policy"]["id"] = f"maskable_{alg['policy']['id']}"
    alg["policy"]["args"].update(MASKS)
    return blocks


@pytest.fixture(params=["causal", "seq2seq"])
def config(request):
    return masked(request.getfixturevalue("tiny_config" if request.param == "causal" else "tiny_seq2seq_config"))


def test_a_run_trains_and_its_model_goes_on_within_its_masks(config, tmp_path, monkeypatch):
    folder = train_config(parse_config(config), base_path_to_store_results=tmp_path, quiet=True)
    rollouts = [json.loads(line) for line in (folder / "rollout_info.jsonl").read_text().splitlines()]
    updates = [json.loads(line) for line in (folder / "training_info.jsonl").read_text().splitlines()]
    assert [line["nlpo/mask_updates"] for line in updates] == [0, 1, 1]
    assert all(line["train/ratio_gap"] < 1e-5 for line in updates)
    assert all(2 <= line["rollout_info/n_allowed"] < 200 for line in rollouts)
    explained = EXPLAINED.read_text(encoding="utf-8")
    assert [key for key in [*rollouts[0], *updates[0]] if f"`{key}`" not in explained] == []
    assert (folder / "model" / "mask_model" / "model.safetensors").is_file()
    writers = []
    original = MaskedTextGenerator.generate

    def generate(self, *args, **kwargs):
        writers.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MaskedTextGenerator, "generate", generate)
    evaluate_run(folder, split="val", limit=2)
    generate_texts(folder, ["Count with me"], max_new_tokens=4)
    for writer in writers:
        assert isinstance(writer, MaskedTextGenerator) and writer.rule.top_mask == 0.5
        assert writer.mask_model is not writer.model
        differences = [
            float((a - b).detach().abs().max())
            for a, b in zip(writer.mask_model.parameters(), writer.model.parameters(), strict=True)
        ]
        assert max(differences) > 0, "the third update came after the refresh"
    assert len(writers) == 2


def test_a_model_without_a_mask_model_is_its_own(config, tmp_path):
    """As in the first iteration of a run that starts from it."""
    from rl4lms_like.policies.loading import load_tokenizer

    model = config["alg"]["policy"]["args"]["model_name"]
    writer = responder_of(parse_config(config), model, load_tokenizer(model), batch_size=1).model
    assert writer.mask_model is writer.model
    ids = torch.tensor([[5, 6, 7]])
    assert writer.generate(ids, torch.ones_like(ids), eos_token_ids=[1], max_new_tokens=4).allowed is not None


def test_what_ends_a_response_is_always_allowed_as_in_the_rollouts(config, tmp_path):
    """Also where only the generation config names it: the rollouts of the run took it from there."""
    from rl4lms_like.policies.loading import load_tokenizer

    model = shutil.copytree(config["alg"]["policy"]["args"]["model_name"], tmp_path / "model")
    tokenizer = load_tokenizer(str(model))
    file = model / "generation_config.json"
    ends = {"eos_token_id": [tokenizer.eos_token_id, 7]}
    file.write_text(json.dumps(json.loads(file.read_text()) | ends))
    config["alg"]["policy"]["args"]["model_name"] = config["tokenizer"]["model_name"] = str(model)
    written_by_run = assemble(parse_config(config)).policy.generator
    written_later = responder_of(parse_config(config), str(model), tokenizer, batch_size=1).model
    assert 7 in written_later.rule.special_token_ids
    assert written_later.rule == written_by_run.rule


@pytest.mark.parametrize("name", NLPO_CONFIGS or [pytest.param("none", marks=needs_theirs)])
def test_their_nlpo_configs_have_no_mistake_in_what_concerns_it(name):
    """Rewards, metrics and pools that are not here are reported; of the algorithm and its policy, nothing is."""
    try:
        config = parse_config(OFFERED[name], source=name)
    except ConfigError as error:
        assert not [issue for issue in error.issues if issue.path.startswith("alg")]
    else:
        assert config.alg.policy.args["top_mask"] == OFFERED[name]["alg"]["policy"]["args"]["top_mask"]


# --- what is refused ------------------------------------------------------------------------------------------------


def test_the_algorithm_and_the_policies_need_each_other():
    for policy in ("causal_lm_actor_critic_policy", "seq2seq_lm_actor_critic_policy"):
        blocks = run_blocks()
        blocks["alg"]["id"] = "nlpo"
        blocks["alg"]["policy"]["id"] = policy
        with raises_at("alg.policy.id", mentions=f"maskable_{policy}"):
            parse_config(blocks)
        blocks = masked(blocks)
        for algorithm in ("ppo", "a2c", "stable_baselines3:PPO"):
            blocks["alg"]["id"], blocks["alg"]["args"] = algorithm, {"n_steps": 128}
            with raises_at("alg.policy.id", mentions="nlpo"):
                parse_config(blocks)


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"top_mask": None}, "top_mask"),
        ({"top_mask": -1}, "top_mask"),
        ({"mask_type": "learned_top_k"}, "top_mask"),
        ({"mask_ema": 1.0}, "mask_ema"),
        ({"generation_kwargs": {"num_beams": 3}}, "generation_kwargs.num_beams"),
        ({"generation_kwargs": {"prompt_lookup_num_tokens": 3}}, "generation_kwargs.prompt_lookup_num_tokens"),
        ({"special_token_ids": [1]}, "special_token_ids"),
    ],
)
def test_masks_that_cannot_be_are_reported_before_a_model_is_loaded(args, key):
    blocks = masked(run_blocks())
    blocks["alg"]["policy"]["args"].update(args)
    with raises_at(f"alg.policy.args.{key}"):
        parse_config(blocks)


def test_top_mask_must_be_given():
    blocks = masked(run_blocks())
    del blocks["alg"]["policy"]["args"]["top_mask"]
    with raises_at("alg.policy.args.top_mask"):
        parse_config(blocks)


def test_the_estimate_counts_the_mask_model(config):
    plain = copy.deepcopy(config)
    plain["alg"]["id"] = "ppo"
    plain["alg"]["policy"]["id"] = plain["alg"]["policy"]["id"].removeprefix("maskable_")
    for key in MASKS:
        del plain["alg"]["policy"]["args"][key]
    own = copy.deepcopy(config)
    own["alg"]["policy"]["args"].update(mask_type="topk", top_mask=5)
    with_model, with_own, without = (estimate_memory(parse_config(blocks)).parts for blocks in (config, own, plain))
    assert with_model["mask model weights"] == with_model["policy weights"]
    assert with_model["KV cache"] == 2 * without["KV cache"] == 2 * with_own["KV cache"]
    assert with_own["mask model weights"] == without["mask model weights"] == without["masks"] == 0
    assert with_model["masks"] == with_own["masks"] > 0
