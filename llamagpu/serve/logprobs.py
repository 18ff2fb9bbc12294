"""Log probabilities of the tokens whose text is in the answer."""

import sys
from collections import deque
from typing import Any, NamedTuple

from llamagpu.llama import Llama
from llamagpu.results import Logprob, Token
from llamagpu.serve.engine_thread import Job

MIN_LOGPROB = -9999.0  # as OpenAI writes minus infinity


class PlacedToken(NamedTuple):
    """A token, and where it stands in the text. Tokens that are parts of one character begin where it does."""

    begin: int
    end: int
    logprob: Logprob


class ScoredTokens:
    """The tokens of a text with log probabilities, in order. Each is held back until its text is out."""

    def __init__(self, llama: Llama, special: bool = False) -> None:
        self._decoder = llama.tokenizer.stream(special)
        self._waiting: deque[PlacedToken] = deque()
        self._decoded = self._shown = 0  # characters

    def push(self, tokens: list[Token]) -> None:
        for token in tokens:
            if token.logprob is None:
                return  # they are not asked for
            begin, self._shown = self._decoded, self._shown + len(token.text)
            self._decoded += len(self._decoder.push(token.id))
            self._waiting.append(PlacedToken(begin, self._decoded, token.logprob))

    def shown(self, job: Job) -> list[PlacedToken]:
        """Those whose text is out by now. What a stop string has cut off is not; without one, the end takes all."""
        return self.take(0, sys.maxsize if job.ended and not job.stopped_by else self._shown)

    def take(self, begin: int, end: int) -> list[PlacedToken]:
        """Those that stand between, also in part. Those before are dropped."""
        found = []
        while self._waiting and self._waiting[0].begin < end:
            token = self._waiting.popleft()
            if token.begin >= begin or token.end > begin:
                found.append(token)
        return found


def logprob_objects(tokens: list[PlacedToken], llama: Llama) -> list[dict[str, Any]]:
    """As OpenAI's chats and responses have them."""
    tokenizer = llama.tokenizer

    def shown(log: Logprob) -> dict[str, Any]:
        raw = tokenizer.token_bytes(log.id) if log.id < tokenizer.vocab_size else b""
        return {"token": log.text, "logprob": logprob_number(log), "bytes": list(raw)}

    logs = [token.logprob for token in tokens]
    return [{**shown(log), "top_logprobs": [shown(top) for top in log.top]} for log in logs]


def logprob_number(value: Logprob) -> float:
    return max(value.logprob, MIN_LOGPROB)
