"""A scorer behind HTTP: a real server on this machine that answers, stumbles, stalls, lies and shuts the door."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl4lms_like.core.observation import Observation
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.rewards.remote import HttpReward
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.errors import RewardError
from rl4lms_like.system.http_client import RemoteError, secret_headers
from rl4lms_like.testing.checkers import SAMPLES, check_reward_function
from tests.builders import episodes_of_lengths

SECRET = "Bearer s3cr3t-t0ken"


class Scorer:
    """A server whose answers a test writes; it keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Callable[[BaseHTTPRequestHandler, dict], None] = answers_lengths
        self.asked: list[dict] = []
        self.headers: list[dict] = []
        self.paths: list[str] = []
        self.clients: list[tuple[str, int]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        scorer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with scorer.lock:
                    scorer.asked.append(body)
                    scorer.headers.append(dict(self.headers))
                    scorer.paths.append(self.path)
                    scorer.clients.append(self.client_address)
                    scorer.at_once += 1
                    scorer.most_at_once = max(scorer.most_at_once, scorer.at_once)
                try:
                    scorer.answer(self, body)
                except OSError:
                    self.close_connection = True  # the client has given up
                finally:
                    with scorer.lock:
                        scorer.at_once -= 1

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def send(handler, content, status=200, **headers) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def answers_lengths(handler, body) -> None:
    send(handler, {"rewards": [len(text) for text in body["responses"]]})


def first(*answers):
    """One answer after the other, then lengths."""
    left = list(answers)

    def answer(handler, body):
        (left.pop(0) if left else answers_lengths)(handler, body)

    return answer


def status(code, content=b"busy", **headers):
    return lambda handler, body: send(handler, content, code, **headers)


def hangs(seconds):
    def answer(handler, body):
        time.sleep(seconds)
        answers_lengths(handler, body)

    return answer


def drops(handler, body) -> None:
    handler.connection.close()
    handler.close_connection = True
    raise OSError


def drips(handler, body) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


def drips_headers(handler, body) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for index in range(100):
        handler.wfile.write(b"X-%d: y\r\n" % index)
        handler.wfile.flush()
        time.sleep(0.05)


@pytest.fixture
def scorer(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = Scorer()
    yield server
    server.close()


@pytest.fixture
def reward(scorer):
    return lambda **args: HttpReward(scorer.url, **{"backoff_s": 0.01, "timeout_s": 5.0, **args})


def scores(reward, texts=("a", "bc", "def"), references=None, metas=None):
    n = len(texts)
    return reward.scores(Texts(["Say"] * n, list(texts), references or [["x"]] * n, metas or [None] * n))


def failure(reward, **kwargs) -> str:
    with pytest.raises(RemoteError) as caught:
        scores(reward, **kwargs)
    return str(caught.value)


def test_the_server_gets_everything_and_its_rewards_are_paid(scorer, reward):
    assert scores(reward(), references=[["x"], [], ["y", "z"]], metas=[{"topic": "é"}, None, None]) == [1, 2, 3]
    assert scorer.asked == [
        {
            "prompts": ["Say"] * 3,
            "responses": ["a", "bc", "def"],
            "references": [["x"], [], ["y", "z"]],
            "meta_infos": [{"topic": "é"}, None, None],
        }
    ]
    assert scorer.headers[0]["Content-Type"] == "application/json"


def test_batches_are_sent_together_and_come_back_in_order(scorer, reward):
    scorer.answer = hangs(0.02)
    texts = ["x" * i for i in range(23)]
    assert scores(reward(batch_size=2, max_connections=3), texts) == list(range(23))
    assert len(scorer.asked) == 12 and 1 < scorer.most_at_once <= 3
    scorer.most_at_once = 0
    assert scores(reward(batch_size=5, max_connections=1), texts) == list(range(23))
    assert scorer.most_at_once == 1


def test_it_passes_the_checker_and_travels(scorer, reward):
    check_reward_function(reward())
    used = reward()
    assert scores(used) == scores(pickle.loads(pickle.dumps(used)))


@pytest.mark.parametrize(
    "trouble", [status(500), status(503), status(429), drops], ids=["500", "503", "429", "dropped connection"]
)
def test_what_may_pass_is_tried_again(scorer, reward, trouble):
    scorer.answer = first(trouble, trouble)
    assert scores(reward(retries=2)) == [1, 2, 3]
    assert len(scorer.asked) == 3


def test_a_server_that_answers_late_is_tried_again(scorer, reward):
    scorer.answer = first(hangs(1.0))
    assert scores(reward(timeout_s=0.2, retries=1)) == [1, 2, 3]


def test_back_off_doubles_and_retry_after_is_honoured(scorer, reward, monkeypatch):
    slept: list[float] = []

    async def pause(seconds):
        slept.append(seconds)

    monkeypatch.setattr("rl4lms_like.system.http_client._pause", pause)
    scorer.answer = first(status(500), status(500), status(500))
    assert scores(reward(retries=3, backoff_s=0.5)) == [1, 2, 3]
    assert slept == [0.5, 1.0, 2.0]
    slept.clear()
    scorer.answer = first(
        status(429, Retry_After="7"), status(503, Retry_After=formatdate(time.time() + 30, usegmt=True))
    )
    assert scores(reward(retries=3)) == [1, 2, 3]
    assert slept[0] == 7.0 and 25 < slept[1] <= 30
    scorer.answer = status(429, Retry_After="3600")
    assert "it asks to wait 3600 s (max_wait_s)" in failure(reward())
    scorer.answer = status(429, Retry_After="9" * 400)
    assert "answered 429" in failure(reward(retries=1))


def test_a_failure_does_not_wait_for_other_requests(scorer, reward):
    scorer.answer = lambda handler, body: status(404 if "bad" in body["responses"] else 500)(handler, body)
    start = time.monotonic()
    detail = failure(reward(batch_size=1, backoff_s=20.0), texts=["a", "b", "bad"])
    assert "answered 404" in detail and time.monotonic() - start < 10


def test_an_interrupt_is_heard_between_retries(scorer, reward):
    scorer.answer = status(500)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            scores(reward(batch_size=1, backoff_s=20.0))
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_was_forked_connects_for_itself(scorer, reward):
    mine = reward()
    assert scores(mine) == [1, 2, 3]
    process = multiprocessing.get_context("fork").Process(target=scores, args=(mine,))
    process.start()
    process.join(20)
    ended = process.exitcode
    process.kill()
    assert ended == 0 and len(scorer.asked) == 2
    assert scores(mine) == [1, 2, 3]


def test_a_connection_is_used_again(scorer, reward):
    mine = reward()
    for _ in range(3):
        scores(mine)
    assert len(set(scorer.clients)) == 1


def test_a_server_that_stays_down_is_named_with_its_status(scorer, reward):
    scorer.answer = status(500, b"out of memory")
    assert failure(reward(retries=2)) == f"{scorer.url} answered 500: 'out of memory'; attempts: 3"
    assert len(scorer.asked) == 3


def test_a_server_that_never_answers_is_given_up(scorer, reward):
    scorer.answer = hangs(1.0)
    assert failure(reward(timeout_s=0.1, retries=1)) == f"{scorer.url} did not answer within 0.1 s; attempts: 2"
    for slow in (drips, drips_headers):
        scorer.answer = slow
        start = time.monotonic()
        detail = failure(reward(timeout_s=0.2, retries=0))
        assert detail == f"{scorer.url} did not answer within 0.2 s; attempts: 1"
        assert time.monotonic() - start < 1.5
    scorer.answer = drops
    assert "could not be reached: RemoteProtocolError" in failure(reward(retries=0))


def test_a_server_that_is_not_there_is_named():
    gone = Scorer()
    gone.close()
    detail = failure(HttpReward(gone.url, retries=1, backoff_s=0.0))
    assert detail.startswith(f"{gone.url} could not be reached: ConnectError") and detail.endswith("attempts: 2")


@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_what_the_client_did_wrong_is_not_tried_again(scorer, reward, code):
    scorer.answer = status(code, b"no such field")
    assert failure(reward()) == f"{scorer.url} answered {code}: 'no such field'"
    assert len(scorer.asked) == 1


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        (b"<html>hello</html>", "answered 200 with invalid JSON: '<html>hello</html>'"),
        (b"", "answered 200 with invalid JSON: ''"),
        ({"scores": [1, 2, 3]}, 'answered 200 without a list under "rewards"'),
        ([1, 2, 3], 'answered 200 without a list under "rewards"'),
        ({"rewards": 3}, 'answered 200 without a list under "rewards"'),
        ({"rewards": [1, 2]}, "answered 200 with 2 rewards for 3 texts"),
        ({"rewards": [1, float("nan"), 3]}, "answered 200 with nan as reward 1; expected a number"),
        ({"rewards": [1, 2, float("inf")]}, "answered 200 with inf as reward 2; expected a number"),
        ({"rewards": [1, None, 3]}, "answered 200 with None as reward 1; expected a number"),
        ({"rewards": ["1", 2, 3]}, "answered 200 with '1' as reward 0; expected a number"),
        ({"rewards": [True, 2, 3]}, "answered 200 with True as reward 0; expected a number"),
        ({"rewards": [10**400, 2, 3]}, "as reward 0; expected a number"),
        (b"[" * 100_000, "answered 200 with invalid JSON"),
    ],
)
def test_an_answer_that_is_none_is_refused_at_once(scorer, reward, content, detail):
    scorer.answer = lambda handler, body: send(handler, content)
    message = failure(reward())
    assert message.startswith(f"{scorer.url} ") and detail in message and len(message) < 600
    assert len(scorer.asked) == 1


