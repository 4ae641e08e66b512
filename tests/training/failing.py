"""Rewards that fail, for runs that must say so."""

import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction


class Late(RewardFunction):
    """Works for some episodes, then does what it was told."""

    terminal = True

    def __init__(self, after: int, what: str) -> None:
        self.left = after
        self.what = what

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        self.left -= 1
        if self.left >= 0:
            return 0.5
        if self.what == "raise":
            raise KeyError("the_missing_key")
        return float("nan") if self.what == "nan" else "text"


class Wanders(RewardFunction):
    """Changes the current folder, when it is made and when it is called."""

    terminal = True

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.chdir(folder)

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        os.chdir(self.folder)
        return 0.5


class TooFew(BatchedRewardFunction):
    """Forgets one value."""

    terminal = True

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        return [0.0] * (len(gen_texts) - 1)


class FillsTheDisk(RewardFunction):
    """From one episode on no file may have more than so many bytes; once, while a marker is there."""

    terminal = True

    def __init__(self, after: int, limit: int, marker: str) -> None:
        self.left, self.limit, self.marker = after, limit, Path(marker)

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        self.left -= 1
        if self.left < 0 and self.marker.exists():
            self.marker.unlink()
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return len(current_observation.context_text) / 10


class Hangs(RewardFunction):
    """Never comes back."""

    terminal = True

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        time.sleep(600)


class Broken(BaseMetric):
    """Exits instead of scoring."""

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        sys.exit(0)


class HangsInThreads(BatchedRewardFunction):
    """Asks several at once; none of them answers."""

    terminal = True

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(time.sleep, [600.0] * len(gen_texts)))


class Forgets(Late):
    """Has a state that cannot be asked for."""

    def __init__(self):
        super().__init__(after=100, what="raise")

    def state_dict(self):
        raise KeyError("forgotten")

    def load_state_dict(self, state):
        pass


class Sorts(RewardFunction):
    """Changes what it is given."""

    terminal = True

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        current_observation.target_or_reference_texts.sort()
        return len(current_observation.context_text) / 10


class Exits(Sorts):
    """Cannot be made."""

    def __init__(self):
        sys.exit(0)


class Samples(TextGenPool):
    """What pools of people's own do."""

    @classmethod
    def prepare(cls, split, what):
        if what == "exit":
            sys.exit(0)
        if what == "nothing":
            return None
        if what == "texts":
            return cls(["a text"])
        references = {"no list": "a text", "half": ["half a pair \ud83d"], "two": ["b", "a"]}[what]
        return cls([Sample(f"{split}_{i}", "Count with me:", references, {"half": "\udfff"}) for i in range(4)])
