"""Rewards, metrics and judges read the images of prompts: as an argument, as parts of a chat, and of a sample."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

from rl4lms_like.core.generated import Generated
from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.sample import Sample
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.rewards.call import score_episodes
from rl4lms_like.rewards.python_function import PythonReward
from rl4lms_like.rewards.remote import HttpReward
from rl4lms_like.rewards.server import RewardServer, texts_of_request
from rl4lms_like.scoring.score import Texts
from tests.judge_server import judge_server

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def picture(color: str) -> Picture:
    return Picture.of(Image.new("RGB", (4, 4), COLORS[color]))


def color_of(image: Image.Image) -> str:
    return next(name for name, value in COLORS.items() if value == image.getpixel((0, 0)))


def asked(*colors: str, **meta_data) -> Sample:
    return Sample("-".join(colors) or "none", "What?", ["red"], meta_data or None, images=tuple(map(picture, colors)))


SAMPLES = [asked("red"), asked("blue", "green"), asked()]


def generated(samples=SAMPLES, text="red") -> list[Generated]:
    return [Generated(sample, text) for sample in samples]


def episode(tokenizer, sample: Sample) -> Observation:
    ids = np.asarray(tokenizer("by the sea", add_special_tokens=False)["input_ids"])
    return Observation(sample, np.array([4]), ids, len(ids), TextLayout(tokenizer, 8, 8))


# ---- functions -------------------------------------------------------------------------------------------------------


def n_red(responses, images):
    return [float(sum(color_of(image) == "red" for image in of_prompt)) for of_prompt in images]


def first_is_red(response, images):
    return float(bool(images) and color_of(images[0]) == "red")


async def asks_first_is_red(response, images):
    return first_is_red(response, images)


def in_the_form_of_trl(prompts, completions, **columns):
    return n_red(completions, columns["images"]) if "images" in columns else [-1.0] * len(completions)


@pytest.mark.parametrize("function", [n_red, first_is_red, asks_first_is_red, in_the_form_of_trl])
def test_a_function_gets_the_images_of_each_prompt(function, tiny_tokenizer):
    reward = PythonReward(function)
    assert reward.needed_columns == ()
    assert list(reward.scores_of(generated())) == [1.0, 0.0, 0.0]

    # The same in a rollout, and as a metric.
    episodes = [episode(tiny_tokenizer, sample) for sample in SAMPLES]
    ends = np.cumsum([item.n_actions for item in episodes]) - 1
    assert score_episodes(reward, episodes)[ends].tolist() == [1.0, 0.0, 0.0]
    metric = METRICS.get("python", {"function": function})
    texts = (["What?"] * 3, ["red"] * 3, [["red"]] * 3)
    ((scores, _),) = compute_metric(metric, *texts, generated=generated()).values()
    assert scores == [1.0, 0.0, 0.0]


def test_images_are_rgb_and_of_all_pictures_in_order():
    calls = []

    def record(responses, images):
        calls.extend([[(image.mode, color_of(image)) for image in of_prompt] for of_prompt in images])
        return [0.0] * len(responses)

    PythonReward(record).scores_of(generated())
    assert calls == [[("RGB", "red")], [("RGB", "blue"), ("RGB", "green")], []]


def test_a_function_that_changes_an_image_changes_it_for_no_other_response():
    sizes = []

    def shrink(response, images):
        images[0].thumbnail((2, 2))
        sizes.append(images[0].size)
        return 0.0

    def shrink_all(responses, images):
        for (image,) in images:
            image.thumbnail((image.width // 2, image.height // 2))
            sizes.append(image.size)
        return [0.0] * len(responses)

    for function in (shrink, shrink_all):
        PythonReward(function).scores_of(generated([SAMPLES[0]] * 3))
    assert sizes == [(2, 2)] * 6


def test_a_file_is_read_once_for_all_responses_to_it(monkeypatch):
    n_opened = []
    open_picture = Picture.open
    monkeypatch.setattr(Picture, "open", lambda self: (n_opened.append(1), open_picture(self))[1])
    PythonReward(n_red).scores_of(generated([asked("red") for _ in range(8)]))
    assert len(n_opened) == 1

    # A reward of a server, which compresses it.
    with reward_server(lambda texts: [0.0] * len(texts.responses)) as url:
        HttpReward(url, batch_size=3).scores_of(generated([asked("red") for _ in range(8)]))
    assert len(n_opened) == 2


def test_a_column_named_images_stays_a_column():
    received = []

    def record(responses, images):
        received.append(images)
        return [0.0] * len(responses)

    PythonReward(record).scores_of(generated([Sample("a", "What?", [], {"images": "a column"})]))
    assert received == [["a column"]]


def test_functions_that_name_no_images_are_called_as_before():
    received = []

    def record(responses, **others):
        received.append(set(others))
        return [0.0] * len(responses)

    PythonReward(record).scores_of(generated([asked()]))
    PythonReward(record).scores_of(generated([asked("red")]))
    assert received == [{"prompts", "references", "meta_infos"}, {"prompts", "references", "meta_infos", "images"}]


def test_an_observation_has_the_images_of_its_sample(tiny_tokenizer):
    class FirstIsRed(RewardFunction):
        terminal = True

        def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
            return float(color_of(current_observation.sample.images[0].open()) == "red")

    episodes = [episode(tiny_tokenizer, sample) for sample in SAMPLES[:2]]
    ends = np.cumsum([item.n_actions for item in episodes]) - 1
    assert score_episodes(FirstIsRed(), episodes)[ends].tolist() == [1.0, 0.0]


# ---- judges ----------------------------------------------------------------------------------------------------------


def colors_in(body: dict) -> list[str]:
    """Colours of the images in a request to a chat server."""
    content = body["messages"][0]["content"]
    if isinstance(content, str):
        return []
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return [color_of(Picture.of(url).open()) for url in urls]


def likes_red(body: dict) -> str:
    return f"Score: {10 if 'red' in colors_in(body) else 1}"


@pytest.fixture
def server():
    with judge_server(likes_red) as judge:
        yield judge


def judge(server, **args):
    return REWARDS.get("llm_judge", {"url": server.url, "model": "judge", "concurrency": 1, **args})


def test_a_judge_sees_the_images_before_the_text(server):
    assert judge(server).scores_of(generated()) == [1.0, 0.0, 0.0]
    assert [colors_in(body) for body in server.bodies] == [["red"], ["blue", "green"], []]
    parts = server.bodies[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text"] and "What?" in parts[1]["text"]
    assert isinstance(server.bodies[2]["messages"][0]["content"], str)


def test_a_metric_of_a_judge_sees_them_too(server):
    metric = METRICS.get("llm_judge", {"url": server.url, "model": "judge"})
    ((scores, _),) = metric.results_of(generated()).values()
    assert scores == [1.0, 0.0, 0.0]


def test_answers_are_stored_for_each_image(server, tmp_path):
    for _ in range(2):
        assert judge(server, cache=str(tmp_path)).scores_of(generated()) == [1.0, 0.0, 0.0]
    assert len(server.bodies) == 3


def test_a_template_without_the_prompt_has_no_images(server):
    judge(server, template="Rate {response}. End with Score: <number>").scores_of(generated())
    assert [colors_in(body) for body in server.bodies] == [[]]  # equal messages are sent once


def test_a_local_judge_reads_no_images(tiny_gpt2_dir):
    local = REWARDS.get("llm_judge", {"model_name": str(tiny_gpt2_dir)})
    with pytest.raises(ValueError, match=r"images.*reads texts only"):
        local.scores_of(generated())


# ---- served rewards --------------------------------------------------------------------------------------------------


@contextmanager
def reward_server(score):
    server = RewardServer(score, host="127.0.0.1", port=0, max_texts=64)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()


def test_a_served_reward_gets_the_images():
    with reward_server(PythonReward(n_red).scores) as url:
        assert HttpReward(url).scores_of(generated()) == [1.0, 0.0, 0.0]
        assert HttpReward(url, batch_size=1).scores_of(generated()) == [1.0, 0.0, 0.0]


def test_requests_with_and_without_images_are_scored_together():
    calls = []

    def score(texts: Texts) -> list[float]:
        calls.append(texts.images)
        return [0.0] * len(texts.responses)

    with reward_server(score) as url:
        HttpReward(url).scores_of(generated(SAMPLES[2:]))
        HttpReward(url).scores_of(generated())
    assert calls[0] is None and [len(images) for images in calls[1]] == [1, 2, 0]


@pytest.mark.parametrize("images", ['"a"', "[]", '["a"]', '[["photo.png"]]', '[["data:text/plain,a"]]', "[[7]]"])
def test_a_request_cannot_name_files_of_the_server(images):
    body = f'{{"prompts": ["a"], "responses": ["b"], "images": {images}}}'
    with pytest.raises(ValueError, match="images"):
        texts_of_request(body.encode())
