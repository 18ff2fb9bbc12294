"""llama.cpp from the wheel xllamacpp: the peer whose tokens and logits tests compare with ours."""

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray


class LlamaCpp:
    """A model file in llama.cpp's server, inside this process: one CPU thread, f32 KV cache."""

    def __init__(self, path: Path, context: int = 64) -> None:
        xllamacpp = pytest.importorskip("xllamacpp", reason="no wheel of llama.cpp (xllamacpp) for this platform")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = context, 1, 0
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.no_extra_bufts = True  # AMX, which not every virtual machine that shows it lets programs use
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it computes in f16
        params.warmup = params.fit_params = False
        params.verbosity = -1
        self.server = xllamacpp.Server(params)  # stops with this object

    def request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """llama.cpp's HTTP API on the loopback interface: the wheel has no function for raw ids and properties."""
        connection = http.client.HTTPConnection(urlsplit(self.server.listening_address).netloc, timeout=100)
        headers = {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        assert response.status == 200, answer
        return answer

    def tokenize(self, text: str, special: bool) -> list[int]:
        """With the tokens that the model wants around a text, such as BOS."""
        body = {"content": text, "add_special": True, "parse_special": special}
        return list(self.request("/tokenize", body)["tokens"])

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The likeliest tokens after these ids; fewer than `count` if one of them ends the text."""
        body = {"prompt": ids, "n_predict": count, "temperature": 0, "return_tokens": True}
        return list(self.request("/completion", body)["tokens"])

    def log_probs(self, ids: list[int], vocab: int) -> NDArray[np.float64]:
        """[vocab]: log probability of each token after these ids."""
        body = {"prompt": ids, "n_predict": 1, "n_probs": vocab, "temperature": 0, "cache_prompt": False}
        found = self.request("/completion", body)["completion_probabilities"][0]["top_logprobs"]
        assert len(found) == vocab
        row = np.empty(vocab)
        row[[entry["id"] for entry in found]] = [entry["logprob"] for entry in found]
        return row

    def log_prob(self, ids: list[int], token: int) -> float:
        """Log probability of a token after these ids. A bias makes it the sampled one; the probability has none."""
        body = {"prompt": ids, "n_predict": 1, "n_probs": 1, "temperature": 0, "logit_bias": [[token, 1e6]]}
        (found,) = self.request("/completion", body)["completion_probabilities"]
        assert found["id"] == token
        return float(found["logprob"])

    def properties(self) -> dict[str, Any]:
        return dict(self.request("/props"))
