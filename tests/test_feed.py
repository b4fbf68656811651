"""The feed hands each prompt out once, reads ahead so far and no further, and stops when it is told to."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from store_rows import failure, prompt

from pipeline.feed import PromptFeed
from pipeline.records import Failure, Prompt, TokenizedPrompt


class Source:
    """Prompts, with a count of those that were read; a read during a read is refused, as a generator refuses it."""

    def __init__(self, items: list[Prompt | Failure]) -> None:
        self._items = iter(items)
        self._reading = threading.Lock()
        self.read = 0

    def __iter__(self) -> Iterator[Prompt | Failure]:
        return self

    def __next__(self) -> Prompt | Failure:
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("read by two threads at once")
        try:
            item = next(self._items)
            self.read += 1
            return item
        finally:
            self._reading.release()


def prompts(count: int) -> list[Prompt | Failure]:
    return [prompt(str(number)) for number in range(count)]


def tokenized(asked: Prompt) -> TokenizedPrompt:
    return TokenizedPrompt(asked, None)


def open_feed(source: Source, window: int = 4, done: Callable[[str], bool] = lambda _: False) -> PromptFeed:
    return PromptFeed(source, done, tokenized, window)


def id_of(item: TokenizedPrompt | Failure) -> str:
    return item.id if isinstance(item, Failure) else item.prompt.id


async def drain(feed: PromptFeed, workers: int = 16, pause: Callable[[], float] = lambda: 0.0) -> list[str]:
    """What workers get between them, in the order in which they get it."""
    taken: list[str] = []

    async def work() -> None:
        async for item in feed:
            taken.append(id_of(item))
            await asyncio.sleep(pause())

    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work())
    return taken


@pytest.mark.parametrize("window", [1, 3, 64, 1000])
@pytest.mark.parametrize("count", [0, 1, 15, 200])
def test_each_prompt_goes_to_one_worker(count: int, window: int) -> None:
    feed = open_feed(Source(prompts(count)), window)
    draw = random.Random(count)
    taken = asyncio.run(drain(feed, 16, lambda: draw.choice([0, 0, 0.001])))
    assert taken == [item.id for item in prompts(count)]
    assert feed.skipped == 0


def test_prompts_with_an_outcome_are_skipped_and_counted() -> None:
    done = {prompt(str(number)).id for number in range(100) if number % 3}
    source = Source(prompts(100))
    feed = open_feed(source, 4, done.__contains__)
    assert asyncio.run(drain(feed)) == [prompt(str(number)).id for number in range(100) if number % 3 == 0]
    assert feed.skipped == len(done)
    assert source.read == 100


def test_whether_a_prompt_is_done_is_asked_when_it_is_read() -> None:
    """Not before: a prompt that comes twice is handed out again only while it has no outcome."""
    done: set[str] = set()

    async def go() -> list[str]:
        feed = open_feed(Source([*prompts(3), *prompts(3)]), 1, done.__contains__)
        taken = []
        async for item in feed:
            taken.append(id_of(item))
            done.add(id_of(item))
        return taken

    assert asyncio.run(go()) == [item.id for item in prompts(3)]


def test_rows_that_never_became_prompts_are_handed_out_as_they_are() -> None:
    broken = failure("broken")
    tokenizer_says = failure("1")

    def tokenize(asked: Prompt) -> TokenizedPrompt | Failure:
        return tokenizer_says if asked.id == prompt("1").id else tokenized(asked)

    async def go() -> list[Any]:
        feed = PromptFeed(Source([prompt("0"), broken, prompt("1")]), lambda _: False, tokenize, 8)
        return [item async for item in feed]

    assert asyncio.run(go()) == [tokenized(prompt("0")), broken, tokenizer_says]


def test_a_failure_that_is_recorded_is_not_handed_out_again() -> None:
    feed = open_feed(Source([failure("broken"), prompt("0")]), 8, {failure("broken").id}.__contains__)
    assert asyncio.run(drain(feed, 1)) == [prompt("0").id]
    assert feed.skipped == 1


@pytest.mark.parametrize("window", [1, 5])
def test_it_never_reads_further_ahead_than_its_window(window: int) -> None:
    source = Source(prompts(60))
    feed = open_feed(source, window)
    taken = 0

    async def work() -> None:
        nonlocal taken
        async for _ in feed:
            taken += 1
            assert source.read <= taken + window
            await asyncio.sleep(0)

    async def go() -> None:
        assert source.read == 0
        await asyncio.gather(*(work() for _ in range(4)))

    asyncio.run(go())
    assert taken == source.read == 60


def test_prompts_that_are_done_take_no_place_in_the_window() -> None:
    source = Source(prompts(30))
    feed = open_feed(source, 2, {prompt(str(number)).id for number in range(25)}.__contains__)

    async def go() -> str:
        return id_of(await anext(feed))

    assert asyncio.run(go()) == prompt("25").id
    assert source.read == 27


def test_after_stop_nothing_more_is_handed_out() -> None:
    source = Source(prompts(100))
    feed = open_feed(source, 10)

    async def go() -> list[str]:
        taken = []
        async for item in feed:
            taken.append(id_of(item))
            if len(taken) == 3:
                feed.stop()
        taken += [id_of(item) async for item in feed]
        return taken

    assert asyncio.run(go()) == [item.id for item in prompts(3)]
    assert source.read == 10, "and nothing more is read"


def test_stop_ends_every_worker() -> None:
    feed = open_feed(Source(prompts(10_000)), 4)

    async def go() -> list[str]:
        async def stop_soon() -> None:
            await asyncio.sleep(0.02)
            feed.stop()

        _, taken = await asyncio.gather(stop_soon(), drain(feed, 16, lambda: 0.001))
        return taken

    taken = asyncio.run(asyncio.wait_for(go(), 10))
    assert taken == [item.id for item in prompts(len(taken))]
    assert len(taken) < 10_000


def test_stop_ends_a_long_search_for_what_is_left() -> None:
    """A run that resumes may skip a million prompts before the first that it needs."""
    deadline = time.monotonic() + 10
    ran_out = []

    def many() -> Iterator[Prompt | Failure]:
        while time.monotonic() < deadline:
            yield prompt("done")
        ran_out.append(True)

    feed = PromptFeed(many(), lambda _: True, tokenized, 4)

    async def go() -> None:
        async def stop_soon() -> None:
            await asyncio.sleep(0.02)
            feed.stop()

        _, taken = await asyncio.gather(stop_soon(), drain(feed, 3))
        assert taken == []

    asyncio.run(go())
    assert ran_out == []


@pytest.mark.parametrize("count", [0, 1, 9])
def test_asking_whether_there_is_anything_loses_nothing(count: int) -> None:
    feed = open_feed(Source(prompts(count)), 4)

    async def go() -> list[str]:
        assert await feed.is_empty() == (count == 0)
        assert await feed.is_empty() == (count == 0)
        taken = await drain(feed, 3)
        assert await feed.is_empty()
        return taken

    assert asyncio.run(go()) == [item.id for item in prompts(count)]


def test_it_is_empty_where_everything_has_its_outcome() -> None:
    feed = open_feed(Source(prompts(300)), 4, lambda _: True)
    assert asyncio.run(feed.is_empty())
    assert feed.skipped == 300


def test_the_event_loop_goes_on_while_prompts_are_read() -> None:
    reading, seen = threading.Event(), threading.Event()

    def tokenize(asked: Prompt) -> TokenizedPrompt:
        reading.set()
        assert seen.wait(10), "the loop stood still"
        return tokenized(asked)

    async def go() -> None:
        feed = PromptFeed(Source(prompts(1)), lambda _: False, tokenize, 4)

        async def look() -> None:
            await asyncio.to_thread(reading.wait, 10)
            seen.set()

        await asyncio.gather(look(), drain(feed, 1))

    asyncio.run(asyncio.wait_for(go(), 20))


def test_an_error_of_the_dataset_reaches_the_worker_that_asked() -> None:
    def broken() -> Iterator[Prompt | Failure]:
        yield prompt("0")
        raise ValueError("the dataset broke off")

    async def go() -> None:
        feed = PromptFeed(broken(), lambda _: False, tokenized, 1)
        assert id_of(await anext(feed)) == prompt("0").id
        with pytest.raises(ValueError, match="broke off"):
            await anext(feed)

    asyncio.run(go())
