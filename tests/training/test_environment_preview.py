"""`check` plays a few episodes of a run's environment."""

from __future__ import annotations

import gymnasium
import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.dialogues import episode_seed
from rl4lms_like.envs.games.guess_number import GuessNumber
from rl4lms_like.preview import preview
from rl4lms_like.system.errors import DialogueError
from rl4lms_like.training.environment_preview import N_EPISODES, drops_reasoning
from tests.chat_models import chat_tokenizer
from tests.training.test_dialogue_runs import run_blocks


class Answers(gymnasium.Env):
    """Answers with a number of letters, one token each."""

    def __init__(self, *, letters: int = 3) -> None:
        self.letters = letters

    def reset(self, *, seed=None, options=None):
        return "Count", {}

    def step(self, action):
        return "".join("QXZJ"[i % 4] for i in range(self.letters)), 0.0, False, False, {}


class Failing(Answers):
    """Fails in its second turn."""

    def step(self, action):
        if getattr(self, "stepped", False):
            raise KeyError("shelf")
        self.stepped = True
        return super().step(action)


class Short(Answers):
    """Has a scripted player whose turns are longer than a turn may be."""

    def player(self):
        return "Q X Z J Q X Z J"


def section(folder, id, algorithm="ppo", *, length=40, **dialogue):
    mapping = run_blocks(folder, algorithm)
    mapping["env"]["dialogue"] |= {"id": id, **dialogue}
    mapping["env"]["args"]["max_episode_length"] = length
    output = list(preview(parse_config(mapping)))
    (text,) = [part for part in output if part.startswith("# environment")]
    assert not any(part.startswith("# chat template") or "prompt  ''" in part for part in output)
    return dict(line.split("  ", 1) if "  " in line else (line, "") for line in text.splitlines()), text


def test_the_numbers_are_those_of_the_first_episodes_played_by_hand(tiny_gpt2_dir):
    rows, _ = section(tiny_gpt2_dir, "guess_number", max_turns=8, max_turn_length=8, length=80)
    n_turns = n_won = 0
    rewards = []
    for number in range(N_EPISODES):
        game = GuessNumber()
        text, _ = game.reset(seed=episode_seed(3, "train", 0, number), options={"sample": Sample("train_0", "")})
        reward, said = 0.0, [f"env: {text}"]
        for _ in range(8):
            turn = game.player()
            answer, points, terminated, _, _ = game.step(turn)
            said += [f"policy: {turn}", f"env: {answer}"]
            reward += points
            n_turns += 1
            if terminated:
                n_won += 1
                break
        rewards.append(reward)
        if number == 0:
            assert rows["first episode"].strip() == " | ".join(said).replace("\n", "⏎")
    assert "rl4lms_like.envs.games.guess_number:GuessNumber; up to 8 turns of up to 8" in rows["guess_number"]
    assert f"with the scripted player: {n_turns / N_EPISODES:.3g} turns" in rows["played"]
    ends = f"rewards {min(rewards):.3g} to {max(rewards):.3g}, {n_won} of {N_EPISODES} terminated"
    assert rows["played"].endswith(ends)


@pytest.mark.parametrize(("length", "letters"), [(31, 3), (29, 3), (28, 3), (20, 0), (19, 0)])
def test_whether_all_turns_fit(tiny_gpt2_dir, tiny_tokenizer, length, letters):
    rows, _ = section(
        tiny_gpt2_dir,
        "tests.training.test_environment_preview:Answers",
        length=length,
        args={"letters": letters},
        max_turns=4,
        max_turn_length=5,
    )
    n_tokens = len(tiny_tokenizer("".join("QXZJ"[i % 4] for i in range(letters)))["input_ids"]) if letters else 0
    assert f"at most {n_tokens} tokens" in rows["answers"]

    # Turns of full length, one after the other, with the answer before each but the first.
    n_fitting, used = 0, 0
    while n_fitting < 4 and used + 5 + n_tokens * (n_fitting > 0) <= length:
        used += 5 + n_tokens * (n_fitting > 0)
        n_fitting += 1
    fits = "all turns fit" if n_fitting == 4 else f"with their full length, {n_fitting} fit"
    assert f"{fits} into max_episode_length {length}" in rows["answers"]


def test_an_environment_without_player_gets_random_texts_and_its_failure_is_reported(tiny_gpt2_dir):
    rows, _ = section(tiny_gpt2_dir, "tests.training.test_environment_preview:Answers", max_turns=2)
    assert "with random texts: 2 turns" in rows["played"] and rows["played"].endswith("0 of 8 terminated")
    with pytest.raises(DialogueError, match=r"Failing' with sample 'train_0'.* step in turn 2 failed: KeyError"):
        section(tiny_gpt2_dir, "tests.training.test_environment_preview:Failing")


def test_turns_of_the_player_that_are_cut_have_a_notice(tiny_gpt2_dir):
    _, text = section(tiny_gpt2_dir, "tests.training.test_environment_preview:Short", max_turns=2, max_turn_length=3)
    assert "notice: 16 of 16 turns of the scripted player are longer than env.dialogue.max_turn_length, 3" in text
    _, text = section(tiny_gpt2_dir, "guess_number", max_turn_length=8)
    assert "notice" not in text


def test_an_algorithm_that_does_not_distinguish_turns_has_a_notice(tiny_gpt2_dir):
    mapping = {"max_turn_length": 8}
    assert "reinforce_pp gives all turns" in section(tiny_gpt2_dir, "guess_number", "reinforce_pp", **mapping)[1]
    assert "gives all turns" not in section(tiny_gpt2_dir, "guess_number", "ppo", **mapping)[1]
    assert "gives all turns" not in section(tiny_gpt2_dir, "guess_number", "reinforce_pp", max_turns=1, **mapping)[1]


def test_templates_that_leave_out_reasoning_are_recognized():
    kept = ChatTemplate(chat_tokenizer())
    dropping = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    assert not drops_reasoning(kept) and drops_reasoning(ChatTemplate(chat_tokenizer(dropping)))
