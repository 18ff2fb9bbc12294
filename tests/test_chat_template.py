"""Chat templates: the prompts of jinja2 itself, what templates rely on, and templates that attack."""

import datetime
import html
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from package_data import templates

from llamagpu.errors import BadArgument, LlamaGpuError
from llamagpu.files import chat_template, template_sandbox
from llamagpu.files.chat_template import render

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <there> & \u4f60\u597d"},
]


TURNS = [
    {"role": "user", "content": "Hi <there> & \u4f60\u597d"},
    {"role": "assistant", "content": " Yes. \n"},
    {"role": "user", "content": "And?\n"},
]
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": "K\u00f6ln"}}}
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": '{"celsius": 3}'},
]
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "In a <city>.", "parameters": CITY}}
# conversation -> messages, tools
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "system": ([MESSAGES[0], *TURNS], None),
    "no system": (TURNS, None),
    "tools": (CALLS, [TOOL]),
}
# jinja2's `safe` gives Markup, and text that is added to it is escaped: &#34; for quotes in a prompt. Ours gives str.
ESCAPED = {("meetkai-functionary-medium-v3.1", "tools")}


def run(template: str, **names: Any) -> str:
    return render(template, MESSAGES, bos_token="<s>", eos_token="</s>", **names)


def refusal(template: str) -> str:
    with pytest.raises(LlamaGpuError) as caught:
        run(template)
    assert caught.value.cause.isprintable() and len(caught.value.cause) < 500 and caught.value.remedy
    return caught.value.cause


