"""What every test may ask for. No network, one thread, models made on the spot.

tiny_tokenizer     byte-level BPE of 320 tokens, pad 0, end 1
tiny_gpt2_dir      a saved GPT-2 of one layer and its tokenizer, as `from_pretrained` reads them
tiny_t5_dir        the same for T5, whose tokenizer ends every text with the end token
deeper_gpt2_dir    with two layers, for tests whose texts are more varied then; so is deeper_t5_dir
shared_dir         the folder with real models and data beside the checkout; the test skips where it is absent
language_data      NLTK finds punkt_tab and WordNet; the test skips, with the reason, where one is absent
"""

from __future__ import annotations

import gc
import itertools
import logging
import multiprocessing
import os
from collections.abc import Iterator

# Before anything imports torch or huggingface_hub: they read these once. This file imports neither, since the process
# that distributes the tests among others reads it too.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"
os.environ["RL4LMS_LIKE_CODE"] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # of `tests...:Name`

from pathlib import Path

import pytest

from tests.tiny_configs import tiny_config, tiny_seq2seq_config  # noqa: F401

# Reward workers and processes of environments are forked from one that has imported what they need.
multiprocessing.set_forkserver_preload(["rl4lms_like.envs.stepping", "rl4lms_like.envs.workers", "rl4lms_like.envs.env",
    "stable_baselines3.common.vec_env", "transformers.tokenization_utils_tokenizers"])  # fmt: skip

REPOSITORY = Path(__file__).resolve().parents[1]
SLOW = REPOSITORY / "tests" / "slow.txt"


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes go by their argument's name: packed ones may hold the time, and all workers must collect the same tests."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `slow.txt`."""
    slow = tuple(line for line in SLOW.read_text().splitlines() if not line.startswith("#"))
    for item in items:
        if item.nodeid.startswith(slow):
            item.add_marker(pytest.mark.slow)


TESTS_BETWEEN_FREEZES = 100
_finished = itertools.count(1)


def pytest_collection_finish() -> None:
    """Garbage collections do not look through imported modules; transformers' `Trainer` asks for many."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # tests make many objects and few circles


def pytest_runtest_logfinish() -> None:
    """Modules that were imported since then are left out, too."""
    if next(_finished) % TESTS_BETWEEN_FREEZES == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_test_writes_to_the_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL4LMS_LIKE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def no_test_leaves_a_listener() -> Iterator[None]:
    """A tracker left open writes the messages of all later tests to its log as well."""
    namespace = logging.getLogger("rl4lms_like")
    before = list(namespace.handlers)
    yield
    left = [handler for handler in namespace.handlers if handler not in before]
    for handler in left:
        namespace.removeHandler(handler)
        handler.close()
    assert not left, f"the test left {left} listening: close its tracker"


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    folder = REPOSITORY.parent / "shared"
    if not (folder / "spec").is_dir():
        pytest.skip(f"needs the real models and data of {folder.name!r} beside the checkout, which are not there")
    return folder


@pytest.fixture(scope="session")
def language_data(shared_dir: Path) -> Iterator[None]:
    import nltk

    from rl4lms_like.scoring import nltk_data
    from rl4lms_like.system.errors import MissingResourceError

    folder = str(shared_dir / "data" / "nltk_data")
    known = os.environ.get("NLTK_DATA", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk.data, "path", [folder, *nltk.data.path])
        patch.setenv("NLTK_DATA", os.pathsep.join(filter(None, [folder, known])))  # for processes that tests start
        try:
            nltk_data.require_data("the test", "punkt_tab", "wordnet")
        except MissingResourceError as error:
            pytest.skip(str(error))
        yield


@pytest.fixture(scope="session")
def tiny_tokenizer():
    from rl4lms_like.testing import models

    return models.make_tokenizer()


@pytest.fixture(scope="session")
def tiny_gguf_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    from tests.gguf_files import save_llama

    folder = tmp_path_factory.mktemp("tiny_gguf")
    save_llama(folder, tiny_tokenizer)
    return folder


@pytest.fixture(scope="session")
def tiny_gpt2_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    from rl4lms_like.testing import models

    model = models.make_causal_lm("gpt2", tiny_tokenizer, n_layers=1)
    return models.save_model(tmp_path_factory.mktemp("tiny_gpt2"), model, tiny_tokenizer)


@pytest.fixture(scope="session")
def tiny_t5_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rl4lms_like.testing import models

    tokenizer = models.make_tokenizer(append_eos=True)
    model = models.make_seq2seq_lm("t5", tokenizer, n_layers=1)
    return models.save_model(tmp_path_factory.mktemp("tiny_t5"), model, tokenizer)


@pytest.fixture(scope="session")
def deeper_gpt2_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    from rl4lms_like.testing import models

    model = models.make_causal_lm("gpt2", tiny_tokenizer)
    return models.save_model(tmp_path_factory.mktemp("deeper_gpt2"), model, tiny_tokenizer)


@pytest.fixture(scope="session")
def deeper_t5_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rl4lms_like.testing import models

    tokenizer = models.make_tokenizer(append_eos=True)
    return models.save_model(tmp_path_factory.mktemp("deeper_t5"), models.make_seq2seq_lm("t5", tokenizer), tokenizer)
