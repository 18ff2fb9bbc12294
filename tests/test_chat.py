"""`chat`: the conversation, the commands, pipes, and a real pseudo-terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import spm_vocab, tiny_llama, tiny_parts, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import ENDLESS, TEMPLATE, finish, run, start  # noqa: F401

from llamagpu.cli.markdown_view import SGR, MarkdownView
from llamagpu.conversation import Conversation, Turn
from llamagpu.errors import BadFile
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.llama import Llama

WORDS = [
    "\u2581The",
    "\u2581answer",
    "\u2581is",
    "\u2581**forty",
    "\u2581two**,",
    "\u2581and",
    "\u2581it",
    "\u2581ends.",
]
ANSWER = " The answer is **forty two**, and it ends."


def talker(path: Path, context: int, endless: bool = False) -> Path:
    """A model that answers everything with WORDS: each token predicts the next, and layers add nothing."""
    size = 288 + len(WORDS)
    vocab = spm_vocab(size)
    vocab["tokenizer.ggml.tokens"][288:] = WORDS
    keys, tensors = tiny_parts(
        vocab=size, tied=False, context=context, metadata=vocab | {"tokenizer.chat_template": TEMPLATE}
    )
    directions = np.random.default_rng(0).standard_normal((size, 64))
    directions /= np.sqrt((directions**2).mean(axis=1, keepdims=True))
    output = np.zeros_like(directions)
    chain = [vocab["tokenizer.ggml.tokens"].index("<0x5D>"), *range(288, size), 288 if endless else 2]  # from "]"
    for token, following in pairwise(chain):
        output[following] += directions[token]
    zeros = {name: np.zeros(t[1]) for name, t in tensors.items() if re.search("attn_output|ffn_down", name)}
    for name, values in ({"token_embd.weight": directions, "output.weight": output} | zeros).items():
        tensors[name] = ("F32", values.shape, values.astype("<f4").tobytes())
    tensors["output_norm.weight"] = ("F32", (64,), np.ones(64, "<f4").tobytes())
    return write_gguf(path, keys, tensors)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return talker(tmp_path_factory.mktemp("model") / "talker.gguf", 512)


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory) -> Path:
    return talker(tmp_path_factory.mktemp("model") / "endless.gguf", ENDLESS, endless=True)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("model") / "random.gguf"
    return tiny_llama(file, context=512, metadata={"tokenizer.chat_template": TEMPLATE})


@pytest.fixture
def prompts(monkeypatch) -> list[list[tuple[str, str]]]:
    """(role, content) of the messages of each answer's prompt."""
    seen, generate, encode = [], Llama.generate, Llama.encode_chat
    encoded = []

    def encode_chat(self, messages):
        encoded[:] = [(m["role"], m["content"]) for m in messages]
        return encode(self, messages)

    def recorded(self, *args, **options):
        seen.append(list(encoded))
        return generate(self, *args, **options)

    monkeypatch.setattr(Llama, "encode_chat", encode_chat)
    monkeypatch.setattr(Llama, "generate", recorded)
    return seen


def questions(prompts: list[list[tuple[str, str]]]) -> list[list[str]]:
    return [[content for role, content in prompt if role == "user"] for prompt in prompts]


# Pipes


def test_chat_keeps_the_conversation(run, random_model, prompts):  # noqa: F811
    result = run(
        *("chat", "-m", random_model, "-n", 8, "--system", "be kind", "-v", "-s", 1, "--temp", 0),
        stdin=b"hello\n\nand you?\n/clear\nagain\n/exit\nnot this\n",
    )
    assert result.code == 0
    assert questions(prompts) == [["hello"], ["hello", "and you?"], ["again"]]
    assert all(prompt[0] == ("system", "be kind") for prompt in prompts)
    role, answer = prompts[1][2]
    assert role == "assistant" and result.out.decode().startswith(answer + "\n")
    assert result.err.count(" | first token ") == 3
    first = len(run("tokenize", "-m", random_model, "-p", "[system]be kind[user]hello[a]").json)
    assert int(re.search(r" \((\d+) from the cache\)", result.err)[1]) >= first - 1  # of the second answer


def test_piped_output_is_the_text_as_it_is(run, model):  # noqa: F811
    assert "cut at" not in run("chat", "-m", model, "-n", 3, stdin=b"a").err
    assert run("chat", "-m", model, "-q", stdin=b"a\nb") == (0, f"{ANSWER}\n{ANSWER}\n".encode(), "")


