"""An algorithm that learns no values: no critic in memory, optimizer, checkpoint or log."""

from dataclasses import dataclass

import pytest
import torch
from stable_baselines3 import PPO as SB3PPO

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.algorithms.arguments import OnPolicyArguments
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.algorithms.policy_gradient import GRPO
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.config.binding import with_defaults
from rl4lms_like.config.load import parse_config
from rl4lms_like.core.losses import policy_gradient
from rl4lms_like.core.objective import Objective
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.rollouts.text_rollouts import with_text_rollouts
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import RL4LMsLikeError
from tests.algorithms.test_update import build
from tests.config_errors import raises_at


@dataclass(frozen=True, kw_only=True)
class ReinforceArguments(OnPolicyArguments):
    needs_critic = False

    learning_rate: float = 1e-3
    n_steps: int = 20
    gamma: float = 1.0
    gae_lambda: float = 1.0
    normalize_advantage: str = "rollout"


class Reinforce(OnPolicyTextAlgorithm):
    arguments_class = ReinforceArguments

    def loss(self, minibatch):
        _, log_prob, entropy = self.policy.evaluate_actions(minibatch.observations, minibatch.actions)
        return Objective(
            policy=policy_gradient(log_prob, minibatch.advantages),
            entropy=-entropy,
            log_ratio=(log_prob - minibatch.old_log_prob).detach(),
        )


@pytest.fixture
def registered():
    ALGORITHMS.add("reinforce", Reinforce)
    yield
    del ALGORITHMS._table["reinforce"]


@pytest.mark.parametrize("algorithm", [Reinforce, GRPO])
@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_there_is_no_critic_anywhere(algorithm, family, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer):
    built = build(algorithm, tiny_gpt2_dir if family == "causal" else tiny_t5_dir, tiny_tokenizer, family)
    policy = built.policy
    assert policy.value_head is None and policy.value_model is None
    assert {group["role"] for group in policy.optimizer.param_groups} == {"actor"}
    trained = {id(parameter) for parameter in policy.policy_model.parameters()}
    assert {id(p) for group in policy.optimizer.param_groups for p in group["params"]} <= trained
    assert not [name for name in policy.training_state() if "value" in name]
    before = policy.policy_model.get_input_embeddings().weight.clone()
    built.learn_iteration(0, 1)
    assert not torch.equal(before, policy.policy_model.get_input_embeddings().weight)
    logged = built.logger.name_to_value
    assert not [key for key in logged if "value" in key or "critic" in key or "explained" in key]
    assert float(logged["train/ratio_gap"]) < 1e-4
    buffer = built.rollout_buffer
    assert float(torch.as_tensor(buffer.values).abs().sum()) == 0.0
    assert float(torch.as_tensor(built.policy.final_values(buffer.episodes)).abs().sum()) == 0.0


def test_micro_batches_change_nothing(tiny_gpt2_dir, tiny_tokenizer):
    weights = []
    for micro_batch_size in (None, 30):
        built = build(Reinforce, tiny_gpt2_dir, tiny_tokenizer, micro_batch_size=micro_batch_size)
        built.learn_iteration(0, 1)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in built.policy.parameters()]))
    torch.testing.assert_close(*weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_critic_that_nothing_learns_is_a_mistake(critic, registered, tiny_config, tiny_gpt2_dir, tiny_tokenizer):
    tiny_config["alg"] |= {"id": "reinforce", "args": {}}
    tiny_config["alg"]["policy"]["args"]["critic"] = critic
    with raises_at("alg.policy.args.critic"):
        parse_config(tiny_config)
    with raises_at("policy_kwargs.critic"):
        build(Reinforce, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"critic": critic})


@pytest.mark.parametrize("given", [{"critic_learning_rate": 1e-4}, {"bootstrap_truncated": True}, {"vf_coef": 0.5}])
def test_arguments_of_a_critic_are_mistakes_without_one(given, registered, tiny_config, tiny_gpt2_dir, tiny_tokenizer):
    tiny_config["alg"] |= {"id": "reinforce", "args": given}
    with raises_at(*(f"alg.args.{key}" for key in given)):
        parse_config(tiny_config)
    with raises_at(*given):
        build(Reinforce, tiny_gpt2_dir, tiny_tokenizer, **given)


def test_stable_baselines3s_own_algorithms_learn_values():
    with pytest.raises(RL4LMsLikeError, match="TextPPO"):
        with_text_rollouts(SB3PPO)("lm_policy", None, policy_kwargs={"critic": "none"})


@pytest.mark.parametrize("algorithm", ["ppo", "stable_baselines3:PPO"])
def test_values_are_learned_by_a_critic(algorithm, tiny_config, tiny_gpt2_dir, tiny_tokenizer):
    tiny_config["alg"]["id"] = algorithm
    tiny_config["alg"]["policy"]["args"]["critic"] = "none"
    with raises_at("alg.policy.args.critic"):
        parse_config(tiny_config)
    with raises_at("policy_kwargs.critic"):
        build(PPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"critic": "none"})


@pytest.mark.parametrize(("id", "args"), [("reinforce", {}), ("grpo", {"group_size": 4})])
def test_a_whole_run_reports_without_one(id, args, registered, tiny_config, tmp_path):
    tiny_config["alg"] |= {"id": id, "args": {"n_steps": 8, **args}}
    del tiny_config["alg"]["policy"]["args"]["value_head_init"]
    tiny_config["reward_fn"] = {"id": "length_penalty", "args": {"max_length": 1, "unit": "characters"}}
    config = parse_config(tiny_config)
    assert with_defaults(config.to_dict())["alg"]["policy"]["args"]["critic"] == "none"
    assert estimate_memory(config).parts["critic weights"] == 0
    folder = train_config(config, base_path_to_store_results=tmp_path, quiet=True)
    assert (folder / "report.html").is_file()
    checkpoint = sorted(folder.glob("checkpoints/*"))[-1]
    assert not [path for path in checkpoint.rglob("*") if "value" in path.name]
    assert assemble(config).policy.has_critic is False
