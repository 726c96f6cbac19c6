"""How much of what the hardware could do at most a training run reaches."""

from dataclasses import dataclass

from app.planner.cluster import Device


@dataclass(frozen=True)
class Rates:
    """Shares of the data sheet's figures.

    Fitted on the tuning split of the published runs by ``python -m benchmarks.planning.fit``, each within bounds that
    physics sets, which stand beside it there.
    """

    matmul: float = 0.83
    """Of the peak, by large products of well aligned matrices."""
    attention: float = 0.54
    """Of the peak, by fused attention, masked or not, counted whole."""
    scores: float = 0.45
    """Of the peak, by the products of unfused attention."""
    memory: float = 0.90
    """Of the memory's bandwidth."""
    node_link: float = 0.85
    """Of the links in a node, by collectives: NCCL's tests show 230 to 250 of an A100's 300 GB/s."""
    network: float = 0.83
    """Of the network, by collectives of large messages."""
    overlap: float = 0.6
    """Of a collective that runs beside computation, hidden by it."""
    launches: float = 5.0
    """Times the device's launch time that an operation of Python takes on average, with its framework's hooks."""


HOPPER = Rates(matmul=0.65, attention=0.28)
"""H100 draws its power limit before its peak, and published runs used FlashAttention 2, which fits Ampere."""
PROCESSOR = Rates(matmul=0.8, attention=0.5, scores=0.5, memory=0.6, node_link=0.8, network=0.8, launches=1.0)
"""Of typical figures, before calibration measures. Not fitted."""


def rates_of(device: Device) -> Rates:
    """Return the rates of a device: Ampere's and older, Hopper's and newer, or a processor's."""
    if device.kind == "cpu":
        return PROCESSOR
    return HOPPER if device.name.startswith(("h100", "h200", "b200")) else Rates()