def test_chat_refuses_bytes_without_a_token(run, model, prompts, monkeypatch):  # noqa: F811
    encode = Tokenizer.encode  # a byte-level vocabulary may lack bytes that UTF-8 never uses
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, *args, **kw: [] if text == "\udcff" else encode(self, text, *args, **kw)
    )
    result = run("chat", "-m", model, "-q", stdin=b"a\nb \xff\n/edit \xff\nc\n")
    assert result.code == 2 and result.out.decode() == f"{ANSWER}\n" * 2 and questions(prompts)[-1] == ["a", "c"]
    assert result.err.startswith("error: byte 2 of the text is 0xff, which this model has no token for\n")
    assert result.err.count("error: ") == 2


def test_chat_with_a_message_that_does_not_fit(run, model, prompts):  # noqa: F811
    lines = b"first\n" + b"word " * 150 + b"\nshort\n"
    result = run("chat", "-m", model, "-q", stdin=lines)
    assert result.code == 5 and result.out.decode() == f"{ANSWER}\n" * 2
    cause, remedy = result.err.splitlines()
    assert re.fullmatch(r"error: the message needs \d+ tokens, and the context has 512", cause)
    assert remedy.strip() == "shorten the message"
    assert questions(prompts)[-1] == ["first", "short"]  # the conversation did not suffer
    assert "-c (this model takes 512)" in run("chat", "-m", model, "-c", 256, stdin=lines).err


def test_full_context_drops_the_oldest_turns(run, model, prompts, tmp_path):  # noqa: F811
    count, file = 20, tmp_path / "all.json"
    lines = "".join(f"q{i}\n" for i in range(count)) + f"/tokens\n/save {file}\n"
    result = run("chat", "-m", model, "--system", "be kind", "-n", 20, stdin=lines.encode())
    assert result.code == 0 and result.out.decode() == f"{ANSWER}\n" * count
    asked = questions(prompts)
    assert asked[0] == ["q0"] and [q[-1] for q in asked] == [f"q{i}" for i in range(count)]
    assert all(prompt[0] == ("system", "be kind") for prompt in prompts)
    starts = [int(q[0][1:]) for q in asked]
    assert starts == sorted(starts) and 1 < len(set(starts)) <= 6  # some turns at a time, not one by one
    told = re.findall(r"the context of 512 is full: the model does not see the oldest (\d+) turns?\n", result.err)
    assert [int(count) for count in told] == sorted(set(starts) - {0})
    tokens, dropped = re.search(r"(\d+) of 512 .* 20 turns; .* oldest (\d+)", result.err).groups()
    assert 0 < int(tokens) <= 512 and int(dropped) >= starts[-1]
    assert len(json.loads(file.read_text())["messages"]) == 1 + 2 * count


def test_older_turns_make_room_for_an_answer(run, endless_model, prompts, tmp_path):  # noqa: F811
    """An answer that fills the context goes on without the older turns, and is cut where there are none left."""
    lines = b"a\nb\n/set max_tokens -1\nlong\n"
    result = run("chat", "-m", endless_model, "-c", 256, "-n", 2, "-s", 1, stdin=lines)
    assert questions(prompts) == [["a"], ["a", "b"], ["a", "b", "long"], ["long"]]
    assert result.err.count("the model does not see the oldest 2 turns") == 1
    assert (
        result.err.count("(cut: the context of 256 is full; ask for a shorter answer, or start with a larger -c)\n")
        == 1
    )
    answer = result.out.decode().splitlines()[2]
    words = ANSWER.split()
    assert len(answer.split()) > 200 and answer.split() == [words[i % len(words)] for i in range(len(answer.split()))]
    assert "cut" not in run("chat", "-m", endless_model, "-c", 256, "-n", 20, stdin=b"a\nb\n").err


