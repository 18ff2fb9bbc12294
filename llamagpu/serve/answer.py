"""Splits the text of an answer, as it arrives, into reasoning, content and tool calls."""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from llamagpu.llama import possible_stop
from llamagpu.serve.tools import HARMONY, MISTRAL, ToolStyle, call_id

MESSAGE_END = "<|end|>"  # gpt-oss writes several messages, each with a header
THINK_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", MESSAGE_END),
)
# The one whom a message is for stands before the channel or after it; "json" or the like may follow.
HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?: ?to=([^\s<]+) ?)?<\|channel\|>(analysis|commentary|final)"
    r"(?: ?to=([^\s<]+))?(?: *(?:<\|constrain\|>)? *\w+)?<\|message\|>"
)
HEADER_BEGINS = ("<|start|>assistant", "<|channel|>", " to=functions.", "to=functions.")
LONGEST_HEADER = 300


class Delta(NamedTuple):
    kind: str  # "reasoning", "content", "call" (a call begins), "arguments" (JSON text of the latest call)
    text: str  # of a call: the name of the function
    number: int = 0  # of the call
    id: str = ""  # of the call
    end: int = 0  # of content: where it ends in the whole text


class Answer:
    """`push` the text, then `end`. What may be the beginning of a tag is held back until it is decided."""

    def __init__(
        self,
        style: ToolStyle | None = None,  # None: tool calls are not looked for
        names: Collection[str] = (),
        thinking: str | None = None,  # the end tag, if the prompt ends within reasoning
        in_call: bool = False,  # the answer is the JSON of a call
        channels: bool = True,  # messages have headers, as gpt-oss'
    ) -> None:
        self.style, self.names = style, names
        self.special = style is not None and style.special  # whether the text has that of control tokens
        self.calls = 0
        self._pushed = 0  # characters
        self._held = ""  # text that is not decided
        self._raw = ""  # the text of a call, for the case that it is none
        self._begun = False  # whether content has come
        self._in_call = in_call
        self._channels = channels
        self._arguments = JsonEnd()  # of a call of gpt-oss
        self._in_message = False  # whether the content is a message of gpt-oss
        self._end_tag = thinking or ""
        self._scanner = CallScanner(style) if style and in_call else None
        self._state = self._think if thinking else self._call if in_call else self._first
        if in_call and style is HARMONY:
            self._held, self._state = style.forced, self._header

    def push(self, text: str) -> list[Delta]:
        self._held += text
        self._pushed += len(text)
        return list(self._run())

    def end(self) -> list[Delta]:
        """The rest. A call that was cut short is no content."""
        found = list(self._run())
        if self._state == self._header and HEADER.match(self._held):  # a call without arguments
            self._held += "{}"
            found += self._run()
        rest = self._raw if self._state == self._call and self._raw else self._held
        if self._cut_short(rest):
            rest = ""
        self._held = self._raw = ""
        kind = "reasoning" if self._state == self._think else "content"
        return found + ([Delta(kind, rest, end=self._pushed)] if rest and (rest.strip() or not self.calls) else [])

    def _cut_short(self, rest: str) -> bool:
        """Whether the rest is the beginning of a call, as far as that can be said."""
        style, scanner = self.style, self._scanner
        if style is None:
            return False
        if style is HARMONY:
            return self._state == self._header and "to=functions." in rest
        if self._state != self._call:
            return self.calls > 0 and style.begin.startswith(rest.strip())
        if self._in_call or (scanner and scanner.name):
            return True
        if not rest.startswith(style.begin) or (style.end and style.end in rest):  # no tag; or whole, and no JSON
            return False
        text = rest.removeprefix(style.begin).lstrip(" \n\t[")
        return text[:1] in ("", "{") or any(text.startswith(name) or name.startswith(text) for name in self.names)

    def _run(self) -> Iterator[Delta]:
        """Apply the states' functions until one wants more text."""
        while True:
            before = self._state
            yield from self._state()
            if self._state == before:
                return

    def _first(self) -> Iterator[Delta]:
        """The beginning: reasoning, or something else."""
        text = self._held.lstrip()
        for begin, end in THINK_TAGS:
            if text.startswith(begin):
                self._held, self._end_tag, self._state = text[len(begin) :], end, self._think
                return
            if begin.startswith(text):
                return
        self._state = self._header
        yield from ()

    def _think(self) -> Iterator[Delta]:
        if not self._begun:
            self._held = self._held.lstrip("\n")
        before, tag, after = self._held.partition(self._end_tag)
        if tag:
            self._held, self._state, self._begun = after, self._header, False
            yield from content("reasoning", before.rstrip("\n"))
        else:
            shown = len(before) - undecided(before, self._end_tag)
            self._held, self._begun = before[shown:], self._begun or shown > 0
            yield from content("reasoning", before[:shown])

    def _header(self) -> Iterator[Delta]:
        """The header of a message of gpt-oss, or text."""
        if self._end_tag:
            self._held = self._held.lstrip("\n")
        text = self._held
        found = HEADER.match(text) if self._channels else None
        self._in_message = found is not None
        if found is None:
            if not self._may_be_header(text):
                self._state = self._text
            return
        name, rest = (found[1] or found[3] or "").removeprefix("functions."), text[found.end() :].lstrip()
        if not name:
            self._held = text[found.end() :]
            self._state = self._text
            if found[2] == "analysis":
                self._end_tag, self._state = MESSAGE_END, self._think
        elif self.style is not HARMONY or name not in self.names or rest[:1] not in ("", "{"):
            self._state = self._text  # with its header
        elif rest:
            self._held, self._state, self._arguments = rest, self._pass_on, JsonEnd()
            yield Delta("call", name, self.calls, call_id(self.style))
            self.calls += 1

    def _may_be_header(self, text: str) -> bool:
        begun = any(begin.startswith(text) or text.startswith(begin) for begin in HEADER_BEGINS)
        return self._channels and begun and "<|message|>" not in text and len(text) < LONGEST_HEADER

    def _pass_on(self) -> Iterator[Delta]:
        """The arguments of a call of gpt-oss."""
        end = self._arguments.find(self._held)
        piece, self._held = (self._held, "") if end is None else (self._held[:end], self._held[end:])
        if piece:
            yield Delta("arguments", piece, self.calls - 1)
        if end is not None:
            self._state = self._after_message

    def _after_message(self) -> Iterator[Delta]:
        """Another message may come."""
        self._held = self._held.lstrip()
        if self._held.startswith(MESSAGE_END):
            self._held = self._held[len(MESSAGE_END) :]
        elif not self._held or MESSAGE_END.startswith(self._held):
            return
        self._state = self._header
        yield from ()

    def _text(self) -> Iterator[Delta]:
        style = self.style
        if style and style.bare and not self._begun and not self.calls:
            text = self._held.lstrip()
            if not text:
                return
            if text.startswith("{"):
                self._held = text
                self._begin_call()
                return
        call = style.begin if style and style is not HARMONY else None
        tags = [tag for tag in (call, MESSAGE_END if self._in_message else None) if tag]
        places = {self._held.find(tag): tag for tag in tags if tag in self._held}
        if not places:
            yield from self._content(len(self._held) - possible_stop(self._held, tags))
            return
        place, tag = min(places.items())
        yield from self._content(place)
        if tag == MESSAGE_END:
            self._state = self._after_message
            return
        self._held, self._raw = self._held.partition(tag)[2], tag
        self._begin_call()

    def _content(self, count: int) -> Iterator[Delta]:
        text = self._held[:count]
        if text.strip() or not self.calls:  # blanks between calls are not content
            self._held, self._begun = self._held[count:], self._begun or bool(text)
            yield from content("content", text, self._pushed - len(self._held))

    def _begin_call(self) -> None:
        assert self.style is not None
        self._scanner, self._state = CallScanner(self.style), self._call

    def _call(self) -> Iterator[Delta]:
        """Text of calls. Where it turns out to be none, it is content."""
        scanner, style = self._scanner, self.style
        assert scanner is not None and style is not None
        self._raw += self._held
        text, self._held = self._held, ""
        for kind, value in scanner.push(text):
            if kind == "call":
                if self.names and value not in self.names:
                    scanner.failed = True
                    break
                yield Delta("call", value, self.calls, call_id(style))
                self.calls += 1
            elif kind == "arguments":
                yield Delta("arguments", value, self.calls - 1)
            else:  # "end" of a call: what follows may be another
                self._raw = ""
        if scanner.failed:
            self._state, self._scanner, text, self._raw = self._after_calls, None, self._raw, ""
            if text.strip() or not self.calls:
                self._begun = True
                yield from content("content", text, self._pushed)
        elif scanner.left is not None:  # the end of the calls
            self._held, self._raw, self._state, self._scanner = scanner.left, "", self._after_calls, None

    def _after_calls(self) -> Iterator[Delta]:
        self._state = self._text
        yield from ()


