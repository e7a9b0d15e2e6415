"""Signals are noted, not obeyed, and handlers go back to what they were."""

import os
import signal
import threading

import pytest

from armillary.training.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_the_block_goes_on(number):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert interrupts.received is None
        os.kill(os.getpid(), number)
        assert interrupts.received == number
    assert signal.getsignal(number) == before


def test_a_second_interrupt_is_obeyed():
    with Interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_after_a_termination_still_waits_for_the_save():
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received == signal.SIGINT


def test_outside_the_main_thread_it_does_nothing():
    found = []

    def run():
        with Interrupts() as interrupts:
            found.append(interrupts.received)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [None]