def hugging_face_environment() -> ImmutableSandboxedEnvironment:
    """Configured as Hugging Face transformers does it."""

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    extensions: list[Any] = [loopcontrols, template_sandbox._Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": fixed_date}
    return environment


def fixed_date(format: str) -> str:
    return datetime.datetime(2026, 2, 3, 4, 5, 6).strftime(format)


def answer(source: str, names: dict[str, Any]) -> dict[str, str]:
    if "strftime_now" in source:
        return template_sandbox._answer(source, names)  # here, where it has `fixed_date`
    try:
        return {"text": render(source, **names)}
    except LlamaGpuError as error:
        return {"cause": error.cause}


def test_public_templates_give_the_prompts_of_jinja2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where jinja2 fails (the template needs tools, or allows no system message), the error is the same."""
    monkeypatch.setattr(template_sandbox, "_strftime_now", fixed_date)
    environment, equal, refused = hugging_face_environment(), 0, 0
    for name, source in templates().items():
        compiled = environment.from_string(source)
        for conversation, (messages, tools) in CONVERSATIONS.items():
            names: dict[str, Any] = {"tools": tools, "documents": None, "bos_token": "<s>", "eos_token": "</s>"}
            names |= {"messages": messages, "add_generation_prompt": True}
            where = f"{name}, {conversation}"
            try:
                expected = compiled.render(names)
            except Exception as error:  # a template may fail in any way Python can
                assert str(error) in answer(source, names)["cause"], where
                refused += 1
                continue
            if (name, conversation) in ESCAPED:
                expected = html.unescape(expected)
            assert answer(source, names) == {"text": expected}, where
            equal += 1
    assert equal > 180 and refused < 20


# what templates rely on


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}", "<s>|</s>|True"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{{ messages|tojson }}", json.dumps(MESSAGES, ensure_ascii=False)),
        ("{{ messages|tojson(indent=2) }}", json.dumps(MESSAGES, ensure_ascii=False, indent=2)),
        ("{{ {'b': 1, 'a': [1.5, none, true]}|tojson }}", '{"b": 1, "a": [1.5, null, true]}'),
        ("{{ {'b': 1, 'a': 2}|tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ '<&>'|safe }}{{ '<&>' }}{{ '<'|e }}", "<&><&>&lt;"),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(4) %}{% if i % 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("a{% generation %}b{{ 1 + 1 }}{% endgeneration %}c", "ab2c"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks, lstrip_blocks
        ("{% set n = namespace(i=0) %}{% for m in 'ab' %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}", None),
        ("{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|length }}", "1"),
        ("{{ messages[1:][0]['role'] }}{{ messages[::-1][0].role }}{{ messages[-1].role }}", "useruseruser"),
        ("{{ messages|map(attribute='role')|join(', ') }}{{ messages|join('-', attribute='role') }}", None),
        ("{{ 'a' ~ 1 ~ none ~ x }}|{{ x is defined }}", "a1None|False"),
        ("{{ ' a b '|trim }}{{ ' a '.strip() }}{{ 'a,b'.split(',')[-1] }}{{ 'ab'.replace('a', 'c') }}", None),
        ("{{ '-'.join(['a', 'b']) }}{{ 'abc'|replace('b', 'x') }}{{ 'it is'|title }}", "a-baxcIt Is"),
        ("{{ '%s is %d' % ('x', 3) }}|{{ '%05.2f'|format(3.14159) }}|{{ '{}-{n}'.format(1, n=2) }}", None),
        ("{{ 'a\nb'|indent(2) }}", "a\n  b"),
        ("{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "b1a2"),
        ("{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{% for k, v in {'b': 1}|items %}{{ k }}{{ v }}{% endfor %}{{ dict(a=1) }}", "b1{'a': 1}"),
        ("{% macro m(x, y='d') %}{{ x }}{{ y }}{{ varargs }}{% endmacro %}{{ m(1) }}{{ m(1, 2, 3) }}", None),
        ("{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}in{% endcall %}", "<in>"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set c %}x{{ a }}{% endset %}{{ c }}", "12x1"),
        ("{{ [1, 2] + [3] }}{{ (1, 2) }}{{ 2 ** 10 }}{{ 7 // 2 }}{{ 'ab' * 2 }}{{ -3|abs }}", None),
        ("{{ [3, 1, 2]|sort|first }}{{ 'abc'|last }}{{ [1, 1]|unique|list }}{{ 'x'|default('y') }}", None),
        ("{{ loop is defined }}{{ '3'|int + 1 }}{{ none|default('d', true) }}{{ 'abc'|upper|length }}", None),
        ("{{ messages[0].get('name', 'n') }}{{ 'role' in messages[0] }}{{ messages[0] is mapping }}", None),
    ],
)  # fmt: skip
def test_what_templates_use(template: str, expected: str | None) -> None:
    """Where no text is given it is what jinja2 itself makes of the template."""
    if expected is None:
        import jinja2

        expected = jinja2.Environment().from_string(template).render(messages=MESSAGES)
    assert run(template) == expected


def test_further_names() -> None:
    assert run("{{ tools[0].name }}{{ thinking }}", tools=[{"name": "f"}], thinking=False) == "fFalse"
    assert run("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


def test_a_long_conversation() -> None:
    llama3 = templates()["meta-llama-Llama-3.2-3B-Instruct"]
    messages = [{"role": "user", "content": "word " * 100}] * 1000  # about 125,000 tokens
    prompt = render(llama3, messages, bos_token="<s>", eos_token="")
    assert prompt.count("<|eot_id|>") == 1001 and len(prompt) > 500_000  # it adds a system message


def test_messages_are_not_changed() -> None:
    before = json.dumps(MESSAGES)
    for call in ("append(1)", "clear()", "pop()", "extend([1])", "insert(0, 1)", "sort()", "reverse()"):
        assert "unsafe" in refusal("{{ messages." + call + " }}")
    for call in ("update({'a': 1})", "pop('role')", "clear()", "setdefault('x', 1)", "popitem()"):
        assert "unsafe" in refusal("{{ messages[0]." + call + " }}")
    assert json.dumps(MESSAGES) == before


# what goes wrong


def test_errors_say_why() -> None:
    assert "roles must alternate" in refusal("{{ raise_exception('roles must alternate') }}")
    assert "unknown tag 'foo'" in refusal("{% foo %}")
    assert "'x' is undefined" in refusal("{{ x.y.z }}")
    assert "division by zero" in refusal("{{ 1 / 0 }}")
    assert "No filter named 'nonsense'" in refusal("{{ 1|nonsense }}")
    assert "Unexpected end" in refusal("{% for m in messages %}")
    assert refusal("{{ raise_exception('a\n\x1b[31mb') }}").endswith("a  [31mb")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ loop.__init__ }}{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{{ messages|map(attribute='__class__')|map(attribute='__mro__')|list }}{{ ''|attr('__class__') }}",
        "{{ '{0.__class__.__mro__}'.format(1).x.y }}",
        "{{ '%s'.format_map({}) }}",
        "{{ ''.encode() }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ cycler.__init__ }}{{ joiner() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% from 'os' import system %}",
        "{% extends 'x' %}",
        "{{ import('os') }}",
        "{{ open('/etc/passwd') }}",
        "{{ eval('1') }}",
    ],
)
def test_nothing_gets_out(template: str) -> None:
    assert "root:" not in refusal(template)


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999)|map('string') %}{% endfor %}{% endfor %}",
    "{% for a in range(9999) if a is odd %}{% for b in range(9999) if b is odd %}{% endfor %}{% endfor %}",
    "{% set x = [1] * 100000 %}{% for i in x %}{% for j in x %}{% set y = i + j %}{% endfor %}{% endfor %}",
    "{% for i in range(9999) %}{{ range(99999)|sort|length }}{% endfor %}",
    "{% macro f(x) %}{{ caller(x) }}{% endmacro %}"
    "{% for i in range(999) %}{% for j in range(99) %}{% call(y) f(1) %}{% endcall %}{% endfor %}"
    "{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set l = range(99999)|list %}{% set m = l[:] %}{% for i in range(99999) %}"
    "{% if " + " and ".join(["l == m"] * 50) + " %}{% endif %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + [i] %}{% endfor %}",
    "{% set ns = namespace() %}{% set ns.a = [ns, ns] %}{{ ns.a }}"
    "{% for i in range(99999) %}{% for j in range(999) %}{{ ns.a == ns.a }}{% endfor %}{% endfor %}",
    # n characters searched for m characters take time n * m
    "{{ ('a' * 4000000).strip('b' * 4000000 + 'a') }}",
    "{{ ('a' * 4000000)|trim('b' * 4000000 + 'a') }}",
]  # fmt: skip
RECURSIVE = [
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(x) %}{{ f(x) ~ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ g() }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% for x in [[1]] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "not " * 5000 + "1 }}",
    "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
]
LARGE = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ ('a' * 1000000) * 1000000 }}",
    "{{ 10**10**10 }}",
    "{{ 2**100000000 }}",
    "{{ (10**70) * (10**70) }}",
    "{{ " + "9" * 100000 + " }}",
    "{% set ns = namespace(a='aaaa') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(a='aaaa') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% set ns = namespace(a=['x']) %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set n = namespace(a=1) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}",
    "{% set ns = namespace(a=['x']) %}{% for i in range(99) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
    "{{ ns.a == ns.a }}",
    "{% set ns = namespace(a=1) %}{% for i in range(99) %}{% set ns.a = {'a': ns.a, 'b': ns.a} %}{% endfor %}"
    "{{ ns.a|tojson }}",
    "{% set ns = namespace(a=1) %}{% for i in range(99) %}{% set ns.a = dict(a=ns.a, b=ns.a) %}{% endfor %}",
    "{% macro f(n) %}{{ f(n-1, varargs, varargs) if n else varargs }}{% endmacro %}{{ f(60, 1) }}",
    "{% macro f(n) %}{{ f(n-1, a=kwargs, b=kwargs) if n else kwargs }}{% endmacro %}{{ f(60, a=1) }}",
    "{% set d = {'k': 'v' * 1000000} %}{{ [d.items()] * 100000 }}",
    "{% set s = 'ab' * 2000000 %}" + "".join(f"{{% set a{i} = s[1:] %}}" for i in range(300)),
    "{% set n = namespace(s='x' * 999999) %}{% for i in range(999) %}{% set n.s = n.s[1:] ~ 1 %}{% endfor %}",
    "{% for i in range(99999) %}" + "x" * 100000 + "{% endfor %}",
    "{% set x %}{% for i in range(9999) %}" + "x" * 100000 + "{% endfor %}{% endset %}{{ x|length }}",
    "{% macro g() %}{% for i in range(9999) %}" + "x" * 100000 + "{% endfor %}{% endmacro %}{{ g()|length }}",
    "{% set l = ['x' * 500000] %}{% set x %}{% for i in range(9999) %}{{ l }}{% endfor %}{% endset %}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'|center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ 'a\t'.expandtabs(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "{{ ('%(a)s' * 100000)|format(a='a' * 1000000) }}",
    "{{ ('{0}' * 100000).format('a' * 1000000) }}",
    "{{ ('b' * 1000000).join('a' * 100000) }}",
    "{{ ('a' * 100000)|list|join('b' * 1000000) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
    "{{ ('a\n' * 1000000)|indent(100000) }}",
    "{{ ('<' * 4000000)|e }}",
    "{{ ('a ' * 2000000)|title }}",
    "{{ ('a ' * 2000000).split()|length }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ messages|tojson(separators=('a' * 4000000, 'b')) }}",
    "{{ 'x'|batch(10**9, 'y')|list }}",
    "{{ 1.5|round(10**9) }}",
    "{{ lipsum(10**6) }}",
]


@pytest.mark.parametrize("template", [pytest.param(t, id=t[:60]) for t in ENDLESS])
def test_endless_templates_end(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0.4)
    assert "0.4 seconds" in refusal(template)


@pytest.mark.parametrize("unit", ["{% if a %}b{% endif %}", "{{ a[0] }}", "{% for a in b %}{% endfor %}"])
def test_long_templates_are_refused(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length bounds the time and the memory of jinja2's compiler. Longest measured: 3 s."""
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 100)
    first, last = "{% set a = [1] %}", "{{ 1 / 0 }}"
    most = (chat_template.SOURCE_CHARS - len(first + last)) // len(unit)
    assert "division" in refusal(first + unit * most + last)
    assert "characters long" in refusal(first + unit * (most + 1) + last)


