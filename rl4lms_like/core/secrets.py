"""Keep secrets in environment variables: configs refer to them by name, and no output or file contains their values.

    api_key: ${JUDGE_KEY}       `args` of a reward, metric, data pool or post-processor: replaced when it is built
    api_key: sk-4711            refused, since the files of a run would contain it
    https://me:pw@host/x        refused for the same reason
    key: 9f86d081884c7d65...    refused, since it looks random; `key: answer` is accepted, it may name a column

Values that were looked up, and those of variables such as HF_TOKEN, are masked in all messages.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from rl4lms_like.core.errors import ConfigIssue, RL4LMsLikeError
from rl4lms_like.core.schema import join
from rl4lms_like.core.wording import shown

HIDDEN = "***"
"""Replacement for a secret."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRETS = {
    *("password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials"),
    *("authorization", "auth", "cookie", "apikey"),
}
_KINDS_OF_KEYS = {
    *("api", "access", "private", "secret", "subscription", "account", "encryption", "signing"),
    *("anthropic", "aws", "azure", "cohere", "gemini", "google", "groq", "hf", "mistral", "openai", "wandb"),
}
_KINDS_OF_TOKENS = {"api", "auth", "access", "hf", "hub", "bearer", "refresh", "session", "login", "github"}
_PLAIN_HEADERS = {"accept", "content", "user"}
_CREDENTIAL = re.compile(r"(?!\d+$)[\w.=+/~-]{12,}")
"""Value of a key `token` that is taken for a secret. Tokens of a language model are named `token` too."""
_UNLESS_CREDENTIAL = {"token", "bearer"}
_WELL_KNOWN = re.compile(
    r"hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|Bearer \S{8,}|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)
"""Tokens of well-known services, by their prefixes."""
_WITHIN = re.compile(
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{20,}|sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])(?=[\w-]*[a-z])[\w-]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|AKIA[0-9A-Z]{16}(?!\w)|xox[abprs]-[\d-]{10,}|Bearer (?=[^\s\d]*\d)[\w.~+/=-]{16,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----)"
)
"""The same within longer texts. Stricter, since ordinary words may have the same prefixes."""
_LONG = 16
"""Characters from which a secret of the environment is too long to occur in a text by chance."""
_RANDOM = re.compile(r"[\w.=+/~-]{20,}")
"""Minimum length and allowed characters of a value that is tested for randomness."""

_LOGIN = re.compile(r"\b(https?://)[^/\s@'\"]+@|(\w://[^/\s@:'\"]+):[^/\s@'\"]+@")
_QUERY = re.compile(r"(?<=[?&#])([^=&#\s]+)=([^&#\s'\"]+)")
_LOOKUP_PLACES = ("reward_fn", "datapool", "train_evaluation")
_SHORTEST, _SHORTEST_LOOKED_UP = 8, 4
"""Minimum characters of a masked value: of a variable with a secret name, and of one that a config refers to."""

_WRITTEN = "be written to the files of a run; refer to an environment variable instead: ${MY_VARIABLE}"

_BETWEEN = "\n\0\n"
"""Separator that occurs in no text of a config."""

_looked_up: set[str] = set()


@cache
def is_secret_name(name: str) -> bool:
    """Return whether a key, header or variable of this name contains a secret.

    Example:
        >>> [is_secret_name(name) for name in ("api_key", "HF_TOKEN", "max_new_tokens")]
        [True, True, False]
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or words[0] in ("n", "num", "max", "min"):
        return False
    before = words[-2] if len(words) > 1 else None
    return (
        not _SECRETS.isdisjoint(words)
        or words[-1] == "bearer"
        or (words[-1] == "token" and (before is None or before in _KINDS_OF_TOKENS))
        or (words[-1] == "key" and before in _KINDS_OF_KEYS)
    )


def names_variable(value: Any) -> bool:
    """Return whether a value of a config refers to an environment variable: `${MY_KEY}`."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def secret_issues(config: Mapping[str, Any]) -> list[ConfigIssue]:
    """Return the errors of a config: secrets, and references to variables where they are not replaced."""
    return [ConfigIssue(path, detail) for path, detail, _ in _found(config)]


def without_values(config: Mapping[str, Any], issues: Collection[ConfigIssue]) -> list[ConfigIssue]:
    """Return the errors of a config with the secrets in it masked."""
    secrets = [value for _, _, value in _found(config) if len(value) >= _SHORTEST_LOOKED_UP]
    values = {*secrets, *(shown(value)[1:-1] for value in secrets)}  # messages shorten long values
    together = _BETWEEN.join(part for issue in issues for part in (issue.path, issue.message))
    parts = without_secrets(together, values).split(_BETWEEN)  # one pass: there may be thousands of both
    return [ConfigIssue(*pair) for pair in zip(parts[::2], parts[1::2], strict=False)]


def masked(config: Any, keys: tuple[str, ...] = ()) -> Any:
    """Return a config with all secrets masked, which may be written to files."""
    if isinstance(config, Mapping):
        return {key: masked(item, (*keys, *str(key).split("."))) for key, item in config.items()}
    if isinstance(config, list | tuple):
        return [masked(item, keys) for item in config]
    if not _is_text(config, keys) or _REFERENCE.fullmatch(str(config)):
        return config
    if _secret_by_place(keys, config) or _secret_by_itself(str(config), _own_secrets()):
        return HIDDEN
    return _without_logins(config) if isinstance(config, str) else config


