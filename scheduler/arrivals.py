"""What a confirmed step brings to the frontends."""

from dataclasses import dataclass, field

import numpy as np

from protocol.messages import Finished, Scores, Started, TokenBatch, pack


@dataclass
class Arrivals:
    """What one result brought: tokens with their scores, and requests that ended with them, each with its frontend."""

    frontends: np.ndarray
    handles: np.ndarray
    tokens: np.ndarray
    finished: list[tuple[int, Finished]]
    started: list[tuple[int, Started]]
    scores: list[tuple[int, Scores]] = field(default_factory=list)

    def add(self, frontend: int, handle: int, token: int) -> None:
        """One more token."""
        self.frontends = np.append(self.frontends, frontend)
        self.handles = np.append(self.handles, handle)
        self.tokens = np.append(self.tokens, token)

    def batches(self) -> list[tuple[int, TokenBatch]]:
        """One message for each frontend concerned."""
        with_tokens = np.flatnonzero(np.bincount(self.frontends)).tolist()
        names = sorted({*with_tokens, *(frontend for frontend, _ in [*self.finished, *self.started, *self.scores])})
        return [(frontend, self._batch(frontend)) for frontend in names]

    def _batch(self, frontend: int) -> TokenBatch:
        mine = self.frontends == frontend
        of_all = (self.finished, self.started, self.scores)
        others = ([message for owner, message in messages if owner == frontend] for messages in of_all)
        return TokenBatch(self.handles[mine].astype("<i8").tobytes(), pack(self.tokens[mine]), *others)
