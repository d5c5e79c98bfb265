"""Where a client finds the engine when nobody says otherwise, and the frame that both put before every message.

launch.py, the ZMQ door and the client must agree on these.
"""

import glob
import os
import random
import tempfile
from pathlib import Path

from protocol.transport import MAX_IPC_PATH

# Every message between a client and the door is two frames: this one, then the payload.
DOOR_VERSION = b"\x01"
LONGEST_NAME = "run-12345678/frontends"  # of a socket in the folder of the default address
MAX_DOOR_BYTES = 8 << 20  # of a frame; a peer that sends a longer one is disconnected


def door_address(address: str, index: int) -> str:
    """Where one of several frontends serves ZMQ clients: the first at the engine's address."""
    return f"{address}.{index}" if index else address


def other_doors(address: str) -> list[Path]:
    """The sockets of the other frontends of an engine's address, as far as they lie there."""
    path = Path(address.removeprefix("ipc://"))
    return [file for file in path.parent.glob(f"{glob.escape(path.name)}.*") if file.suffix[1:].isdigit() and file.is_socket()]


def pick_door(address: str) -> str:
    """The address of one of an engine's frontends, so that clients spread over them."""
    return random.choice([address, *(f"ipc://{path}" for path in other_doors(address))])


def default_client_address() -> str:
    """This user's ipc address: below /run/user/UID, else the temporary folder, else /tmp. Creates nothing.

    The temporary folder is passed over when a socket path would be too long for the kernel there, of the engine's own ones too.
    """
    owner = os.getuid()
    name = f"stepahead-{owner}"
    for folder in (f"/run/user/{owner}", tempfile.gettempdir()):
        place = Path(folder) / name
        if os.access(folder, os.W_OK) and len(os.fsencode(place / LONGEST_NAME)) <= MAX_IPC_PATH and str(place).isprintable():
            return f"ipc://{place / 'engine.sock'}"
    return f"ipc:///tmp/{name}/engine.sock"
