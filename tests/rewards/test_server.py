"""A served reward model scores as the local one, together for all that wait, and refuses what is wrong."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl4lms_like.cli import main
from rl4lms_like.rewards.learned import RewardModel
from rl4lms_like.rewards.remote import HttpReward
from rl4lms_like.rewards.server import RewardServer, ScoringQueue, StoppedError
from rl4lms_like.scoring.score import Texts
from rl4lms_like.testing.checkers import check_reward_function
from tests.local_models import LOCAL_MODELS


def texts_of(*responses: str) -> Texts:
    return Texts(["Why?"] * len(responses), list(responses), [[]] * len(responses), [None] * len(responses))


def lengths(texts: Texts) -> list[float]:
    return [float(len(response)) for response in texts.responses]


@pytest.fixture
def serve():
    """Serve a function of texts in a thread; return the server."""
    servers = []

    def start(score, **settings):
        server = RewardServer(score, **{"host": "127.0.0.1", "port": 0, "max_texts": 64} | settings)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("regressor")
    LOCAL_MODELS["regressor"](folder)
    return str(folder)


def test_scores_are_those_of_the_local_reward(serve, model_folder):
    url = serve(RewardModel(model_folder).scores).url
    responses = ["It is so.", "", "a film", "the film was good, and long", "é 😀", "no", "1 2 3"]
    texts = texts_of(*responses)
    expected = RewardModel(model_folder).scores(texts)
    assert HttpReward(url).scores(texts) == expected  # in the same batch, bit for bit
    assert HttpReward(url, batch_size=3).scores(texts) == pytest.approx(expected, abs=1e-5)
    check_reward_function(HttpReward(url))


def test_requests_that_wait_are_scored_together_and_each_gets_its_own():
    calls = []
    first_call, proceed = threading.Event(), threading.Event()

    def slow(texts):
        calls.append(len(texts.responses))
        first_call.set()
        assert proceed.wait(30)
        return lengths(texts)

    scoring = ScoringQueue(slow, max_texts=10)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(scoring.scores, texts_of("a"))
        assert first_call.wait(30)
        later = [pool.submit(scoring.scores, texts_of("b" * n, "c")) for n in range(1, 7)]
        while scoring._waiting.qsize() < 6:
            pass
        proceed.set()
        assert first.result() == [1.0]
        assert [future.result() for future in later] == [[float(n), 1.0] for n in range(1, 7)]
    assert calls == [1, 10, 2]  # at most 10 texts and what the last request has more
    scoring.close()


def test_a_failure_reaches_only_the_request_that_caused_it():
    first_call, proceed = threading.Event(), threading.Event()

    def failing(texts):
        first_call.set()
        assert proceed.wait(30)
        if "bad" in texts.responses:
            raise ArithmeticError("no score")
        return lengths(texts)

    scoring = ScoringQueue(failing, max_texts=10)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(scoring.scores, texts_of("a"))
        assert first_call.wait(30)
        futures = [pool.submit(scoring.scores, texts_of(text)) for text in ("good", "bad")]
        while scoring._waiting.qsize() < 2:
            pass
        proceed.set()
        assert (first.result(), futures[0].result()) == ([1.0], [4.0])
        with pytest.raises(ArithmeticError, match="no score"):
            futures[1].result()
    scoring.close()
    with pytest.raises(StoppedError):
        scoring.scores(texts_of("late"))


def asked(server, body, *, method="POST", path="/", headers=None):
    """Status and content of the answer to one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the body is not JSON"),
        ("[1]", "no JSON object"),
        ({"prompts": ["a"]}, "responses: expected a list of texts"),
        ({"prompts": ["a"], "responses": "b"}, "responses: expected a list of texts"),
        ({"prompts": ["a"], "responses": [1]}, "responses: expected a list of texts"),
        ({"responses": ["b"]}, "prompts: expected a list of texts"),
        ({"prompts": [], "responses": ["b"]}, "prompts: has 0 entries for 1 responses"),
        ({"prompts": ["a"], "responses": ["b"], "references": ["c"]}, "references: expected a list of lists of texts"),
        ({"prompts": ["a"], "responses": ["b"], "meta_infos": [1]}, "meta_infos: expected a list of objects or null"),
        ({"prompts": ["a"], "responses": ["b"], "meta_infos": [{}, {}]}, "meta_infos: has 2 entries for 1 responses"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(serve, content, message):
    server = serve(lengths)
    status, answer = asked(server, content if isinstance(content, str) else json.dumps(content))
    assert status == 400
    assert message in answer["error"]


def test_other_requests_are_answered_too(serve):
    server = serve(lengths)
    body = json.dumps({"prompts": ["a"], "responses": ["four"]})
    assert asked(server, body) == (200, {"rewards": [4.0]})
    assert asked(server, json.dumps({"prompts": [], "responses": []})) == (200, {"rewards": []})
    assert asked(server, body, path="/elsewhere")[0] == 404
    assert asked(server, None, method="GET")[0] == 405
    assert asked(server, iter([body.encode()]), headers={"Transfer-Encoding": "chunked"})[0] == 411
    assert asked(server, "", headers={"Content-Length": str(2**40)})[0] == 413
    assert asked(server, None, method="PATCH")[0] == 501


def raw_answer(server, sent, *, is_reset=False):
    """Bytes of the answer to raw bytes, after which the client sends nothing more or resets the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(sent)
        if is_reset:  # by closing without lingering
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return b""
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            return answer.read()


def test_what_is_not_http_is_answered_as_json_and_a_client_that_goes_away_leaves_no_traceback(serve, capfd):
    server = serve(lengths)
    for garbage in (b'GET "\\\x16 x y HTTP/1.1\r\n\r\n', b"POST / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\nA: b"):
        _, _, body = raw_answer(server, garbage).rpartition(b"\r\n")
        assert list(json.loads(body)) == ["error"]

    header = b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\n"
    for sent in (header[:20], header, header + b"{"):
        raw_answer(server, sent, is_reset=True)
    assert asked(server, json.dumps({"prompts": ["a"], "responses": ["four"]})) == (200, {"rewards": [4.0]})
    server.shutdown()
    assert capfd.readouterr().err == ""


def test_a_failing_reward_is_answered_with_its_message(serve):
    def failing(texts):
        raise ArithmeticError("no score for this")

    status, answer = asked(serve(failing), json.dumps({"prompts": ["a"], "responses": ["b"]}))
    assert (status, answer) == (500, {"error": "ArithmeticError: no score for this"})


def test_the_command_serves_until_ctrl_c(model_folder):
    command = [sys.executable, "-m", "rl4lms_like", "serve-reward", model_folder, "--port", "0", "--set", "scale=2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, process.stderr.read()
        url = next(word for word in line.split() if word.startswith("http://")).rstrip(";")
        texts = texts_of("It is so.", "a film")
        assert HttpReward(url).scores(texts) == pytest.approx(
            RewardModel(model_folder, scale=2.0).scores(texts), abs=1e-6
        )

        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert errors.split()[-1] == "stopped"  # libraries may write lines before it
    finally:
        process.kill()


def test_the_command_reports_wrong_arguments_and_a_port_in_use(serve, model_folder, capsys):
    assert (
        main(["serve-reward", model_folder, "--set", "templat=chat", "--set", "model_name=x", "--set", "scale=a"]) == 2
    )
    error = capsys.readouterr().err
    assert all(word in error for word in ("--set templat:", "--set model_name:", "--set scale:"))
    assert main(["serve-reward", model_folder, "--port", str(serve(lengths).server_port)]) == 1
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err