@pytest.mark.parametrize("template", [pytest.param(t, id=t[:60]) for t in RECURSIVE])
def test_recursion_ends(template: str) -> None:
    assert "nested too deeply" in refusal(template)


@pytest.mark.parametrize("template", [pytest.param(t, id=t[:60]) for t in LARGE])
def test_large_values_are_refused(template: str) -> None:
    """By the count of values alone: not every system limits the memory of a process."""
    refusal(template)
    tracemalloc.start()
    try:
        assert "cause" in template_sandbox._answer(template, {"messages": []})
        assert tracemalloc.get_traced_memory()[1] < 300 << 20  # measured at most 65 MiB
    finally:
        tracemalloc.stop()


def test_limits_hold_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0.4)
    causes: list[str] = []
    threads = [threading.Thread(target=lambda: causes.append(refusal(ENDLESS[0]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(causes) == 2 and all("0.4 seconds" in cause for cause in causes)


# the process that renders


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
# every loop keeps a list of 100,000 numbers that no count of values sees
HOARDING = (
    "{% set ns = namespace(b=[]) %}{% for i in range(3000) %}{% for x in range(100000)|reverse %}"
    "{% set n = loop.length %}{% set ns.b = ns.b + [namespace(k=loop)] %}{% break %}{% endfor %}{% endfor %}"
)


def sandbox() -> Path:
    """The folder of the running process in /proc."""
    run("")
    assert chat_template._sandbox.process
    return Path("/proc", str(chat_template._sandbox.process.pid))


def status(process: Path, field: str) -> str:
    return dict(line.split(":\t") for line in (process / "status").read_text().splitlines())[field].strip()


def script(text: str) -> "subprocess.Popen[str]":
    """Run Python in a process group of its own."""
    head = f"from llamagpu.files import chat_template as c\nendless = {ENDLESS[0]!r}\n"
    head += "def run(t): return c.render(t, [], bos_token='', eos_token='')\n"
    return subprocess.Popen([sys.executable, "-c", head + text], stdout=subprocess.PIPE, text=True, process_group=0)


@LINUX
def test_the_kernel_limits_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 100)
    limits = (sandbox() / "limits").read_text()
    assert re.search(rf"Max address space +{512 << 20} +{512 << 20} ", limits)
    assert "too much memory" in refusal(HOARDING)
    assert run("x") == "x"


def test_memory_where_the_kernel_does_not_limit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MEMORY", 1000)
    with pytest.raises(MemoryError):
        template_sandbox._answer("{{ [1] }}", {})


def test_only_cpu_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    run("")
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0.4)
    assert chat_template._sandbox.process
    pid = chat_template._sandbox.process.pid
    os.kill(pid, signal.SIGSTOP)  # another process has the processor
    threading.Timer(1, os.kill, (pid, signal.SIGCONT)).start()
    assert run("{{ 1 + 1 }}") == "2"


def test_many_expressions() -> None:
    assert run("{{ 1 + 1 }}" * 5000) == "2" * 5000


def test_the_time_of_the_clock_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "WALL_SECONDS", 0.5)
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 100)
    assert "0.5 seconds" in refusal(ENDLESS[0])


