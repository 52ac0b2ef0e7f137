"""The processes of a run watch one another: when one has died or no longer answers, the others stop and say which.

Without it they would wait, in a sum over all processes, until the timeout of the process group: half an hour. A thread
in each process sends a beat every second to the first process, which answers; it beats however long a step, a
compilation or a checkpoint takes.
"""

from __future__ import annotations

import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import lightning
import torch.distributed as dist

from metattt.errors import MetaTTTError
from metattt.registry import register

BEAT_SECONDS = 1.0
GRACE_SECONDS = 2.0  # for an error of its own, when another process has one
ASLEEP_SECONDS = 5.0  # a thread that was this late was itself stopped: what it did not hear meanwhile says nothing
LEAVE_SECONDS = 10.0  # for the others to hear a last word
EXIT_CODE = 1
BEAT, BYE, FAILED, GONE = b"beat", b"bye", b"failed", b"gone"


class Peer:
    """Another process at the other end of a connection.

    Args:
        rank: its number; −1: it has not said it yet.
        connection: not blocking from here on.
    """

    def __init__(self, rank: int, connection: socket.socket):
        connection.setblocking(False)
        self.rank, self.connection = rank, connection
        self.heard = time.monotonic()
        self.name = f"process {rank}"
        self._received = b""

    def send(self, word: bytes) -> None:
        """Sends a word; what cannot be sent is noticed when nothing is heard."""
        with suppress(OSError):
            self.connection.send(word + b"\n")

    def send_no_more(self) -> None:
        """The other end reads that all has been said."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def words(self) -> list[bytes] | None:
        """What has arrived; None: the connection has ended."""
        try:
            received = self.connection.recv(4096)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not received:
            return None
        self.heard = time.monotonic()
        *words, self._received = (self._received + received).split(b"\n")
        return words


@register(group="callback", name="watch")
class Watch(lightning.Callback):
    """Ends this process, with a line that names the one that is lost, when another has died or has not answered for
    `patience` seconds. A process alone has nobody to watch.

    Args:
        patience: seconds without a sign of life. More than the longest time for which a library may keep Python's
            threads from running.

    Raises:
        MetaTTTError: less than three seconds.
    """

    def __init__(self, patience: float = 40.0):
        if not patience >= 3:
            raise MetaTTTError(f"callbacks.watch.patience={patience} is not allowed: it must be at least 3 seconds")
        self.patience = patience
        self.folder = ""  # of the run, for the line; set by the training command
        self.launcher: Any = None  # whose processes are taken along
        self._peers: list[Peer] = []
        self._rank = self._world_size = 0
        self._last_word = b""
        self._thread: threading.Thread | None = None

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        if trainer.world_size == 1 or not dist.is_initialized() or self._thread is not None:
            return
        self._rank, self._world_size = trainer.global_rank, trainer.world_size
        self.launcher = trainer.strategy.launcher
        token = trainer.strategy.broadcast(secrets.token_hex(16))
        if self._rank == 0:
            server = socket.create_server(("", 0), backlog=self._world_size)
            trainer.strategy.broadcast(server.getsockname()[1])
            self._peers = self._accept(server, token)
        else:
            port = trainer.strategy.broadcast(0)
            connection = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=self.patience)
            connection.sendall(f"{token} {self._rank} {os.getpid()} {socket.gethostname()}\n".encode())
            self._peers = [Peer(0, connection)]
        self._thread = threading.Thread(target=self._beat, daemon=True, name="watch")
        self._thread.start()

    def close(self, failed: bool = False) -> None:
        """Says goodbye: this process ends, and the others need not miss it; `failed`: they stop too."""
        if self._thread is None:
            return
        self._last_word = FAILED if failed else BYE
        self._thread.join(self.patience)
        self._thread = None

    def wait(self) -> None:
        """For a process whose message to another has failed: if that one is lost, the thread ends this one and says
        so. Returns if all are alive."""
        if self._thread is not None:
            self._thread.join(self.patience + ASLEEP_SECONDS)

    def _accept(self, server: socket.socket, token: str) -> list[Peer]:
        """The other processes, by rank; a connection of anybody else is closed."""
        found: dict[int, Peer] = {}
        server.settimeout(self.patience)
        with server:
            while len(found) < self._world_size - 1:
                connection, _ = server.accept()
                connection.settimeout(self.patience)
                with connection.makefile("rb") as lines:
                    known = re.fullmatch(rf"{token} (\d+) (\d+) (\S+)\n", lines.readline(256).decode(errors="replace"))
                if known is None:
                    connection.close()
                    continue
                peer = found[int(known[1])] = Peer(int(known[1]), connection)
                peer.name = f"process {known[1]} of {self._world_size} (pid {known[2]} on {known[3]})"
        return [found[rank] for rank in sorted(found)]

    def _beat(self) -> None:
        """In a thread of its own, until all have said goodbye or one is lost."""
        watched, beaten = {peer.rank: peer for peer in self._peers}, time.monotonic()
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            while watched and not self._last_word:
                for key, _ in selector.select(BEAT_SECONDS / 4):
                    self._hear(key.data, watched, selector)
                now = time.monotonic()
                if now - beaten > ASLEEP_SECONDS:
                    for peer in watched.values():
                        peer.heard = now
                if now - beaten >= BEAT_SECONDS:
                    beaten = now
                    for peer in watched.values():
                        peer.send(BEAT)
                for peer in watched.values():
                    if now - peer.heard > self.patience:
                        self._lost(peer, f"has not answered for {self.patience:.0f} s")
        self._leave()

    def _leave(self) -> None:
        """The last word to all, and out when they have heard it: a connection that is closed with beats unread in it is
        reset, and a word that still waits for an earlier beat to be acknowledged is lost with it."""
        for peer in self._peers:
            peer.send(self._last_word or BYE)
            peer.send_no_more()
        waiting, until = list(self._peers), time.monotonic() + LEAVE_SECONDS
        while waiting and time.monotonic() < until:
            time.sleep(0.01)
            waiting = [peer for peer in waiting if peer.words() is not None]
        for peer in self._peers:
            peer.connection.close()

    def _hear(self, peer: Peer, watched: dict[int, Peer], selector: selectors.BaseSelector) -> None:
        words = peer.words()
        for word in words or ():
            if word == BYE:
                watched.pop(peer.rank, None)
                peer.send_no_more()  # it waits for that
            elif word == FAILED and not self._ends_too():
                self._lost(peer, "has stopped with an error", said=self._rank > 0)
            elif word == GONE:  # the first process has said it
                self._end()
        if words is None:
            selector.unregister(peer.connection)
            if peer.rank in watched:
                self._lost(peer, "has died")

    def _ends_too(self) -> bool:
        """Whether this process stops by itself, as where all find the same error: then each says its own."""
        until = time.monotonic() + GRACE_SECONDS
        while not self._last_word and time.monotonic() < until:
            time.sleep(0.05)
        return bool(self._last_word)

    def _lost(self, peer: Peer, what: str, said: bool = False) -> None:
        """Tells the user, unless that is done, and the other processes; ends this one."""
        if not said:
            name = peer.name if self._rank == 0 else f"{peer.name} of {self._world_size}"
            line = f"error: {name} {what}: the run stops. To go on: metattt train resume={self.folder}"
            print(line, file=sys.stderr, flush=True)
        for other in self._peers:
            other.send(GONE)
        self._end()

    def _end(self) -> None:
        """At once: the main thread may wait for the lost process in a call that nothing interrupts."""
        if self.launcher is not None:
            self.launcher.kill(9)  # one that was stopped would stay for ever
        sys.stdout.flush()
        os._exit(EXIT_CODE)
