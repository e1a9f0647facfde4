"""Continuous batching: which sequences run, and one decode step of all of them.

Owns the key-value cache and every running generation. Invariants: running generations occupy rows
0 … n-1 of the cache, row i holding all tokens of generation i but its newest; a generation leaves
exactly once, through the return value of `step` or of an abort. Not thread-safe: one thread calls it.

A prompt is prefilled up to its last token, and that token goes through the common decode step, so
every sampled token comes from one code path. Requests with equal prompts share one prefill while one of
them runs under unchanged weights.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from learner.kv import KVCache
from learner.model import Decoder
from learner.serve.generation import Generation
from learner.serve.sampling import sample

PREFILL_CHUNK_TOKENS = 512
"""Longest piece of one prompt that goes through the model at once; bounds activation memory."""


class EngineStats:
    """Counters since the start; the gauges are the engine's own properties."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        """Prompt tokens of admitted requests."""
        self.shared_prompt_tokens = 0
        """Those copied from a running sibling instead of computed."""
        self.sampled_tokens = 0
        self.steps = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}


class InferenceEngine:
    """Generates for many requests at once.

    Args:
        model: in its final dtype; switched to evaluation mode.
        max_batch: rows of the cache, the most generations that run at once.
        max_len: longest sequence, prompt and continuation together, at most the model's.
        prefill_tokens: padded prompt tokens that one step may prefill (at least one prompt), which
            bounds how long running sequences wait for new ones.
        seed: base of the random numbers of requests that bring no seed.
    """

    def __init__(
        self, model: Decoder, *, max_batch: int, max_len: int, prefill_tokens: int = 4096, seed: int = 0
    ) -> None:
        config = model.config
        if not 2 <= max_len <= config.max_len:
            raise ValueError(f"max_len = {max_len}: must lie in [2, {config.max_len}], the model's limit")
        self.model = model.eval()
        self.max_batch = max_batch
        self.max_len = max_len
        self.weight_version = 0
        self.stats = EngineStats()
        self.cache = KVCache(
            layers=config.layers,
            num_rows=max_batch,
            kv_heads=config.kv_heads,
            max_len=max_len,
            head_dim=config.head_dim,
            dtype=model.embedding.weight.dtype,
        )
        self._prefill_tokens = prefill_tokens
        self._seed = seed
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, Generation]] = []
        self._running: list[Generation] = []
        self._lengths = np.zeros(max_batch, dtype=np.int64)
        self._next_tokens = np.zeros(max_batch, dtype=np.int64)
        self._donors: dict[tuple[str, tuple[int, ...]], Generation] = {}

    @property
    def num_running(self) -> int:
        """Generations with a row of the cache."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Generations without one."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._running or self._waiting)

    def submit(self, generation: Generation) -> None:
        """Queues a generation; lower priority numbers first, then by arrival."""
        arrival = next(self._arrivals)
        entropy: int | tuple[int, int] = (self._seed, arrival)
        if generation.seed is not None:
            entropy = generation.seed % 2**64
        generation.draws = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
        heapq.heappush(self._waiting, (generation.priority, arrival, generation))

    def abort(self, generation: Generation) -> bool:
        """Ends a generation where it stands (`abort`, partial tokens); False when it has ended already."""
        if generation.finish_reason is not None:
            return False
        self._finish(generation, "abort")
        if generation in self._running:
            self._release([self._running.index(generation)])
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not generation]
            heapq.heapify(self._waiting)
        return True

    def abort_all(self) -> list[Generation]:
        """Ends every generation; returns them."""
        everyone = self._running + [generation for _, _, generation in self._waiting]
        for generation in everyone:
            self._finish(generation, "abort")
        self._running.clear()
        self._waiting.clear()
        self._donors.clear()
        return everyone

    def weights_changed(self, version: int) -> None:
        """Call after the model's parameters were overwritten: later tokens are of `version`.

        Running sequences go on with the keys and values they have; no new request will share them.
        """
        self.weight_version = version
        self._donors.clear()

    @torch.inference_mode()
    def step(self, *, admit: bool = True) -> list[Generation]:
        """Admits what fits, samples one token for every running generation; returns the finished ones."""
        if admit and self._waiting:
            self._admit()
        return self._decode() if self._running else []

    def _admit(self) -> None:
        """Moves waiting generations into free rows, leaders by prefill, followers by copying a sibling's row."""
        leaders: dict[tuple[str, tuple[int, ...]], Generation] = {}
        followers: list[Generation] = []
        budget = self._prefill_tokens
        while self._waiting and len(self._running) + len(leaders) + len(followers) < self.max_batch:
            generation = self._waiting[0][2]
            key = generation.prefix_key
            if key in self._donors or key in leaders:
                followers.append(generation)
            elif leaders and len(generation.prompt) > budget:
                break
            else:
                leaders[key] = generation
                budget -= len(generation.prompt)
            heapq.heappop(self._waiting)
        self._prefill(sorted(leaders.values(), key=lambda leader: len(leader.prompt)))
        for follower in followers:
            self._follow(follower)

    def _prefill(self, leaders: Sequence[Generation]) -> None:
        """Computes the prompts of `leaders` (sorted by length), in batches of similar length."""
        for batch in _by_padded_size(leaders, self._prefill_tokens):
            first_row = len(self._running)
            width = len(batch[-1].prompt) - 1
            padded = torch.zeros(len(batch), width, dtype=torch.long)
            for row, generation in enumerate(batch):
                padded[row, : len(generation.prompt) - 1] = torch.tensor(generation.prompt[:-1], dtype=torch.long)
            for start in range(0, width, PREFILL_CHUNK_TOKENS):
                self.model.prefill(padded[:, start : start + PREFILL_CHUNK_TOKENS], self.cache, first_row, start)
            for generation in batch:
                self._enter(generation)

    def _follow(self, generation: Generation) -> None:
        """Admits a generation whose prompt is already in the cache, in a sibling's row."""
        donor = self._donors[generation.prefix_key]
        shared = len(generation.prompt) - 1
        self.cache.copy(self._running.index(donor), len(self._running), shared)
        self.stats.shared_prompt_tokens += shared
        self._enter(generation)

    def _enter(self, generation: Generation) -> None:
        """Takes the next row, whose cache entries are in place, into the running batch."""
        row = len(self._running)
        self._running.append(generation)
        self._lengths[row] = len(generation.prompt) - 1
        self._next_tokens[row] = generation.prompt[-1]
        self._donors[generation.prefix_key] = generation
        self.stats.prompt_tokens += len(generation.prompt)

    def _decode(self) -> list[Generation]:
        rows = len(self._running)
        lengths = self._lengths[:rows]
        hidden = self.model.decode(
            torch.from_numpy(self._next_tokens[:rows]), self.cache, torch.from_numpy(lengths), int(lengths.max())
        )
        tokens, logprobs = sample(self._logits(hidden), self._running)
        lengths += 1
        self._next_tokens[:rows] = tokens
        self.stats.steps += 1
        self.stats.sampled_tokens += rows
        done: list[int] = []
        for row, (generation, token, logprob) in enumerate(zip(self._running, tokens, logprobs, strict=True)):
            reason = self._extend(generation, token, logprob)
            if reason is not None:
                self._finish(generation, reason)
                done.append(row)
                if reason == "error":
                    self.cache.clear(row)  # or it would spoil the next sequence here, under good weights too
        finished = [self._running[row] for row in done]
        self._release(done)
        return finished

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def _extend(self, generation: Generation, token: int, logprob: float) -> str | None:
        """Appends a sampled token; returns why the generation ends with it, if it does."""
        if not math.isfinite(logprob):
            return "error"
        generation.append(token, logprob, self.weight_version)
        if token in generation.stop_ids:
            return "stop"
        return "length" if len(generation.token_ids) >= generation.max_tokens else None

    def _finish(self, generation: Generation, reason: str) -> None:
        generation.finish_reason = reason
        self.stats.finished[reason] += 1

    def _release(self, rows: Sequence[int]) -> None:
        """Frees rows (ascending); the last running rows move into the gaps, which keeps them compact."""
        for row in reversed(rows):
            gone = self._running[row]
            last = len(self._running) - 1
            if row != last:
                self.cache.copy(last, row, int(self._lengths[last]))
                self._lengths[row] = self._lengths[last]
                self._next_tokens[row] = self._next_tokens[last]
                self._running[row] = self._running[last]
            self._running.pop()
            if self._donors.get(gone.prefix_key) is gone:
                del self._donors[gone.prefix_key]


def _by_padded_size(generations: Sequence[Generation], budget: int) -> Iterator[list[Generation]]:
    """Splits generations sorted by prompt length into batches whose padded size fits the budget."""
    batch: list[Generation] = []
    for generation in generations:
        if batch and (len(batch) + 1) * len(generation.prompt) > budget:
            yield batch
            batch = []
        batch.append(generation)
    if batch:
        yield batch
