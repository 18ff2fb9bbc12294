"""The read-eval-print loop of `chat`: answers messages and runs /commands."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llamagpu.cli.generate import repeats_itself, summary
from llamagpu.cli.terminal import Interrupted, PipeClosed, Usage, interruptible, log, progress_line, write
from llamagpu.cli.tokenize import check_bytes
from llamagpu.conversation import Conversation, Turn
from llamagpu.errors import BadArgument, DoesNotFit, GrammarFailed, LlamaGpuError

if TYPE_CHECKING:
    from llamagpu.engine.grammar import Grammar
    from llamagpu.engine.sampler import Sampling
    from llamagpu.llama import Generation, Llama

Answering = tuple[Callable[[], None], Callable[[str], None]]
HELP = """\
/help               this list
/clear              start a new conversation
/regenerate         answer the last message again
/edit [TEXT]        change the last message and answer it
/undo               remove the last message and its answer
/system [TEXT]      show or set the system message; none: remove it
/set [NAME VALUE]   show or set how answers are sampled
/save FILE          save the conversation as JSON
/load FILE          continue a saved conversation
/stats              times and speeds of the last answer
/tokens             how much of the context the conversation takes
/exit               end; also /quit, /bye"""
COMMANDS = [line.split()[0] for line in HELP.splitlines()]
ALIASES = {"/quit": "/exit", "/bye": "/exit"}
WITH_TEXT = ("/edit", "/system", "/set", "/save", "/load")
NO_STATS = "nothing was answered yet"
INTEGERS = ("top_k", "repeat_last_n", "seed", "max_tokens")
PENALTIES = ("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty")
SETTINGS = ("temperature", "top_k", "top_p", "min_p", *PENALTIES, "seed", "max_tokens")


def turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


@contextmanager
def command_errors() -> Iterator[None]:
    """A command that fails or a message of wrong bytes does not end a piped chat, as other errors of a file would."""
    try:
        yield
    except LlamaGpuError as error:
        raise Usage(error.cause, error.remedy) from error


class Frontend(Protocol):
    """Where messages come from and answers go to."""

    interactive: bool

    def read(self, default: str = "") -> str | None:
        """The user's next message, `default` edited; None at the end of input."""

    def answering(self) -> AbstractContextManager[Answering]:
        """A block that shows an answer: yields `check`, which raises Interrupted, and the function that writes."""


class Pipe:
    """A line of standard input per turn, plain text on stdout."""

    interactive = False

    def read(self, default: str = "") -> str | None:
        line = sys.stdin.readline() if sys.stdin else ""
        return line.removesuffix("\n") if line else None

    @contextmanager
    def answering(self) -> Iterator[Answering]:
        with interruptible() as check:
            yield check, write
            write("\n")


