"""Each of RL4LMs' 44 configs, unchanged: it loads, it binds, and what needs no weights is built of it.

Tokenizers, and the configs of models, are those of tiny models, because RL4LMs' are on the hub; data sets are read from
small local copies of their published files. What cannot be built here stands in `MISSING`, what is built without its
weights in `UNLOADED`; both tables are exact.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from rl4lms_like.config.binding import build_component
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.config.settings import check_settings
from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.offline.assemble_supervised import check_settings as check_supervised_settings
from rl4lms_like.offline.assemble_supervised import example_encoder
from rl4lms_like.on_policy.assemble import build_env
from rl4lms_like.rewards import REWARDS, BatchedRewardFunction, RewardFunction
from rl4lms_like.rewards.call import score_episodes
from rl4lms_like.rollouts.kl import KLController, make_kl_controller
from rl4lms_like.system.errors import ComponentError, MissingResourceError, ModelError
from rl4lms_like.system.schema import at
from rl4lms_like.training.inputs import build_datapool, build_tokenizer, end_tokens
from tests.conftest import REPOSITORY
from tests.local_data import LOCAL_DATA

THEIRS = REPOSITORY.parent / "shared" / "spec" / "rl4lms_configs.json"
CONFIGS: dict[str, Any] = json.loads(THEIRS.read_text()) if THEIRS.is_file() else {}
NAMES = list(CONFIGS) or [pytest.param("none", marks=pytest.mark.skip(reason=f"needs {THEIRS.name}, absent here"))]

MISSING = {
    ("metric", "spice"): "CoreNLP 3.6.0",
    ("reward", "common_gen_preference_model"): "weights",
}
"""Components that are not built, and words of what is said to be missing."""

UNLOADED = {
    ("reward", "learned_reward"): "lvwerra/distilbert-imdb",
    ("metric", "learned_reward"): "lvwerra/distilbert-imdb",
    ("reward", "intent_accuracy"): "rajkumarrrk/roberta-daily-dialog-intent-classifier",
    ("metric", "intent_accuracy"): "rajkumarrrk/roberta-daily-dialog-intent-classifier",
    ("metric", "bert_score"): "roberta-large, bert-base-multilingual-cased",
    ("metric", "causal_perplexity"): "gpt2",
}
"""Components that are built, and the weights or tokenizers of the hub that they load with the first text."""

TINY = {
    "gpt2": "causal",
    "lvwerra/gpt2-imdb": "causal",
    "t5-base": "seq2seq",
    "allenai/unifiedqa-t5-base": "seq2seq",
    "facebook/bart-base": "seq2seq",
    "facebook/blenderbot-400M-distill": "seq2seq",
}
"""Tokenizers of the hub -> the family of the tiny model that stands in."""


@pytest.fixture(scope="module")
def local_data(shared_dir, tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for pool in LOCAL_DATA:
        folders[pool] = tmp_path_factory.mktemp(pool)
        LOCAL_DATA[pool](shared_dir, folders[pool])
    return folders


@pytest.fixture(scope="module")
def a_model(tiny_gpt2_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir)


@pytest.fixture
def run(request, local_data, tiny_gpt2_dir, tiny_t5_dir):
    """A config of RL4LMs with local data, tokenizer and policy, as parsed; all else is as it stands there."""
    blocks = copy.deepcopy(CONFIGS[request.param])
    tiny = {"causal": tiny_gpt2_dir, "seq2seq": tiny_t5_dir}[TINY[blocks["tokenizer"]["model_name"]]]
    blocks["tokenizer"]["model_name"] = str(tiny)
    (blocks["alg"] if "model_name" in blocks["alg"] else blocks["alg"]["policy"]["args"])["model_name"] = str(tiny)
    pool = blocks["datapool"]["id"]
    if pool in local_data:
        args = blocks["datapool"]["args"] = dict(blocks["datapool"].get("args") or {})
        args["data_dir"] = str(local_data[pool])
    return parse_config(blocks, source=request.param)


def components(blocks) -> Iterator[tuple[str, str]]:
    """Kind and id of a config's reward and metrics, shaping rewards included."""
    if "reward_fn" in blocks:
        yield "reward", blocks["reward_fn"]["id"]
        if shaping := at(blocks, "reward_fn.args.shaping_fn"):
            yield "reward", shaping
    yield from (("metric", metric["id"]) for metric in blocks["train_evaluation"]["metrics"])


def build(registry, config) -> Any:
    """The component, or what is missing for it."""
    try:
        return build_component(registry, config)
    except MissingResourceError as error:
        return error


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_and_binds_as_it_stands(name):
    config = parse_config(CONFIGS[name], source=name)
    assert len(config.train_evaluation.metrics) == len(CONFIGS[name]["train_evaluation"]["metrics"])


