"""One sequence: the token ids whose keys and values are in the KV cache, and the pages that hold them."""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Sequence:
    slot: int = 0  # its row in the page table
    ids: list[int] = field(default_factory=list)
    checked: int = 0  # leading tokens whose keys and values are known to be right (Engine.check)
    pages: list[int] = field(default_factory=list)  # of the KV cache, in the order of its positions

    def __len__(self) -> int:
        return len(self.ids)

    def truncate(self, length: int) -> None:
        """Drop the tokens after the first `length`."""
        del self.ids[length:]
        self.checked = min(self.checked, length)
