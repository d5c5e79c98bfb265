"""Where a client finds the engine when nobody says otherwise, and the frame that both put before every message.

launch.py, the ZMQ door and the client must agree on these.
"""

import os
import tempfile
from pathlib import Path

from protocol.transport import MAX_IPC_PATH

# Every message between a client and the door is two frames: this one, then the payload.
DOOR_VERSION = b"\x01"
MAX_DOOR_BYTES = 8 << 20  # of a frame; a peer that sends a longer one is disconnected


def default_client_address() -> str:
    """This user's ipc address: below /run/user/UID, else the temporary folder, else /tmp. Creates nothing.

    The temporary folder is passed over when the socket path would be too long for the kernel there.
    """
    owner = os.getuid()
    tail = Path(f"stepahead-{owner}") / "engine.sock"
    for folder in (f"/run/user/{owner}", tempfile.gettempdir()):
        path = Path(folder) / tail
        if os.access(folder, os.W_OK) and len(os.fsencode(path)) <= MAX_IPC_PATH:
            return f"ipc://{path}"
    return f"ipc://{Path('/tmp') / tail}"
