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

from rl4lms_like.system.errors import ConfigIssue, RL4LMsLikeError
from rl4lms_like.system.schema import join
from rl4lms_like.system.wording import shown

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
_LOOKUP_BLOCKS = ("reward_fn", "datapool", "train_evaluation")
"""Blocks of a config whose `args` may refer to environment variables."""
_SHORTEST = 8
"""Minimum characters of a masked value of a variable with a secret name."""
_SHORTEST_LOOKED_UP = 4
"""The same of a variable that a config refers to."""

_WRITTEN = "be written to the files of a run; refer to an environment variable instead: ${MY_VARIABLE}"

_BETWEEN = "\n\0\n"
"""Separator that occurs in no text of a config."""

_looked_up: set[str] = set()


@cache
def is_secret_name(name: str) -> bool:
    """Return whether a key, header or variable of this name contains a secret.

    Examples:
        >>> [is_secret_name(name) for name in ("api_key", "HF_TOKEN", "max_new_tokens")]
        [True, True, False]
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or words[0] in ("n", "num", "max", "min"):  # counts and limits of a model's tokens
        return False
    if words[-1] == "bearer" or not _SECRETS.isdisjoint(words):
        return True

    # `eos_token` and `key` of a column are no secrets, `hub_token` and `api_key` are: the word before decides.
    word_before = words[-2] if len(words) > 1 else None
    if words[-1] == "token":
        return word_before is None or word_before in _KINDS_OF_TOKENS
    return words[-1] == "key" and word_before in _KINDS_OF_KEYS


def names_variable(value: Any) -> bool:
    """Return whether a value of a config refers to an environment variable: `${MY_KEY}`."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def secret_issues(config: Mapping[str, Any]) -> list[ConfigIssue]:
    """Return the errors of a config: secrets, and references to variables where they are not replaced."""
    return [ConfigIssue(path, message) for path, message, _ in _refused_values(config)]


def without_values(config: Mapping[str, Any], issues: Collection[ConfigIssue]) -> list[ConfigIssue]:
    """Return the errors of a config with the secrets in it masked."""
    # As they stand in the config, and as messages shorten long ones.
    values: set[str] = set()
    for _, _, value in _refused_values(config):
        if len(value) >= _SHORTEST_LOOKED_UP:
            values.add(value)
            values.add(shown(value)[1:-1])

    # All paths and messages as one text, so that there is one pass for each secret: there may be thousands of both.
    texts: list[str] = []
    for issue in issues:
        texts += [issue.path, issue.message]
    texts = without_secrets(_BETWEEN.join(texts), values).split(_BETWEEN)
    return [ConfigIssue(path, message) for path, message in zip(texts[::2], texts[1::2], strict=False)]


def masked(config: Any, keys: tuple[str, ...] = ()) -> Any:
    """Return a config with all secrets masked, which may be written to files."""
    if isinstance(config, Mapping):
        return {key: masked(item, (*keys, *str(key).split("."))) for key, item in config.items()}
    if isinstance(config, list | tuple):
        return [masked(item, keys) for item in config]

    # The name of a variable may be shown; whoever resumes the run must set it.
    if not _is_text(config, keys) or _REFERENCE.fullmatch(str(config)):
        return config
    if _secret_by_key(keys, config) or _secret_by_itself(str(config), _environment_secrets()):
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

    variable = reference[1]
    secret = os.environ.get(variable, "")
    if not secret:
        raise RL4LMsLikeError(f"{path}: the environment variable {variable} is not set")

    # From now on it is masked in all messages, whatever the variable's name. To mask `1` would spoil every number.
    if len(secret) >= _SHORTEST_LOOKED_UP:
        _looked_up.add(secret)
    return secret


