"""A ConfigError is checked by the paths of its issues, never by their wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rl4lms_like.core.errors import ConfigError


@contextmanager
def raises_at(
    *paths: str, among_others: bool = False, mentions: str = ""
) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Expect a ConfigError whose issues have these paths, in any order.

    Args:
        paths: one path per issue; an issue of a function that is not given its place in a config has the path "".
        among_others: the error may have further issues.
        mentions: a datum of the test (a value, a file, a known name) that the first of these issues must contain.
    """
    with pytest.raises(ConfigError) as caught:
        yield caught
    issues = caught.value.issues
    found = [issue.path for issue in issues]
    if among_others:
        assert set(paths) <= set(found), f"expected issues at {paths}: {caught.value}"
    else:
        assert sorted(found) == sorted(paths), f"expected issues at {paths}, nowhere else: {caught.value}"
    at_first = [issue.message for issue in issues if issue.path == paths[0]]
    assert any(mentions in message for message in at_first), f"{paths[0]} does not mention {mentions!r}: {caught.value}"
