"""A run's report in headless Chromium: light and dark, in a narrow window."""

from __future__ import annotations

import copy
import json

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.run import train_config
from tests.benchmarking.conftest import RUN
from tests.browser import assert_readable, needs_chromium, opened

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_gpt2_dir):
    config = copy.deepcopy(RUN)
    config["tokenizer"]["model_name"] = config["alg"]["policy"]["args"]["model_name"] = str(tiny_gpt2_dir)
    config["train_evaluation"] = {**config["train_evaluation"], "save_rollouts": True}
    return train_config(parse_config(config), base_path_to_store_results=tmp_path_factory.mktemp("run"), quiet=True)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_report_is_readable_and_complete(folder, tmp_path, dark):
    page = opened(folder / "report.html", tmp_path, dark=dark)
    assert_readable(page, dark=dark)
    last = json.loads((folder / "epoch_2_val_split_predictions.json").read_text())
    assert page.dom.count('class="pair"') >= len(last) > 0
    assert page.dom.count('id="rollout-') == 2 and 'href="#tokens-2-' in page.dom
    titles = page.dom.count("<figure")
    assert titles >= 8 and page.measured["charts"] >= titles