class Repl:
    """One conversation with a model."""

    def __init__(
        self,
        llama: "Llama",
        frontend: Frontend,
        system: str | None,
        sampling: "Sampling",
        max_tokens: int = -1,
        quiet: bool = False,
        verbose: bool = False,
        grammar: "Grammar | None" = None,
    ) -> None:
        if llama.tokenizer.chat_template is None:
            raise Usage("this model has no chat template", "it continues text: use `llamagpu generate`")
        self.llama, self.frontend, self.sampling, self.max_tokens = llama, frontend, sampling, max_tokens
        self.quiet, self.verbose, self.grammar = quiet, verbose, grammar
        self.conversation = Conversation(system)
        self.ended = False
        self.tries = 0  # answers to the last message: each has another seed
        self.stats = NO_STATS

    def run(self) -> int:
        """Read and answer until the end of input. Return the exit code."""
        code = 0
        while not self.ended and (text := self.frontend.read()) is not None:
            try:
                self.handle(text)
            except LlamaGpuError as error:
                survives = self.frontend.interactive or isinstance(
                    error, Usage | BadArgument | DoesNotFit | GrammarFailed
                )
                if isinstance(error, PipeClosed) or not survives:
                    raise
                log(f"error: {error.cause}" + (f"\n       {error.remedy}" if error.remedy else ""))
                code = error.exit_code
        return 0 if self.frontend.interactive else code

    def handle(self, text: str) -> None:
        """Run a command, or answer a message. An unknown command is a message if a blank precedes it."""
        word = next(iter(text.split(maxsplit=1)), "").lower()
        name = ALIASES.get(word, word)
        if name in COMMANDS:
            rest = text.strip()[len(word) :].strip()
            if rest and name not in WITH_TEXT:
                raise Usage(f"{name} takes no text", f"write {name} alone")
            getattr(self, "do_" + name[1:])(rest)
        elif text.startswith("/") and "\n" not in text:
            close = get_close_matches(name, COMMANDS, n=1)
            remedy = f"did you mean {close[0]}?" if close else "/help lists the commands"
            raise Usage(f"there is no command {name}", f"{remedy} (a blank before the / makes it a message)")
        elif name:
            self.tries = 0
            self.answer(text)

    def say(self, text: str) -> None:
        """Confirm a command."""
        if not self.quiet:
            log(text)

    def answer(self, question: str) -> None:
        """Show the answer and add the turn. A turn that was stopped before any text is not added."""
        conversation, before = self.conversation, self.conversation.dropped
        with command_errors():
            check_bytes(self.llama.tokenizer, question)
        with self.frontend.answering() as (check, show):
            runs = self.generate(question, check, show)
        run, text, ids = runs[-1], "".join(run.text for run in runs), [id for run in runs for id in run.ids]
        stopped = run.finish_reason == "interrupted"
        if text or not stopped:
            conversation.turns.append(Turn(question, text))
        if stopped:
            self.say("(stopped)" if text else "stopped before there was an answer: the message was taken back")
        if conversation.dropped > before:
            unseen = f"the model does not see the oldest {turns(conversation.dropped)}"
            self.say(f"the context of {self.llama.context} is full: {unseen}")
        if repeats_itself(ids):
            self.say("the answer repeats itself: try /set repeat_penalty 1.1, then /regenerate")
        if run.finish_reason == "length" and self.frontend.interactive:
            self.say(f"(cut at {len(ids)} tokens; /set max_tokens)")
        if run.finish_reason == "context":
            larger = ", or start with a larger -c" if self.llama.context < self.llama.config.context else ""
            self.say(f"(cut: the context of {self.llama.context} is full; ask for a shorter answer{larger})")
        self.stats = summary(run)
        if self.verbose:
            log(self.stats)

    def generate(self, question: str, check: Callable[[], None], show: Callable[[str], None]) -> "list[Generation]":
        """Stream an answer. When the context is full, the oldest turns are dropped and a new run continues it.

        With a grammar it ends there: a new run would begin the grammar again.
        """
        conversation, context, seed = self.conversation, self.llama.context, self.sampling.seed
        sampling = self.sampling if seed is None else replace(self.sampling, seed=seed + self.tries)
        self.tries += 1
        runs: list[Generation] = []
        answer: list[int] = []
        while not runs or (runs[-1].finish_reason == "context" and conversation.dropped < len(conversation.turns)):
            left = self.max_tokens - len(answer) if self.max_tokens >= 0 else -1
            try:
                ids = conversation.prompt(self.llama, question, left, answer)
            except DoesNotFit:
                if not runs:
                    raise
                break  # the template shows less than the turns
            run = self.llama.generate(
                ids,
                max_tokens=left if left <= context - len(ids) else -1,
                sampling=sampling,
                grammar=self.grammar,
                # A status line would erase the last line of an answer that is on the screen.
                progress=progress_line("reading", self.quiet or bool(runs), check),
            )
            runs.append(run)
            try:
                for token in run:
                    if token.text:
                        show(token.text)
                    check()
            except Interrupted:
                run.finish_reason = "interrupted"
            answer += run.ids
            if self.grammar:
                break
        return runs

    def last(self) -> Turn:
        if not self.conversation.turns:
            raise Usage("there is no message yet", "write one first")
        return self.conversation.turns[-1]

    def answer_last(self, question: str) -> None:
        """Replace the last turn. It stays if there is no new answer."""
        conversation, turn = self.conversation, self.conversation.turns.pop()
        before, count = conversation.dropped, len(conversation.turns)
        conversation.dropped = min(before, count)
        try:
            self.answer(question)
        finally:
            if len(conversation.turns) == count:
                conversation.turns.append(turn)
                conversation.dropped = before

    # Commands

    def do_help(self, _: str) -> None:
        log(HELP)
        if self.frontend.interactive:
            log("Alt-Enter begins a new line, Ctrl-C stops an answer, Ctrl-D ends.")

    def do_clear(self, _: str) -> None:
        self.conversation = Conversation(self.conversation.system)
        self.stats = NO_STATS
        self.say("a new conversation")

    def do_regenerate(self, _: str) -> None:
        question = self.last().question
        if self.sampling.greedy:
            self.say("temperature is 0: the answer does not change")
        self.answer_last(question)

    def do_edit(self, text: str) -> None:
        question = self.last().question
        if not text and not self.frontend.interactive:
            raise Usage("/edit has no text", "write /edit TEXT: there is no terminal to edit it at")
        new = text or self.frontend.read(question) or ""
        if new.strip():
            self.tries = 0
            self.answer_last(new)

    def do_undo(self, _: str) -> None:
        turn = self.last()
        self.conversation.turns.pop()
        self.conversation.dropped = min(self.conversation.dropped, len(self.conversation.turns))
        first = turn.question.strip().splitlines()[0]
        self.say(f"removed: {first if len(first) <= 60 else first[:57] + '...'}")

    def do_system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text.lower() == "none" else text
        (self.say if text else log)(f"system message: {self.conversation.system or 'none'}")

    def do_set(self, text: str) -> None:
        name, value = re.fullmatch(r"([^\s=]*)[\s=]*(.*)", text, re.S).groups()  # type: ignore[union-attr]
        name = name.lower().replace("-", "_")
        name = {"temp": "temperature", "n": "max_tokens", "predict": "max_tokens"}.get(name, name)
        if text and name not in SETTINGS:
            raise Usage(f"there is no setting {name or text}", f"it is one of {', '.join(SETTINGS)}")
        if value:
            self.change(name, value)
        values = {**{n: getattr(self.sampling, n) for n in SETTINGS[:-1]}, "max_tokens": self.max_tokens}
        (self.say if value else log)("\n".join(f"{n} {v}" for n, v in values.items() if name in ("", n)))

    def change(self, name: str, value: str) -> None:
        try:
            number: int | float = int(value) if name in INTEGERS else float(value)
        except ValueError:
            kind = "a whole number" if name in INTEGERS else "a number"
            raise Usage(f"{name} is {value}", f"give {kind}") from None
        if name == "max_tokens":
            if number < 1 and number != -1:
                raise Usage(f"max_tokens is {value}", "give a whole number from 1 up; -1: until the model ends")
            self.max_tokens = int(number)
            return
        if name == "seed" and number == -1:
            number = int.from_bytes(os.urandom(4), "little")
        self.sampling = replace(self.sampling, **{name: number})  # type: ignore[arg-type]

    def do_save(self, text: str) -> None:
        self.last()
        path = self.path("/save", text)
        with command_errors():
            self.conversation.save(path, self.llama.context)
        self.say(f"saved in {path}: {turns(len(self.conversation.turns))}")

    def do_load(self, text: str) -> None:
        path = self.path("/load", text)
        with command_errors():
            self.conversation = Conversation.load(path, self.llama.context)
        self.stats = NO_STATS
        self.say(f"loaded from {path}: {turns(len(self.conversation.turns))}")

    def path(self, command: str, text: str) -> Path:
        if not text.isprintable() or not text:
            raise Usage(f"{command} has no file name", f"write {command} FILE")
        try:
            return Path(text).expanduser()
        except RuntimeError:
            raise Usage(f"{text}: there is no such user", "name another file") from None

    def do_stats(self, _: str) -> None:
        log(self.stats)

    def do_tokens(self, _: str) -> None:
        conversation = self.conversation
        dropped, ids = conversation.fit(self.llama, None)
        unseen = f"; the model does not see the oldest {dropped}" if dropped else ""
        log(f"{len(ids)} of {self.llama.context} tokens, {turns(len(conversation.turns))}{unseen}")

    def do_exit(self, _: str) -> None:
        self.ended = True
