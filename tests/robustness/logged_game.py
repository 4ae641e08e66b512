"""Environment for `killed_runs.py`, which shows whether a process was killed in the middle of episodes."""

import time
from pathlib import Path

import gymnasium

STEP_S = 0.003
"""Duration of a step: most of an iteration is then spent in episodes."""


class LoggedGame(gymnasium.Env):
    """Draws texts, rewards and the ends of episodes from its seed, and appends a letter to a file for each call.

    `r` is a call of `reset`, `t` a turn that others follow, `e` the last turn of an episode. If the last letter is `t`,
    an episode is open.

    Args:
        log: path of the file.
    """

    def __init__(self, log: str) -> None:
        self.log = Path(log)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_left = int(self.np_random.integers(2, 6))
        self._append("r")
        return f"Count {self.np_random.integers(100)}", {"metrics": {"longest": self.n_left}}

    def step(self, action):
        time.sleep(STEP_S)
        self.n_left -= 1
        ends = self.n_left == 0
        self._append("e" if ends else "t")
        reward = float(self.np_random.normal()) + len(action) % 5
        return " higher" if self.np_random.random() < 0.5 else "", reward, ends, False, {}

    def _append(self, letter: str) -> None:
        with self.log.open("a") as file:
            file.write(letter)


def is_in_an_episode(log: Path) -> bool:
    """Return whether the last call in the file was a turn that others follow."""
    return log.is_file() and log.read_text().endswith("t")
