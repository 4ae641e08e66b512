"""Episodes in the console: of a person, of a scripted player, and of a trained model."""

from __future__ import annotations

import io
import re

import pytest

from rl4lms_like.cli import main
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.dialogues import episode_seed
from rl4lms_like.envs.games.guess_number import GuessNumber
from rl4lms_like.envs.games.shop import Shop
from rl4lms_like.inference import evaluate_run
from rl4lms_like.playing import play
from tests.dialogues import Scripted
from tests.training.test_dialogue_runs import run_blocks, trained


class Messages(Scripted):
    """Answers with messages, calls of tools among them."""

    def __init__(self):
        call = {"type": "function", "function": {"name": "clock", "arguments": {}}}
        said = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "noon"}]
        super().__init__((said, 0.5, False, False, {}), ("bye", 0, True, False, {}), first="The time?")


def typed(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_person_plays_the_episodes_of_the_seed(monkeypatch, capsys):
    number = GuessNumber(high=7)
    number.reset(seed=episode_seed(5, "test", 0))
    secret = number.number
    wrong = [guess for guess in range(1, 8) if guess != secret][:2]
    answers = ["higher" if guess < secret else "lower" for guess in wrong]
    typed(monkeypatch, "".join(f"{guess}\n" for guess in (*wrong, secret)))

    assert main(["play", "guess_number", "--args", "high=7", "--seed", "5"]) == 0
    expected = f"# episode 1\nGuess a number from 1 to 7:\n> {answers[0]}\n> {answers[1]}\n> correct\n"
    score = "reward 0.8, 3 turns, terminated, won 1\n\nscore 0.8, the mean reward of 1 episode\n"
    assert capsys.readouterr().out == expected + score


@pytest.mark.parametrize("leave", [EOFError, KeyboardInterrupt])
def test_a_person_who_leaves_keeps_the_score_of_finished_episodes(leave):
    turns = iter(["no number", "é", "1"])

    def read():
        turn = next(turns)
        if turn == "1":
            raise leave
        return turn

    lines = []
    played = play("guess_number", episodes=9, read=read, show=lines.append)
    assert [dialogue.turns[0].text for dialogue in played] == ["no number", "é"]
    assert lines[-1] == "score -1, the mean reward of 2 episodes"


def test_the_end_of_the_input_is_no_error(monkeypatch, capsys):
    typed(monkeypatch, "")
    assert main(["play", "guess_number"]) == 0
    assert capsys.readouterr().out.endswith("> \nno episode was played to its end\n")


def test_the_scripted_player_plays_as_by_hand(capsys):
    assert main(["play", "shop", "--scripted", "--episodes", "3", "--seed", "2"]) == 0
    printed = capsys.readouterr().out

    rewards = []
    for number in range(3):
        shop = Shop()
        text, _ = shop.reset(seed=episode_seed(2, "test", number), options={"sample": Sample(f"test_{number}", "")})
        lines = [f"# episode {number + 1}", text.rstrip("\n")]
        reward = 0.0
        for _ in range(8):
            lines.append(f"> {(turn := shop.player())}")
            answer, points, terminated, truncated, _ = shop.step(turn)
            lines.append(answer.rstrip("\n"))
            reward += points
            if terminated or truncated:
                break
        assert "\n".join(lines) in printed
        rewards.append(reward)
    assert printed.endswith(f"score {sum(rewards) / 3:g}, the mean reward of 3 episodes\n")


def test_messages_are_shown_with_their_roles():
    lines = []
    play("tests.test_playing:Messages", read=lambda: "hm", show=lines.append)
    assert lines[1] == "The time?"
    assert lines[2].startswith('assistant:  [{"type": "function"') and lines[2].endswith("\ntool: noon")
    assert lines[3] == "bye\nreward 0.5, 2 turns, terminated\n"


def test_a_model_plays_the_episodes_of_its_evaluation(tiny_gpt2_dir, tmp_path):
    mapping = run_blocks(tiny_gpt2_dir)
    mapping["train_evaluation"]["n_iters"] = 0
    run = trained(mapping, tmp_path)
    scores = evaluate_run(run, split="test", seed=3, batch_size=32)

    lines = []
    played = play(mapping["env"]["dialogue"]["id"], run, episodes=5, seed=3, show=lines.append)
    assert sum(dialogue.reward for dialogue in played) / 5 == pytest.approx(scores["environment/reward"])
    first = played[0]
    assert lines[0].startswith(f"# episode 1\n{first.sample.prompt_or_input_text}\n> {first.turns[0].text}\n")
    assert re.fullmatch(r"score -?[\d.]+, the mean reward of 5 episodes", lines[-1])


def test_a_model_without_dialogues_in_its_run_plays_with_default_limits(tiny_gpt2_dir):
    (dialogue,) = play("guess_number", tiny_gpt2_dir, max_turns=3, show=lambda text: None)
    assert 1 <= len(dialogue.turns) <= 3 and all(turn.n_actions <= 64 for turn in dialogue.turns)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["guess_nmber"], "ENV: unknown environment 'guess_nmber'; did you mean 'guess_number'?"),
        (["guess_number", "--args", "hihg=3"], "--args hihg: unknown key; did you mean 'high'?"),
        (["guess_number", "--args", "high"], "--args: expected PATH=VALUE"),
        (["tests.test_playing:Messages", "--scripted"], "has no scripted player"),
    ],
)
def test_errors_name_the_argument(arguments, message, capsys):
    assert main(["play", *arguments]) == 2
    assert message in capsys.readouterr().err
