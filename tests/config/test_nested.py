"""Components inside components: looked up and checked with the config, built from the inside out."""

from __future__ import annotations

import sys

import pytest

from rl4lms_like.config.binding import build_component, with_defaults
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import dump_yaml, parse_yaml
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.answers import PassAtK
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.answers import MathEqualReward
from rl4lms_like.rewards.combine import CombinedReward
from rl4lms_like.rewards.sentiment import SentimentReward
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers
from rl4lms_like.system.errors import ComponentError, ConfigError, MissingExtraError
from tests.config_errors import raises_at
from tests.configs import run_blocks

OWN = '''
from __future__ import annotations
from dataclasses import dataclass
from typing import NamedTuple
from rl4lms_like import BatchedRewardFunction, RewardFunction
from rl4lms_like.rewards.base import AnyReward
from rl4lms_like.rewards.call import score_transition


class Halved(RewardFunction):
    """Half of another reward."""

    def __init__(self, inner: AnyReward, by: float = 2.0) -> None:
        self.inner, self.by = inner, by

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return score_transition(self.inner, prev_observation, action, current_observation, done) / self.by


@dataclass
class Rule:
    reward: RewardFunction
    limit: int = 3


class Rules(RewardFunction):
    """All rules."""

    def __init__(
        self,
        rules: list[Rule],
        more: dict[str, AnyReward] | None = None,
        judge: BatchedRewardFunction | None = None,
    ) -> None:
        self.rules, self.more, self.judge = rules, more, judge

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return 0.0


class Defaults(RewardFunction):
    """Null is its default, though its types do not say so."""

    def __init__(
        self, inner: AnyReward = None, limit: int = None, pair: tuple[AnyReward, float] | None = None
    ) -> None:
        self.inner, self.limit, self.pair = inner, limit, pair

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return 0.0


class DefaultObject(RewardFunction):
    """A reward unless another is given."""

    def __init__(self, inner: AnyReward = Rules([]), by: float = 2.0) -> None:
        self.inner, self.by = inner, by

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return 0.0


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Options:
    """Has no reward in it."""

    n: int = 1
    rate: float = 0.5

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("n must not be negative")


class WithOptions(RewardFunction):
    """Takes objects that are no rewards."""

    def __init__(self, options: Options | None = None, more: list[Options] = [], point: Point = Point(0, 0)) -> None:
        self.options, self.more, self.point = options, more, point

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return 0.0


class NoReward:
    """Cannot be called."""


class OwnShaping(RewardFunction):
    """Does with its shaping_fn what it likes."""

    def __init__(self, shaping_fn: str | None = None) -> None:
        self.shaping_fn = shaping_fn

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return 0.0


class TakesAnything(RewardFunction):
    """Any argument by name."""

    def __init__(self, **others) -> None:
        self.others = others

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return 0.0
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RL4LMS_LIKE_CODE", str(tmp_path))
    yield
    sys.modules.pop("own_rewards", None)


def with_reward(id, args=None):
    return run_blocks() | {"reward_fn": {"id": id, "args": args}}


def parsed(id, args=None):
    return parse_config(with_reward(id, args))


def built(id, args=None):
    return build_component(REWARDS, parsed(id, args).reward_fn)


def mistakes_of(id, args=None):
    with pytest.raises(ConfigError) as caught:
        parsed(id, args)
    return [issue.path for issue in caught.value.issues]


def test_combine_builds_its_parts_first_and_names_them_by_their_ids():
    reward = built(
        "combine",
        {
            "rewards": [
                {"id": "increasing_numbers", "args": {"min_tokens": "8"}, "weight": "0.5"},
                "sentiment",
                {"id": "sentiment", "name": "without_prompt", "args": {"include_prompt": False}, "weight": -1},
            ]
        },
    )
    assert isinstance(reward, CombinedReward)
    names = [(part.name, part.weight, type(part.reward)) for part in reward.parts]
    assert names == [
        ("increasing_numbers", 0.5, RewardIncreasingNumbers),
        ("sentiment", 1.0, SentimentReward),
        ("without_prompt", -1.0, SentimentReward),
    ]
    assert reward.parts[0].reward.min_tokens == 8 and not reward.parts[2].reward.include_prompt


def test_every_mistake_inside_is_told_with_its_place():
    rewards = [
        {"id": "increasing_numbers", "args": {"min_tokns": 5}, "weigt": 2},
        "sentimental",
        {"args": {}},
        {"id": "sentiment", "args": 3},
        5,
        {"id": "sentiment", "weight": "heavy", "args": {"shaping_fn": {"id": "increasing_numbers"}}},
        {"id": "sentiment", "weight": float("inf"), "name": "last"},
    ]
    place = "reward_fn.args.rewards"
    assert mistakes_of("combine", {"rewards": rewards}) == [
        f"{place}.0.args.min_tokns",
        f"{place}.0.args.min_tokens",
        f"{place}.0.weigt",
        f"{place}.1",
        f"{place}.2.id",
        f"{place}.3.args",
        f"{place}.4",
        f"{place}.5.weight",
        f"{place}.5.args.shaping_fn.args.min_tokens",
        f"{place}.5.name",
        f"{place}.6.weight",
    ]
    assert mistakes_of("combine") == [place]
    assert mistakes_of("combine", {"rewards": {"id": "sentiment"}}) == [place]


def test_parts_are_shown_complete_and_parse_to_the_same_run():
    second = {"id": "sentiment", "name": "b", "args": {"shaping_fn": "sentences_with_dates"}}
    config = parsed("combine", {"rewards": ["sentiment", second]})
    complete = with_defaults(config.to_dict())["reward_fn"]["args"]["rewards"]
    assert complete == [
        {"id": "sentiment", "args": {"include_prompt": True}, "weight": 1.0, "name": "sentiment"},
        {
            "id": "sentiment",
            "args": {"include_prompt": True, "shaping_fn": {"id": "sentences_with_dates", "args": {}}},
            "weight": 1.0,
            "name": "b",
        },
    ]
    again = parse_config(parse_yaml(dump_yaml(with_defaults(config.to_dict())), "again")[0])
    assert with_defaults(again.to_dict()) == with_defaults(config.to_dict())
    assert parse_config(config.to_dict()) == config


@pytest.mark.parametrize(
    "shaping",
    ["increasing_numbers", {"id": "increasing_numbers"}, {"id": "increasing_numbers", "args": {"min_tokens": 8}}],
)
def test_any_reward_takes_a_shaping_function(shaping):
    if shaping in ("increasing_numbers", {"id": "increasing_numbers"}):
        assert mistakes_of("sentiment", {"shaping_fn": shaping}) == ["reward_fn.args.shaping_fn.args.min_tokens"]
        return
    reward = built("sentiment", {"include_prompt": False, "shaping_fn": shaping})
    parts = [(part.name, part.weight, type(part.reward)) for part in reward.parts]
    assert parts == [("sentiment", 1.0, SentimentReward), ("increasing_numbers", 1.0, RewardIncreasingNumbers)]
    assert not reward.parts[0].reward.include_prompt


def test_a_shaping_function_that_is_unknown_is_told():
    for shaping, where in (("sentimental", "shaping_fn"), ({"id": "sentimental"}, "shaping_fn.id")):
        with raises_at(f"reward_fn.args.{where}", mentions="'sentiment'"):
            parsed("sentiment", {"shaping_fn": shaping})
    assert type(built("sentiment", {"shaping_fn": None})) is SentimentReward


def test_a_class_keeps_a_shaping_fn_of_its_own_unchanged(own):
    assert built("own_rewards:OwnShaping", {"shaping_fn": "whatever"}).shaping_fn == "whatever"


def test_shaping_is_not_swallowed_by_a_reward_that_takes_any_argument(own):
    reward = built("own_rewards:TakesAnything", {"shaping_fn": "sentiment", "x": 1})
    assert [part.name for part in reward.parts] == ["TakesAnything", "sentiment"]
    assert reward.parts[0].reward.others == {"x": 1}


def test_a_wrapper_of_ones_own_gets_the_object(own):
    reward = built("own_rewards:Halved", {"inner": {"id": "sentiment", "args": {"include_prompt": "no"}}, "by": 4})
    assert isinstance(reward.inner, SentimentReward) and not reward.inner.include_prompt and reward.by == 4.0
    nested = built("own_rewards:Halved", {"inner": {"id": "own_rewards:Halved", "args": {"inner": "sentiment"}}})
    assert isinstance(nested.inner.inner, SentimentReward)
    assert mistakes_of("own_rewards:Halved") == ["reward_fn.args.inner"]
    with raises_at("reward_fn.args.inner.args.include_promt", mentions="'include_prompt'"):
        parsed("own_rewards:Halved", {"inner": {"id": "sentiment", "args": {"include_promt": 1}}})
    assert mistakes_of("own_rewards:Halved", {"inner": None}) == ["reward_fn.args.inner"]
    with raises_at("reward_fn.args.inner.arg", mentions="'args'"):
        parsed("own_rewards:Halved", {"inner": {"id": "sentiment", "arg": {}}})


def test_lists_mappings_and_dataclasses_may_hold_rewards(own):
    args = {
        "rules": [{"reward": {"id": "increasing_numbers", "args": {"min_tokens": 2}}, "limit": "5"}],
        "more": {"mood": "sentiment"},
    }
    reward = built("own_rewards:Rules", args)
    assert type(reward.rules[0]).__name__ == "Rule" and reward.rules[0].limit == 5 and reward.judge is None
    assert isinstance(reward.rules[0].reward, RewardIncreasingNumbers)
    assert isinstance(reward.more["mood"], SentimentReward)
    complete = with_defaults(parsed("own_rewards:Rules", {"rules": [{"reward": "sentences_with_dates"}]}).to_dict())
    assert complete["reward_fn"]["args"] == {
        "rules": [{"reward": {"id": "sentences_with_dates", "args": {}}, "limit": 3}],
        "more": None,
        "judge": None,
    }


def test_a_reward_of_the_wrong_kind_is_told(own):
    with raises_at("reward_fn.args.rules.0.reward", "reward_fn.args.judge", mentions="BatchedRewardFunction"):
        parsed("own_rewards:Rules", {"rules": [{"reward": "sentiment"}], "judge": "sentences_with_dates"})
    shaped = {"id": "sentiment", "args": {"shaping_fn": "sentences_with_dates"}}
    with raises_at("reward_fn.args.judge.id", mentions="BatchedRewardFunction"):
        parsed("own_rewards:Rules", {"rules": [], "judge": shaped})


def test_a_metric_may_hold_a_reward():
    blocks = run_blocks()
    metric = {"id": "pass_at_k", "args": {"k": [1, "2"], "scorer": {"id": "math_equal", "args": {"rel_tol": 0.01}}}}
    blocks["train_evaluation"]["metrics"] = [metric]
    config = parse_config(blocks)
    built_metric = build_component(METRICS, config.train_evaluation.metrics[0])
    assert isinstance(built_metric, PassAtK) and built_metric.k == [1, 2]
    assert isinstance(built_metric.scorer, MathEqualReward) and built_metric.scorer.rel_tol == 0.01
    metric["args"]["scorer"] = "increasing_numbers"
    place = "train_evaluation.metrics.0.args.scorer"
    with raises_at(place, f"{place}.args.min_tokens"):
        parse_config(blocks)


def test_an_inner_reward_that_cannot_be_built_is_named_with_its_place():
    with pytest.raises(ComponentError, match=r"'regex' .*args.rewards.1 .*'combine'"):
        built("combine", {"rewards": ["sentiment", {"id": "regex", "args": {"pattern": "("}}]})
    with pytest.raises(ComponentError, match=r"'regex' .*args.shaping_fn .*'sentiment'"):
        built("sentiment", {"shaping_fn": {"id": "regex", "args": {"pattern": "("}}})


def test_a_missing_extra_of_an_inner_reward_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "needs_extra.py").write_text(
        "from rl4lms_like.system.errors import MissingExtraError\nraise MissingExtraError('nltk', 'lexical', 'this')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RL4LMS_LIKE_CODE", str(tmp_path))
    args = {"rewards": [{"id": "needs_extra:Reward", "args": {"x": 1}}]}
    assert parsed("combine", args).reward_fn.args["rewards"][0]["args"] == {"x": 1}
    with pytest.raises(MissingExtraError) as caught:
        built("combine", args)
    assert caught.value.extra == "lexical"


def test_a_default_of_null_may_be_said_whatever_the_type_says(own):
    config = parsed("own_rewards:Defaults", {"limit": None})
    complete = with_defaults(config.to_dict())
    assert complete["reward_fn"]["args"] == {"inner": None, "limit": None, "pair": None}
    assert with_defaults(parse_config(complete).to_dict()) == complete
    assert built("own_rewards:Defaults", {"inner": None}).inner is None


def test_names_of_rewards_are_text(own):
    assert mistakes_of("own_rewards:Rules", {"rules": [], "more": {1: "sentiment"}}) == ["reward_fn.args.more"]
    nameless = {"rewards": [{"id": "sentiment", "name": ""}]}
    assert mistakes_of("combine", nameless) == ["reward_fn.args.rewards.0.name"]


def test_a_misspelt_shaping_fn_is_recognised(own):
    with raises_at("reward_fn.args.shaping", mentions="'shaping_fn'"):
        parsed("sentiment", {"shaping": "sentiment"})
    with raises_at("reward_fn.args.x", mentions="shaping_fn"):
        parsed("own_rewards:OwnShaping", {"x": 1})


def test_what_is_no_reward_or_metric_is_told_before_it_is_built(own):
    with raises_at("reward_fn.id", mentions="RewardFunction"):
        parsed("own_rewards:NoReward")
    with raises_at("reward_fn.args.rewards.0", mentions="RewardFunction"):
        parsed("combine", {"rewards": ["own_rewards:NoReward"]})
    blocks = run_blocks()
    blocks["train_evaluation"]["metrics"] = [{"id": "own_rewards:TakesAnything"}]
    with raises_at("train_evaluation.metrics.0.id"):
        parse_config(blocks)


def test_a_default_that_is_an_object_is_left_to_the_class(own):
    complete = with_defaults(parsed("own_rewards:DefaultObject").to_dict())
    assert complete["reward_fn"]["args"] == {"by": 2.0}
    assert with_defaults(parse_config(parse_yaml(dump_yaml(complete), "again")[0]).to_dict()) == complete
    assert type(built("own_rewards:DefaultObject").inner).__name__ == "Rules"


def test_objects_of_an_argument_are_built_by_the_check_and_written_with_their_defaults(own):
    args = {"options": {"n": 2}, "more": [{"rate": 1}], "point": [1, 2]}
    config = parsed("own_rewards:WithOptions", args)
    assert config.reward_fn.args["options"] == {"n": 2, "rate": 0.5}
    assert parse_config(config.to_dict()).reward_fn == config.reward_fn
    reward = built("own_rewards:WithOptions", args)
    assert (reward.options.n, reward.more[0].rate, reward.point.y) == (2, 1.0, 2)
    assert mistakes_of("own_rewards:WithOptions", {"options": {"n": -1}}) == ["reward_fn.args.options"]
    assert mistakes_of("own_rewards:WithOptions", {"more": [{}, {"n": "x"}]}) == ["reward_fn.args.more.1.n"]


def test_a_module_that_fails_at_import_runs_once(tmp_path, monkeypatch, own):
    (tmp_path / "fails.py").write_text("open('imported', 'a').write('x')\nraise RuntimeError('no')\n")
    monkeypatch.chdir(tmp_path)
    assert mistakes_of("python", {"function": "fails:f"}) == ["reward_fn.args.function"]
    assert (tmp_path / "imported").read_text() == "x"


def test_a_mistake_deep_inside_is_found_once_per_level(monkeypatch):
    """A check that is repeated on every level takes exponentially long."""
    args = {"max_length": "x"}
    blocks = {"id": "length_penalty", "args": args}
    for _ in range(12):
        blocks = {"id": "combine", "args": {"rewards": [blocks]}}
    assert mistakes_of("combine", blocks["args"]) == [f"reward_fn.args.{'rewards.0.args.' * 12}max_length"]
