"""Benchmark rows as text: llama-bench's formats, its fields in its order, then ours."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from llamagpu.bench.cases import case_name
from llamagpu.markdown import padded

Row = dict[str, Any]  # a value for every one of FIELDS and SAMPLES

LLAMA_BENCH_FIELDS = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type",
    "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask", "cpu_strict", "poll",
    "type_k", "type_v", "n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu", "no_kv_offload", "flash_attn",
    "devices", "tensor_split", "tensor_buft_overrides", "load_mode", "embeddings", "no_op_offload", "no_host",
    "fit_target", "fit_min_ctx", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts",
    "stddev_ts",
)  # fmt: skip
SAMPLES = ("samples_ns", "samples_ts")  # JSON and JSONL only
OUR_FIELDS = (
    "median_ts", "ttft_ns", "itl_p50_ns", "itl_p95_ns", "gpu_ns", "encode_ns", "submit_ns",
    "dispatches_per_token", "weight_bytes_per_token", "kv_bytes_per_token", "gbps", "copy_gbps", "copy_share",
    "tflops", "gpu_bytes_peak", "load_ns", "compile_ns", "settled", "settle_ns", "adapter", "driver",
    "backend", "wgpu_version", "kernel_set", "precision",
)  # fmt: skip
FIELDS = LLAMA_BENCH_FIELDS + OUR_FIELDS
JSON_FIELDS = LLAMA_BENCH_FIELDS + SAMPLES + OUR_FIELDS
TEXT = {
    "build_commit", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "cpu_mask", "type_k",
    "type_v", "split_mode", "devices", "tensor_split", "tensor_buft_overrides", "load_mode", "test_time",
    "adapter", "driver", "backend", "wgpu_version", "kernel_set", "precision",
}  # fmt: skip
REAL = {
    "avg_ts",
    "stddev_ts",
    "median_ts",
    "dispatches_per_token",
    "weight_bytes_per_token",
    "kv_bytes_per_token",
    "gbps",
    "copy_gbps",
    "copy_share",
    "tflops",
    "wall_per_gpu",
    "rows_per_s",
    "linear_tflops",
}
# Heading and width of a Markdown column; a negative width aligns to the left
COLUMNS = {
    "model": ("model", -30),
    "size": ("size", 10),
    "params": ("params", 10),
    "backend": ("backend", -10),
    "n_gpu_layers": ("ngl", 3),
    "n_batch": ("n_batch", 7),
    "n_ubatch": ("n_ubatch", 8),
    "type_k": ("type_k", 6),
    "type_v": ("type_v", 6),
    "flash_attn": ("fa", 3),
    "devices": ("dev", -12),
    "test": ("test", 15),
    "t/s": ("t/s", 20),
}
OPTIONAL = ("n_batch", "n_ubatch", "type_k", "type_v", "flash_attn", "devices")  # shown when they are set


def shown(row: Row, field: str) -> str:
    """The value as llama-bench writes it in CSV and SQL; empty where nothing was measured."""
    value = row[field]
    if value is None:
        return ""
    if field in REAL:
        return f"{value:.6f}"
    return str(int(value)) if isinstance(value, bool) else str(value)


def test_name(row: Row) -> str:
    return case_name(row["n_prompt"], row["n_gen"], row["n_depth"])


class Csv:
    def __init__(self, fields: Sequence[str] = FIELDS, json_fields: Sequence[str] = JSON_FIELDS) -> None:
        self.fields, self.json_fields = fields, json_fields

    def header(self) -> str:
        return ",".join(self.fields) + "\n"

    def row(self, row: Row) -> str:
        text = io.StringIO()
        csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow([shown(row, f) for f in self.fields])
        return text.getvalue()

    def footer(self) -> str:
        return ""

    def json_items(self, row: Row) -> list[str]:
        return [
            f"{json.dumps(name)}: {json.dumps(rounded(row[name]), ensure_ascii=False)}" for name in self.json_fields
        ]


def rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


class Json(Csv):
    """A row is closed by what follows it: each text ends a line, which a status line on the terminal may then use."""

    open = ""

    def header(self) -> str:
        return "[\n"

    def row(self, row: Row) -> str:
        before, self.open = self.open and "  },\n", "  }"
        return f"{before}  {{\n    " + ",\n    ".join(self.json_items(row)) + "\n"

    def footer(self) -> str:
        return f"{self.open}\n]\n"


class Jsonl(Csv):
    def header(self) -> str:
        return ""

    def row(self, row: Row) -> str:
        return "{" + ", ".join(self.json_items(row)) + "}\n"


class Sql(Csv):
    def header(self) -> str:
        columns = [f"  {f} {'TEXT' if f in TEXT else 'REAL' if f in REAL else 'INTEGER'}" for f in FIELDS]
        return "CREATE TABLE IF NOT EXISTS llama_bench (\n" + ",\n".join(columns) + "\n);\n\n"

    def row(self, row: Row) -> str:
        quoted = ["NULL" if row[f] is None else "'" + shown(row, f).replace("'", "''") + "'" for f in FIELDS]
        return f"INSERT INTO llama_bench ({', '.join(FIELDS)}) VALUES ({', '.join(quoted)});\n"


class Markdown(Csv):
    def __init__(self, extra: Sequence[str] = ()) -> None:
        """`extra`: the fields of OPTIONAL that the command line set."""
        self.fields = ["model", "size", "params", "backend", "n_gpu_layers"]
        self.fields += [*(f for f in OPTIONAL if f in extra), "test", "t/s"]
        self.build = ""

    def header(self) -> str:
        names, lines = "|", "|"
        for name, width in (COLUMNS[f] for f in self.fields):
            names += f" {padded(name, width)} |"
            lines += f" {'-' * (abs(width) - 1)}{':' if width > 0 else '-'} |"
        return f"{names}\n{lines}\n"

    def row(self, row: Row) -> str:
        size, params = row["model_size"] / 2**20, row["model_n_params"] / 1e6
        values = {
            "model": row["model_type"],
            "size": f"{size:.2f} MiB" if size < 1024 else f"{size / 1024:.2f} GiB",
            "params": f"{params:.2f} M" if params < 1000 else f"{params / 1000:.2f} B",
            "backend": row["backends"],
            "test": test_name(row),
            "t/s": f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
        }
        self.build = row["build_commit"]
        cells = (padded(values.get(f) or shown(row, f), COLUMNS[f][1]) for f in self.fields)
        return "|" + "".join(f" {cell} |" for cell in cells) + "\n"

    def footer(self) -> str:
        return f"\nbuild: {self.build}\n" if self.build else ""


FORMATS: dict[str, type[Csv]] = {"csv": Csv, "json": Json, "jsonl": Jsonl, "md": Markdown, "sql": Sql}


def printer(name: str, extra: Sequence[str] = ()) -> Csv:
    return Markdown(extra) if name == "md" else FORMATS[name]()


# Details for people, which llama-bench does not print

NOTICED_S = 2.5  # a warm-up that takes longer is worth a line

DETAILS = (
    "model", "test", "median t/s", "ttft ms", "itl p50 ms", "itl p95 ms", "gpu ms", "gpu/wall", "record ms",
    "submit ms", "disp/token", "MB/token", "GB/s", "of copy", "TFLOP/s", "peak MiB", "load s", "compile s",
)  # fmt: skip


def details(row: Row) -> list[str]:
    """One cell for each of DETAILS; times are those of one repetition."""

    def milliseconds(field: str) -> str:
        return "-" if row[field] is None else f"{row[field] / 1e6:.2f}"

    bytes_per_token = row["weight_bytes_per_token"] + row["kv_bytes_per_token"]
    share = "-" if row["gpu_ns"] is None else f"{row['gpu_ns'] / row['avg_ns']:.1%}"
    return [
        row["model_type"],
        test_name(row),
        f"{row['median_ts']:.2f}",
        milliseconds("ttft_ns"),
        milliseconds("itl_p50_ns"),
        milliseconds("itl_p95_ns"),
        milliseconds("gpu_ns"),
        share,
        milliseconds("encode_ns"),
        milliseconds("submit_ns"),
        f"{row['dispatches_per_token']:.1f}",
        f"{bytes_per_token / 1e6:.1f}",
        f"{row['gbps']:.1f}",
        f"{row['copy_share']:.1%}",
        f"{row['tflops']:.3g}",
        f"{row['gpu_bytes_peak'] / 2**20:.1f}",
        f"{row['load_ns'] / 1e9:.2f}",
        f"{row['compile_ns'] / 1e9:.2f}",
    ]


def conditions(row: Row) -> str:
    return (
        f"{row['adapter']}, driver {row['driver']}, {row['backend']} {row['wgpu_version']}, "
        f"kernels {row['kernel_set']}, precision {row['precision']}, KV cache {row['type_k']}, "
        f"a copy {row['copy_gbps']:.1f} GB/s"
    )


def aside(row: Row) -> str:
    """The most important details in one line, for stderr."""
    gpu = "" if row["gpu_ns"] is None else f", the GPU busy {row['gpu_ns'] / row['avg_ns']:.1%} of the time"
    first = "" if row["ttft_ns"] is None else f", first token after {row['ttft_ns'] / 1e6:.1f} ms"
    rates = f"{row['gbps']:.1f} GB/s ({row['copy_share']:.1%} of a copy), {row['tflops']:.3g} TFLOP/s"
    return f"{test_name(row)}: median {row['median_ts']:.2f} t/s, {rates}{first}{gpu}"


def settling(row: Row) -> str:
    return settling_line(test_name(row), row)


def settling_line(name: str, row: Row) -> str:
    """What to say about the wait for steady times; nothing where it was short."""
    seconds = row["settle_ns"] / 1e9
    if row["settled"] is False:
        return f"{name}: not settled: after {seconds:.1f} s of warm-up its times still drift; measure again"
    return f"{name}: settled after {seconds:.1f} s of warm-up" if row["settled"] and seconds > NOTICED_S else ""