def test_the_process_is_kept_and_replaced() -> None:
    run("")
    first = chat_template._sandbox.process
    assert first and run("a") == "a" and chat_template._sandbox.process is first
    first.kill()
    first.wait()
    assert run("b") == "b" and chat_template._sandbox.process is not first


@LINUX
def test_the_process_has_nothing_of_ours() -> None:
    with socket.socket() as held:
        held.set_inheritable(True)
        chat_template._sandbox.close()
        process = sandbox()
    assert {file.name for file in (process / "fd").iterdir()} == {"0", "1", "2"}
    maps = (process / "maps").read_text()
    assert "python" in maps and not re.search("numpy|wgpu|vulkan", maps)


@LINUX
def test_the_process_ends_with_its_parent() -> None:
    with script("c.CPU_SECONDS = 0.5; run(''); print(c._sandbox.process.pid, flush=True); run(endless)") as parent:
        assert parent.stdout
        process = Path("/proc", parent.stdout.readline().strip())
        assert process.is_dir()
        parent.kill()
    deadline = time.monotonic() + 60
    while process.is_dir() and status(process, "State") != "Z (zombie)":
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="sends Ctrl-C to a process group")
def test_ctrl_c_ends_the_template_only() -> None:
    # a shell starts background jobs with SIGINT ignored
    text = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    text += "c.CPU_SECONDS = 100; run('a')\n"
    text += "try: print('started', flush=True); run(endless)\nexcept KeyboardInterrupt: print(run('b'))"
    with script(text) as parent:
        assert parent.stdout and parent.stdout.readline() == "started\n"
        time.sleep(0.2)
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.read() == "b\n"
    assert parent.returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_after_a_fork() -> None:
    text = "import os\nrun('')\nname = 'parent' if os.fork() else 'child'\n"
    text += "print({run(name) for i in range(50)} == {name})"
    with script(text) as parent:
        assert parent.stdout and parent.stdout.read() == "True\nTrue\n"


def test_messages_that_are_not_json() -> None:
    with pytest.raises(BadArgument, match="not JSON"):
        run("", tools=[object()])


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_mutated_templates_never_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0.5)
    rng = random.Random(3)
    sources = [source for source in templates().values() if len(source) < 2500]  # quick to compile
    assert len(sources) > 5
    bits = [
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "-",
        "|",
        "(",
        ")",
        "[",
        "'",
        "\\",
        "loop",
        "range(999)",
        "*",
        "**",
        "\ud800",
    ]
    worked = refused = 0
    for _ in range(400):
        text = rng.choice(sources)
        for _ in range(rng.randint(1, 2)):
            at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
            end = min(end, at + 6)
            text = text[:at] + rng.choice(["", text[at:end] * 2, rng.choice(bits), rng.choice(bits)]) + text[end:]
        try:
            run(text)
            worked += 1
        except LlamaGpuError as error:
            assert error.cause.isprintable()
            refused += 1
    assert worked > 20 and refused > 20
