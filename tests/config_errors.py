"""A ConfigError is checked by the paths of its issues, never by their wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rl4lms_like.system.errors import ConfigError


@contextmanager
def raises_at(
    path: str, *more: str, among_others: bool = False, mentions: str = ""
) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Expect a ConfigError whose issues have these paths, in any order.

    Args:
        path: of one issue; "" where the tested function is not given its place in a config.
        more: paths of the other issues.
        among_others: the error may have further issues.
        mentions: a datum of the test (a value, a file, a known name) that the issue at `path` must contain.
    """
    with pytest.raises(ConfigError) as caught:
        yield caught
    issues = caught.value.issues
    paths, found = (path, *more), [issue.path for issue in issues]
    if among_others:
        assert set(paths) <= set(found), f"expected issues at {paths}: {caught.value}"
    else:
        assert sorted(found) == sorted(paths), f"expected issues at {paths}, nowhere else: {caught.value}"
    messages = [issue.message for issue in issues if issue.path == path]
    assert any(mentions in message for message in messages), f"{path} does not mention {mentions!r}: {caught.value}"
