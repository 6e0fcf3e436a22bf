"""A template that means harm, or a process that is killed, costs a request at most; nothing of it stays."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from model.inputs import chat_renderer
from model.inputs.chat import ChatTemplate
from model.inputs.chat_renderer import MEMORY, ChatFailed, ChatRenderer
from tests.support.chats import conversation
from tests.support.processes import is_alive, wait_until

HI = conversation("user: Hi")
MOST = 100_000
MODULE = "model.inputs.chat_process"


@contextmanager
def rendering(source: str) -> Iterator[ChatRenderer]:
    """Makes the renderer of a template that answers "fine" to a message "fine", whatever else it does."""
    fine = "{% if messages[0].content == 'fine' %}fine{% else %}" + source + "{% endif %}"
    renderer = ChatRenderer(ChatTemplate(fine, Path("chat_template.jinja"), {"bos_token": "<s>"}))
    try:
        yield renderer
    finally:
        renderer.close()
    assert children() == []


def children() -> list[psutil.Process]:
    return [c for c in psutil.Process().children() if is_alive(c) and MODULE in c.cmdline()]


def serves(renderer: ChatRenderer) -> bool:
    return renderer.render(conversation("user: fine"), {}, MOST) == "fine"


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
REFUSED, ERROR, LIMIT = "CHAT_REFUSED", "CHAT_ERROR", "CHAT_LIMIT"


@pytest.mark.parametrize(
    ("source", "reason", "message"),
    [
        (ENDLESS, LIMIT, "computes for more than 1 s"),
        ("{% set ns = namespace(n=1) %}" + ENDLESS.replace("{% endfor %}", "{% set ns.n = ns.n + 1 %}{% endfor %}", 1),
         LIMIT, "computes for more than 1 s"),
        ("{{ messages[0].content * 10**9 }}", LIMIT, "needs more than 256 MiB"),
        ("{{ 'a' * 10**9 }}", LIMIT, "needs more than 256 MiB"),
        ("{{ ('a' * 10**9) | length }}", LIMIT, "needs more than 256 MiB"),
        ("{{ 'a'.center(1000000000) }}", LIMIT, "needs more than 256 MiB"),
        ("{{ '{:>1000000000}'.format(1) }}", LIMIT, "needs more than 256 MiB"),
        ("{{ '%1000000000d' % 1 }}", LIMIT, "needs more than 256 MiB"),
        ("{% set x = namespace(a=messages) %}{% for i in range(99999) %}{% set x.a = x.a + x.a %}{% endfor %}",
         LIMIT, "needs more than 256 MiB"),
        ("{% for i in range(99999) %}{% for j in range(9) %}12{% endfor %}{% endfor %}",
         LIMIT, "makes more than 100000 characters"),
        ("{{ 'a' * 100001 }}", LIMIT, "makes more than 100000 characters"),
        ("{{ range(10**9) | length }}", ERROR, "Range too big"),
        ("{{ ''.__class__.__mro__ }}", ERROR, "'__class__' of 'str' object is unsafe"),
        ("{{ ''['__class__'].__base__.__subclasses__() }}", ERROR, "'__class__' of 'str' object is unsafe"),
        ("{{ ('' | attr('__class__')).__mro__ }}", ERROR, "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", ERROR, "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", ERROR, "unsafe"),
        ("{{ raise_exception.__globals__.sys }}", ERROR, "unsafe"),
        ("{% set n = namespace(__class__=1) %}", ERROR, "begins with _"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", ERROR, "begins with _"),
        ("{% include '/etc/passwd' %}", ERROR, "no loader"),
        ("{{ messages.append(1) }}", ERROR, "'append' of 'list' object is unsafe"),
        ("{{ messages[0].update({'content': 'x'}) }}", ERROR, "'update' of 'dict' object is unsafe"),
        ("{{ nothing.at.all }}", ERROR, "'nothing' is undefined"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", ERROR, "RecursionError"),
        ("{{ 1 / 0 }}", ERROR, "ZeroDivisionError"),
        ("{{ raise_exception('only é users') }}", REFUSED, "the model's chat template says: only é users"),
        ("{{ raise_exception('x' * 100000) }}", REFUSED, "x" * 500),
    ],
)  # fmt: skip
@pytest.mark.sample(3)
def test_hostile_templates_fail_alone(source: str, reason: str, message: str) -> None:
    with rendering(source) as renderer:
        assert serves(renderer)
        with pytest.raises(ChatFailed) as failed:
            renderer.render(HI, {}, MOST)
        assert failed.value.reason == reason
        assert message in str(failed.value)
        assert len(str(failed.value)) < 600
        assert serves(renderer)


def test_unsafe_attributes_that_are_only_looked_at_give_nothing() -> None:
    for source in ("{{ lipsum.__globals__ }}", "{{ self.__init__ }}", "{{ (namespace | attr('__init__')) }}"):
        with rendering(source) as renderer:
            assert "function" not in renderer.render(HI, {}, MOST)


def test_what_one_conversation_sets_another_does_not_see() -> None:
    with rendering("{% set messages = 1 %}{% set bos_token = bos_token ~ 'x' %}{{ bos_token }}{{ given }}") as renderer:
        assert renderer.render(HI, {"given": "a"}, MOST) == "<s>xa"
        assert renderer.render(HI, {}, MOST) == "<s>x"


def test_text_of_any_length_and_any_character_comes_back() -> None:
    with rendering("{{ messages[0].content }}") as renderer:
        for text in ("", "\n", "\ud800", "𝄞" * MOST, "\x00" * MOST):
            assert renderer.render([{"role": "user", "content": text}], {}, MOST) == text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_is_killed_between_requests_is_replaced(number: int) -> None:
    with rendering("x") as renderer:
        (process,) = children()
        process.send_signal(number)
        process.wait()
        assert serves(renderer)
        (other,) = children()
        assert other.pid != process.pid


def test_a_process_that_is_killed_while_it_renders_is_replaced_and_the_conversation_rendered_again() -> None:
    source = "{% for i in range(900) %}{% for j in range(900) %}{% endfor %}{% endfor %}x"
    with rendering(source) as renderer, ThreadPoolExecutor() as pool:
        (process,) = children()
        process.suspend()
        text = pool.submit(renderer.render, HI, {}, MOST)
        time.sleep(0.05)
        process.kill()
        assert text.result() == "x"


def test_a_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.inputs.line_process.WAIT", 1.0)
    with rendering("x") as renderer:
        children()[0].suspend()
        assert serves(renderer)


def test_a_process_that_ran_out_of_memory_is_replaced() -> None:
    with rendering("{{ 'a' * 10**9 }}") as renderer:
        before = children()
        with pytest.raises(ChatFailed):
            renderer.render(HI, {}, MOST)
        assert serves(renderer)
        assert not set(before) & set(children())


def test_signals_that_stop_a_server_leave_it_alone() -> None:
    with rendering("x") as renderer:
        (process,) = children()
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        assert serves(renderer)
        assert children() == [process]


def test_an_answer_that_nobody_waits_for_any_more_reaches_nobody() -> None:
    source = "{% for i in range(900) %}{% for j in range(900) %}{% endfor %}{% endfor %}secret"

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with rendering(source) as renderer:
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            with pytest.raises(KeyboardInterrupt):
                renderer.render(HI, {}, MOST)
            time.sleep(0.5)
            assert serves(renderer)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_arguments_of_any_depth_are_answered() -> None:
    with rendering("{{ deep | length }}") as renderer:
        for depth in range(900, 1000, 7):
            deep: list[object] = []
            for _ in range(depth):
                deep = [deep]
            with suppress(ChatFailed):
                assert renderer.render(HI, {"deep": deep}, MOST) == "1"
            assert serves(renderer)


def test_concurrent_conversations_get_their_own_text() -> None:
    with rendering("{{ messages[0].content }}") as renderer, ThreadPoolExecutor(8) as pool:
        texts = [f"{number} " * number for number in range(200)]
        futures = [pool.submit(renderer.render, [{"role": "user", "content": text}], {}, MOST) for text in texts]
        assert [future.result() for future in futures] == texts


def test_close_ends_what_is_being_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_renderer, "RENDER_SECONDS", 3600.0)
    with rendering(ENDLESS) as renderer, ThreadPoolExecutor() as pool:
        endless = pool.submit(renderer.render, HI, {}, MOST)
        time.sleep(0.1)
        renderer.close()
        with pytest.raises((RuntimeError, ChatFailed)):
            endless.result(60)
        renderer.close()
        with pytest.raises(RuntimeError, match="closed"):
            serves(renderer)


PARENT = """
import sys, threading, time
from pathlib import Path
import psutil
from model.inputs import chat_renderer
from model.inputs.chat import ChatTemplate
from model.inputs.chat_renderer import ChatRenderer
assert "jinja2" not in sys.modules
renderer = ChatRenderer(ChatTemplate(sys.argv[1], Path("t"), {}))
threading.Thread(target=renderer.render, args=([{"role": "user", "content": ""}], {}, 100), daemon=True).start()
time.sleep(0.1)
print(psutil.Process().children()[0].pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("source", ["x", ENDLESS], ids=["idle", "busy"])
def test_it_ends_with_its_parent_even_if_that_is_killed(source: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, source], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        assert is_alive(process)
        parent.kill()
        wait_until(lambda: not is_alive(process), "the end of the template's process", 5)


def test_it_does_not_end_with_the_thread_that_started_it() -> None:
    made: list[ChatRenderer] = []
    thread = threading.Thread(target=lambda: made.append(ChatRenderer(ChatTemplate("x", Path("t"), {}))))
    thread.start()
    thread.join()
    (process,) = children()
    assert made[0].render(HI, {}, MOST) == "x"
    assert children() == [process]
    made[0].close()


def test_it_loads_little_and_is_limited() -> None:
    script = (
        f"import sys, {MODULE}\n"
        "found = {'torch', 'grpc', 'numpy', 'ray', 'tokenizers', 'asyncio'} & sys.modules.keys()\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    with rendering("x"):
        (process,) = children()
        assert process.rlimit(psutil.RLIMIT_AS) == (MEMORY, MEMORY)
        assert process.memory_info().vms < MEMORY / 4
        assert os.getpgid(process.pid) == os.getpgid(0)
