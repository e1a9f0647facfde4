"""The generated demo family (see `rollout.tasks.demo.family`)."""

from rollout.tasks.demo.family import DemoFamily, join_words, split_words

__all__ = ["DemoFamily", "join_words", "split_words"]
