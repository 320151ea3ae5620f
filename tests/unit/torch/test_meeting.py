"""How the ranks of process groups find rank 0's store."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from wfbp.torch.distributed import groups


@contextmanager
def server(address: str, port: int, says: bytes | None) -> Iterator[int]:
    """Another server at an address; its port."""
    with socket.create_server((address, port)) as listener:

        def serve() -> None:
            try:
                with listener.accept()[0] as peer:
                    if says is not None:
                        peer.sendall(says)
                    over.wait(60.0)
            except OSError:  # closed, without a visit
                pass

        over = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_only_a_server_with_the_token_is_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_CONNECT_S", 0.3)
    token = "a" * 32
    with (
        server("127.0.0.4", 0, token.encode()) as port,
        server("127.0.0.2", port, None),
        server("127.0.0.3", port, b"b" * 32),
    ):
        addresses = [f"127.0.0.{k}" for k in (5, 2, 3, 4)]
        assert groups._reachable(addresses[:3], port, token) == ""
    with server("127.0.0.4", 0, token.encode()) as port, server("127.0.0.3", port, b"b" * 32):
        assert groups._reachable(["127.0.0.3", "127.0.0.4"], port, token) == "127.0.0.4"


def test_rank_0_offers_other_hosts_no_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"127.0.0.1": "lo", "10.0.0.7": "eth0", "127.5.0.1": "lo"}
    monkeypatch.setattr(groups, "interfaces", lambda: found)
    assert groups._addresses() == ["10.0.0.7"]


def test_the_token_is_told_to_all_who_connect() -> None:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        with groups._telling(listener, "secret"):
            assert groups._reachable(["127.0.0.1"], port, "secret") == "127.0.0.1"
            assert groups._reachable(["127.0.0.1"], port, "other!") == ""
        assert listener.getblocking()
