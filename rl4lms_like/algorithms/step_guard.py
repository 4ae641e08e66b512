"""Handling of optimizer steps whose loss or gradient is not finite. Such a step never changes the weights.

stop    the run ends with an error that reports the loss and gradient
skip    the step is skipped and counted; the run ends once every step of an update was skipped
"""

from __future__ import annotations

from typing import Any, Literal

from rl4lms_like.system.errors import ModelError

FEWEST = 2
"""Minimum number of consecutive skipped steps that end a run: an update of one step may be skipped once."""


class StepGuard:
    """Guard that accepts only finite optimizer steps, and counts the skipped ones.

    Args:
        non_finite: action for a step whose loss or gradient is not finite.
    """

    def __init__(self, non_finite: Literal["stop", "skip"] = "stop") -> None:
        self.non_finite = non_finite
        self.skipped = 0
        self.in_a_row = 0
        self.last_found = ""

    def accepts(self, is_finite: bool, problem: str, hint: str) -> bool:
        """Return whether the step may be taken.

        Args:
            is_finite: whether loss, gradient and step are finite.
            problem: what is not finite and where: `the loss is nan in optimizer step 7`.
            hint: advice for the message.

        Raises:
            ModelError: the step is not finite, and `non_finite` is `stop`.
        """
        if is_finite:
            self.in_a_row = 0
            return True
        if self.non_finite == "stop":
            raise ModelError(f"{problem}: the weights were not changed. {hint}")

        # The run does not end here: a later step of this update may be finite again. `end_update` decides.
        self.skipped += 1
        self.in_a_row += 1
        self.last_found = problem
        return False

    def end_update(self, n_steps: int) -> None:
        """Check the skipped steps after an update of `n_steps` steps.

        Raises:
            ModelError: every step of the update was skipped.
        """
        # Counted over updates: with one step per update, as A2C has, only the next update's step makes it two.
        if self.in_a_row >= max(n_steps, FEWEST):
            raise ModelError(
                f"the last {self.in_a_row} steps were skipped, including all of this update; in the last one, "
                f"{self.last_found}. The weights no longer change. Lower alg.args.learning_rate, or check the rewards"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that changes during a run."""
        # `last_found` is the name in checkpoints, which other versions read as well.
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "last_found": self.last_found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.skipped = int(state["skipped"])
        self.in_a_row = int(state["in_a_row"])
        self.last_found = str(state["last_found"])
