"""Real models against llama.cpp itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp_peer import LlamaCpp
from one_sequence import load_one
from package_data import default_model, english_text, gemma_3

from llamagpu.convert.convert import convert, open_source, plan
from llamagpu.engine.sampler import Sampling
from llamagpu.files.gguf_file import GgufFile
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.llama import Llama

GREEDY = Sampling(temperature=0)
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
# Prompt -> number of tokens. The likeliest of each is ahead of the second by 1.4 or more, in log probability: llama.cpp
# rounds the inputs of linears to int8, which moves the difference by up to 0.7.
CERTAIN = {QUESTION: 8, "1, 2, 3, 4, 5, 6,": 24, "The Fibonacci sequence is 0, 1, 1, 2, 3, 5,": 15}


@pytest.fixture(scope="module")
def peer() -> LlamaCpp:
    return LlamaCpp(default_model())


@pytest.mark.parametrize("special", [True, False])
def test_tokens(peer: LlamaCpp, special: bool) -> None:
    tokenizer = Tokenizer.from_gguf(GgufFile(default_model()).metadata)
    for text in (*CERTAIN, " a  b\n", "Gr\u00fc\u00dfe \u4f60\u597d \U0001f999 12345"):
        assert tokenizer.encode(text, special=special) == peer.tokenize(text, special)


def test_greedy_ids(gpu: Any, peer: LlamaCpp) -> None:
    """On the backend that the adapter gets, fused or not."""
    with Llama(default_model(), device=gpu, context=64, precision="high") as llama:
        for prompt, count in CERTAIN.items():
            ids = llama.tokenizer.encode(prompt)
            found = [token.id for token in llama.generate(ids, max_tokens=count, sampling=GREEDY, ignore_eos=True)]
            assert found == peer.greedy(ids, count), llama.tokenizer.decode(found)


@pytest.mark.slow
def test_gemma_3(gpu: Any, tmp_path: Path) -> None:
    """llama.cpp reads the weights as F16: those of the file itself make it round activations to int8."""
    tokenizer = Tokenizer.from_gguf(GgufFile(gemma_3()).metadata)
    ids = tokenizer.encode(english_text()[:8000])[: 64 if gpu.caps.cpu else 512]
    source, f16 = open_source(str(gemma_3())), tmp_path / "f16.gguf"
    convert(source, f16, plan(source, "f16"))
    got = load_one(gpu, gemma_3(), context=512).log_probs(ids)
    peer = LlamaCpp(f16, context=640)
    want = np.array([peer.log_prob(ids[:n], ids[n]) for n in range(1, len(ids))])
    assert np.exp(-got.mean()) == pytest.approx(np.exp(-want.mean()), rel=1e-3)  # the perplexity
    assert np.abs(got - want).max() < 0.02
