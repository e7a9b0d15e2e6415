"""A scorer over a server, against one that answers as vLLM does, and ones that do not."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from armillary.errors import UserError
from armillary.evaluation import server_scorer
from armillary.evaluation.scoring import Continuation
from armillary.evaluation.server_scorer import ServerScorer

VOCABULARY = 7
CONTEXT = [3, 1, 4]
CONTINUATIONS = [Continuation((1, 5), 2), Continuation((2, 6, 5), 1), Continuation((5,), 1)]


def logprobs_after(prefix: list[int]) -> list[float]:
    """Made up out of the prefix's sum and length; each prefix has its own likeliest token."""
    logits = np.array([float((sum(prefix) * k + len(prefix)) % 11) for k in range(VOCABULARY)])
    return list(logits - np.log(np.exp(logits).sum()))


def vllm(body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answers, its choices turned round, with the prompts' log-probabilities."""
    choices = []
    for index, prompt in enumerate(body["prompt"]):
        ids = [*prompt, 0]  # one token is generated
        own: list[float | None] = [None]
        top: list[dict[str, float] | None] = [None]
        for place in range(1, len(ids)):
            values = logprobs_after(ids[:place])
            best = int(np.argmax(values))
            own.append(values[ids[place]])
            top.append({f"token_id:{token}": values[token] for token in (best, ids[place])})
        tokens = [f"token_id:{token}" for token in ids]
        found = {"tokens": tokens, "token_logprobs": own, "top_logprobs": top}
        choices.append({"index": index, "text": "", "logprobs": found})
    used = {"prompt_tokens": sum(map(len, body["prompt"]))}
    return {"choices": choices[::-1], "usage": used}


class Server:
    """Answers /v1/completions with `answer(body)`, or with what stands first in `failures`."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.answer: Callable[[dict[str, Any]], Any] = vllm
        self.failures: list[tuple[int, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models: Any = {"data": [{"id": "small", "max_model_len": 9}, {"id": "other"}]}


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, state.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.bodies.append(body)
            state.keys.append(self.headers["Authorization"])
            if state.failures:
                self.reply(*state.failures.pop(0))
            else:
                self.reply(200, state.answer(body))

        def reply(self, status: int, value: Any) -> None:
            text = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        state = Server(listening.server_port)
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield state
        listening.shutdown()
        thread.join()


def scorer_of(server: Server, **changes: Any) -> ServerScorer:
    return ServerScorer(server.url, **({"vocab_size": VOCABULARY, "pause": 0.0} | changes))


def test_log_probabilities_and_greedy_flags_are_the_servers(server):
    scored = scorer_of(server, key="secret").score(CONTEXT, CONTINUATIONS)
    for each, continuation in zip(scored, CONTINUATIONS, strict=True):
        ids = [*CONTEXT, *continuation.tokens]
        places = range(len(ids) - continuation.scored, len(ids))
        values = [logprobs_after(ids[:place]) for place in places]
        expected = [own[ids[place]] for own, place in zip(values, places, strict=True)]
        likeliest = [own[ids[p]] == max(own) for own, p in zip(values, places, strict=True)]
        np.testing.assert_array_equal(each.logprobs, expected)
        assert each.likeliest.tolist() == likeliest
    assert {flag for each in scored for flag in each.likeliest.tolist()} == {True, False}
    (body,) = server.bodies
    assert body["prompt"] == [[*CONTEXT, *each.tokens] for each in CONTINUATIONS]
    assert (body["model"], body["echo"], body["max_tokens"]) == ("small", True, 1)
    assert server.keys == ["Bearer secret"]


def test_model_and_window_are_the_servers_unless_given(server):
    """The server insists on generating a token, for which there must be room."""
    scorer = scorer_of(server)
    assert (scorer.model, scorer.window, scorer.vocab_size) == ("small", 8, VOCABULARY)
    given = ServerScorer(f"{server.url}/v1/", vocab_size=VOCABULARY, model="x", window=50)
    assert (given.model, given.window, given.url) == ("x", 50, f"{server.url}/v1")
    with pytest.raises(UserError, match="does not say its window; give it with window="):
        scorer_of(server, model="other")
    with pytest.raises(UserError, match="does not serve big; it serves small, other"):
        scorer_of(server, model="big")
    with pytest.raises(ValueError, match="window of 8"):
        scorer.score([1] * 7, [Continuation((1, 2), 1)])


def generated_alone(body: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's server answers: no log-probabilities but of what it generated."""
    answer = vllm(body)
    for choice in answer["choices"]:
        choice["logprobs"] = {key: values[-1:] for key, values in choice["logprobs"].items()}
    return answer


def no_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": n, "logprobs": None} for n in range(len(body["prompt"]))]}


def nulls(body: dict[str, Any]) -> dict[str, Any]:
    answer = vllm(body)
    for choice in answer["choices"]:
        choice["logprobs"]["token_logprobs"][:-1] = [None] * len(choice["logprobs"]["tokens"][:-1])
    return answer


def cut(body: dict[str, Any]) -> dict[str, Any]:
    return vllm(body | {"prompt": [prompt[1:] for prompt in body["prompt"]]})


def encoded_anew(body: dict[str, Any]) -> dict[str, Any]:
    return vllm(body | {"prompt": [[2, *prompt[1:]] for prompt in body["prompt"]]})


def one_answer(body: dict[str, Any]) -> dict[str, Any]:
    return vllm(body | {"prompt": body["prompt"][:1]})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (generated_alone, "gives no log-probabilities of the prompt"),
        (no_logprobs, "gives no log-probabilities of the prompt"),
        (nulls, "gives no log-probabilities of the prompt"),
        (cut, "15 prompt tokens were sent, and 12 read; the server cuts prompts"),
        (encoded_anew, "token 0 was sent as 3 and read as 2"),
        (one_answer, "3 prompts were sent, and not as many answered"),
        (lambda _: [], "answered with something that is no JSON object"),
        (lambda _: b"<html>", "answered with something that is no JSON object"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_answer_to_something_else_is_refused(server, answer, message):
    server.answer = answer
    with pytest.raises(UserError, match=message) as raised:
        scorer_of(server).score(CONTEXT, CONTINUATIONS)
    assert "\n" not in str(raised.value)


def test_a_refusal_is_said_in_one_line_and_not_asked_again(server):
    """llama.cpp's server does not echo; llama-cpp-python's does not take ids."""
    server.failures = [(400, {"error": {"message": "Only no echo\nis supported"}})]
    with pytest.raises(UserError, match=r"/completions: 400 .*: Only no echo is supported$"):
        scorer_of(server).score(CONTEXT, CONTINUATIONS)
    assert len(server.bodies) == 1


def test_what_may_pass_is_asked_again_a_few_times(server, monkeypatch):
    server.failures = [(503, b"loading"), (429, b"")]
    assert len(scorer_of(server).score(CONTEXT, CONTINUATIONS)) == 3
    assert len(server.bodies) == 3
    server.failures = [(503, b"loading the model")] * 9
    with pytest.raises(UserError, match=r"no answer in 4 tries \(503 .*: loading the model\)"):
        scorer_of(server).score(CONTEXT, CONTINUATIONS)
    monkeypatch.setattr(server_scorer, "TRIES", 1)
    with pytest.raises(UserError, match="no answer in 1 tries"):
        ServerScorer("http://127.0.0.1:9", vocab_size=VOCABULARY)
    with pytest.raises(UserError, match="is no http"):
        ServerScorer("localhost:8000", vocab_size=VOCABULARY)