def test_an_answer_that_is_too_large_is_refused_before_it_is_read_whole(scorer, reward):
    scorer.answer = lambda handler, body: send(handler, b" " * 5_000_000)
    assert "answered 200 with more than 1000 bytes (max_response_bytes)" in failure(reward(max_response_bytes=1000))


def test_an_answer_is_never_unpacked(scorer, reward):
    packed = gzip.compress(b" " * 50_000_000)
    scorer.answer = lambda handler, body: send(handler, packed, Content_Encoding="gzip")
    assert "answered 200 in the encoding 'gzip', which was not asked for" in failure(reward(max_response_bytes=100_000))
    assert scorer.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("location", ["http://[", "//[::1", "http://127.0.0.1:99999999/", "\x7f", "http://a\tb/"])
@pytest.mark.parametrize("code", [302, 307])
def test_a_redirect_to_an_invalid_address_is_an_error_with_the_servers_name(code, location, scorer, reward):
    scorer.answer = status(code, Location=location)
    assert failure(reward(retries=0)).startswith(f"{scorer.url} ")


def test_a_proxy_is_not_used_for_this_machine(scorer, reward, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert scores(reward(retries=0)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HTTPS_PROXY", "gopher://proxy"), ("SSL_CERT_FILE", "/no/such/file"), ("ALL_PROXY", "socks5://127.0.0.1:9")],
)
def test_invalid_settings_of_the_environment_are_errors_with_the_servers_name(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    message = failure(HttpReward("https://scores.invalid/score", retries=0, timeout_s=5.0))
    assert message.startswith("https://scores.invalid/score ") and variable in message


def test_only_redirects_within_the_server_are_followed(scorer, reward):
    scorer.answer = first(status(307, Location="/moved"))
    assert scores(reward()) == [1, 2, 3] and scorer.paths == ["/score", "/moved"]
    scorer.answer = status(308, Location="http://example.invalid/score?token=abc")
    detail = failure(reward())
    assert detail.endswith("a redirect to http://example.invalid/score; other servers are not followed")
    scorer.answer = status(302, Location="/elsewhere")
    assert "answered 302, a redirect to /elsewhere, which is not followed" in failure(reward())
    scorer.answer = status(307, Location="/again")
    assert "redirects more than 3 times" in failure(reward())


def test_secrets_come_from_the_environment_and_are_never_shown(scorer, reward, monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", SECRET)
    mine = reward(headers_from_env={"Authorization": "SCORER_TOKEN"}, retries=0)
    assert scores(mine) == [1, 2, 3] and scorer.headers[0]["Authorization"] == SECRET
    assert b"s3cr3t" not in pickle.dumps(mine)
    scorer.answer = lambda handler, body: send(handler, f"not {handler.headers['Authorization']}".encode(), 403)
    assert failure(mine) == f"{scorer.url} answered 403: 'not ***'"
    echoes = [
        lambda handler, secret: send(handler, f"not {secret}".encode(), 500),
        lambda handler, secret: send(handler, {"rewards": [secret, 2, 3]}),
        lambda handler, secret: send(handler, ("x" * 190 + secret).encode(), 403),
        lambda handler, secret: send(handler, b"", 302, Location=f"/{secret.split()[-1]}/"),
        lambda handler, secret: send(handler, b"", 307, Location=f"http://{secret.split()[-1]}.example/"),
        lambda handler, secret: send(handler, b"", Content_Encoding=secret),
    ]
    for echo in echoes:
        scorer.answer = lambda handler, body, echo=echo: echo(handler, handler.headers["Authorization"])
        assert "s3cr3t" not in failure(mine)
    monkeypatch.setenv("SCORER_TOKEN", "Bearer " + "s3cr3t" * 200)
    scorer.answer = lambda handler, body: send(handler, f"no: {handler.headers['Authorization']}".encode(), 403)
    assert "s3cr3t" not in failure(mine)


def test_a_secret_that_is_not_there_or_is_no_header_is_told_when_the_reward_is_built(reward, monkeypatch):
    monkeypatch.delenv("SCORER_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"SCORER_TOKEN.*Authorization"):
        reward(headers_from_env={"Authorization": "SCORER_TOKEN"})
    monkeypatch.setenv("SCORER_TOKEN", "s3cr3t\nX-Other: 1")
    with pytest.raises(ValueError, match="SCORER_TOKEN") as caught:
        reward(headers_from_env={"Authorization": "SCORER_TOKEN"})
    assert "s3cr3t" not in str(caught.value)
    monkeypatch.setenv("SCORER_TOKEN", " padded \n")
    assert secret_headers({"A": "SCORER_TOKEN"}) == {"A": "padded"}


@pytest.mark.parametrize("url", ["score", "ftp://host/x", "http://", "http://user:pw@host/x", "http://host:99999/x"])
def test_what_is_no_url_or_holds_a_password_is_refused(url):
    with pytest.raises(ValueError) as caught:
        HttpReward(url)
    assert "pw" not in str(caught.value)


def test_it_is_asked_from_reward_workers_too(scorer, reward, tiny_tokenizer, monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", SECRET)
    mine = reward(headers_from_env={"Authorization": "SCORER_TOKEN"}, batch_size=1)
    batch = episodes_of_lengths([3, 1, 5, 2], vocab_size=300)
    paid = []
    for workers in (0, 2):
        env = TextVecEnv(4, tiny_tokenizer, mine, list(SAMPLES), 6, 8, reward_workers=workers)
        try:
            env.seed(0)
            env.reset()
            paid.append(env.play(batch).tolist())
        finally:
            env.close()
    assert paid[0] == paid[1] and any(paid[0])
    assert len(scorer.asked) == 8 and {headers["Authorization"] for headers in scorer.headers} == {SECRET}


def test_meta_data_that_is_no_json_is_told(scorer, reward):
    assert failure(reward(), metas=[{"x": {1, 2}}, None, None]).startswith(
        "the samples' meta_data cannot be sent as JSON"
    )
    assert scorer.asked == []


def test_a_failure_names_reward_and_sample(scorer, reward, tiny_tokenizer):
    from rl4lms_like.core.observation import TextLayout
    from rl4lms_like.rewards.call import score_episodes

    scorer.answer = status(404, b"nothing here")
    layout = TextLayout(tiny_tokenizer, 8, 8)
    episode = Observation(SAMPLES[0], layout.encode("x"), layout.encode("yes"), 1, layout)
    with pytest.raises(RewardError, match=r"HttpReward .*'check_0'.*404: 'nothing here'"):
        score_episodes(reward(), [episode])
