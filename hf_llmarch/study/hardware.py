"""Peak figures of hardware that models run on, as their makers publish them.

FLOPs a second are of dense matrix products in 16 bits (bf16; fp16 where a device has no bf16), without the doubling
that structured sparsity promises; bandwidth is that of the memory beside the chip. Nobody reaches a peak: a share of 40
to 60 % of the first and 70 to 90 % of the second is good.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """
    Attributes:
        flops: a second, at the peak.
        bandwidth: bytes a second, at the peak.
        memory: bytes.
        source: where the figures stand.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    source: str

    @property
    def balance(self) -> float:
        """FLOPs a byte at which computing takes as long as reading: below it memory is the bound."""
        return self.flops / self.bandwidth


def _gpu(name: str, tera_flops: float, gigabytes_a_second: float, gigabytes: float, source: str) -> Hardware:
    return Hardware(name, tera_flops * 1e12, gigabytes_a_second * 1e9, gigabytes * 1e9, source)


HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _gpu("v100", 125, 900, 32, "NVIDIA V100 datasheet, SXM2 32GB (fp16)"),
        _gpu("t4", 65, 320, 16, "NVIDIA T4 datasheet (fp16)"),
        _gpu("a10", 125, 600, 24, "NVIDIA A10 datasheet"),
        _gpu("a100-40gb", 312, 1555, 40, "NVIDIA A100 datasheet, SXM 40GB"),
        _gpu("a100-80gb", 312, 2039, 80, "NVIDIA A100 datasheet, SXM 80GB"),
        _gpu("l4", 121, 300, 24, "NVIDIA L4 datasheet, half of its 242 with sparsity"),
        _gpu("l40s", 362, 864, 48, "NVIDIA L40S datasheet"),
        _gpu("rtx-4090", 165.2, 1008, 24, "NVIDIA Ada GPU architecture whitepaper, appendix A, fp32 accumulation"),
        _gpu("h100", 989.4, 3350, 80, "NVIDIA H100 datasheet, SXM, half of its 1,979 with sparsity"),
        _gpu("h200", 989.4, 4800, 141, "NVIDIA H200 datasheet, SXM, half of its 1,979 with sparsity"),
        _gpu("b200", 2250, 8000, 180, "NVIDIA HGX and DGX B200 datasheets, an eighth, half of 36,000 with sparsity"),
        _gpu("mi300x", 1307.4, 5300, 192, "AMD Instinct MI300X datasheet"),
        _gpu("tpu-v4", 275, 1200, 32, "docs.cloud.google.com/tpu/docs/v4"),
        _gpu("tpu-v5e", 197, 819, 16, "docs.cloud.google.com/tpu/docs/v5e"),
        _gpu("tpu-v5p", 459, 2765, 95, "docs.cloud.google.com/tpu/docs/v5p"),
    )
}


def find(name: str) -> Hardware:
    """Hardware by its name; `measure.this_machine` knows the one at hand.

    Raises:
        ValueError: for a name that is not in the table, with those that are.
    """
    if name not in HARDWARE:
        close = difflib.get_close_matches(name, HARDWARE, n=1, cutoff=0.4)
        raise ValueError(
            f"No hardware {name!r}."
            + (f" Did you mean {close[0]!r}?" if close else "")
            + f" There are: {', '.join(HARDWARE)}."
        )
    return HARDWARE[name]


@dataclass(frozen=True)
class Roofline:
    """A pass on hardware, were both of its peaks reached (Williams et al. 2009, doi 10.1145/1498765.1498785).

    Attributes:
        flops, bytes: computed, and moved to and from memory.
    """

    hardware: Hardware
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    @property
    def attainable(self) -> float:
        """FLOPs a second under the roof."""
        return min(self.hardware.flops, self.intensity * self.hardware.bandwidth)

    @property
    def bound(self) -> str:
        return "compute" if self.intensity >= self.hardware.balance else "memory"

    @property
    def seconds(self) -> float:
        """The least time that it takes."""
        return max(self.flops / self.hardware.flops, self.bytes / self.hardware.bandwidth)
