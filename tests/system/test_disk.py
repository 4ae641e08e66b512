"""Where `~` leads: a config of somebody else's, or a container without that user, is a mistake at its key, no crash."""

import os

import pytest

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.system.disk import reason, with_home
from tests.config_errors import raises_at
from tests.configs import run_blocks

NOWHERE = "~nobody_has_this_name/files"


def test_a_home_that_is_there_is_put_in(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert with_home("~/a") == tmp_path / "a"
    assert str(with_home("a/~")) == "a/~"


def test_a_home_that_is_not_there_stays_as_it_is_written():
    assert str(with_home(NOWHERE)) == NOWHERE


def test_folders_of_a_config_below_no_home_are_mistakes_at_their_keys():
    blocks = run_blocks()
    blocks["tokenizer"]["model_name"] = NOWHERE
    blocks["datapool"] = {"id": "imdb", "args": {"data_dir": NOWHERE}}
    for path in ("tokenizer.model_name", "datapool.args.data_dir"):
        with raises_at(path, among_others=True, mentions=repr(NOWHERE)):
            parse_config(blocks)


@pytest.mark.parametrize(
    "command",
    [["train", "--resume", NOWHERE], ["evaluate", NOWHERE], ["generate", NOWHERE, "a prompt"]],
    ids=lambda command: command[0],
)
def test_a_command_told_of_a_folder_below_no_home_names_it(command, capsys):
    assert main(command) in (1, 2)
    text = capsys.readouterr().err
    assert NOWHERE in text
    assert "home directory" not in text


def test_a_descriptor_that_somebody_closed_is_reported_with_the_likely_cause(tmp_path):
    with (tmp_path / "a").open("wb", buffering=0) as file, pytest.raises(OSError) as caught:
        os.close(file.fileno())
        try:
            file.write(b"x")
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
    assert "such as a reward" in reason(caught.value)
