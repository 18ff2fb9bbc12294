"""The `perplexity` command."""

import json
from typing import Annotated

from llamagpu.cli import options as o
from llamagpu.cli.models import find_model, open_model
from llamagpu.cli.terminal import interruptible, progress_line, read_text, write
from llamagpu.cli.tokenize import check_bytes
from llamagpu.engine.options import EngineOptions
from llamagpu.gpu.caps import Library
from llamagpu.hub.catalogue import DEFAULT


def perplexity(
    model: o.ModelOption = DEFAULT,
    hf_repo: o.HfOption = None,
    file: o.FileOption = None,
    ctx_size: Annotated[
        int, o.option("-c", "--ctx-size", min=8, help="Tokens of a chunk; its second half is scored.")
    ] = 512,
    cache_type: o.CacheOption = None,
    precision: o.PrecisionOption = None,
    device: o.DeviceOption = None,
    backend: o.BackendOption = Library.AUTO,
    offline: o.OfflineOption = False,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
    verbose: o.VerboseOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Measure the perplexity of a text from -f or standard input, by the method of llama-perplexity."""
    from llamagpu.perplexity import perplexity as measure

    text = read_text(None, file)
    path = find_model(model, hf_repo, offline, quiet)
    options = EngineOptions(device, ctx_size, kv_type=cache_type, precision=precision)
    with interruptible() as check:
        llama = open_model(path, options, quiet, verbose, check)
        check_bytes(llama.tokenizer, text)
        found = measure(llama, text, ctx_size, progress_line("chunks", quiet, check))
    if as_json:
        counts = {"tokens": found.tokens, "chunks": found.chunks, "ctx_size": ctx_size}
        write(json.dumps({"perplexity": found.value, "error": found.error, **counts}) + "\n")
    else:
        chunks = f"{found.tokens} tokens in {found.chunks} chunks of {ctx_size}"
        write(f"PPL = {found.value:.4f} +/- {found.error:.4f} ({chunks})\n")