def test_tokens_are_those_that_the_model_sees(run, endless_model, tmp_path):  # noqa: F811
    file = tmp_path / "chat.json"
    turns = "".join(f"q{i}\n/tokens\n" for i in range(6))
    long = "/set max_tokens -1\nlong\n/tokens\n/undo\n/tokens\n"
    lines = f"{turns}{long}/save {file}\n/clear\n/tokens\n/load {file}\n/tokens\n"
    result = run("chat", "-m", endless_model, "-c", 256, "-n", 30, "-s", 1, stdin=lines.encode())
    told = re.findall(r"^(\d+) of 256 tokens, .*", result.err, re.M)
    said = [line for line in result.err.splitlines() if " of 256 tokens" in line]
    assert len(told) == 10 and max(map(int, told)) <= 256 and said[8] == "0 of 256 tokens, 0 turns"
    assert said[6].endswith("7 turns; the model does not see the oldest 7") and said[7] == said[9]
    other = run("chat", "-m", endless_model, "-c", 4096, stdin=f"/load {file}\n/tokens\n".encode())
    assert re.search("of 4096 tokens, 6 turns\n", other.err)  # a larger context has room for all


def test_commands_are_told_not_sent(run, model, prompts):  # noqa: F811
    lines = b"/foo\n/claer\n/CLEAR  \n/clear the table\n/edit\n/undo\n/Help \n/etc/hosts\n /etc/hosts\n/Bye  \nx\n"
    result = run("chat", "-m", model, stdin=lines)
    assert result.code == 2 and questions(prompts) == [[" /etc/hosts"]]
    for said in (
        *(
            "no command /foo\n       /help lists",
            "did you mean /clear?",
            "a new conversation\n",
            "/clear takes no text",
        ),
        *("there is no message yet", "/regenerate  ", "no command /etc/hosts\n"),
    ):
        assert said in result.err


def test_regenerate_edit_and_undo(run, random_model, prompts, monkeypatch):  # noqa: F811
    seeds, generate = [], Llama.generate

    def recorded(self, ids, **options):
        seeds.append(options["sampling"].seed)
        return generate(self, ids, **options)

    monkeypatch.setattr(Llama, "generate", recorded)
    lines = b"a\nb\n/regenerate\n/regenerate\n/edit c\n/undo\nd\n/undo\n/undo\n/undo\n"
    result = run("chat", "-m", random_model, "-n", 4, "-s", 1, stdin=lines)
    assert questions(prompts) == [["a"], ["a", "b"], ["a", "b"], ["a", "b"], ["a", "c"], ["a", "d"]]
    assert seeds == [1, 1, 2, 3, 1, 1]
    assert result.code == 2 and result.err.count("removed: ") == 3 and "no message yet" in result.err


def test_set(run, model, monkeypatch):  # noqa: F811
    used, generate = [], Llama.generate

    def recorded(self, ids, **options):
        used.append((options["sampling"], options["max_tokens"]))
        return generate(self, ids, **options)

    monkeypatch.setattr(Llama, "generate", recorded)
    wrong = {
        "": "=1",
        "top_p": "2",
        "temperature": "nan",
        "top-k": "1.5",
        "max_tokens": "0",
        "seed": "x",
        "colour": "red",
    }
    lines = ["a", *(f"/set {name} {value}" for name, value in wrong.items())]
    lines += [
        "/SET Temp=0.5",
        "/set top-k 7",
        "/set seed 9",
        "/set repeat_penalty 1.2",
        "/set max_tokens 3",
        "b",
        "/set",
    ]
    result = run("chat", "-m", model, "-s", 4, stdin="\n".join(lines).encode())
    assert result.code == 2 and result.err.count("error: ") == len(wrong)
    (before, unlimited), (after, limited) = used
    assert after == replace(before, temperature=0.5, top_k=7, seed=9, repeat_penalty=1.2)
    assert (unlimited, limited) == (-1, 3)
    assert "\ntemperature 0.5\ntop_k 7\ntop_p 0.95\n" in result.err and "\nmax_tokens 3\n" in result.err


def test_system_and_stats(run, model, prompts):  # noqa: F811
    lines = b"/stats\na\n/system be kind\nb\n/system\n/SYSTEM none\nc\n/stats\n/clear\n/stats\n"
    result = run("chat", "-m", model, stdin=lines)
    assert [prompt[0] for prompt in prompts] == [("user", "a"), ("system", "be kind"), ("user", "a")]
    assert result.err.count("system message: be kind\n") == 2 and "system message: none\n" in result.err
    assert result.err.count("nothing was answered yet") == 2 and result.err.count(" | first token ") == 1


