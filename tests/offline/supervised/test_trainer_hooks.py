"""What `ReferenceTrainer` uses of transformers' Trainer without a promise of its developers still exists and works."""

import inspect
import re

import pytest
import transformers
from transformers import Trainer

from rl4lms_like.offline.reference_trainer import ReferenceTrainer
from rl4lms_like.run import resume
from tests.offline.supervised.test_resume import blocks, stopped

VERSION = f"transformers {transformers.__version__}"

OVERRIDDEN = {
    "_save_checkpoint": "the Trainer would write its own checkpoints, with pickles, into the final folder",
    "_prepare_inputs": "the Trainer would move batches to the device, and to plan passes the process would wait for it",
    "_load_from_checkpoint": "the Trainer would load the model's files over the restored weights, and fail on adapters",
}
"""Private methods that are overridden -> what would happen if they were not."""

VALUES = {
    "_tr_loss": "loss since the last log",
    "_total_loss_scalar": "loss before the last log",
    "_globalstep_last_logged": "step of the last log",
}
"""Private values that checkpoints contain -> their meaning."""


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_an_overridden_method_exists_in_the_trainer_and_is_called(name, tmp_path, monkeypatch, tiny_gpt2_dir):
    consequence = f"{OVERRIDDEN[name]}; look for the new place, and adapt ReferenceTrainer.{name}"
    assert callable(getattr(Trainer, name, None)), f"{VERSION} has no Trainer.{name}: {consequence}"

    calls = []
    override = vars(ReferenceTrainer)[name]

    def recorded(self, *arguments, **named):
        calls.append(name)
        return override(self, *arguments, **named)

    monkeypatch.setattr(ReferenceTrainer, name, recorded)
    folder = stopped(blocks("causal", tiny_gpt2_dir), tmp_path, 3, monkeypatch)
    resume(folder, quiet=True)
    assert calls, f"{VERSION} does not call {name} in a run that is saved and resumed: {consequence}"


def test_no_other_private_method_is_overridden():
    """A new override needs a reason and a test; a name of ours that the Trainer gets later would replace its method."""
    private = {name for name in vars(ReferenceTrainer) if re.match("_[a-z]", name)}
    both = {name for name in private if hasattr(Trainer, name)}
    assert both == set(OVERRIDDEN), f"ReferenceTrainer and the Trainer of {VERSION} both define {sorted(both)}"


@pytest.mark.parametrize("name", VALUES)
def test_a_private_value_in_checkpoints_is_one_of_the_trainer(name):
    message = f"the Trainer of {VERSION} has no {name}, the {VALUES[name]}: adapt begin() and _training_state()"
    assert f"self.{name}" in inspect.getsource(Trainer), message


def test_no_other_private_name_of_the_trainer_is_used():
    source = inspect.getsource(ReferenceTrainer)
    used = set(re.findall(r"(?:self|super\(\))\.(_[a-z]\w*)", source))
    assert used - set(vars(ReferenceTrainer)) == set(VALUES)
