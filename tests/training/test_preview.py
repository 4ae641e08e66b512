"""`check` says what a run would say before it loads anything."""

import pytest

from rl4lms_like.core.errors import ConfigError
from rl4lms_like.training.config import parse_config
from rl4lms_like.training.preview import preview
from tests.training.configs import run_blocks


def test_arguments_of_generate_are_checked():
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["generation_kwargs"]["max_new_token"] = 3
    with pytest.raises(ConfigError, match=r"generation_kwargs.max_new_token: .*did you mean 'max_new_tokens'"):
        list(preview(parse_config(blocks)))


def test_a_device_that_is_elsewhere_is_not_a_mistake_of_the_file():
    blocks = run_blocks() | {"device": "cuda:7"}
    assert "# memory" in "\n".join(preview(parse_config(blocks)))
