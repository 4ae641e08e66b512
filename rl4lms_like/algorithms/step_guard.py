"""What happens to an optimizer step whose loss or gradient is not finite. The weights never see it.

stop    the run ends with an error that says what was found
skip    the step is left out and counted; the run ends once every step of an update was left out
"""

from __future__ import annotations

from typing import Any, Literal

from rl4lms_like.core.errors import ModelError

FEWEST = 2
"""Left-out steps in a row that may end a run: of an update with one step, one may be left out."""


class StepGuard:
    """Lets steps through, or not.

    Args:
        non_finite: what to do with a step whose loss or gradient is not finite.
    """

    def __init__(self, non_finite: Literal["stop", "skip"] = "stop") -> None:
        self.non_finite = non_finite
        self.skipped = 0
        self.in_a_row = 0
        self.last_found = ""

    def accepts(self, finite: bool, found: str, way_out: str) -> bool:
        """Whether the step may be taken.

        Args:
            finite: whether loss, gradient and step are.
            found: what is not, where: `the loss is nan in update 7`.
            way_out: what to change.

        Raises:
            ModelError: it is not finite, and such steps end the run.
        """
        if finite:
            self.in_a_row = 0
            return True
        if self.non_finite == "stop":
            raise ModelError(f"{found}: the weights are left as they are. {way_out}")
        self.skipped += 1
        self.in_a_row += 1
        self.last_found = found
        return False

    def end_update(self, n_steps: int) -> None:
        """An update of `n_steps` steps is over.

        Raises:
            ModelError: every one of them was left out.
        """
        if self.in_a_row >= max(n_steps, FEWEST):
            raise ModelError(
                f"the last {self.in_a_row} steps were left out, all of the update; in the last {self.last_found}. "
                f"Nothing is learned any more, the weights are as they were. Lower alg.args.learning_rate, or see "
                f"what the reward pays"
            )

    def state_dict(self) -> dict[str, Any]:
        """What changes during a run."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "last_found": self.last_found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])
        self.last_found = str(state["last_found"])