@pytest.mark.usefixtures("language_data")
@pytest.mark.parametrize("run", NAMES, indirect=True)
def test_what_needs_no_weights_is_built(run, request, a_model):
    blocks = CONFIGS[request.node.callspec.params["run"]]
    built = {("metric", metric.id): build(METRICS, metric) for metric in run.train_evaluation.metrics}
    if isinstance(run, RunConfig):
        built["reward", run.reward_fn.id] = build(REWARDS, run.reward_fn)
    missing = {part: str(result) for part, result in built.items() if isinstance(result, MissingResourceError)}
    assert missing.keys() == MISSING.keys() & set(components(blocks)), "correct the table MISSING"
    for part, message in missing.items():
        assert MISSING[part] in message
    kinds = {"metric": BaseMetric, "reward": (RewardFunction, BatchedRewardFunction)}
    assert all(isinstance(result, kinds[kind]) for (kind, id), result in built.items() if (kind, id) not in missing)

    samples = build_datapool(run.datapool, "val").samples[:2]
    for (kind, id), result in built.items():
        if kind == "metric" and (kind, id) not in missing:
            scored(kind, id, lambda metric=result: scores_of(metric, samples, a_model))

    pools = {split: build_datapool(run.datapool, split) for split in ("train", "val", "test")}
    assert all(len(pool) for pool in pools.values())
    tokenizer = build_tokenizer(run.tokenizer)
    if isinstance(run, RunConfig):
        check_settings(run)
        reward = built["reward", run.reward_fn.id]
        reward = None if isinstance(reward, MissingResourceError) else reward
        play(run, tokenizer, reward, pools["train"])
        if reward is not None:
            scored("reward", run.reward_fn.id, lambda: reward_of(reward, pools["train"].samples[:2], tokenizer))
        kl = run.alg.kl_div
        assert isinstance(make_kl_controller(kl.coeff, kl.target_kl, controller=kl.controller), KLController)
    else:
        check_supervised_settings(run)
        model_config = AutoConfig.from_pretrained(run.alg.model_name)
        encoder = example_encoder(run, tokenizer, model_config, end_tokens(tokenizer, model_config, None))
        assert encoder.encode(pools["train"].samples).rows


def scored(kind, id, score):
    """It gives numbers, or is said not to for want of its weights, which then is a row of the table."""
    try:
        numbers = score()
    except ComponentError as error:
        assert isinstance(error.__cause__, ModelError | OSError), f"{kind} {id}: {error}"
        assert (kind, id) in UNLOADED, f"{kind} {id}: {error}"
        assert any(name in str(error) for name in UNLOADED[kind, id].split(", ")), error
    else:
        assert (kind, id) not in UNLOADED, "it has all that it needs: correct the table UNLOADED"
        assert all(isinstance(number, float) for number in numbers)


def scores_of(metric, samples, model):
    """A metric of the first references themselves."""
    answers = [(sample.references or ["42"])[0] for sample in samples]
    results = compute_metric(
        metric,
        [sample.prompt_or_input_text for sample in samples],
        answers,
        [sample.references for sample in samples],
        [sample.meta_data for sample in samples],
        model,
        "val",
    )
    return [score for _, score in results.values()]


def reward_of(reward, samples, tokenizer):
    """The reward of short answers to the samples."""
    answer = np.asarray(tokenizer("This is an answer, 1 2 3.", add_special_tokens=False)["input_ids"])
    layout = TextLayout(tokenizer, max_prompt_length=64, max_context_length=len(answer))
    prompts = layout.encode_all([sample.prompt_or_input_text for sample in samples])
    episodes = [
        Observation(sample, prompt, answer, len(answer), layout)
        for sample, prompt in zip(samples, prompts, strict=True)
    ]
    return score_episodes(reward, episodes).astype(float).tolist()


def play(run, tokenizer, reward, pool):
    """The environment is built, and gives the prompts of its first episodes."""
    model_config = AutoConfig.from_pretrained(run.alg.policy.args["model_name"])
    env = build_env(run, tokenizer, reward, pool, model_config)
    try:
        observations = env.reset()
        width = run.env.args["max_prompt_length"]
        assert observations["prompt_or_input_encoded_pt"].shape == (run.env.n_envs, width)
    finally:
        env.close()


@pytest.mark.skipif(not CONFIGS, reason=f"needs {THEIRS.name}, absent here")
def test_every_row_of_the_tables_is_needed():
    named = {part for blocks in CONFIGS.values() for part in components(blocks)}
    assert MISSING.keys() | UNLOADED.keys() <= named
    assert {blocks["tokenizer"]["model_name"] for blocks in CONFIGS.values()} == TINY.keys()
