"""The shares of a device's rates that training reaches: fitted to published runs, or measured on the spot."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Shares of a device's rates that training reaches.

    Attributes:
        products: Share of the rate of the best large matrix product. Products of a training step are smaller,
            and the device runs warmer.
        attention: The same for a fused attention kernel, which does more than multiply.
        memory: Share of the bandwidth of the device's memory.
        network: Share of the links' bandwidth.
        contention: Seconds by which a second of collectives slows the computation that hides it, since they
            take multiprocessors and memory bandwidth from it.
        operation: Shortest time of an operation, in seconds.
        host_link: Share of the bandwidth to the host.
        wide: Rate of products in float32 as a share of that in 16 bits (TF32; half of it without).
        sources: Where the rates and links that are not the data sheet's come from, a line each.
    """

    products: float = 0.85
    attention: float = 0.5
    memory: float = 0.9
    network: float = 0.8
    contention: float = 0.4
    operation: float = 6e-6
    host_link: float = 0.8
    wide: float = 1 / 8
    sources: tuple[str, ...] = ()


RATES = Rates()
