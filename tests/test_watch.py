"""Processes that watch one another: who leaves is not taken for dead. (Those that die: test_runs_killed.)"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from metattt.training import watch
from metattt.training.watch import BEAT, Peer, Watch


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watch, Watch]]:
    """Those of two processes, connected; their threads have not begun."""

    def end(self: Watch) -> None:
        raise Ended

    monkeypatch.setattr(Watch, "_end", end)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    first, second = Watch(), Watch()
    for own, rank, connection in ((first, 0, here), (second, 1, there)):
        own._rank, own._world_size, own._peers = rank, 2, [Peer(1 - rank, connection)]
    yield first, second
    here.close()
    there.close()


def begin(one: Watch, ends: list[str]) -> None:
    def beat() -> None:
        try:
            one._beat()
            ends.append(f"{one._rank} left")
        except Ended:
            ends.append(f"{one._rank} ended")

    one._thread = threading.Thread(target=beat, daemon=True)
    one._thread.start()


def test_a_word_of_goodbye_arrives_though_beats_are_unread(
    pair: tuple[Watch, Watch], capsys: pytest.CaptureFixture[str]
) -> None:
    """A connection closed on unread beats is reset, and with it goes what waits for an earlier beat to be acknowledged: the
    goodbye. The other said "has died", of a run that was complete."""
    first, second = pair
    ends: list[str] = []
    for _ in range(20):  # beyond those that are acknowledged at once
        second._peers[0].send(BEAT)
        time.sleep(0.002)
    first._peers[0].send(BEAT)
    time.sleep(0.01)
    second._last_word = watch.BYE  # it leaves without another look at what has arrived
    second._peers[0].send(BEAT)
    begin(second, ends)
    time.sleep(0.2)
    begin(first, ends)
    assert first._thread is not None and second._thread is not None
    first._thread.join(30)
    second._thread.join(30)
    assert sorted(ends) == ["0 left", "1 left"] and "has died" not in capsys.readouterr().err


def test_who_leaves_waits_no_longer_than_it_must(pair: tuple[Watch, Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hears nothing any more, as a stopped process."""
    monkeypatch.setattr(watch, "LEAVE_SECONDS", 0.3)
    ends: list[str] = []
    begin(pair[1], ends)
    began = time.monotonic()
    pair[1].close()
    assert ends == ["1 left"] and 0.2 < time.monotonic() - began < 10


def test_one_that_is_gone_without_a_word_is_named(pair: tuple[Watch, Watch], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = pair
    ends: list[str] = []
    second._peers[0].connection.close()
    begin(first, ends)
    assert first._thread is not None
    first._thread.join(30)
    assert ends == ["0 ended"] and "process 1 has died: the run stops" in capsys.readouterr().err
