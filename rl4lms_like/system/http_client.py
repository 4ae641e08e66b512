"""Requests to an HTTP server, with retries.

    connection error, timeout, cut off, 429, 5xx     retried after 1, 2, 4 ... back-offs, or as `Retry-After` says
    anything else but 200                            an error with URL, status and the first characters of the answer

Headers with secrets are read from the environment. They never appear in a config, an error or a pickle.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit, urlunsplit

from rl4lms_like.system.numbers import Count, NonNegative, Positive, Whole

if TYPE_CHECKING:
    import httpx2

_EXCERPT = 200
_MAX_REDIRECTS = 3


class RemoteError(ValueError):
    """Error of a server that did not return a usable answer."""


class _TemporaryError(Exception):
    """The server is busy, unreachable or slow: the request is repeated, after the time that the server asks for."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(eq=False, repr=False)
class HttpClient:
    """Client of one HTTP server; requests may be repeated.

    Args:
        url: `http://` or `https://`, without user name and password.
        timeout_s: time limit of a request in seconds, including its answer.
        retries: maximum number of retries of a request.
        backoff_s: seconds before the first retry; doubled with each retry.
        max_wait_s: maximum back-off in seconds; if the server asks for a longer wait (`Retry-After`), it has failed.
        headers_from_env: header -> name of the environment variable that holds its value.
        max_response_bytes: maximum size of an answer.
        max_connections: maximum number of concurrent requests.
    """

    url: str
    timeout_s: Positive = 30.0
    retries: Whole = 3
    backoff_s: NonNegative = 1.0
    max_wait_s: NonNegative = 60.0
    headers_from_env: dict[str, str] | None = None
    max_response_bytes: Count = 10_000_000
    max_connections: Count = 4

    def __post_init__(self) -> None:
        check_url(self.url)
        self._client: httpx2.AsyncClient | None = None
        self._client_loop: asyncio.AbstractEventLoop | None = None
        # Read only to fail now if a variable is missing. They are read again for each request and never stored.
        secret_headers(self.headers_from_env)

    async def answer(self, body: bytes, path: str = "") -> bytes:
        """Send a POST request, with retries after temporary failures, and return the body of the answer.

        Args:
            body: JSON.
            path: path of the request on the server, with its query; default: that of `url`.

        Raises:
            RemoteError: the server did not answer with status 200.
        """
        for attempt in range(self.retries + 1):
            try:
                return await asyncio.wait_for(self._request(body, path), self.timeout_s)
            except asyncio.TimeoutError:
                failure = f"did not answer within {self.timeout_s:g} s"
                retry_after_s = None
            except _TemporaryError as error:
                failure = str(error)
                retry_after_s = error.retry_after_s

            # An earlier retry than the server asks for would fail again; a longer wait would look like a hanging run.
            if retry_after_s is not None and retry_after_s > self.max_wait_s:
                raise self.error(f"{failure}; it asks to wait {retry_after_s:g} s (max_wait_s)", path=path)
            if attempt == self.retries:
                raise self.error(f"{failure}; attempts: {attempt + 1}", path=path)

            # 1, 2, 4 ... back-offs
            wait_s = min(self.backoff_s * 2**attempt, self.max_wait_s)
            await _pause(wait_s if retry_after_s is None else retry_after_s)
        raise AssertionError("unreachable")

    def decoded(self, content: bytes) -> Any:
        """Return the JSON value of an answer.

        Raises:
            RemoteError: it is not valid JSON.
        """
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise self.error("answered 200 with invalid JSON", content) from error

    async def _request(self, body: bytes, path: str) -> bytes:
        import httpx2

        # Uncompressed, so that the size of the body is that of the answer.
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        headers |= secret_headers(self.headers_from_env)
        url = self.url + path

        # Redirects are followed here, one by one, because httpx2 would also follow them to other servers. 307 and 308
        # repeat the POST with its body; other redirects would turn it into a GET, and are errors (`_checked`).
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                async with self._connected().stream("POST", url, content=body, headers=headers) as response:
                    content = await self._content(response)
                    if response.status_code in (307, 308) and "location" in response.headers:
                        url = self._redirected(url, response.headers["location"], response.status_code)
                        continue
                    return self._checked(response, content)
        except httpx2.TransportError as error:
            raise _TemporaryError(f"could not be reached: {type(error).__name__}: {error}") from error
        # `from None`: its text is masked in our message; a chained error would show it as it is.
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise self.error(f"did not return a valid answer: {type(error).__name__}: {error}") from None
        raise self.error(f"redirects more than {_MAX_REDIRECTS} times")

    async def _content(self, response: httpx2.Response) -> bytes:
        """Return the raw body up to `max_response_bytes`; a compressed body could expand without limit."""
        content = bytearray()
        async for piece in response.aiter_raw():
            content += piece
            # Checked while it arrives: a length in the headers may be missing or wrong.
            if len(content) > self.max_response_bytes:
                detail = f"answered {response.status_code} with more than {self.max_response_bytes} bytes"
                raise self.error(f"{detail} (max_response_bytes)", bytes(content))
        return bytes(content)

    def _checked(self, response: httpx2.Response, content: bytes) -> bytes:
        """Return the body of an answer with status 200; anything else is an error."""
        status = response.status_code
        headers = response.headers

        # Too many requests, or the server has failed: worth another attempt.
        if status == 429 or status >= 500:
            retry_after_s = _retry_after(headers.get("retry-after"))
            raise _TemporaryError(f"answered {status}: {self._excerpt(content)}", retry_after_s)

        if 300 <= status < 400:
            target_url = _without_query(headers.get("location", "nowhere"))
            raise self.error(f"answered {status}, a redirect to {target_url}, which is not followed", content)
        if status != 200:
            raise self.error(f"answered {status}", content)

        # Not the content in the message: compressed bytes say nothing.
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise self.error(f"answered 200 in the encoding {encoding!r}, which was not asked for")
        return content

    def _redirected(self, url: str, location: str, status: int) -> str:
        """Return the target of a redirect to the same server; any other target is an error."""
        try:
            target = urljoin(url, location)
            target_server = urlsplit(target)[:2]
        except ValueError:
            raise self.error(f"answered {status}, a redirect to an invalid address") from None

        # Scheme, host and port: another server, or the same without encryption, must not receive the secret headers.
        if target_server != urlsplit(self.url)[:2]:
            target_url = _without_query(target)
            raise self.error(f"answered {status}, a redirect to {target_url}; other servers are not followed")
        return target

    def _connected(self) -> httpx2.AsyncClient:
        """Return the client of the running loop, without its own timeout: `timeout_s` limits the whole request."""
        # Connections belong to the loop in which they were opened; a later loop cannot wait for them.
        loop = asyncio.get_running_loop()
        if self._client is None or self._client_loop is not loop:
            import httpx2

            # A transport of our own excludes the environment's proxies, which could not reach this machine's loopback.
            limits = httpx2.Limits(max_connections=self.max_connections)
            transport = None
            try:
                if _is_loopback(self.url):
                    transport = httpx2.AsyncHTTPTransport(limits=limits)
                self._client = httpx2.AsyncClient(
                    timeout=None, limits=limits, follow_redirects=False, transport=transport
                )
            except (OSError, ValueError, ImportError) as error:
                variables = "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE, SSL_CERT_DIR"
                detail = f"{type(error).__name__}: {error}"
                raise self.error(f"cannot be requested with the environment's {variables}: {detail}") from None
            self._client_loop = loop
        return self._client

    def error(self, what: str, content: bytes | None = None, *, path: str = "") -> RemoteError:
        """Return an error that names the server; secrets are masked, also in text quoted from the server."""
        detail = self.without_secrets(f"{_without_query(self.url + path)} {what}")
        if content is not None:
            detail += f": {self._excerpt(content)}"
        return RemoteError(detail)

    def _excerpt(self, content: bytes) -> str:
        text = self.without_secrets(content.decode(errors="replace"))
        return repr(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}...")

    def without_secrets(self, text: str) -> str:
        """Mask secrets that the server may echo; case is ignored because `httpx2` lower-cases host names."""
        for value in secret_headers(self.headers_from_env).values():
            # `Bearer abcd` as a whole, then each word of it. Words of up to three characters occur in any text.
            for secret in sorted({value, *value.split()}, key=len, reverse=True):
                if len(secret) > 3:
                    text = re.sub(re.escape(secret), "***", text, flags=re.IGNORECASE)
        return text

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the connections, which cannot be pickled."""
        return self.__dict__ | {"_client": None, "_client_loop": None}


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def secret_headers(headers_from_env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers with their values from the environment.

    Raises:
        ValueError: a variable is not set, or its value is not valid in a header. The message does not show the value.
    """
    headers = {}
    for header, variable in (headers_from_env or {}).items():
        value = os.environ.get(variable, "").strip()
        if not value:
            raise ValueError(f"headers_from_env: {variable}, for the header {header}, is not set in the environment")
        # A line break would start another header.
        if not (value.isascii() and value.isprintable()):
            raise ValueError(f"headers_from_env: the value of {variable} cannot be a header: it is not printable ASCII")
        headers[header] = value
    return headers


