"""A script with `Run` under torchrun: all processes call the same methods."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json
import os

from rl4lms_like import Run


def length(responses):
    return [float(len(response)) for response in responses]


if __name__ == "__main__":
    prompts = [f"Count {{number}}" for number in range(6)]
    run = Run(
        {model!r}, prompts, length, folder={folder!r}, n_iters=2, n_episodes=16, group_size=4, max_new_tokens=6,
        learning_rate=1e-3, eval_prompts=prompts,
    )
    before = run.evaluate()
    run.train(quiet=True).train(n_iters=3, quiet=True)
    seen = {{
        "before": before, "after": run.evaluate(), "texts": run.generate(prompts, decoding="greedy"),
        "done": run.n_done, "folder": str(run.folder), "report": str(run.report), "saved": str(run.save({saved!r})),
    }}
    with open(f"{{{saved!r}}}_{{os.environ.get('RANK', '0')}}.json", "w") as file:
        json.dump(seen, file)
"""


def run_script(model, folder, *launcher: str):
    script = folder / "script.py"
    saved = folder / "saved"
    script.write_text(SCRIPT.format(model=str(model), folder=str(folder / "a" / "run"), saved=str(saved)))
    command = [sys.executable, *launcher, str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=folder)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(file.read_text()) for file in sorted(folder.glob("saved_*.json"))], ran.stdout


def test_two_processes_see_the_same_run_in_one_folder(tiny_gpt2_dir, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (alone,), _ = run_script(tiny_gpt2_dir, tmp_path / "one")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    (first, second), printed = run_script(tiny_gpt2_dir, tmp_path / "two", *launcher)
    assert first == second
    assert first["before"] == alone["before"] and first["done"] == alone["done"] == 3
    assert printed.count("is finished") <= 1
    assert (tmp_path / "two" / "saved" / "config.json").is_file()