def with_values(value: Any, path: str = "") -> Any:
    """Return a component's arguments with references to environment variables replaced by their values.

    Raises:
        RL4LMsLikeError: a variable is not set.
    """
    if isinstance(value, Mapping):
        return {key: with_values(item, join(path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [with_values(item, join(path, index)) for index, item in enumerate(value)]
    reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if reference is None:
        return value
    found = os.environ.get(reference[1], "")
    if not found:
        raise RL4LMsLikeError(f"{path}: the environment variable {reference[1]} is not set")
    if len(found) >= _SHORTEST_LOOKED_UP:
        _looked_up.add(found)
    return found


def without_secrets(text: str, also: Collection[str] = ()) -> str:
    """Return a text with the known secrets of this process masked, and further values that are given."""
    for form in sorted(_forms({*_own_secrets(), *_looked_up, *also}), key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return _without_logins(text)


def _forms(values: Iterable[str]) -> set[str]:
    """Return values unchanged, without surrounding whitespace, and as `repr` and JSON write them."""
    return {
        form
        for value in values
        for form in (value, value.strip(), repr(value)[1:-1], json.dumps(value)[1:-1])
        if len(form) >= _SHORTEST_LOOKED_UP
    }


def _found(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the path, the message, and the text that must not be shown."""
    own = _own_secrets()
    for path, keys, value in _texts(config, "", ()):
        reference = _REFERENCE.fullmatch(value)
        if reference is not None:
            if not (keys[0] in _LOOKUP_PLACES and "args" in keys) and "post_processing_fn" not in keys:
                detail = "variables are replaced in the args of the reward, metrics, data pool and post-processor only"
                yield path, detail, ""
        elif _from_environment(keys):
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
                yield path, "expected the name of an environment variable, not its value", value
        elif _secret_by_place(keys, value):
            yield path, f"a secret would {_WRITTEN}", value
        elif _secret_by_itself(value, own):
            yield path, f"looks like a secret, which would {_WRITTEN}", value
        elif _without_logins(value) != value:
            yield path, f"a URL with a name, password or key would {_WRITTEN}", value


def _texts(value: Any, path: str, keys: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield each text of a config with its path and keys; also numbers where a secret is expected."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, join(path, key), (*keys, *str(key).split(".")))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, join(path, index), keys)
    elif _is_text(value, keys):
        yield path, keys, str(value)


def _is_text(value: Any, keys: tuple[str, ...]) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and _secret_by_place(keys, value)
    return bool(keys) and (number or (isinstance(value, str) and value != ""))


def _secret_by_place(keys: tuple[str, ...], value: Any) -> bool:
    if _from_environment(keys):
        return False
    words = [word.lower() for word in _WORDS.findall(keys[-1])]
    is_header = "headers" in keys[:-1] and (not words or words[0] not in _PLAIN_HEADERS)
    names = {key for key in keys if is_secret_name(key)}
    if is_header or names - _UNLESS_CREDENTIAL:
        return True
    if words[-1:] in (["key"], ["keys"]) and _looks_random(str(value)):  # such keys may also name columns or fields
        return True
    return bool(names) and _CREDENTIAL.fullmatch(str(value)) is not None


def _secret_by_itself(value: str, own: Collection[str]) -> bool:
    return _WELL_KNOWN.fullmatch(value) is not None or _holds_secret(value, own)


def _holds_secret(value: str, own: Collection[str]) -> bool:
    """Return whether a text is or contains a secret. A short secret only counts if it is the whole text."""
    if value in own or _WITHIN.search(value):
        return True
    return any(secret in value for secret in own if len(secret) >= _LONG or _looks_random(secret))


def _looks_random(value: str) -> bool:
    """Return whether a value has digits, and words and numbers of at most 3.5 characters on average."""
    if not _RANDOM.fullmatch(value) or not any(character.isdigit() for character in value):
        return False
    return len(value) <= 3.5 * len(_WORDS.findall(value))


def secret_in(value: Any, path: str = "state", known: Collection[str] | None = None) -> str | None:
    """Return the path in JSON-like data of a known secret or of a value that looks like one; None if there is none."""
    if known is None:
        known = _forms({*_own_secrets(), *(value for value in _looked_up if len(value) >= _SHORTEST)})
    if isinstance(value, dict):
        pairs = [(f"{path}[{key!r}]", item) for key, item in value.items()]
        if any(secret_in(key, "", known) is not None for key in value):
            return f"a key of {path}"
    elif isinstance(value, list):
        pairs = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return path if isinstance(value, str) and _holds_secret(value, known) else None
    return next((found for inner, item in pairs if (found := secret_in(item, inner, known)) is not None), None)


def _from_environment(keys: tuple[str, ...]) -> bool:
    """Return whether a value is the name of a variable: `headers_from_env: {Authorization: MY_VARIABLE}`."""
    return any(key.endswith("_from_env") for key in keys)


def _own_secrets() -> set[str]:
    """Return the values of this process's environment variables with secret names."""
    return {
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and (is_secret_name(name) or name.upper().endswith(("_TOKEN", "_KEY", "_PASS")))
        if name not in ("PWD", "OLDPWD")  # folders, set by the shell
    }


def _without_logins(text: str) -> str:
    """Mask names and passwords in URLs, and the values of secret names in their queries."""
    if "://" not in text:
        return text
    text = _LOGIN.sub(lambda found: f"{found[1]}{HIDDEN}@" if found[1] else f"{found[2]}:{HIDDEN}@", text)
    return _QUERY.sub(lambda found: f"{found[1]}={HIDDEN}" if is_secret_name(found[1]) else found[0], text)
