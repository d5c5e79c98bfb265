"""The child's end of the lifeline."""

import socket
import threading

import pytest

from protocol.lifeline import Lifeline, Ready


@pytest.mark.parametrize("unread", [False, True])
def test_a_supervisor_that_is_gone_cuts_it_whether_or_not_it_has_read_everything(unread):
    supervisor, child = socket.socketpair()
    lifeline = Lifeline(child.detach())
    assert not lifeline.is_cut()
    if unread:
        lifeline.send(Ready())
    told = threading.Event()
    threading.Thread(target=lambda: (lifeline.wait_cut(), told.set()), daemon=True).start()
    supervisor.close()
    assert told.wait(timeout=5) and lifeline.is_cut()
