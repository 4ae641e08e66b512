"""Samples with the same text and other pictures are other prompts, wherever prompts are compared."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import TokenizerConfig
from rl4lms_like.core.generated import Generated
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.files import JsonlPool
from rl4lms_like.data_pools.sampler import DifficultySampler
from rl4lms_like.metrics import METRICS
from rl4lms_like.on_policy.doctor.diagnostics import diagnostics_of
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.probes import Probes
from rl4lms_like.sampled_pairs import digest_of
from rl4lms_like.system.errors import CheckpointError
from rl4lms_like.training.resuming.states import check_frozen, frozen_digests
from tests.builders import episodes_of_lengths
from tests.configs import run_blocks
from tests.judge_server import judge_server

RED, BLUE = "red", "blue"
QUESTION = "What colour?"


def picture(color: str) -> Picture:
    return Picture.of(Image.new("RGB", (4, 4), color))


def asked(id: str, color: str | None, references=("red",)) -> Sample:
    """A sample with the same question as all others."""
    return Sample(id, QUESTION, list(references), images=() if color is None else (picture(color),))


def responses(*colors_and_texts) -> list[Generated]:
    return [Generated(asked(str(index), color), text) for index, (color, text) in enumerate(colors_and_texts)]


@pytest.mark.parametrize("id", ["pass_at_k", "maj_at_k"])
def test_votes_and_attempts_are_of_one_picture(id):
    metric = METRICS.get(id, {"k": [2]})
    of_two = responses((RED, "red"), (BLUE, "green"), (RED, "red"), (BLUE, "green"))
    ((scores, overall),) = metric.results_of(of_two).values()
    assert scores == [1.0, 0.0, 1.0, 0.0] and overall == 0.5

    # With one picture, all four are attempts at one prompt.
    ((scores, _),) = metric.results_of(responses(*((RED, item.text) for item in of_two))).values()
    assert len(set(scores)) == 1


def test_too_few_attempts_are_reported_with_the_prompt():
    with pytest.raises(ValueError, match=r"2 of 2 prompts have fewer, 'What colour\?' has 1"):
        METRICS.get("pass_at_k", {"k": [2]}).results_of(responses((RED, "red"), (BLUE, "green")))


def longer_wins(body: dict) -> str:
    """Answer that the longer response wins."""
    message = json.dumps(body)
    a, b = (message.partition(f"[Response {name}]\\n")[2].partition("\\n\\n")[0] for name in "AB")
    return f"Winner: {'A' if len(a) > len(b) else 'B'}"


def test_a_judge_compares_responses_to_one_picture():
    pairs = ((RED, "a"), (BLUE, "a b c"), (RED, "a b"), (BLUE, "a b c d"))
    with judge_server(longer_wins) as server:
        judge = REWARDS.get("llm_judge", {"url": server.url, "model": "judge", "compare_with": "responses"})
        assert judge.scores_of(responses(*pairs)) == [0.0, 0.0, 1.0, 1.0]
        assert judge.scores_of(responses(*((RED, text) for _, text in pairs))) == pytest.approx([0, 2 / 3, 1 / 3, 1])


def test_pairs_that_were_sampled_for_other_pictures_are_not_continued():
    config = parse_config(run_blocks())
    digests = {digest_of(config, [asked("a", color)], []) for color in (RED, BLUE, None)}
    assert len(digests) == 3
    assert digest_of(config, [asked("a", RED)], []) in digests


def test_a_changed_picture_is_refused_on_resuming(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": QUESTION, "image": "a.png"}) + "\n")
    args = {"prompt_column": "q", "image_column": "image", "data_files": {"train": str(tmp_path / "rows.jsonl")}}
    module = torch.nn.Linear(1, 1)
    tokenizer = TokenizerConfig(model_name="model")

    def digests(color: str) -> dict[str, str]:
        stream = io.BytesIO()
        Image.new("RGB", (4, 4), color).save(stream, "PNG")
        (tmp_path / "a.png").write_bytes(stream.getvalue())
        return frozen_digests(module, {}, {"train": JsonlPool.prepare("train", **args).samples})

    of_run = digests(RED)
    check_frozen(digests(RED), of_run, tokenizer)
    with pytest.raises(CheckpointError, match="are not those of the run"):
        check_frozen(digests(BLUE), of_run, tokenizer)


def test_the_difficulty_of_a_question_is_that_of_its_picture():
    sampler = DifficultySampler([asked("a", RED), asked("b", BLUE)], seed=0, momentum=1.0)
    sampler.update(["a", "b"], [1.0, 0.0])
    assert sampler.update(["a"], [1.0]) | {"success_rate": None} == {
        "too_hard": 0.5,
        "useful": 0.0,
        "too_easy": 0.5,
        "success_rate": None,
    }


def test_the_doctor_compares_responses_to_different_pictures():
    episodes = episodes_of_lengths([4] * 8)
    one_question = torch.full_like(episodes.prompt_ids, 5)
    one_answer = torch.arange(4).expand(8, -1)
    equal = replace(episodes, prompt_ids=one_question, response_ids=one_answer)
    of_two = diagnostics_of({}, replace(equal, pictures=torch.tensor([1, 2] * 4)), [0.0] * 8)
    assert of_two["duplicates"] == of_two["near_duplicates"] == 1.0
    of_one = diagnostics_of({}, replace(equal, pictures=torch.ones(8, dtype=torch.long)), [0.0] * 8)
    assert of_one["duplicates"] is None and of_one["near_duplicates"] is None


class OneToken:
    """Encoder of prompts with images."""

    def encode(self, sample, max_length):
        return np.array([4])


def test_an_audit_uses_each_picture(tiny_tokenizer):
    samples = [asked("a", RED), asked("b", RED), asked("c", BLUE)]
    layout = TextLayout(tiny_tokenizer, 16, 16, pictures=OneToken())
    probes = Probes(samples, layout)
    assert [sample.id for sample in probes.samples] == ["a", "c"]