def test_save_and_load(run, model, prompts, tmp_path):  # noqa: F811
    file, notes = tmp_path / "chat.json", tmp_path / "notes.txt"
    notes.write_text("mine")
    saved = run("chat", "-m", model, "--system", "be kind", stdin=f"a\n/save {file}\nb\n/save {file}\n".encode())
    assert saved.code == 0
    roles = ["system", *["user", "assistant"] * 2]
    messages = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in messages] == roles and messages[1]["content"] == "a"
    loaded = run("chat", "-m", model, stdin=f"/load {file}  \nc\n".encode())
    assert loaded.code == 0 and questions(prompts)[-1] == ["a", "b", "c"] and prompts[-1][0] == ("system", "be kind")
    for line, said in (
        ("/load", "/load has no file name"),
        (f"/load {tmp_path}/none", "No such file"),
        (f"/load {notes}\n/quit\n/load", "no conversation"),
        (f"a\n/save {notes}", "no conversation"),
        (f"a\n/save {tmp_path}/none/x", "cannot write"),
        ("/save ~nobody_here/x", "no message yet"),
    ):
        result = run("chat", "-m", model, stdin=line.encode())
        assert result.code == 2 and said in result.err and result.err.count("error: ") == 1
    assert notes.read_text() == "mine"
    result = run("chat", "-m", model, stdin=f"/load {tmp_path}/none\nd\n".encode())
    assert result.code == 2 and result.out.decode() == f"{ANSWER}\n" and questions(prompts)[-1] == ["d"]


def test_files_that_are_no_conversation(tmp_path):
    file = tmp_path / "x.json"
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "\udcff é"}
    for data in (
        *("", "[", "3", "{}", '{"messages": 3}', "[3]", "[" * 100_000),
        *(json.dumps(m) for m in ([user], [user, user], [assistant, user], [user, {**assistant, "content": 1}])),
        json.dumps([user, assistant, {"role": "system", "content": "late"}]),
    ):
        file.write_text(data)
        with pytest.raises(BadFile, match="no conversation"):
            Conversation.load(file)
    for messages in ([], [user, assistant], [{"role": "system", "content": "s"}, user, assistant]):
        file.write_text(json.dumps(messages))
        conversation = Conversation.load(file)
        assert conversation.messages() == messages
        conversation.save(file)
        assert Conversation.load(file) == conversation


def test_dropped_turns_are_left_out():
    conversation = Conversation("s", [Turn("a", "b"), Turn("c", "d")])
    assert [m["content"] for m in conversation.messages("e", dropped=1)] == ["s", "c", "d", "e"]


def test_chat_continues_after_an_interrupt(endless_model):
    process = start("chat", "-m", endless_model, "-q", stdin=subprocess.PIPE)
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    process.stdin.write(b"/exit\n")
    process.stdin.close()
    process.stdin = None
    assert finish(process).code == 0


def test_a_pipe_does_not_import_the_line_editor(model):
    patch = "import atexit, sys\natexit.register(lambda: print('prompt_toolkit' in sys.modules, file=sys.stderr))"
    process = start("chat", "-m", model, "-q", patch=patch, stdin=subprocess.PIPE)
    process.stdin.write(b"a\n")
    result = finish(process)
    assert result == (0, f"{ANSWER}\n".encode(), "False\n")


# Markdown


def shown(text: str, width: int = 40, styled: bool = True, pieces: int = 1) -> str:
    out: list[str] = []
    view = MarkdownView(out.append, lambda: width, styled)
    for i in range(0, len(text), pieces):
        view.feed(text[i : i + pieces])
    view.close()
    return "".join(out)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("\n  a **b c** d*e f*\n", "a <1>b</> <1>c</> d*e f*\n"),
        ("*a* _b_ __c__ ***d*** `x  *y*` end", "<3>a</> <3>b</> <1>c</> <1;3>d</> <36>x</>  <36>*y*</> end\n"),
        ("2 * 3 * 4, 2**3, snake_case_name, \\*x\\*", "2 * 3 * 4, 2**3, snake_case_name, *x*\n"),
        ("**open\nclosed", "<1>open</>\nclosed\n"),
        ("# A b\n\ntext", "<1>A</> <1>b</>\n\ntext\n"),
        ("- one\n  * two\n10. three", "• one\n  • two\n10. three\n"),
        ("> quoted\n---\n-- no rule", f"<2>│ </>quoted\n<2>{'─' * 40}</>\n-- no rule\n"),
        ("```py\nx = '**a**'\n\n    y\n```\n**b**", "<36>x = '**a**'</>\n\n<36>    y</>\n<1>b</>\n"),
        ("~~~\n```\n~~~\n`a` b", "<36>```</>\n<36>a</> b\n"),
        ("| a | **b** |\n|---|:-:|\n| long | 1 |\n\nx", "| a    | b   |\n| ---- | --- |\n| long | 1   |\n\nx\n"),
        ("|a|b| is no table", "|a|b| is no table\n"),
        ("a \x1b[31mred\x07\r\n\x9bx", "a [31mred\nx\n"),
        ("", ""),
    ],
)
def test_markdown(text, want):
    want = re.sub("<([0-9;]+)>", "\x1b[\\1m", want).replace("</>", "\x1b[0m")
    for pieces in (1, 2, 7, 1000):
        assert shown(text, pieces=pieces) == want


