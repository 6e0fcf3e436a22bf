"""Each program of examples/ runs and shows what it says."""

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from quire import Client

from tests.model.vision.cases import BY_NAME
from tests.model.vision.conftest import Shelf
from tests.model.vision.pictures import encoded, picture
from tests.support.chats import TOOLED
from tests.support.checkpoints import write_llama
from tests.support.gateway import running_gateway
from tests.support.image_chats import EITHER
from tests.support.server import RunningServer, clean_environment, running_server

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(file.name for file in EXAMPLES.glob("*.py"))
CACHED = re.compile(r"(\d+) of (\d+) (?:prompt )?tokens (?:were )?cached")
BYTES_BEFORE_THE_CUT = 1200  # HTTP/2's settings and headers have 500, 400 tokens at least 2,000


def run(name: str, *arguments: str | Path, typed: str = "", code: int = 0) -> str:
    """Runs the program, and returns what it prints; on standard error if it fails with that code."""
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(
        command, input=typed.encode(), capture_output=True, timeout=120, env=clean_environment(), check=False
    )
    assert done.returncode == code, done.stderr.decode()
    # The tiny model's text has carriage returns, which subprocess's `text=True` would make line feeds.
    return (done.stderr if code else done.stdout).decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language model with a chat template."""
    directory = Shelf(tmp_path_factory.mktemp("examples")).checkpoint(BY_NAME["llava-clip"])
    (directory / "chat_template.jinja").write_text(EITHER)
    return directory


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with running_server("--model", str(model), "--kv-cache-memory", "16MiB") as running:
        yield running


@contextmanager
def cut_connection(address: str) -> Iterator[str]:
    """The address of a relay to a server: cuts its only connection after some bytes, then takes no other."""
    host, port = address.rsplit(":", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        name = f"127.0.0.1:{listener.getsockname()[1]}"

        listener.settimeout(60)

        def relay() -> None:
            client, _ = listener.accept()
            listener.close()
            with client, socket.create_connection((host, int(port))) as upstream:
                forward = threading.Thread(target=copy, args=(client, upstream))
                forward.start()
                copy(upstream, client, BYTES_BEFORE_THE_CUT)
                for end in (client, upstream):
                    with suppress(OSError):  # it has hung up itself
                        end.shutdown(socket.SHUT_RDWR)
                forward.join()

        thread = threading.Thread(target=relay)
        thread.start()
        yield name
        thread.join()


def copy(source: socket.socket, target: socket.socket, most: int | None = None) -> None:
    """Copies until one of them ends, or that many bytes are copied."""
    copied = 0
    with suppress(OSError):
        while (most is None or copied < most) and (data := source.recv(256)):
            target.sendall(data)
            copied += len(data)


def test_streaming(server: RunningServer) -> None:
    shown = run("streaming.py", server.address)
    with Client(server.address) as client:
        answer = client.generate("ROMEO:", max_tokens=100, temperature=0.8, seed=1)
    assert shown.startswith(answer.sequences[0].text + "\n[FINISH_REASON_")
    assert f"+ {answer.usage.completion_tokens} generated tokens]" in shown


def test_async_requests(server: RunningServer) -> None:
    shown = run("async_requests.py", server.address)
    assert len(set(re.findall(r"^--- ([A-Z ]+):", shown, re.MULTILINE))) == 8
    assert "no answer" not in shown


@pytest.mark.slow
def test_batch() -> None:
    shown = run("batch.py")
    assert re.findall(r"^(ROMEO:|JULIET:|First Citizen:|To be, or)", shown, re.MULTILINE)[:2] == ["ROMEO:", "JULIET:"]
    assert len(re.findall(r"^\[(?:stop|length); \d+ of \d+ tokens were the likeliest\]$", shown, re.MULTILINE)) == 4
    assert "prompts [1] are wrong: 1 of 2 prompts failed, none was run: prompts[1]: " in shown


def test_logits_processor() -> None:
    shown = run("logits_processor.py")
    (with_it, _), (without, _) = re.findall(r"^\[(\d+) of (\d+) tokens are repeats\]$", shown, re.MULTILINE)
    assert int(with_it) == 0 < int(without)


def test_chat(server: RunningServer) -> None:
    shown = run("chat.py", server.address, typed="Who are you?\nSince when?\n")
    (_, first), (cached, second) = (map(int, pair) for pair in CACHED.findall(shown))
    assert first < second
    assert 0 < cached < second, "the first turn is there, and where it is tokenized alike its answer too"


def test_images(server: RunningServer, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(40, 30, number)))
    files = [tmp_path / "0.png", tmp_path / "1.png"]
    shown = run("images.py", *files, "--server", server.address, "--question", "the cat?")
    image_tokens, prompt_tokens = map(int, re.findall(r"\[(\d+) of (\d+) prompt tokens are the images'\]", shown)[0])
    assert 2 <= image_tokens < prompt_tokens
    files[1].write_bytes(b"no image")
    said = run("images.py", *files, "--server", server.address, code=1)
    assert "chat.messages[0].parts[1].image is '8 bytes': is no image" in said


def test_sequences(server: RunningServer) -> None:
    shown = run("sequences.py", server.address)
    assert re.findall(r"^sample (\d), sum of logprobs -[\d.]+: ", shown, re.MULTILINE) == ["0", "1", "2"]
    scores = [float(score) for score in re.findall(r"^beam \d, score (-[\d.]+): ", shown, re.MULTILINE)]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


@pytest.mark.slow
def test_resume(server: RunningServer) -> None:
    with cut_connection(server.address) as first:
        shown = run("resume.py", "--server", first, server.address, "--streams", "2").splitlines()
    counts = [re.findall(r"(\d+) tokens from ([\d.:]+)", line) for line in shown]
    (before, cut), (after, other) = counts[0]
    assert (cut, other) == (first, server.address), "the first connection was cut on the way"
    assert int(before) + int(after) == 400
    assert counts[1] == [("400", server.address)]
    with Client(server.address) as client:
        for seed, line in enumerate(shown):
            asked = {"max_tokens": 400, "temperature": 0.8, "seed": seed, "ignore_eos": True}
            text = client.generate("ROMEO:", **asked).sequences[0].text
            assert line.endswith(f"; it ends with {text[-30:]!r}")


def test_agent(tmp_path: Path) -> None:
    directory = write_llama(tmp_path, max_position_embeddings=4096)
    (directory / "chat_template.jinja").write_text(TOOLED)
    flags = ("--model", str(directory), "--kv-cache-memory", "16MiB")
    with running_server(*flags) as calling, running_gateway([calling.address]) as gateway:
        first, second, *_ = run("agent.py", f"{gateway.url}/v1").splitlines()
    for line in (first, second):
        call = r"temperature\({'city': '\w+'}\)|fahrenheit\({'celsius': -?\d+}\)"
        assert re.fullmatch(rf"({call}) -> \S+ degrees \w+", line), line


def test_openai_client(server: RunningServer) -> None:
    with running_gateway([server.address]) as gateway:
        completion, *streamed, chat = run("openai_client.py", f"{gateway.url}/v1").splitlines()
    assert re.search(r"\[(stop|length)\]$", completion)
    assert streamed
    assert not chat.startswith("no chat:")


def test_prefix_cache(server: RunningServer) -> None:
    (first, _), *others = (
        (int(cached), int(all_of_it)) for cached, all_of_it in CACHED.findall(run("prefix_cache.py", server.address))
    )
    assert first == 0
    assert len(others) == 2
    for cached, tokens in others:
        assert cached % 16 == 0
        assert tokens / 2 < cached < tokens


@pytest.mark.slow
def test_ray_cluster(tmp_path: Path) -> None:
    """Its requests last until the program ends: 65,536 tokens take minutes.

    It reads each stream, but the tiny model may be faster than that, so all of a stream's tokens may wait for it.
    """
    model = write_llama(tmp_path, max_position_embeddings=65536)
    flags = ("--ray", "--replicas", "2", "--kv-cache-memory", "96MiB", "--max-backlog", "65536")
    with running_server("--model", str(model), *flags) as server:
        shown = run("ray_cluster.py", "--server", server.address, "--admin", server.admin)
    assert len(re.findall(r"^[A-Z]+ has begun: ", shown, re.MULTILINE)) == 4
    requests = [int(count) for count in re.findall(r"^replica \d, .*: (\d+) live requests$", shown, re.MULTILINE)]
    assert len(requests) == 2
    assert all(requests)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_short_listed_and_tested(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert 15 <= len(text.splitlines()) <= 50
    assert f"examples/{name}" in text, "it says how to run it"
    assert f"[`{name}`]({name})" in (EXAMPLES / "README.md").read_text()
    assert f'run("{name}"' in Path(__file__).read_text()
