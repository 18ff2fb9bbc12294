"""What all handlers share: the options, the engine thread, the figures."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamagpu.llama import Llama
from llamagpu.serve.engine_thread import EngineThread
from llamagpu.serve.errors import ApiError
from llamagpu.serve.metrics import Metrics
from llamagpu.serve.options import ServeOptions


@dataclass(slots=True)
class Server:
    options: ServeOptions
    engine: EngineThread
    metrics: Metrics
    log: Callable[[str], None]  # a line of the access log
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def llama(self) -> Llama:
        """The model. Refused while it is being loaded."""
        return self.engine.need_ready()

    def check_model(self, name: str | None) -> str:
        """The model's name. Another one is refused; none means this one."""
        if name and name not in (self.options.model, *self.options.aliases):
            message = f"the model {name[:100]!r} does not exist; this server has {self.options.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.options.model

    def log_access(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        client = (scope.get("client") or ("-",))[0]
        path = "".join(letter if letter.isprintable() else "?" for letter in scope["path"][:200])
        self.log(f"{client} {scope['method']} {path} {status} {seconds:.3f} s")
