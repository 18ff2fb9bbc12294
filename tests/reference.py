"""The whole model in numpy float64, straight from the GGUF file: what the GPU is measured against.
It shares nothing with the package but the file reader: gguf dequantises, and every rule is written again."""

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from llamagpu.files.gguf_file import GgufFile, RawTensor

EMBEDDING = "token_embd"


class Reference:
    """One sequence with its KV cache.

    It rounds what the device rounds, so that only the error of the arithmetic is left: F32 matrices to f16
    (unless `exact`), keys and values to `kv_type`, f16 or q8_0. `int8_decode` rounds the inputs of linears of one row,
    which the output matrix always is, to 1/127 of the largest of each 32; `int8_prefill` those of several rows.
    """

    def __init__(
        self,
        file: GgufFile,
        *,
        exact: bool = False,
        kv_type: str = "f32",
        int8_decode: bool = False,
        int8_prefill: bool = False,
    ) -> None:
        meta, arch = file.metadata, file.metadata["general.architecture"]
        self.layers = meta[f"{arch}.block_count"]
        self.heads = meta[f"{arch}.attention.head_count"]
        self.kv_heads = meta[f"{arch}.attention.head_count_kv"]
        head_dim = meta[f"{arch}.embedding_length"] // self.heads
        self.head_dim = meta.get(f"{arch}.attention.key_length", head_dim)
        self.eps = meta[f"{arch}.attention.layer_norm_rms_epsilon"]
        self.window = meta.get(f"{arch}.attention.sliding_window", 0) if arch == "llama" else 0
        self.neox = arch == "qwen2"
        self.exact, self.kv_type = exact, kv_type
        self.int8_decode, self.int8_prefill = int8_decode, int8_prefill
        self.w = {name: self.load(tensor) for name, tensor in file.tensors.items()}
        dims = meta.get(f"{arch}.rope.dimension_count", self.head_dim)
        base = meta.get(f"{arch}.rope.freq_base", 10000.0)
        assert meta.get(f"{arch}.rope.scaling.type", "linear") == "linear", "the reference knows no yarn"
        self.freqs = float(base) ** (-np.arange(0, dims, 2) / dims)  # radians per position, one per pair
        self.freqs /= meta.get(f"{arch}.rope.scaling.factor", 1.0) * self.w.get("rope_freqs.weight", 1.0)
        self.clear()

    def load(self, tensor: RawTensor) -> np.ndarray:
        values = dequantize(tensor.data, GGMLQuantizationType[tensor.ggml_type]).reshape(tensor.shape)
        if not self.exact and len(tensor.shape) == 2 and tensor.ggml_type == "F32":
            values = values.astype(np.float16)
        return values.astype(np.float64)

    def clear(self) -> None:
        none = np.zeros((self.kv_heads, 0, self.head_dim))
        self.keys, self.values = [none] * self.layers, [none] * self.layers  # [kv_heads, n, head_dim] each

    def forward(self, ids: list[int]) -> np.ndarray:
        """Appends ids; [len(ids), vocab] logits."""
        x = self.w[f"{EMBEDDING}.weight"][list(ids)]
        pos = self.keys[0].shape[1] + np.arange(len(ids))
        for i in range(self.layers):
            x = x + self.attention(i, self.norm(x, f"blk.{i}.attn_norm"), pos)
            h = self.norm(x, f"blk.{i}.ffn_norm")
            gate, up = self.linear(h, f"blk.{i}.ffn_gate"), self.linear(h, f"blk.{i}.ffn_up")
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, f"blk.{i}.ffn_down")
        return self.linear(self.norm(x, "output_norm"), "output" if "output.weight" in self.w else EMBEDDING)

    def greedy(self, ids: list[int], count: int) -> tuple[list[int], np.ndarray]:
        """The next `count` ids and the logits [count, vocab] that each was chosen from."""
        logits = [self.forward(ids)[-1]]
        for _ in range(count - 1):
            logits.append(self.forward([int(logits[-1].argmax())])[-1])
        return [int(row.argmax()) for row in logits], np.array(logits)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + self.eps) * self.w[f"{name}.weight"]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        if self.int8_decode if len(x) == 1 or name in ("output", EMBEDDING) else self.int8_prefill:
            blocks = x.reshape(-1, 32)
            step = np.abs(blocks).max(axis=1, keepdims=True) / 127
            x = (np.rint(blocks / step) * step).reshape(x.shape)
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def attention(self, i: int, h: np.ndarray, pos: np.ndarray) -> np.ndarray:
        def heads(part: str) -> np.ndarray:  # [heads, m, head_dim]
            return self.linear(h, f"blk.{i}.attn_{part}").reshape(len(h), -1, self.head_dim).swapaxes(0, 1)

        q, k = self.rotate(heads("q"), pos), rounded(self.rotate(heads("k"), pos), self.kv_type)
        k = self.keys[i] = np.concatenate([self.keys[i], k], axis=1)
        v = self.values[i] = np.concatenate([self.values[i], rounded(heads("v"), self.kv_type)], axis=1)
        y = attention(q, k, v, pos, self.window)
        return self.linear(y.swapaxes(0, 1).reshape(len(h), -1), f"blk.{i}.attn_output")

    def rotate(self, x: np.ndarray, pos: np.ndarray) -> np.ndarray:
        angle, n = pos[:, None] * self.freqs, len(self.freqs)  # [m, pairs]
        # neox: pair i is dimensions (i, i + n); else (2i, 2i + 1). Further dimensions are not rotated.
        a, b = (slice(n), slice(n, 2 * n)) if self.neox else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
        out = x.copy()
        out[..., a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
        out[..., b] = x[..., a] * np.sin(angle) + x[..., b] * np.cos(angle)
        return out


def rounded(x: np.ndarray, kv_type: str) -> np.ndarray:
    """Keys or values [..., head_dim]; q8_0 rounds to 1/127 of the largest of each 32, and that to f16."""
    if kv_type != "q8_0":
        return x.astype(np.float16 if kv_type == "f16" else np.float64)
    blocks = x.reshape(-1, 32)
    step = np.abs(blocks).max(axis=1, keepdims=True) / 127
    return (np.rint(blocks / step) * step.astype(np.float16)).reshape(x.shape)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, pos: np.ndarray, window: int) -> np.ndarray:
    """q [heads, m, d] at positions pos, k and v [kv_heads, n, d] -> [heads, m, d]. Causal; with a
    window, a token sees the last `window` positions, its own included."""
    share = len(q) // len(k)
    at = np.arange(k.shape[1])
    hidden = at > pos[:, None]
    if window:
        hidden |= at <= pos[:, None] - window
    out = np.empty_like(q)
    for head in range(len(q)):
        scores = np.where(hidden, -np.inf, q[head] @ k[head // share].T / np.sqrt(q.shape[2]))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[head] = weights @ v[head // share] / weights.sum(axis=1, keepdims=True)
    return out


def assert_close(got: np.ndarray, want: np.ndarray, nmse: float, largest: float, what: str = "") -> None:
    """Two bounds: the squared error over all values relative to theirs, and the worst single error relative
    to the largest value. The first alone hides one bad column, the second a small error everywhere."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: {got.shape} is not {want.shape}"
    error = np.abs(got - want)
    mean = (error**2).sum() / max((want**2).sum(), 1e-300)
    worst = error.max() / max(np.abs(want).max(), 1e-300)
    index = np.unravel_index(np.nanargmax(np.where(np.isnan(error), np.inf, error)), error.shape)
    said = f"{what}: NMSE {mean:.1e} (at most {nmse:g}), largest error {worst:.1e} ({largest:g}) at {index}"
    assert mean <= nmse and worst <= largest, said  # NaN fails both