def test_words_wrap():
    assert shown("one two three four", 9) == "one two\nthree\nfour\n"
    assert shown("- one two three", 9) == "• one two\n  three\n"
    assert SGR.sub("", shown("> one two three", 9)) == "│ one two\n│ three\n"
    assert shown("abcdefghij klm", 4) == "abcd\nefgh\nij\nklm\n"
    assert shown("\u65e5\u672c\u8a9e\u6587\u5b57", 4) == "\u65e5\u672c\n\u8a9e\u6587\n\u5b57\n"  # two columns each
    for text in ("----1", ">   1", "1111. 1"):  # as wide as the line before its kind is known
        assert shown(text, 4, pieces=1) == shown(text, 4, pieces=1000)
    assert shown("          deep indent here", 9).splitlines()[-1].strip() == "here"
    assert shown("# a **b** `c`\n```\nlong line of code\n```", 8, styled=False) == (
        "# a\n**b**\n`c`\n```\nlong line of code\n```\n"
    )


@given(st.text(st.sampled_from("ab *_`#->|~1.\\\n\t\u65e5"), max_size=60), st.integers(4, 16), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_text_is_shown(text, width, styled):
    whole = shown(text, width, styled, pieces=1000)
    assert shown(text, width, styled, pieces=1) == whole
    kept = "ab\u65e5" if styled else "ab\u65e5*_`#~\\1."
    code = "```" in text or "~~~" in text  # the line of a fence is not shown
    if not (styled and code):
        assert [c for c in whole if c in kept] == [c for c in SGR.sub("", text) if c in kept]
    if not code and not re.search(r"\||\d\d", text):
        assert all(len(line.strip()) <= width for line in SGR.sub("", whole).splitlines())


# Terminals

PROMPT = r"\n(?:\x1b\[[0-9;?]*[A-Za-z])*>"


class Terminal:
    """llamagpu ARGS in a pseudo-terminal of its own."""

    def __init__(self, *args: object, home: Path, columns: int = 80, **env: str) -> None:
        self.control, tty = pty.openpty()
        fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        folders = {"HOME": str(home), "XDG_STATE_HOME": str(home)}
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llamagpu", *map(str, args)],
            **{name: tty for name in ("stdin", "stdout", "stderr")},
            env={**inherited, "TERM": "xterm", "NO_COLOR": "", **folders, **env},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C reaches it
        )
        os.close(tty)
        self.unread = "\n"  # a prompt begins a line

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.control)

    def wait_for(self, pattern: str) -> str:
        """What the terminal shows up to the pattern."""
        deadline = time.monotonic() + 60
        while not (found := re.search(pattern, self.unread)):
            ready, _, _ = select.select([self.control], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.unread!r}"
            try:
                self.unread += os.read(self.control, 65536).decode(errors="replace")
            except OSError:  # Linux: the process has ended
                raise AssertionError(f"ended without {pattern!r}: {self.unread!r}") from None
        before, self.unread = self.unread[: found.end()], self.unread[found.end() :]
        return before

    def type(self, keys: str) -> None:
        os.write(self.control, keys.encode())

    def enter(self, line: str) -> str:
        """Type a line; return what is shown before the next prompt, without escape sequences."""
        self.type(line + "\r")
        return plain(self.wait_for(PROMPT))

    def ends(self) -> int:
        try:
            while os.read(self.control, 65536):
                pass
        except OSError:
            pass
        return self.process.wait(60)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def saved(terminal: Terminal, folder: Path) -> list[str]:
    """The questions of the conversation."""
    file = folder / "saved.json"
    terminal.enter(f"/save {file}")
    return [m["content"] for m in json.loads(file.read_text())["messages"] if m["role"] == "user"]


