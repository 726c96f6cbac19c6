"""How much of what the hardware could do at most a training run reaches. Each share is bounded by physics."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Shares of the data sheet's figures, fitted on the tuning split of the published runs."""

    matmul: float = 0.80
    """Of the peak, by large products of well aligned matrices. H100 draws its power limit before its peak."""
    attention: float = 0.50
    """Of the peak, by fused attention, causal or not, counted whole."""
    scores: float = 0.40
    """Of the peak, by the products of unfused attention."""
    memory: float = 0.80
    """Of the memory's bandwidth."""
    node_link: float = 0.75
    """Of the links in a node, by collectives."""
    network: float = 0.80
    """Of the network, by collectives of large messages."""
    overlap: float = 0.90
    """Of a collective that runs beside computation, hidden by it."""
    jitter: float = 0.004
    """Longer steps for each doubling of the nodes: all wait for the slowest."""
    micro_batch_s: float = 0.002
    """Seconds between micro-batches, beside the model."""
    launches: float = 1.0
    """Times the device's launch time that a kernel takes, of a framework in Python."""
