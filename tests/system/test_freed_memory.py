"""Memory that glibc keeps: measured in processes of their own, since the setting cannot be undone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rl4lms_like.system.freed_memory import why_returned

PROGRAM = """
import resource, sys
import numpy as np
from rl4lms_like.system.freed_memory import keep_freed_memory

kept = keep_freed_memory()
def make():
    return np.ones(2**24)  # 128 MiB

make()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
make()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**variables):
    """Whether freed memory is kept, and the number of pages that the second array gets from the system."""
    plain = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    environment = {**plain, "PYTHONPATH": os.getcwd(), "NUMPY_MADVISE_HUGEPAGE": "0", **variables}
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    kept, faults = program.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(why_returned() is not None, reason=str(why_returned()))
def test_a_second_array_has_the_pages_of_the_first():
    kept, faults = page_faults()
    assert kept
    assert faults < 100


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize("variable", [{"MALLOC_PERTURB_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}])
def test_settings_of_the_environment_are_kept(variable):
    kept, faults = page_faults(**variable)
    assert not kept
    assert faults > 10_000
