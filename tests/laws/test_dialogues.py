"""Updates on dialogues: the first ratio is 1, and micro-batches and shared prompts change no gradient."""

import dataclasses
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.testing.models import make_causal_lm, make_tokenizer, save_model
from tests.builders import MASKABLE, POLICIES, SAMPLING
from tests.dialogues import Chatter, dialogue_env

FAMILIES = ("gpt2", "llama", "qwen2")
IDS = ("ppo", "nlpo", "vapo", "sao", "a2c", "grpo", "gspo", "dapo", "rloo", "reinforce_pp", "cispo", "online_dpo")
CASES = [("gpt2", id) for id in IDS] + [(family, id) for family in FAMILIES[1:] for id in ("ppo", "grpo")]


class Observed:
    """Keeps the gradient and what is logged of each step, and takes none."""

    def clip_and_step(self, info):
        self.gradient = torch.cat([p.grad.flatten() for p in self.policy.parameters() if p.grad is not None])
        self.logged = {name: float(value) for name, value in info.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    tokenizer = make_tokenizer()
    folders = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        folders[family] = save_model(folder, make_causal_lm(family, tokenizer, scale=3.0), tokenizer)
    return folders


def built(models, family, id, *, uses_sampler=False):
    """An algorithm that has collected a rollout of dialogues, on the policy that it would update."""
    algorithm = ALGORITHMS.resolve(id)
    folder = models[family]
    arguments = {"n_steps": 10, "learning_rate": 1e-3, "seed": 1, "device": "cpu", "ent_coef": 0.01}
    if id in ("ppo", "nlpo", "vapo", "sao"):
        arguments["batch_size"] = 2000
    if "n_epochs" in algorithm.arguments_class.__dataclass_fields__:
        arguments["n_epochs"] = 1
    if id == "vapo":
        arguments |= {"critic_pretrain": None}
    policy_kwargs = {"model_name": str(folder), "generation_kwargs": SAMPLING}
    policy_kwargs["speedups"] = {"sampler_log_probs": uses_sampler}
    if id == "nlpo":
        policy_kwargs |= {"mask_type": "learned_top_p", "top_mask": 0.9, "min_tokens_to_keep": 5}
    env = dialogue_env(AutoTokenizer.from_pretrained(folder), folder, partial(Chatter, end=0.4), n_envs=16)
    size = {"reinforce_pp": 1, "online_dpo": 2}.get(id, 4)
    placement = getattr(algorithm.arguments_class, "kl_placement", "reward")
    made = type(f"Observed{id}", (Observed, algorithm), {"arguments_class": algorithm.arguments_class})(
        (MASKABLE if id == "nlpo" else POLICIES)["causal"],
        env,
        policy_kwargs=policy_kwargs,
        group_size=size,
        kl_controller=FixedKLController(0.1, placement=placement),
        **arguments,
    )
    made.learn_iteration(0, 1)
    return made


@pytest.mark.parametrize(("family", "id"), CASES)
def test_micro_batches_never_change_the_gradient_and_the_first_ratio_is_one(models, family, id):
    algorithm = built(models, family, id)
    buffer = algorithm.rollout_buffer
    episodes = buffer.episodes
    assert episodes.observed.sum() > 30 and len(set(episodes.lengths.tolist())) > 1
    assert float(buffer.advantages.abs().max()) > 0.1
    assert algorithm.logged.get("ratio_gap", 0.0) <= 1e-5

    # Another policy than that of the rollout: ratios differ, some are clipped.
    buffer.log_probs.add_(0.3 * torch.randn(buffer.n_tokens, generator=torch.Generator().manual_seed(0)))
    gradients, logged = [], []
    for micro_batch_size in (None, 60, 1):
        algorithm.arguments = dataclasses.replace(algorithm.arguments, micro_batch_size=micro_batch_size)
        algorithm.train()
        gradients.append(algorithm.gradient)
        logged.append(algorithm.logged)
    assert float(gradients[0].norm()) > 1e-6
    for gradient, numbers in zip(gradients[1:], logged[1:], strict=True):
        assert float((gradient - gradients[0]).norm() / gradients[0].norm()) < 1e-5
        assert numbers == pytest.approx(logged[0], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("family", "id"), [case for case in CASES if case[1] in ("ppo", "a2c", "grpo")])
def test_the_first_ratio_is_one_with_log_probs_of_the_sampling(models, family, id):
    algorithm = built(models, family, id, uses_sampler=True)
    assert algorithm.collector.uses_sampler_log_probs and algorithm.rollout_buffer.episodes.observed.any()
    assert algorithm.logged["ratio_gap"] <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_is_computed_once_gives_the_same_gradient(models, family):
    algorithm = built(models, family, "grpo")
    assert algorithm.policy.shares_prompts and len(algorithm.rollout_buffer.episodes.prompt_rows.unique()) < 16
    gradients = []
    for shares in (True, False):
        for reader in (algorithm.policy.reader, algorithm.policy.ref_reader):
            reader.shares_prompts = shares
        algorithm.train()
        gradients.append(algorithm.gradient)
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-5
