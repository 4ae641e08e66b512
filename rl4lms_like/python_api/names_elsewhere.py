"""Names of settings in TRL, OpenRLHF and verl -> what `Run` has in their place.

    num_generations      group_size
    beta                 kl_coeff
    output_dir           folder

The table is that of files, with the flat names of `Run` in place of keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rl4lms_like.core.keys_elsewhere import PAGE, row_of

_PATH = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")

OF_RUN = {
    "alg.id": "algorithm",
    "alg.model_name": "model",
    "alg.policy.args.model_name": "model",
    "reward_fn": "reward",
    "--experiment_name": "folder",
    "--log_to_wandb": "train(log_to_wandb=True)",
    "--log_to_trackio": "train(log_to_trackio=True)",
    "--project_name": "train(wandb_project=...)",
    "--entity_name": "train(entity_name=...)",
    "--resume": "Run.from_folder(folder)",
    "alg.training_args": "a setting of the same name",
}
"""Keys and options of the command line that are no flat settings."""


def equivalent(name: str, names: Mapping[str, Sequence[str]], *, is_rl: bool) -> str | None:
    """Return what a setting of another library is here; None for a name that the table has not.

    Args:
        name: the setting.
        names: settings of this run: flat name -> config paths.
        is_rl: False for supervised and preference runs.
    """
    row = row_of(name, is_rl=is_rl)
    if row is None:
        return None

    of_path = {path: flat for flat, paths in names.items() for path in paths}
    of_path |= OF_RUN | {"datapool": "prompts" if is_rl else "data"}
    note = row.note.replace("`", "").replace("alg.id: ", "algorithm ").replace("--", "")
    note = _PATH.sub(lambda match: of_path.get(match[0], match[0]), note)
    note = f", {note}" if note else ""
    if row.page != PAGE:
        return f"{note.removeprefix(', ')} ({row.page})"
    if not row.key:
        return f"there is no equivalent{note.replace(',', ':', 1)} ({PAGE})"
    if row.key in of_path:
        return f"the equivalent is {of_path[row.key]}{note} ({PAGE})"

    # A setting of other algorithms, or one within a setting with a dictionary.
    flat = row.key.rpartition(".")[2]
    return f"the equivalent is {flat}, which this algorithm does not have ({PAGE})"
