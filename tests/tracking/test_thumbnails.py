"""Thumbnails: predictions, kept rollouts and token credit name them, and the report embeds a few."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
from PIL import Image

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.pictures import Picture
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.tracking.base import SilentTracker, Tracker
from rl4lms_like.tracking.report import write_report
from rl4lms_like.tracking.run_folder import IMAGES
from rl4lms_like.tracking.thumbnails import N_EMBEDDED, embedded, keep_thumbnails
from tests.vision_models import save_vision_model

URL = re.compile(r'<img src="(data:image/jpeg;base64,[^"]+)"')


def noise(seed: int, side: int = 200) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Picture.of(Image.fromarray(pixels))


def predictions(n: int, n_images: int = 1) -> list[dict]:
    rows = []
    for index in range(n):
        row = {"split_name": "val", "sample_id": f"val_{index}", "prompt_text": "Why?", "generated_text": "So."}
        images = tuple(noise(n_images * index + number) for number in range(n_images))
        rows.append({**row, "ref_text": "", **({"images": images} if images else {})})
    return rows


def tracked(folder, rows):
    """Run folder of a tracker that has recorded these predictions."""
    with Tracker(folder, {"alg": {"id": "grpo"}}, "project", "run", quiet=True) as tracker:
        tracker.log_predictions(0, "val", rows)
    return tracker.run_path


def written(run) -> list[dict]:
    return json.loads((run / "epoch_0_val_split_predictions.json").read_text())


def test_only_the_main_process_of_a_run_writes_them(tmp_path):
    with SilentTracker(tmp_path, {"alg": {"id": "grpo"}}) as tracker:
        tracker.log_predictions(0, "val", predictions(2))
        assert tracker.keep_thumbnails([noise(0)]) == []
    assert list(tmp_path.iterdir()) == []


def test_files_name_small_copies_and_no_pixels(tmp_path):
    rows = predictions(5, n_images=2)
    run = tracked(tmp_path, rows)
    assert len(list((run / IMAGES).iterdir())) == 10
    for row, original in zip(written(run), rows, strict=True):
        for name, picture in zip(row["images"], original["images"], strict=True):
            assert name == f"images/{picture.number:016x}.jpg"
            assert max(Picture.of(run / name).open().size) == 96


def test_the_report_embeds_the_pictures_of_three_samples(tmp_path):
    run = tracked(tmp_path, predictions(10, n_images=2))
    urls = URL.findall(write_report(run).read_text())
    assert len(urls) == N_EMBEDDED * 2
    for url in urls:
        assert max(Picture.of(url).open().size) <= 96
        assert len(url) < 16_000


def test_without_pictures_nothing_is_added(tmp_path):
    run = tracked(tmp_path, predictions(4, n_images=0))
    assert not (run / IMAGES).exists() and "images" not in written(run)[0]
    assert "<img" not in write_report(run).read_text()


def test_a_thumbnail_is_written_once(tmp_path):
    keep_thumbnails(tmp_path, [noise(0)])
    (file,) = (tmp_path / IMAGES).iterdir()
    before = file.stat().st_mtime_ns
    assert keep_thumbnails(tmp_path, [noise(0), noise(0)]) == [f"{IMAGES}/{file.name}"] * 2
    assert file.stat().st_mtime_ns == before


def test_only_small_jpeg_files_of_the_folder_are_embedded(tmp_path):
    (name,) = keep_thumbnails(tmp_path, [noise(0)])
    good = base64.b64encode((tmp_path / name).read_bytes()).decode()
    assert embedded(tmp_path, {"images": [name]}) == [f"data:image/jpeg;base64,{good}"]
    (tmp_path / "secret.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / IMAGES / f"{1:016x}.jpg").write_bytes(b"text")
    (tmp_path / IMAGES / f"{2:016x}.jpg").write_bytes(b"\xff\xd8" + bytes(2**17))
    others = [
        "secret.jpg",
        "images/../secret.jpg",
        f"images/{1:016x}.jpg",
        f"images/{2:016x}.jpg",
        "images/gone.jpg",
        7,
    ]
    assert embedded(tmp_path, {"images": others}) == [] == embedded(tmp_path, {"images": "all"})


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / IMAGES).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RL4LMsLikeError):
        keep_thumbnails(tmp_path / "run", [noise(0)])
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_run_names_the_pictures_of_its_prompts(tmp_path):
    model = str(save_vision_model(tmp_path / "model", "idefics3"))
    config = parse_config(
        {
            "tokenizer": {"model_name": model, "padding_side": "left"},
            "reward_fn": {"id": "exact_match"},
            "datapool": {"id": "shapes", "args": {"n_train": 6, "n_eval": 4, "side": 56}},
            "env": {"n_envs": 8, "args": {"max_prompt_length": 128, "max_episode_length": 2}},
            "alg": {
                "id": "grpo",
                "args": {"n_episodes": 8, "group_size": 4, "minibatch_episodes": 8, "n_epochs": 1},
                "kl_div": {"coeff": 0},
                "policy": {
                    "id": "vision_lm_actor_critic_policy",
                    "args": {"model_name": model, "generation_kwargs": {"do_sample": True, "max_new_tokens": 2}},
                },
            },
            "train_evaluation": {
                "eval_batch_size": 4,
                "n_iters": 1,
                "eval_every": 1,
                "save_rollouts": True,
                "n_credit_episodes": 4,
                "metrics": [{"id": "exact_match"}],
            },
        }
    )
    train_config(config, base_path_to_store_results=tmp_path, experiment_name="run", quiet=True)
    run = tmp_path / "rl4lm_exps" / "run"
    files = (*run.glob("epoch_*_predictions.json"), run / "token_credit.jsonl", *run.glob("rollouts/*.jsonl"))
    assert len(files) >= 4
    for file in files:
        names = re.findall(r"images/[0-9a-f]{16}\.jpg", file.read_text())
        assert names and all((run / name).is_file() for name in names), file
    assert len(URL.findall((run / "report.html").read_text())) >= 3 * N_EMBEDDED
