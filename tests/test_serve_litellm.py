"""litellm pointed at the server. It needs older versions of the other clients, so that no extra has it."""

from collections.abc import Iterator
from typing import Any

import pytest
from serving import MODEL, Served, served

litellm = pytest.importorskip("litellm")
REQUEST: Any = {"model": f"openai/{MODEL}", "messages": [{"role": "user", "content": "hello you"}], "max_tokens": 12}


@pytest.fixture(scope="module")
def server(gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("litellm")) as found:
        yield found


def test_chat_and_its_stream(server: Served) -> None:
    options: Any = {**REQUEST, "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}
    whole = litellm.completion(**options)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 12)
    chunks = list(litellm.completion(stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_errors(server: Served) -> None:
    options: Any = {**REQUEST, "api_base": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**options, "model": "openai/other"})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**options, temperature=-1)
