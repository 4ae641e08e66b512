"""Entry point of `python -m rl4lms_like`, the same as `rl4lms-like`."""

from __future__ import annotations

import sys

from rl4lms_like.cli import main

if __name__ == "__main__":
    sys.exit(main())
