"""Scores by a language model behind an OpenAI-compatible chat endpoint, or on this machine.

    prompt, response ─ template ─> POST {url}/chat/completions ─> answer ─ regex or JSON key ─> number
                               └─> generation with transformers ─┘

    compare_with: null          one number for each response, the mean of n_samples answers
    compare_with: responses     fraction of the other responses to its prompt against which a response wins
    compare_with: references    fraction of its references against which a response wins

If the template has the prompt, a server gets the prompt's images, too, as `image_url` parts before the text.

A comparison is made in both orders, because language models prefer a position: it is won only if both orders agree,
else it is a tie, which counts as a half (arXiv 2306.05685). `system.http_client` describes retries and errors.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from itertools import combinations
from statistics import fmean
from typing import Any, Literal, NamedTuple

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.core.pictures import Picture
from rl4lms_like.scoring.answering import AnsweringModel
from rl4lms_like.scoring.answers import compiled, extracted
from rl4lms_like.scoring.frozen import version_of
from rl4lms_like.scoring.score import Score, Texts
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.event_loop import EventLoop, gathered
from rl4lms_like.system.http_client import HttpClient, RemoteError, check_url, secret_headers
from rl4lms_like.system.numbers import Count, Day, Finite, NonNegative, Positive, Whole
from rl4lms_like.system.wording import beginning

RATE = """\
Rate the response to the prompt below.

[Prompt]
{prompt}

[Response]
{response}

How helpful, correct and well written is the response, from 1 (worst) to 10 (best)? Explain your rating in one sentence.
Then write the rating in a last line of this form:
Score: <number>"""
COMPARE = """\
Compare two responses to the prompt below.

[Prompt]
{prompt}

[Response A]
{response_a}

[Response B]
{response_b}

Which response is more helpful, correct and well written? Explain your choice in one sentence. Then write A, B or tie in
a last line of this form:
Winner: <choice>"""

# Models like to write "**Score:** 7" in Markdown, hence the asterisks.
_SCORE = r"(?i)score:[\s*]*(-?\d+(?:\.\d+)?)"
_WINNER = r"(?i)winner:[\s*]*(A|B|tie)\b"
_POINTS = {"a": 1.0, "tie": 0.5, "b": 0.0}
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_OBJECT = re.compile(r'\{\s*"')
_RANGE = (1.0, 10.0)
_VERSION = re.compile(r"[-@:](?:\d{2,4}-\d\d-\d\d|\d{4,8})")
"""End of a model's name that stands for its version: a server answers for `gpt-4o` as `gpt-4o-2024-08-06`."""
_LONGEST_ANSWER = 100_000
"""Characters of an answer: the time that it takes to search it for a score has no other limit."""
_MOST_BROKEN_OBJECTS = 1000
"""Number of beginnings of objects that are no JSON, above which an answer has no score."""
_LARGEST_BODY = 2**20
"""Bytes of the body of an answer."""
_OF_SERVER = (
    *("url", "model", "n_samples", "temperature", "request", "repeats", "concurrency", "timeout_s", "retries"),
    *("headers_from_env", "answer_models"),
)
"""Arguments that only have an effect with `url`: a local model answers greedily, so one more answer is the same."""
_OF_MODEL = ("max_new_tokens", "batch_size", "device", "dtype", "template_date", "trust_remote_code")
"""Arguments that only have an effect with `model_name`."""
_LOCKED_S = 60.0
"""Seconds to wait while another process writes to the cache."""


class Message(NamedTuple):
    """Message to the model.

    Args:
        text: the template with the texts of a response.
        images: pictures of the prompt, if the template has it.
    """

    text: str
    images: tuple[Picture, ...] = ()


