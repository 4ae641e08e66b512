"""Process of one run. The runner calls `start(RUN_FOLDER)` in a new Python interpreter.

    job.json ──parse──► config ──train──► run folder ──► result.json

Standard input is a pipe from the runner. When it closes, because the runner was interrupted or killed, the run is
interrupted as by Ctrl-C: it saves its state and ends. No run therefore continues after its benchmark has ended.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rl4lms_like
from rl4lms_like.benchmarking.jobs import JOB_FILE, JOB_LOCK, OUTPUT_FILE, Result, at_work, write_result
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import AnyConfig
from rl4lms_like.system.disk import remove_path
from rl4lms_like.system.errors import CheckpointError, ConfigError, RL4LMsLikeError
from rl4lms_like.system.secrets import without_secrets
from rl4lms_like.system.wording import printable
from rl4lms_like.tracking.record import number, read_run
from rl4lms_like.tracking.run_folder import FINISHED_FILE

PACKAGES = ("torch", "transformers", "stable-baselines3", "numpy")
"""Packages with the largest effect on results."""

MIB = 2**20


def main(folder: Path) -> int:
    """Run the job of a folder and return the exit status, as for `rl4lms-like train`."""
    with at_work(folder):
        return _run(Path(os.path.abspath(folder)))  # a component may change the current folder


def _run(folder: Path) -> int:
    start = time.perf_counter()
    job = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
    try:
        _train(folder, job["config"])
    except RL4LMsLikeError as error:
        _say(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    import torch  # loaded by the training

    # From the files, which also have what the process did before it was resumed.
    run = read_run(folder)
    last_iteration = run.iterations[-1] if run.iterations else {}

    # Of each split, the scores of its last evaluation, by `split:metric`.
    scores = {}
    for split, scores_at in run.evaluations.items():
        for key, score in scores_at[max(scores_at)].items():
            scores[f"{split}:{key}"] = number(score)

    # Bytes; MiB in the result.
    sizes = [file.stat().st_size for file in (folder / "model").rglob("*") if file.is_file()]
    result = Result(
        label=job["label"],
        seed=job["seed"],
        scores=scores,
        iterations=int(last_iteration.get("iteration", 0)),
        tokens=int(last_iteration.get("timesteps", 0)),
        seconds=None if job["resumed"] else time.perf_counter() - start,
        peak_memory_mb=_peak_memory_mb(),
        peak_gpu_memory_mb=torch.cuda.max_memory_allocated() / MIB if torch.cuda.is_available() else None,
        model_mb=sum(sizes) / MIB if sizes else None,
        versions={
            "python": sys.version.split()[0],
            "rl4lms-like": rl4lms_like.__version__,
            **{package: version(package) for package in PACKAGES},
        },
        resumed=job["resumed"],
    )
    write_result(folder, result)
    return 0


def _train(folder: Path, raw: dict[str, Any]) -> None:
    """Train or resume. If the newest checkpoint is damaged, use an older one or start over, and print a message."""
    from rl4lms_like.run import resume
    from rl4lms_like.system.import_paths import trusting
    from rl4lms_like.training.resuming.checkpoints import newest_checkpoint, older_intact

    config = parse_config(raw, source=str(folder / JOB_FILE))
    if (folder / FINISHED_FILE).exists():  # only the result was not written before the process ended
        return

    # This also resumes from the newest checkpoint, if there is one.
    try:
        return _train_in(folder, config)
    except CheckpointError as error:
        _say(f"{error}\n")

    # Nobody watches the runs of a benchmark, so what `train` would only advise is done here.
    if older := older_intact(newest_checkpoint(folder)):
        _say(f"resuming from {older}")
        with suppress(CheckpointError):
            resume(older, trust_remote_code=any(trusting(raw)))
            return

    # The three files of the job stay: this process holds the lock and writes the output.
    _say("no checkpoint is intact: the run is restarted from the beginning")
    for path in folder.iterdir():
        if path.name not in (JOB_FILE, OUTPUT_FILE, JOB_LOCK):
            remove_path(path)
    _train_in(folder, config)


def _train_in(folder: Path, config: AnyConfig) -> None:
    from rl4lms_like.run import train_config

    # The three parts of the run path: <results>/runs, <label>, seed_<k>.
    run_path = train_config(
        config,
        base_path_to_store_results=folder.parent.parent,
        project_name=folder.parent.name,
        experiment_name=folder.name,
    )
    if run_path != folder:
        raise RL4LMsLikeError(f"{folder} already contains a run; this one was written to {run_path}")


def _say(text: str) -> None:
    print(printable(without_secrets(text)), file=sys.stderr)


def _peak_memory_mb() -> float | None:
    """Return the largest resident memory of this process so far, MiB; None if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return None

    # Bytes on macOS, KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak * 1024 / MIB


def end_with_the_runner() -> None:
    """Interrupt the main thread when standard input closes."""

    def wait() -> None:
        # Unbuffered: `sys.stdin.read` would hold a lock at the interpreter's exit. The runner writes nothing: reading
        # returns, with no bytes, only when the pipe is closed.
        while os.read(sys.stdin.fileno(), 1):
            pass

        # A real signal also interrupts blocking calls of the main thread; Windows has none.
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            _thread.interrupt_main()

    # Shells start background jobs with SIGINT ignored, and Ray its workers with SIGINT blocked.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=wait, name="runner", daemon=True).start()


def start(folder: str) -> None:
    """Run the job of a folder and exit with its status."""
    end_with_the_runner()
    try:
        status = main(Path(folder))
    except Exception:
        _say(traceback.format_exc())
        status = 1
    sys.exit(status)