def test_chat_on_a_terminal(model, tmp_path):
    with Terminal("chat", "-m", model, home=tmp_path, columns=30) as terminal:
        assert "talker.gguf, context 512,\r\n/help lists the commands\r\n" in terminal.wait_for(PROMPT)
        terminal.type("hello\r")
        answer = terminal.wait_for(PROMPT)
        assert "\x1b[1mforty\x1b[0m \x1b[1mtwo\x1b[0m," in answer
        assert "\nThe answer is forty two, and\nit ends.\n" in plain(answer)
        assert "/regenerate" in terminal.enter("/Help ")
        assert "\nsystem message: none\n" in terminal.enter("/sy\t")
        assert "\ntop_k 40\n" in terminal.enter("/set top_k\t")
        terminal.enter("\x1b[200~one\ntwo\n\x1b[201~")  # a paste
        terminal.enter("three\x1b\rfour")  # Alt-Enter
        assert saved(terminal, tmp_path) == ["hello", "one\ntwo", "three\nfour"]
        terminal.type("/edit\r")
        terminal.wait_for(r"four")
        terminal.enter("!")
        assert saved(terminal, tmp_path) == ["hello", "one\ntwo", "three\nfour!"]
        terminal.type("/edit\r")
        terminal.wait_for(r"four!")
        terminal.type("\x03")  # changes nothing
        terminal.wait_for(PROMPT)
        terminal.enter("/set max_tokens 3")
        assert "\n(cut at 3 tokens; /set\nmax_tokens)\n" in terminal.enter("short")
        assert "\nerror: there is no command\n/foo\n" in terminal.enter("/foo")
        terminal.type("\x04")
        assert terminal.ends() == 0
    with Terminal("chat", "-m", model, "-q", home=tmp_path, NO_COLOR="1") as terminal:
        assert "talker" not in terminal.wait_for(PROMPT)
        answer = terminal.enter("\x1b[A")  # /foo, of the other session
        assert "no command /foo" in answer
        terminal.type("x\r")
        assert "The answer is **forty two**, and it ends.\r\n" in terminal.wait_for(PROMPT)
        terminal.type("/exit\r")
        assert terminal.ends() == 0
    assert next(tmp_path.rglob("chat_history")).stat().st_mode & 0o777 == 0o600


def test_keys_and_interrupts_on_a_terminal(endless_model, tmp_path):
    with Terminal("chat", "-m", endless_model, home=tmp_path) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("lost\x03")  # clears the line
        terminal.wait_for(PROMPT)
        terminal.type("first\r")
        terminal.wait_for("The answer")
        terminal.type("xyzzy\x1b[200~p\nq\x1b[201~\r")
        answer = "".join(terminal.wait_for("ends") for _ in range(50))
        assert "xyzzy" not in answer and "p\r\nq" not in answer
        terminal.process.send_signal(signal.SIGINT)  # the terminal's Ctrl-C discards what was typed
        terminal.wait_for("xyzzyp")  # at the next prompt
        terminal.wait_for("The answer")
        terminal.type("\x03\x03\x03")
        assert "\n(stopped)\n" in plain(terminal.wait_for(PROMPT))
        assert saved(terminal, tmp_path) == ["first", "xyzzyp\nq"]
        assert "2 turns" in terminal.enter("/tokens")
        terminal.type("\x03")
        assert "Ctrl-D or /exit ends" in terminal.wait_for(PROMPT)
        terminal.type("\x04")
        assert terminal.ends() == 0


def test_dumb_terminal(model, tmp_path):
    with Terminal("chat", "-m", model, "-q", home=tmp_path, TERM="dumb") as terminal:
        terminal.wait_for("> ")
        terminal.type("hello\r")
        answer = terminal.wait_for("> ")
        assert "**forty two**, and it ends.\r\n" in answer and "\x1b" not in answer
        terminal.type("/exit\r")
        assert terminal.ends() == 0


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi", "hi"),
        ("<|channel|>final<|message|>hi", "hi"),
        ("<|channel|>analysis<|message|>cut sho", ""),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final", ""),
        ("a <|channel|>final<|message|>", "a <|channel|>final<|message|>"),
    ],
)
def test_the_next_prompt_has_no_reasoning_of_other_channels(answer: str, kept: str) -> None:
    assert Conversation(turns=[Turn("question", answer)]).messages()[1]["content"] == kept
