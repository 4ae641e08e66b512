"""Records of dialogues: token credit, kept rollouts, predictions, and the pages that show them."""

from __future__ import annotations

import html
import json
import re
from types import SimpleNamespace

import pytest

from rl4lms_like.cli import main
from rl4lms_like.on_policy.rollout_files import read_rollout, turns_of
from rl4lms_like.tracking import write_report
from rl4lms_like.tracking.record import dialogue_parts
from rl4lms_like.tracking.run_folder import CREDIT_FILE
from tests.training.test_dialogue_runs import run_blocks, trained

LISTS = ("rewards", "advantages", "returns", "values", "probs", "ratios")


@pytest.fixture(scope="module")
def run(tiny_gpt2_dir, tmp_path_factory):
    mapping = run_blocks(tiny_gpt2_dir)
    mapping["train_evaluation"] |= {"save_rollouts": True, "n_credit_episodes": 4}
    return trained(mapping, tmp_path_factory.mktemp("dialogues"))


def lines(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_tokens_of_the_environment_are_recorded_without_numbers(run):
    kept = {(line["iteration"], line["episode"]): line for line in lines(run / "rollouts" / "iteration_00001.jsonl")}
    stored = read_rollout(run / "rollouts" / "iteration_00001.safetensors").batches[0].episodes
    recorded = lines(run / CREDIT_FILE)[0]
    assert any("observed" in episode for episode in recorded["episodes"])
    for episode in recorded["episodes"]:
        of_file = kept[1, episode["episode"]]
        assert "".join(episode["tokens"]) == of_file["response"]

        # The mask of the kept rollout, column by column.
        row, observed = episode["episode"], []
        for column in range(int(stored.response_mask[row].sum())):
            if bool(stored.observed[row, column]):
                observed.append(column)
        assert episode.get("observed", []) == observed
        for name in LISTS:
            assert len(episode[name]) == len(episode["tokens"])
            assert [i for i, value in enumerate(episode[name]) if value is None] == observed, name


def test_kept_rollouts_have_the_turns(run, capsys):
    episodes = lines(run / "rollouts" / "iteration_00002.jsonl")
    assert any(len(line["turns"]) > 1 for line in episodes)
    for line in episodes:
        assert "".join(turn["text"] + turn["answer"] for turn in line["turns"]) == line["response"]
        assert all(turn["answer"] for turn in line["turns"][:-1]) and not line["turns"][-1]["answer"]

    assert main(["rollouts", str(run), "--iteration", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    for line, shown in zip(episodes, printed, strict=True):
        assert shown.count(" | env: ") == len(line["turns"]) - 1


def test_turns_are_the_runs_of_the_mask():
    letters = SimpleNamespace(text=lambda before, ids: "".join(ids))
    observed = [False, False, True, False, True, True, False]
    turns = turns_of(letters, "p", list("abXcYZd"), observed)
    assert turns == [{"text": "ab", "answer": "X"}, {"text": "c", "answer": "YZ"}, {"text": "d", "answer": ""}]


def test_the_report_shows_texts_of_the_environment_in_grey(run):
    page = write_report(run).read_text(encoding="utf-8")

    # Tokens: no number in the tooltip, no colour of a quantity.
    observed = re.findall(r'<span class="(observed[^"]*)" title="([^"]*)">', page)
    episodes = [episode for line in lines(run / CREDIT_FILE) for episode in line["episodes"]]
    assert observed and {classes for classes, _ in observed} == {"observed"}
    assert all(re.fullmatch(r"“[^”]*”", html.unescape(title).strip()) for _, title in observed)
    assert len(observed) >= sum(len(episode.get("observed", ())) for episode in episodes)
    assert "grey: text of the environment" in page

    # Predictions and kept rollouts.
    prediction = json.loads((run / "epoch_2_test_split_predictions.json").read_text())[0]
    for turn in prediction["turns"]:
        if turn["answer"]:
            assert f'<span class="observed">{html.escape(turn["answer"], quote=False)}</span>' in page


def test_messages_of_an_environment_are_shown_with_roles():
    messages = [{"role": "tool", "content": "noon"}, {"role": "user", "content": None}]
    turns = [{"text": "a", "answer": messages, "reward": 0.0}, {"text": "b", "answer": ""}]
    assert dialogue_parts(turns) == [(False, "a"), (True, "tool: noon\nuser: "), (False, "b")]
    assert dialogue_parts(None) == []