class AnswerCache:
    """Answers by key in an SQLite file, which several processes can use at the same time.

    Args:
        folder: folder of the file; created if it does not exist.

    Raises:
        ValueError: the file cannot be read or written; also raised by the methods.
    """

    def __init__(self, folder: str) -> None:
        self._file = with_home(folder).absolute() / "answers.sqlite"
        if self._file.exists() and not self._file.is_file():
            raise ValueError(f"cache: {self._file} is not a regular file; remove it")
        with self._database() as database:
            database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the stored answers by key."""
        answers = {}
        with self._database() as database:
            # One query for each key: SQLite limits the number of parameters of a query.
            for key in keys:
                row = database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    answers[key] = self._decoded(row[0])
        return answers

    def _decoded(self, stored: Any) -> str:
        """Return a stored answer; one that this class did not write is a `ValueError`."""
        try:
            answer = json.loads(stored)
        except (TypeError, ValueError, RecursionError):
            answer = None
        if not isinstance(answer, str) or len(answer) > _LONGEST_ANSWER:
            raise ValueError(f"cache: {self._file} was changed: it has an answer that no judge stored; remove the file")
        return answer

    def write(self, key: str, answer: str) -> None:
        """Store an answer; after the return it survives the end of the process."""
        # As JSON, because SQLite rejects lone surrogates.
        with self._database() as database:
            database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        # A connection for each use: one connection must not be used by several threads or after a fork. As a context
        # manager it commits, and `closing` closes it.
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._file, timeout=_LOCKED_S)) as database, database:
                yield database
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"cache: {self._file}: {error}") from error


@dataclass(eq=False, repr=False)
class LLMJudge(Score):
    """Score of a response by a language model, on an OpenAI-compatible server (`POST {url}/chat/completions`) or here.

    Args:
        url: address of the API, `http://127.0.0.1:8000/v1`, without user name and password; or set `model_name`.
        model: name of the model on the server. An answer of another model is an error; versions of a name are the same.
        template: message to the model, with the placeholders `{response}` and optionally `{prompt}` and `{reference}`;
            with `compare_with`, `{response_a}` and `{response_b}`. Default: a rating from 1 to 10, or a comparison.
        compare_with: instead of a rating, the fraction of the other `responses` to the same prompt in a call, or of the
            `references`, against which a response wins in both orders; a tie counts as a half.
        score_regex: regular expression with one group; the group of its last match is the score (with `compare_with`:
            A, B or tie). Default: a number after `Score:`, or the choice after `Winner:`.
        score_json: instead of `score_regex`: key of the score in a JSON object in the answer.
        score_range: lowest and highest valid score; null accepts any number.
        rescale: map `score_range`, if there is one, linearly to 0..1.
        n_samples: answers per message, which are averaged; above 1 they need a temperature.
        temperature: of the model; null: the server's.
        request: further fields of a request, such as `{max_tokens: 256}`.
        repeats: maximum number of further answers to ask for if an answer has no valid score.
        concurrency: maximum number of concurrent requests.
        timeout_s: time limit of a request in seconds, including its answer.
        retries: maximum number of retries of a request that failed.
        max_requests: maximum number of requests of this process; a request and its retries count as one.
        max_seconds: maximum time that this process waits for answers, in all calls together.
        headers_from_env: header -> name of the environment variable that holds its value, for example
            `{Authorization: JUDGE_AUTHORIZATION}` with the value `Bearer ...`.
        cache: folder in which answers are stored; they are found again by URL, request and number of the sample.
        answer_models: further names under which the server's answers are accepted, if `model` is an alias.
        model_name: in place of `url` and `model`: hub id or local folder of a causal language model that answers here,
            greedily.
        max_new_tokens: with `model_name`: maximum length of an answer.
        batch_size: with `model_name`: messages that are answered together.
        device: with `model_name`: device of the model; `auto` uses a GPU if available.
        dtype: with `model_name`: data type of its weights.
        template_date: with `model_name`: the day that its chat template writes as today, such as 2026-11-20. Needed by
            templates that write it.
        trust_remote_code: with `model_name`: run code shipped with the checkpoint.
    """

    url: str | None = None
    model: str | None = None
    template: str | None = None
    compare_with: Literal["responses", "references"] | None = None
    score_regex: str | None = None
    score_json: str | None = None
    score_range: tuple[Finite, Finite] | None = _RANGE
    rescale: bool = True
    n_samples: Count = 1
    temperature: NonNegative | None = 0.0
    request: dict[str, Any] | None = None
    repeats: Whole = 2
    concurrency: Count = 8
    timeout_s: Positive = 60.0
    retries: Whole = 3
    max_requests: Count | None = None
    max_seconds: Positive | None = None
    headers_from_env: dict[str, str] | None = None
    cache: str | None = None
    answer_models: list[str] | None = None
    model_name: str | None = None
    max_new_tokens: Count = 256
    batch_size: Count = 8
    device: Device = "auto"
    dtype: Dtype = "float32"
    template_date: Day | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        is_rating = self.compare_with is None
        default_template = RATE if is_rating else COMPARE
        default_regex = _SCORE if is_rating else _WINNER
        self._template = default_template if self.template is None else self.template
        self._regex = default_regex if self.score_regex is None else self.score_regex

        issues = list(self._issues())
        if issues:
            raise ValueError("; ".join(issues))
        self._pattern = compiled(self._regex)
        self.needs_references = self.compare_with == "references" or "{reference}" in self._template

        self._cache = None if self.cache is None else AnswerCache(self.cache)
        self._answering_model: AnsweringModel | None = None
        if self.model_name is not None:
            self._answering_model = AnsweringModel(
                self.model_name,
                template_date=self.template_date,
                device=self.device,
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code,
            )
        else:
            self._connect()

        # Of this process, in all calls: what `max_requests` and `max_seconds` limit.
        self._n_requests = 0
        self._seconds = 0.0

    def _connect(self) -> None:
        assert self.url is not None
        self._loop = EventLoop("judge")
        self._client = HttpClient(
            f"{self.url.rstrip('/')}/chat/completions",
            timeout_s=self.timeout_s,
            retries=self.retries,
            headers_from_env=self.headers_from_env,
            max_response_bytes=_LARGEST_BODY,
            max_connections=self.concurrency,
        )

    @property
    def _name(self) -> str:
        """Name of the server or of the local model, for messages."""
        return str(self.url if self.model_name is None else self.model_name)

    def _issues(self) -> Iterator[str]:
        """Yield everything that is wrong with the arguments."""
        yield from self._issues_of_kind()
        checks: tuple[Callable[[], object], ...] = (
            lambda: None if self.url is None else check_url(self.url),
            lambda: secret_headers(self.headers_from_env),
            self._check_regex,
            self._check_request,
        )
        for check in checks:
            try:
                check()
            except ValueError as error:
                yield str(error)
        yield from self._template_issues()

        if self.score_range is not None and not self.score_range[0] < self.score_range[1]:
            yield f"score_range: expected [low, high] with low below high, got {list(self.score_range)}"
        if self.compare_with is not None and (self.score_range != _RANGE or not self.rescale):
            yield "score_range, rescale: have no effect with compare_with; remove them"
        if self.n_samples > 1 and self.temperature == 0:
            yield "temperature: answers at temperature 0 are equal; for n_samples above 1 set it above 0"

    def _issues_of_kind(self) -> Iterator[str]:
        """Yield arguments of a server and of a local model that are set together, and those that are missing."""
        defaults = {field.name: field.default for field in fields(self)}
        if self.model_name is not None:
            for name in _OF_SERVER:
                if getattr(self, name) != defaults[name]:
                    yield f"{name}: is of a server, and model_name is a model on this machine, which answers greedily"
            return

        if self.url is None or self.model is None:
            yield "url, model: set both, or model_name for a model on this machine"
        for name in _OF_MODEL:
            if getattr(self, name) != defaults[name]:
                yield f"{name}: has no effect without model_name"

    def _template_issues(self) -> Iterator[str]:
        """Yield placeholders that nothing would replace, and those without which the model sees no response."""
        needed = ("response",) if self.compare_with is None else ("response_a", "response_b")
        known = (*needed, "prompt", "reference")
        placeholders = _PLACEHOLDER.findall(self._template)

        for name in sorted({*placeholders} - {*known}):
            listed = ", ".join(f"{{{placeholder}}}" for placeholder in known)
            yield f"template: unknown placeholder {{{name}}}; known: {listed}"
        for name in needed:
            if name not in placeholders:
                yield f"template: has no placeholder {{{name}}}"

    def _check_regex(self) -> None:
        if self.score_regex is not None and self.score_json is not None:
            raise ValueError("score_regex, score_json: set one of them")
        if compiled(self._regex).groups != 1:
            raise ValueError(f"score_regex: expected one group, {self._regex!r} has {compiled(self._regex).groups}")

    def _check_request(self) -> None:
        # Fields that other arguments set, and those that would change the form of the answer.
        names = {"model", "messages", "temperature", "n", "stream"} & {*(self.request or {})}
        if names:
            raise ValueError(f"request: {', '.join(sorted(names))} cannot be set here")
        try:
            json.dumps(self.request)
        except TypeError as error:  # YAML has dates
            raise ValueError(f"request: {error}") from error

    def per_text(self, texts: Texts) -> list[float]:
        if self.compare_with is not None:
            return self._win_rates(texts)
        return self._means([self._message(texts, index, response=text) for index, text in enumerate(texts.responses)])

    def compare(self, texts: Texts, others: Sequence[str]) -> list[float]:
        """Compare the response of each sample with another text, in both orders.

        Returns:
            1 if the response wins in both orders, 0 if the other text does, else 0.5; equal texts are not compared.
        """
        compared = [index for index, other in enumerate(others) if texts.responses[index] != other]
        messages = []
        for index in compared:
            messages += self._both_orders(texts, others, index)
        means = self._means(messages)

        # Mean points of A, which is the response in the first order and the other text in the second. What wins only as
        # A, or only as B, wins by its position: a tie.
        results = [0.5] * len(others)
        for index, as_a, other_as_a in zip(compared, means[::2], means[1::2], strict=True):
            if as_a > 0.5 > other_as_a:
                results[index] = 1.0
            elif as_a < 0.5 < other_as_a:
                results[index] = 0.0
        return results

    def _both_orders(self, texts: Texts, others: Sequence[str], index: int) -> list[Message]:
        """Return the messages that compare a response with the other text, first as A and then as B."""
        response = texts.responses[index]
        return [
            self._message(texts, index, response_a=response, response_b=others[index]),
            self._message(texts, index, response_a=others[index], response_b=response),
        ]

    def _win_rates(self, texts: Texts) -> list[float]:
        """Return the mean result of each response against all texts with which it is compared."""
        results: list[list[float]] = [[] for _ in texts.responses]
        if self.compare_with == "references":
            indices = []
            references: list[str] = []
            for index, sample_references in enumerate(texts.references):
                indices += [index] * len(sample_references)
                references += sample_references
            for index, result in zip(indices, self.compare(texts.chosen(indices), references), strict=True):
                results[index].append(result)
            return [fmean(sample_results) for sample_results in results]

        # Each pair of responses to a prompt is compared once: what one wins, the other loses.
        pairs = _pairs_of_one_prompt(texts)
        others = [texts.responses[second] for _, second in pairs]
        compared = self.compare(texts.chosen([first for first, _ in pairs]), others)
        for (first, second), result in zip(pairs, compared, strict=True):
            results[first].append(result)
            results[second].append(1 - result)
        return [fmean(sample_results) for sample_results in results]

    def _message(self, texts: Texts, index: int, **responses: str) -> Message:
        """Return the message about one sample; a `ValueError` for images that the model cannot read."""
        # In one pass, so that a placeholder in a response stays as it is: it would otherwise change the instructions.
        values = {"prompt": texts.prompts[index], "reference": "\n".join(texts.references[index]), **responses}
        text = _PLACEHOLDER.sub(lambda match: values[match[1]], self._template)

        # A prompt without its images would be another one.
        images = () if texts.images is None or "{prompt}" not in self._template else texts.images[index]
        if images and self.model_name is not None:
            way_out = "set url and model of a server that reads images, or a template without {prompt}"
            raise ValueError(f"the prompts have images, and {self.model_name} reads texts only; {way_out}")
        return Message(text, images)

    def _means(self, messages: Sequence[Message]) -> list[float]:
        """Return the mean value of the answers to each message; equal messages are sent once."""
        # `n_samples` answers for each distinct message, each with a key of its own.
        keys_of = {message: self._keys(message) for message in messages}
        message_of: dict[str, Message] = {}
        for message, keys in keys_of.items():
            message_of |= dict.fromkeys(keys, message)

        # Before the first request: paying for a part of the answers would be of no use.
        values = self._stored_values(list(message_of))
        missing = [key for key in message_of if key not in values]
        if self.max_requests is not None and self._n_requests + len(missing) > self.max_requests:
            left = f"{len(missing)} requests are needed and {self.max_requests - self._n_requests} are left"
            raise RemoteError(f"{self._name}: {left} of max_requests: {self.max_requests}")

        start = time.monotonic()
        try:
            if self._answering_model is not None:
                values |= self._generated(self._answering_model, {key: message_of[key] for key in missing})
            else:
                calls = [partial(self._ask, key, message_of[key]) for key in missing]
                values |= zip(missing, self._loop.run(self._in_time(calls)), strict=True)
        finally:
            self._seconds += time.monotonic() - start

        means = []
        for message in messages:
            means.append(fmean(values[key] for key in keys_of[message]))
        return means

    def _stored_values(self, keys: Sequence[str]) -> dict[str, float]:
        """Return the values of the stored answers, by key."""
        values: dict[str, float] = {}
        if self._cache is None:
            return values

        # An answer may be of a run with another regex or range, under which it has a value, while here it has none.
        for key, answer in self._cache.read(keys).items():
            value = self._value(answer)
            if value is not None:
                values[key] = value
        return values

    def _generated(self, model: AnsweringModel, message_of: dict[str, Message]) -> dict[str, float]:
        """Return the values of the answers that a local model generates, by key, and store the answers."""
        start = time.monotonic()
        keys = list(message_of)
        values: dict[str, float] = {}
        texts = [message.text for message in message_of.values()]
        answers = model.answers(texts, max_new_tokens=self.max_new_tokens, batch_size=self.batch_size)

        # Each answer is stored at once: a run that ends at the next one does not generate it again.
        for answer in answers:
            value = self._value(answer.text) if answer.is_complete else None
            if value is None:
                detail = self._without_score(1, is_complete=answer.is_complete, limit="max_new_tokens")
                raise ValueError(f"{self._name} {detail}: {answer.text[:200]!r}")
            self._store(keys[answer.index], answer.text)
            values[keys[answer.index]] = value
            self._n_requests += 1
            if self.max_seconds is not None and self._seconds + time.monotonic() - start > self.max_seconds:
                raise RemoteError(f"{self._name}: the answers took longer than max_seconds: {self.max_seconds:g}")
        return values

    async def _in_time(self, calls: Sequence[Callable[[], Awaitable[float]]]) -> list[float]:
        left = None if self.max_seconds is None or not calls else self.max_seconds - self._seconds
        try:
            return await asyncio.wait_for(gathered(calls, self.concurrency), left)
        except asyncio.TimeoutError:
            raise RemoteError(f"{self._name}: the answers took longer than max_seconds: {self.max_seconds:g}") from None

    def _body(self, message: Message, url_of: Callable[[Picture], str]) -> bytes:
        """Return the request for an answer, with the addresses of the images that a function returns."""
        if self.model_name is not None:
            # Everything on which an answer depends; a folder that is written again has another version.
            settings = [self.model_name, version_of(self.model_name), self.max_new_tokens, self.dtype]
            return json.dumps([*settings, self.template_date, message.text]).encode()
        content: Any = message.text
        if message.images:
            content = [{"type": "image_url", "image_url": {"url": url_of(image)}} for image in message.images]
            content.append({"type": "text", "text": message.text})
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], **(self.request or {})}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return json.dumps(body).encode()

    def _keys(self, message: Message) -> list[str]:
        """Return the cache keys of a message's samples: hashes of URL, request and number of the sample."""
        # Numbers in place of the images: what a compressor writes depends on its version.
        body = self._body(message, lambda picture: str(picture.number))
        keys = []
        for sample in range(self.n_samples):
            content = b"\n".join([(self.url or "").encode(), body, str(sample).encode()])
            keys.append(sha256(content).hexdigest())
        return keys

    async def _ask(self, key: str, message: Message) -> float:
        """Return the value of the first answer that has one, and store that answer."""
        for _ in range(self.repeats + 1):
            answer, is_complete = await self._answer(message)

            # The "Score: 1" of an answer that was cut off may be the beginning of "Score: 10".
            value = self._value(answer) if is_complete else None
            if value is not None:
                self._store(key, answer)
                return value

        # An answer without a score is no score of 0: the run stops, and the message shows the last answer.
        detail = self._without_score(
            self.repeats + 1, is_complete=is_complete, limit="the limit of tokens in `request`"
        )
        raise self._client.error(detail, answer.encode(errors="replace"))

    def _store(self, key: str, answer: str) -> None:
        if self._cache is not None:
            self._cache.write(key, answer)

    def _without_score(self, n_answers: int, *, is_complete: bool, limit: str) -> str:
        """Return what is wrong with the last of some answers, of which none has a score, for an error."""
        if not is_complete:
            cut_off = f"cut off its answers (finish_reason: length), also the last of {n_answers}"
            return f"{cut_off}; raise {limit}; the answer"
        what = f"the key {self.score_json!r}" if self.score_json else f"the regex {self._regex!r}"
        valid = "" if self.compare_with or self.score_range is None else " from {:g} to {:g}".format(*self.score_range)
        return f"answered {n_answers} times without a valid score{valid} under {what}; the last answer"

    async def _answer(self, message: Message) -> tuple[str, bool]:
        """Return the text of one answer without secrets, which a server may repeat, and whether it is complete."""
        # Checked again, because repeated answers come on top of the requests that `_means` counted.
        if self.max_requests is not None and self._n_requests >= self.max_requests:
            raise RemoteError(f"{self.url}: no request is left of max_requests: {self.max_requests}")
        self._n_requests += 1

        content = await self._client.answer(self._body(message, Picture.png_url))
        decoded = self._client.decoded(content)
        try:
            choice = decoded["choices"][0]
            text = choice["message"]["content"]
        except (TypeError, LookupError):
            raise self._client.error("answered 200 without choices[0].message.content", content) from None

        # Servers that serve one model may leave out its name.
        model = decoded.get("model")
        if isinstance(model, str) and not self._is_the_model(model):
            hint = "if it is the same, add it to `answer_models`"
            raise self._client.error(f"answered as the model {model[:100]!r} instead of {self.model!r}; {hint}")
        if not isinstance(text, str):
            return "", True
        if len(text) > _LONGEST_ANSWER:
            raise self._client.error(f"answered with {len(text)} characters, of at most {_LONGEST_ANSWER}", content)
        return self._client.without_secrets(text), choice.get("finish_reason") != "length"

    def _is_the_model(self, name: str) -> bool:
        """Return whether an answer under this name is one of the requested model, also as a version of it."""
        for requested in (self.model, *(self.answer_models or ())):
            newest = requested.removesuffix("-latest")
            if name == requested or (name.startswith(newest) and _VERSION.fullmatch(name[len(newest) :])):
                return True
        return False

    def _value(self, answer: str) -> float | None:
        """Return the score in an answer, or the result for response A of a comparison; None if it has no valid one."""
        written: Any = json_value(answer, self.score_json) if self.score_json else extracted(answer, self._pattern)
        if self.compare_with is not None:
            return _POINTS.get(str(written).strip().lower())

        # {"score": true} is no score of 1.
        try:
            score = math.nan if isinstance(written, bool) else float(written)
        except (TypeError, ValueError, OverflowError):
            return None
        low, high = self.score_range or (-math.inf, math.inf)
        if not math.isfinite(score) or not low <= score <= high:
            return None
        return (score - low) / (high - low) if self.rescale and self.score_range else score


