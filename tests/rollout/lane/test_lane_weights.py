"""Weights reach the subscriber whole, in order, and are acknowledged."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from rollout.lane.errors import PeerGone, WeightsFault
from rollout.lane.weights import WeightPublisher, WeightSubscriber, WeightUpdate

NBYTES = 10_000


@pytest.fixture
def ends() -> Iterator[tuple[WeightPublisher, WeightSubscriber]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    publisher, subscriber = WeightPublisher(one, NBYTES), WeightSubscriber(other)
    yield publisher, subscriber
    publisher.close()
    subscriber.close()


def filled_with(value: int):
    def write(view: memoryview) -> None:
        np.frombuffer(view, np.uint8)[:] = value

    return write


def next_update(subscriber: WeightSubscriber) -> WeightUpdate:
    import select

    waiting = select.poll()
    waiting.register(subscriber, select.POLLIN)
    while True:
        assert waiting.poll(5000)
        update = subscriber.poll()
        if update is not None:
            return update


def published(publisher: WeightPublisher, version: int, value: int, timeout_s: float = 5) -> tuple:
    errors: list[Exception] = []

    def run() -> None:
        try:
            publisher.publish(version, filled_with(value), timeout_s)
        except WeightsFault as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_published_bytes_arrive_read_only_and_verified(ends) -> None:
    publisher, subscriber = ends
    for version in range(1, 5):
        thread, errors = published(publisher, version, version)
        update = next_update(subscriber)
        update.verify()
        assert update.version == version
        assert update.buffer.readonly
        assert len(update.buffer) == NBYTES
        assert set(update.buffer) == {version}
        update.ack()
        thread.join(5)
        assert not errors


def test_the_acknowledged_buffer_stays_until_the_next_one_is_acknowledged(ends) -> None:
    publisher, subscriber = ends
    thread, _ = published(publisher, 1, 1)
    first = next_update(subscriber)
    first.ack()
    thread.join(5)
    thread, _ = published(publisher, 2, 2)
    second = next_update(subscriber)
    assert set(first.buffer) == {1}
    assert set(second.buffer) == {2}
    second.ack()
    thread.join(5)


def test_a_damaged_buffer_is_found_and_its_refusal_reaches_the_learner(ends) -> None:
    publisher, subscriber = ends
    thread, errors = published(publisher, 1, 1)
    update = next_update(subscriber)
    publisher._mapping[publisher._buffer_bytes + 77] = 9
    with pytest.raises(WeightsFault, match="damaged"):
        update.verify()
    update.reject("damaged")
    thread.join(5)
    assert "refused version 1" in str(errors[0])


def test_a_silent_subscriber_is_a_timeout_and_its_late_answer_is_ignored(ends) -> None:
    publisher, subscriber = ends
    with pytest.raises(WeightsFault, match="within"):
        publisher.publish(1, filled_with(1), 0.05)
    next_update(subscriber).ack()
    thread, errors = published(publisher, 2, 2)
    update = next_update(subscriber)
    assert set(update.buffer) == {2}
    update.ack()
    thread.join(5)
    assert not errors


def test_a_version_is_never_reused(ends) -> None:
    publisher, _ = ends
    with pytest.raises(WeightsFault):
        publisher.publish(1, filled_with(1), 0.01)
    with pytest.raises(WeightsFault, match="not newer"):
        publisher.publish(1, filled_with(1), 0.01)


def test_each_end_learns_of_the_others_death() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    publisher, subscriber = WeightPublisher(one, NBYTES), WeightSubscriber(other)
    subscriber.close()
    with pytest.raises(PeerGone):
        publisher.publish(1, filled_with(1), 5)
    publisher.close()
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    publisher, subscriber = WeightPublisher(one, NBYTES), WeightSubscriber(other)
    publisher.close()
    with pytest.raises(PeerGone):
        subscriber.poll()
    subscriber.close()
