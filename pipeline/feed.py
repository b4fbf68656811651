"""The prompts of a run that have no outcome yet, tokenised, handed to whichever worker asks next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from pipeline.records import Failure, Prompt, TokenizedPrompt

Tokenize = Callable[[Prompt], TokenizedPrompt | Failure]


class PromptFeed:
    """An asynchronous iterator shared by all workers; it reads ahead ``window`` prompts and no further.

    Reading, skipping and tokenising happen in a thread. ``skipped`` counts prompts that had their outcome already;
    ``exhausted`` says that every prompt of the dataset was handed out or skipped.
    """

    def __init__(
        self, prompts: Iterator[Prompt | Failure], is_done: Callable[[str], bool], tokenize: Tokenize, window: int
    ) -> None:
        self._prompts = prompts
        self._is_done = is_done
        self._tokenize = tokenize
        self._window = window
        self._ready: deque[TokenizedPrompt | Failure] = deque()
        self._one_at_a_time = asyncio.Lock()
        self._stopped = False
        self.skipped = 0
        self._at_the_end = False

    def stop(self) -> None:
        """Hands out nothing more."""
        self._stopped = True

    @property
    def exhausted(self) -> bool:
        """Whether no prompt is left to hand out."""
        return self._at_the_end and not self._ready

    async def is_empty(self) -> bool:
        """Whether every prompt has its outcome already."""
        async with self._one_at_a_time:
            await self._fill()
            return not self._ready

    def __aiter__(self) -> PromptFeed:
        return self

    async def __anext__(self) -> TokenizedPrompt | Failure:
        async with self._one_at_a_time:
            await self._fill()
            if self._stopped or not self._ready:
                raise StopAsyncIteration
            return self._ready.popleft()

    async def _fill(self) -> None:
        if not self._ready and not self._stopped:
            self._ready.extend(await asyncio.to_thread(self._read))

    def _read(self) -> list[TokenizedPrompt | Failure]:
        found: list[TokenizedPrompt | Failure] = []
        for prompt in self._prompts:
            if self._is_done(prompt.id):
                self.skipped += 1
            else:
                found.append(prompt if isinstance(prompt, Failure) else self._tokenize(prompt))
            if self._stopped or len(found) >= self._window:
                return found
        self._at_the_end = True
        return found
