"""Faults on demand, for tests with the checksum model."""

import os
import signal

PLACES = ("worker.load", "worker.step")
ACTIONS = ("raise", "exit", "abort", "kill", "stop")


class Failpoint:
    """`PLACE:STEP:ACTION`, such as worker.step:100:kill; does nothing when the spec is None."""

    def __init__(self, spec: str | None):
        self.place, self.step, self.action = "", -1, ""
        if spec is not None:
            match spec.split(":"):
                case [place, step, action] if place in PLACES and step.isdecimal() and action in ACTIONS:
                    self.place, self.step, self.action = place, int(step), action
                case _:
                    raise ValueError(f"a failpoint is one of {PLACES}, a step and one of {ACTIONS}, joined by colons; got {spec!r}")

    def hit(self, place: str, step: int) -> None:
        """Fail here, if this is the place and the step."""
        if (place, step) != (self.place, self.step):
            return
        match self.action:
            case "raise":
                raise RuntimeError(f"failpoint at {place} {step}")
            case "exit":
                os._exit(0)
            case "abort":
                os.abort()
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