def content(kind: str, text: str, end: int = 0) -> Iterator[Delta]:
    if text:
        yield Delta(kind, text, end=end)


def undecided(text: str, tag: str) -> int:
    """How many characters at the end may be the beginning of the tag, with the line ends before it."""
    before = text[: len(text) - possible_stop(text, [tag])]
    return len(text) - len(before.rstrip("\n"))


class CallScanner:
    """Reads calls as the style writes them. `push` yields ("call", name), ("arguments", JSON text) and ("end", "").

    Arguments that come after the name are passed on as they arrive; others when the call is complete.
    """

    # {"name": "f", "arguments": {        with "type": "function" in front, as Llama 3 may write it
    WITH_NAME = re.compile(
        r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
        r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
    )
    MISTRAL_NAME = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{)")  # f[ARGS]{
    MISTRAL_BEGUN = re.compile(r"[\w.-]{0,100}\s*[\[\]\w-]{0,50}\Z")

    def __init__(self, style: ToolStyle) -> None:
        self.style = style
        self.name = ""
        self.failed = False
        self.left: str | None = None  # the text after the calls, once they have ended
        self._text = ""
        self._arguments: JsonEnd | None = None  # those that are passed on
        self._wrapped = False  # whether the object around the arguments has to end, too

    def push(self, text: str) -> Iterator[tuple[str, str]]:
        self._text += text
        while not self.failed and self.left is None:
            found = list(self._pass_on() if self._arguments else self._look())
            yield from found
            if not found:
                return

    def _pass_on(self) -> Iterator[tuple[str, str]]:
        assert self._arguments is not None
        end = self._arguments.find(self._text)
        piece, self._text = (self._text, "") if end is None else (self._text[:end], self._text[end:])
        if piece:
            yield "arguments", piece
        if end is not None:
            self._arguments = None
            yield "end", ""

    def _look(self) -> Iterator[tuple[str, str]]:
        """Look for the next call, or for the end."""
        text = self._text.lstrip()
        if self._wrapped and text:
            self._wrapped, text = False, text.removeprefix("}")
        self._text = text
        if self.name and self._ended(text.lstrip()):
            return
        self._text = text = self._text.lstrip(" \n\t,;[]")
        if found := self.WITH_NAME.match(text):
            self._wrapped = True
            yield from self._begin(json.loads(found[1], strict=False), found.end())
        elif self.style is MISTRAL and (found := self.MISTRAL_NAME.match(text)):
            yield from self._begin(found[1], found.end())
        elif text.startswith("{"):
            yield from self._whole()
        elif text and not (self.style is MISTRAL and self.MISTRAL_BEGUN.match(text)):
            self.failed = True

    def _begin(self, name: str, end: int) -> Iterator[tuple[str, str]]:
        self.name, self._text, self._arguments = name, self._text[end:], JsonEnd()
        yield "call", name

    def _ended(self, text: str) -> bool:
        """Whether the calls have ended here (`left` is set then), or it cannot be said yet."""
        end = self.style.end
        if end and text.startswith(end):
            self.left = text[len(end) :]
            return True
        if end:
            return end.startswith(text)
        text, begin = text.lstrip(" \n,;]"), self.style.begin
        if text.startswith(begin):
            self._text = text[len(begin) :]
            return False
        if text and text[0] not in "{[" and self.style is not MISTRAL:
            self.left = text
        return begin.startswith(text) or self.left is not None

    def _whole(self) -> Iterator[tuple[str, str]]:
        """A call with other keys, or in another order: passed on when it is complete."""
        end = JsonEnd().find(self._text)
        if end is None:
            return
        try:
            call: Any = json.loads(self._text[:end])
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        except (ValueError, KeyError, TypeError, RecursionError):
            name = None
        if not isinstance(name, str):
            self.failed = True
            return
        self.name, self._text = name, self._text[end:]
        yield "call", name
        yield "arguments", arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield "end", ""


class JsonEnd:
    """Finds where a JSON object ends in text that arrives in pieces."""

    def __init__(self) -> None:
        self.depth, self.in_string, self.escaped = 0, False, False

    def find(self, text: str) -> int | None:
        for i, letter in enumerate(text):
            if self.escaped:
                self.escaped = False
            elif self.in_string:
                self.escaped, self.in_string = letter == "\\", letter != '"'
            elif letter == '"':
                self.in_string = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return i + 1
        return None
