"""A link between two network namespaces that delivers each Ethernet frame after a delay.

Linux does this with netem, which not every kernel has. Both ends are TAP devices. Their frames have checksums and are
no longer than the MTU, because a TAP device offloads nothing. A single thread copies them.

    python -m tests.cluster.delayed_link DELAY_S PID DEVICE PID DEVICE

Each PID is a process in a namespace. It prints a line once both devices exist, and ends when one of them is gone.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

from tests.cluster.machines import enter_network

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_MAX_FRAME_BYTES = 65536


def _tap(pid: int, device: str) -> int:
    """Make a TAP device in the network namespace of a process, and return its descriptor."""
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        enter_network(namespace.fileno())
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def main(delay_s: float, ends: dict[int, int]) -> None:
    """Copy frames from each device to the other."""
    in_flight: deque[tuple[float, int, bytes]] = deque()
    while True:
        timeout_s = max(0.0, in_flight[0][0] - time.monotonic()) if in_flight else None
        for tap in select.select([*ends], [], [], timeout_s)[0]:
            in_flight.append((time.monotonic() + delay_s, ends[tap], os.read(tap, _MAX_FRAME_BYTES)))
        while in_flight and in_flight[0][0] <= time.monotonic():
            _, tap, frame = in_flight.popleft()
            with suppress(OSError):  # a cable that is not plugged in
                os.write(tap, frame)


if __name__ == "__main__":
    one, other = (_tap(int(sys.argv[at]), sys.argv[at + 1]) for at in (2, 4))
    print("ready", flush=True)
    main(float(sys.argv[1]), {one: other, other: one})