def without_secrets(text: str, also: Collection[str] = ()) -> str:
    """Return a text with the known secrets of this process masked, and further values that are given."""
    # The longest first: a secret may be part of another one, whose ends would then be shown.
    for form in sorted(_forms({*_environment_secrets(), *_looked_up, *also}), key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return _without_logins(text)


def _forms(values: Iterable[str]) -> set[str]:
    """Return values unchanged, without surrounding whitespace, and as `repr` and JSON write them."""
    forms: set[str] = set()
    for value in values:
        forms |= {value, value.strip(), repr(value)[1:-1], json.dumps(value)[1:-1]}
    return {form for form in forms if len(form) >= _SHORTEST_LOOKED_UP}


def _refused_values(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the path, the message, and the text that must not be shown."""
    secrets = _environment_secrets()
    for path, keys, value in _texts(config, "", ()):
        # A reference: accepted where it is replaced. Elsewhere a component would receive the text `${MY_KEY}`.
        if _REFERENCE.fullmatch(value) is not None:
            if not (keys[0] in _LOOKUP_BLOCKS and "args" in keys) and "post_processing_fn" not in keys:
                detail = "variables are replaced in the args of the reward, metrics, data pool and post-processor only"
                yield path, detail, ""

        # The name of a variable: a value with other characters is the secret itself, written there by mistake.
        elif _from_environment(keys):
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
                yield path, "expected the name of an environment variable, not its value", value

        # A text, from the surest sign to the weakest; only one message each.
        elif _secret_by_key(keys, value):
            yield path, f"a secret would {_WRITTEN}", value
        elif _secret_by_itself(value, secrets):
            yield path, f"looks like a secret, which would {_WRITTEN}", value
        elif _without_logins(value) != value:
            yield path, f"a URL with a name, password or key would {_WRITTEN}", value


def _texts(value: Any, path: str, keys: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield each text of a config with its path and keys; also numbers where a secret is expected."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            # A key may be a dotted path, as in the `set` of a benchmark's run: {alg.args.token: ...}.
            yield from _texts(item, join(path, key), (*keys, *str(key).split(".")))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, join(path, index), keys)
    elif _is_text(value, keys):
        yield path, keys, str(value)


def _is_text(value: Any, keys: tuple[str, ...]) -> bool:
    """Return whether a value may be a secret: a text, or a number under a secret name, such as a PIN."""
    if not keys:
        return False
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _secret_by_key(keys, value)
    return isinstance(value, str) and value != ""


def _secret_by_key(keys: tuple[str, ...], value: Any) -> bool:
    """Return whether the keys above a value, from the outermost, make it a secret."""
    if _from_environment(keys):
        return False
    words = [word.lower() for word in _WORDS.findall(keys[-1])]

    # Headers may be named by their server: all are secrets but a few well-known ones (`Accept`, `User-Agent`).
    is_header = "headers" in keys[:-1] and (not words or words[0] not in _PLAIN_HEADERS)
    secret_names = {key for key in keys if is_secret_name(key)}
    if is_header or secret_names - _UNLESS_CREDENTIAL:
        return True

    # Names that have other meanings, too: the value must look like a secret. `key` often names a column or field.
    if words[-1:] in (["key"], ["keys"]) and _looks_random(str(value)):
        return True
    return bool(secret_names) and _CREDENTIAL.fullmatch(str(value)) is not None


def _secret_by_itself(value: str, secrets: Collection[str]) -> bool:
    return _WELL_KNOWN.fullmatch(value) is not None or _holds_secret(value, secrets)


def _holds_secret(value: str, secrets: Collection[str]) -> bool:
    """Return whether a text is or contains a secret. A short secret only counts if it is the whole text."""
    if value in secrets or _WITHIN.search(value):
        return True
    contained = [secret for secret in secrets if secret in value]
    return any(len(secret) >= _LONG or _looks_random(secret) for secret in contained)


def _looks_random(value: str) -> bool:
    """Return whether a value has digits, and words and numbers of at most 3.5 characters on average."""
    if not _RANDOM.fullmatch(value) or not any(character.isdigit() for character in value):
        return False
    # Random characters change often between digits, small and capital letters: `9f86d081` is 9, f, 86, d, 081.
    return len(value) <= 3.5 * len(_WORDS.findall(value))


def secret_in(value: Any, path: str = "state", known: Collection[str] | None = None) -> str | None:
    """Return the path in JSON-like data of a known secret or of a value that looks like one; None if there is none."""
    # Short values that were looked up are left out: a state may contain one by chance, and could not be saved.
    if known is None:
        known = _forms({*_environment_secrets(), *(value for value in _looked_up if len(value) >= _SHORTEST)})

    # A key that is a secret must not be part of the path, which is shown.
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        if any(secret_in(key, "", known) is not None for key in value):
            return f"a key of {path}"
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, str) and _holds_secret(value, known):
        return path

    for item_path, item in items:
        secret_path = secret_in(item, item_path, known)
        if secret_path is not None:
            return secret_path
    return None


def _from_environment(keys: tuple[str, ...]) -> bool:
    """Return whether a value is the name of a variable: `headers_from_env: {Authorization: MY_VARIABLE}`."""
    return any(key.endswith("_from_env") for key in keys)


def _environment_secrets() -> set[str]:
    """Return the values of this process's environment variables with secret names."""
    secrets: set[str] = set()
    for name, value in os.environ.items():
        if name in ("PWD", "OLDPWD"):  # folders, set by the shell; `pwd` is a word for a password
            continue
        is_secret = is_secret_name(name) or name.upper().endswith(("_TOKEN", "_KEY", "_PASS"))
        if is_secret and len(value) >= _SHORTEST:
            secrets.add(value)
    return secrets


def _without_logins(text: str) -> str:
    """Mask names and passwords in URLs, and the values of secret names in their queries."""
    if "://" not in text:
        return text

    # http: the name is masked too, since a token may be given in its place. Other schemes (databases): the password.
    def masked_login(match: re.Match[str]) -> str:
        return f"{match[1]}{HIDDEN}@" if match[1] else f"{match[2]}:{HIDDEN}@"

    def masked_query(match: re.Match[str]) -> str:
        return f"{match[1]}={HIDDEN}" if is_secret_name(match[1]) else match[0]

    return _QUERY.sub(masked_query, _LOGIN.sub(masked_login, text))
