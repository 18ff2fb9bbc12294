"""The options of the server."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

KEEP_ALIVE_S = 10.0  # silence on a stream after which a comment is sent: proxies end silent ones after 30 to 60 s
HEADER_S = 20.0  # for the headers of a request
BODY_S = 60.0  # for its body


@dataclass(frozen=True, slots=True)
class ServeOptions:
    host: str = "127.0.0.1"
    port: int = 8080  # 0: any that is free
    model: str = "model"  # its name in the API
    aliases: tuple[str, ...] = ()  # further names that requests may use
    api_keys: tuple[str, ...] = ()  # none: everybody may ask
    cors: tuple[str, ...] = ()  # origins whose pages may ask; "*": all
    allowed_hosts: tuple[str, ...] = ()  # names in the Host header beside those of this machine; "*": all
    queue: int = 256  # requests that may wait beside those that run
    body_bytes: int = 16 << 20
    timeout_s: float = 3600.0  # for one request
    grace_s: float = 30.0  # for the requests that run at shutdown
    warm_up: bool = True  # compile all kernels before the first request
    keep_alive_s: float = KEEP_ALIVE_S
    header_s: float = HEADER_S
    body_s: float = BODY_S

    def allows_host(self, header: str) -> bool:
        """Whether a Host header is fine. A page whose own name is made to mean 127.0.0.1 (DNS rebinding) has another.

        Where other machines may ask, or a key is needed, any name is, unless names are given.
        """
        if not self.allowed_hosts and (self.api_keys or is_public(self.host)):
            return True
        try:
            name = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        return not is_public(name) or name == self.host or not {name, "*"}.isdisjoint(self.allowed_hosts)


def is_public(host: str) -> bool:
    """Whether other machines can reach this address."""
    return host not in ("localhost", "::1") and not re.fullmatch(r"127(\.\d+){1,3}", host)