def _pairs_of_one_prompt(texts: Texts) -> list[tuple[int, int]]:
    """Return the pairs of indices `i < j` of equal prompts; a `ValueError` for a prompt without a second response."""
    groups: dict[str, list[int]] = {}
    for index, identity in enumerate(texts.identities):
        groups.setdefault(identity, []).append(index)

    pairs: list[tuple[int, int]] = []
    for group in groups.values():
        if len(group) == 1:
            prompt = texts.prompts[group[0]]
            hint = "set alg.args.group_size above 1, without env.reward_workers, or compare_with: references"
            raise ValueError(f"compare_with: a single response to the prompt {beginning(prompt)}; {hint}")
        pairs += combinations(group, 2)
    return pairs


def json_value(text: str, key: str) -> Any:
    """Return the value of a key in the last JSON object of a text that has it; None if there is none.

    Examples:
        >>> json_value('I think {not 3}. ```json {"score": 4, "why": "short"}```', "score")
        4
    """
    # Tried at each `{"`: a model writes text before, between and after its objects, and may repeat itself.
    decoder = json.JSONDecoder()
    value = None
    end = 0
    n_failed = 0

    while start := _OBJECT.search(text, end):
        try:
            decoded, end = decoder.raw_decode(text, start.start())
            value = decoded.get(key, value)
        except ValueError:
            end = start.end()
            n_failed += 1
        except RecursionError:
            return None

        # No answer of a model: to try each of tens of thousands of objects would take seconds.
        if n_failed > _MOST_BROKEN_OBJECTS:
            return None
    return value
