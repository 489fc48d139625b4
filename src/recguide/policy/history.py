"""What a policy remembers of one request: the signals of the paper's equation 2."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class History:
    """A request's last rounds."""

    uncertainties: deque[float] = field(default_factory=lambda: deque(maxlen=2))
    """Mean entropies of the last two, in nats."""
    last_block: int = 0
    was_full: bool = False
    last_committed: int | None = None
    """By the last block with a draft."""

    @property
    def certainty(self) -> float | None:
        """The paper's s: minus the mean of the uncertainties; `None` before the first round."""
        if not self.uncertainties:
            return None
        return -sum(self.uncertainties) / len(self.uncertainties)
