"""The `serve` command: arguments of the server."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from llamagpu.cli import options as o
from llamagpu.cli.models import find_model, open_model
from llamagpu.cli.terminal import Usage, log, read_text
from llamagpu.engine.options import EngineOptions
from llamagpu.errors import LlamaGpuError, install_extra
from llamagpu.files import chat_template
from llamagpu.gpu.caps import Library
from llamagpu.hub.catalogue import DEFAULT

if TYPE_CHECKING:
    from llamagpu.llama import Llama

MIB = 1 << 20


def serve(
    model: o.SampledModelOption = DEFAULT,
    hf_repo: o.HfOption = None,
    host: Annotated[str, o.option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, o.option("--port", min=0, max=65535, help="Port; 0: any that is free.")] = 8080,
    parallel: Annotated[
        int, o.option("-np", "--parallel", min=1, help="Generations that share a step; more of them wait.")
    ] = 4,
    api_key: Annotated[
        list[str] | None, o.option("--api-key", help="Key that requests need; may be repeated (default: none).")
    ] = None,
    api_key_file: Annotated[
        str | None, o.option("--api-key-file", help="File with a key on each line (default: none).")
    ] = None,
    alias: Annotated[
        str | None, o.option("-a", "--alias", help="The model's name in the API (default: as -m gives it).")
    ] = None,
    cors: Annotated[
        list[str] | None, o.option("--cors", help="Origin whose pages may ask, or *; may be repeated (default: none).")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        o.option(
            "--allowed-host",
            help="Further name that requests may use for this server, or *; may be repeated (default: on 127.0.0.1 "
            "without a key only localhost and 127.0.0.1, else any).",
        ),
    ] = None,
    queue: Annotated[int, o.option("--queue", min=0, help="Generations that may wait; others get status 429.")] = 256,
    max_body: Annotated[int, o.option("--max-body", min=1, help="Largest body of a request in MiB.")] = 16,
    timeout: Annotated[float, o.option("--timeout", help="Seconds for a request.", callback=o.finite(0.1))] = 3600.0,
    grace: Annotated[
        float, o.option("--grace", help="Seconds that running requests get at shutdown.", callback=o.finite(0))
    ] = 30.0,
    no_warmup: Annotated[
        bool, o.option("--no-warmup", help="Compile kernels when a step needs them, not before the first request.")
    ] = False,
    template_file: o.TemplateOption = None,
    ctx_size: o.ContextOption = 0,
    kv_memory: o.KvMemoryOption = None,
    temp: o.TempOption = 0.8,
    top_k: o.TopKOption = 40,
    top_p: o.TopPOption = 0.95,
    min_p: o.MinPOption = 0.05,
    repeat_penalty: o.PenaltyOption = 1.0,
    repeat_last_n: o.LastNOption = 64,
    ubatch: o.UbatchOption = None,
    cache_type: o.CacheOption = None,
    precision: o.PrecisionOption = None,
    device: o.DeviceOption = None,
    backend: o.BackendOption = Library.AUTO,
    offline: o.OfflineOption = False,
    quiet: o.QuietOption = False,
    verbose: o.VerboseOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, and a chat page at /.

    Needs the extra: pip install "llamagpu[serve]". SIGTERM or Ctrl-C ends it after the requests that run.
    """
    need_packages()
    from llamagpu.serve import server
    from llamagpu.serve.options import ServeOptions, is_public

    template = read_text(None, template_file) if template_file else None
    keys = (*(api_key or ()), *read_keys(api_key_file))
    if not all(keys):
        raise Usage("--api-key is empty", "a server without a key has no --api-key")
    for origin in cors or ():
        if origin not in ("*", "null") and "://" not in origin:
            raise Usage(f"--cors {origin} names no origin", f"an origin has a scheme: https://{origin}")
    path = find_model(model, hf_repo, offline, quiet)
    name = alias or (f"hf:{hf_repo}" if hf_repo else Path(model).stem if model.endswith(".gguf") else model)
    options = ServeOptions(
        host=host,
        port=port,
        model=name,
        aliases=(model, path.name, path.stem),
        api_keys=keys,
        cors=tuple(cors or ()),
        allowed_hosts=tuple(name.lower() for name in allowed_host or ()),
        queue=queue,
        body_bytes=max_body * MIB,
        timeout_s=timeout,
        grace_s=grace,
        warm_up=not no_warmup,
    )
    engine_options = EngineOptions(device, ctx_size or None, ubatch, cache_type, precision, kv_memory=kv_memory)

    def load() -> "Llama":
        from llamagpu.llama import Sampling

        llama = open_model(path, engine_options, quiet, verbose, lambda: None, parallel)
        llama.sampling = Sampling(temp, top_k, top_p, min_p, repeat_penalty, repeat_last_n)
        llama.tokenizer.chat_template = template or llama.tokenizer.chat_template
        if options.warm_up and not llama.gpu.software:
            log_line("compiling kernels (--no-warmup: when a step needs them)")
        return llama

    def log_line(text: str) -> None:
        if not quiet:
            log(text)

    if is_public(host) and not keys:
        log(f"warning: {host} can be reached by other machines, and there is no --api-key")
    chat_template.start()
    server.serve(load, options, log_line, log_line)


def need_packages() -> None:
    """Refuse to start without the packages of the extra."""
    missing = [name for name in ("starlette", "uvicorn", "msgspec", "llguidance") if find_spec(name) is None]
    if missing:
        cause = f"the server needs packages that are not installed: {', '.join(missing)}"
        raise LlamaGpuError(cause, install_extra("serve"))


def read_keys(file: str | None) -> list[str]:
    if file is None:
        return []
    keys = [line.strip() for line in read_text(None, file).splitlines()]
    if not any(keys):
        raise Usage(f"{file} has no key", "write one on each line")
    return [key for key in keys if key]