def check_url(url: str) -> None:
    """Raise a `ValueError` if a URL is not one of an HTTP server, or contains a password."""
    split_url = urlsplit(url)
    if split_url.scheme not in ("http", "https") or not split_url.hostname:
        raise ValueError(f"url: expected http://... or https://..., got {_without_query(url)!r}")
    _ = split_url.port  # raises a ValueError if the port is invalid

    if split_url.username or split_url.password:
        raise ValueError(
            "url: contains a name or password; use a header instead, headers_from_env: {Authorization: MY_VARIABLE}"
        )


def _is_loopback(url: str) -> bool:
    """Return whether a URL is of this machine: `localhost`, 127.0.0.0/8 or ::1."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _without_query(url: str) -> str:
    """Return the URL without the parts that may be secret: user name, password, query and fragment."""
    try:
        split_url = urlsplit(url)
    except ValueError:  # of a redirect, for instance "http://[": a server can send anything
        return "an invalid address"
    return urlunsplit((split_url.scheme, split_url.netloc.rpartition("@")[2], split_url.path, "", ""))


def _retry_after(header: str | None) -> float | None:
    """Return the seconds given by a `Retry-After` header (seconds or a date), or None if it is neither."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)

    # A date, such as `Wed, 21 Oct 2026 07:28:00 GMT`, as seconds from now; one in the past as 0.
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
