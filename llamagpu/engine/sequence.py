"""One sequence: the token ids whose keys and values are in the KV cache."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Sequence:
    slot: int = 0  # its index in the KV cache
    ids: list[int] = field(default_factory=list)
    checked: int = 0  # leading tokens whose keys and values are known to be right (Engine.check)

    def __len__(self) -> int:
        return len(self.ids)

    def truncate(self, length: int) -> None:
        """Drop the tokens after the first `length`."""
        del self.ids[length:]
        self.checked = min(self.checked, length)

    def shared_prefix(self, ids: Items[int]) -> int:
        """How many leading ids the sequence already has."""
        pairs = enumerate(zip(self.ids, ids, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self.ids), len(ids)))
