"""A conversation: its turns, the prompt that fits the context, and the JSON file that keeps it."""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from llamagpu.errors import BadFile, DoesNotFit, is_whole
from llamagpu.files.atomic import atomic_write
from llamagpu.files.tokenizer import FINAL_CHANNEL
from llamagpu.llama import Llama, Message


class Turn(NamedTuple):
    question: str
    answer: str


def without_channels(answer: str) -> str:
    """The text in the final channel of gpt-oss, whose template refuses an answer with its reasoning."""
    if not answer.startswith("<|channel|>"):
        return answer
    _, mark, text = answer.rpartition(FINAL_CHANNEL)
    return text if mark else ""


@dataclass(slots=True)
class Conversation:
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    dropped: int = 0  # oldest turns that the prompt leaves out

    def messages(self, question: str | None = None, dropped: int = 0) -> list[Message]:
        """The messages after the first `dropped` turns, in the form of a chat template."""
        pairs = [("system", self.system)] if self.system else []
        for turn in self.turns[dropped:]:
            pairs += [("user", turn.question), ("assistant", without_channels(turn.answer))]
        if question is not None:
            pairs.append(("user", question))
        return [{"role": role, "content": content} for role, content in pairs]

    def fit(
        self, llama: Llama, question: str | None, max_tokens: int = -1, answer: Sequence[int] = ()
    ) -> tuple[int, list[int]]:
        """How many of the oldest turns have to be dropped to leave room for an answer, and the prompt ids then.

        Without a question: to fit the context. `answer`: what was generated of it already. A quarter of the context
        more than necessary is freed: the next turns then reuse the KV cache.
        """
        context, count = llama.context, len(self.turns)
        limit = context
        if question is not None:
            limit -= context // 4 if max_tokens < 0 else min(max_tokens, context // 2)

        def encode(dropped: int) -> list[int]:
            if question is None and dropped == count:
                return []  # some templates refuse a conversation without a message
            return [*llama.encode_chat(self.messages(question, dropped)), *answer]

        dropped = self.dropped
        ids = encode(dropped)
        if len(ids) > limit and dropped < count:
            counts = range(dropped + 1, count)
            dropped += 1 + bisect_left(counts, True, key=lambda n: len(encode(n)) <= limit - context // 4)
            ids = encode(dropped)
        return dropped, ids

    def prompt(self, llama: Llama, question: str, max_tokens: int = -1, answer: Sequence[int] = ()) -> list[int]:
        """The prompt ids. If too little of the context is left for an answer, the oldest turns are dropped."""
        context = llama.context
        dropped, ids = self.fit(llama, question, max_tokens, answer)
        if len(ids) >= context:
            most = llama.config.context
            remedy = f", or use a larger -c (this model takes {most})" if most > context else ""
            raise DoesNotFit(
                f"the message needs {len(ids)} tokens, and the context has {context}", f"shorten the message{remedy}"
            )
        self.dropped = dropped
        return ids

    def save(self, path: Path, context: int = 0) -> None:
        """Write the messages as JSON. A file that holds anything else is not overwritten.

        What the model sees of them depends on the context, so both are kept.
        """
        if path.is_file() and path.stat().st_size:
            Conversation.load(path)
        seen = {"context": context, "dropped_turns": self.dropped} if self.dropped else {}
        text = json.dumps({"messages": self.messages(), **seen}, ensure_ascii=False, indent=1) + "\n"
        with atomic_write(path) as file:
            file.write(text.encode("utf-8", "surrogatepass"))

    @classmethod
    def load(cls, path: Path, context: int = 0) -> "Conversation":
        """Read a file of `save`, or a JSON list of messages."""
        try:
            data = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
            messages = data["messages"] if isinstance(data, dict) else data
            roles, texts = [m["role"] for m in messages], [m["content"] for m in messages]
        except OSError as error:
            raise BadFile(f"{path}: {error.strerror}", "check the name of the file") from error
        except (ValueError, KeyError, TypeError, RecursionError):
            data, roles, texts = None, ["none"], []
        system = texts.pop(0) if roles[:1] == ["system"] else None
        if roles[system is not None :] != ["user", "assistant"] * (len(texts) // 2) or not all(
            isinstance(text, str) for text in (system or "", *texts)
        ):
            raise BadFile(f"{path}: no conversation (messages of user and assistant in turn)", "name another file")
        turns = [Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
        dropped: Any = data.get("dropped_turns") if isinstance(data, dict) and data.get("context") == context else 0
        return cls(system, turns, dropped if is_whole(dropped, 0) and dropped <= len(turns) else 0)
