"""How fast and how large a machine is: a small table, measured or published, every figure of which can be replaced.

Speeds are what a program sees, not data sheets: of large products, of the attention kernels that `easy_context.kernels`
chooses from, of copies. The data sheets' peak only serves the MFU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..metrics import PEAK_BF16

GIB = 2**30
Speeds = Mapping[str, Mapping[int, tuple[float, float]]]  # kernel, head size: FLOP/s forward, backward


@dataclass(frozen=True)
class Hardware:
    """One GPU, its links, and the host it shares with the others of its node. Bytes, seconds, FLOP/s."""

    name: str
    memory: float  # of a GPU, as its driver tells
    peak: float  # dense bf16, data sheet
    matmul: float  # a large bf16 product
    kernels: Speeds
    bandwidth: float  # of GPU memory, read + write
    host_link: float  # pinned host memory, one way, a GPU
    host_total: float  # the same, all GPUs of a node together
    link: Mapping[int, float] = field(default_factory=dict)  # GPUs of a node: bytes of a message -> bytes a second
    between_nodes: float = 25e9  # a GPU's share of the network
    adam: float = 4.7e9  # parameters a second that the host updates, a node
    disk_write: float = 1.2e9  # a node
    disk_read: float = 1.0e9
    compiles: bool = True  # elementwise work, by torch.compile, where a plan leaves it open
    # Host memory of a rank: interpreter, libraries, CUDA, compilers, what DeepSpeed holds beside 18 bytes a parameter.
    # Measured on H200, one rank: 4.0 GiB beside a Llama of 1.2B parameters, 4.8 beside one of 6.7B.
    process: float = 4.5 * GIB

    def kernel(self, name: str | None, head_size: int) -> tuple[str, float, float]:
        """`(name, forward, backward)` FLOP/s; None takes the fastest. A kernel's nearest head size in the table counts.

        Raises:
            ValueError: the table has no such kernel for this device, or none at all.
        """
        speeds = {known: sizes[min(sizes, key=lambda s: abs(s - head_size))] for known, sizes in self.kernels.items()}
        if "torch_flash" in speeds:  # one algorithm, built in and as a package
            speeds.setdefault("flash_attn_2", speeds["torch_flash"])
        if not speeds or name not in (None, *speeds):
            raise ValueError(f"--kernel {name}: no figures on {self.name}; one of {', '.join(speeds) or 'none'}")
        name = name or min(speeds, key=lambda known: 1 / speeds[known][0] + 2.5 / speeds[known][1])
        return (name, *speeds[name])

    def message(self, size: float, *, crosses_nodes: bool = False) -> float:
        """Seconds of a message of `size` bytes between two GPUs, each way at once."""
        if not size:
            return 0.0
        sizes = np.array(list(self.link), dtype=float)
        seconds = sizes / np.array(list(self.link.values()))
        within = size / self.link[max(self.link)]
        if size < sizes[-1]:
            within = float(np.exp(np.interp(np.log(max(size, sizes[0])), np.log(sizes), np.log(seconds))))
        return max(within, size / self.between_nodes) if crosses_nodes else within


# Measured over NCCL between two H200 of one host (NV18), each way.
_NV18 = {1 << 20: 10e9, 1 << 24: 184e9, 1 << 26: 264e9, 1 << 28: 301e9, 1 << 30: 359e9}

# Measured: torch 2.11+cu130, cuDNN 9.19, 32K tokens causal, 32 query and 8 KV heads.
_H200_KERNELS = {
    "flash_attn_4": {64: (539e12, 538e12), 128: (669e12, 615e12)},
    "cudnn": {64: (459e12, 419e12), 128: (604e12, 541e12)},
    "torch_flash": {64: (311e12, 283e12), 128: (345e12, 323e12)},
}

HARDWARE = {
    "H200": Hardware(
        name="H200",
        memory=139.8 * GIB,
        peak=PEAK_BF16["H200"],
        matmul=697e12,
        kernels=_H200_KERNELS,
        bandwidth=4.23e12,
        host_link=55e9,
        host_total=220e9,
        link=_NV18,
        between_nodes=50e9,  # 400 Gb/s a GPU
    ),
    # The H200's chip with other memory: its kernels and links, but the best one as MagiAttention's benchmark has it
    # on 8 H100 (645 / 529 TFLOP/s); 3.35 TB/s on the data sheet, of which the H200 reaches 88%.
    "H100": Hardware(
        name="H100",
        memory=79.1 * GIB,
        peak=PEAK_BF16["H100"],
        matmul=680e12,
        kernels={**_H200_KERNELS, "flash_attn_4": {64: (520e12, 463e12), 128: (645e12, 529e12)}},
        bandwidth=2.95e12,
        host_link=55e9,
        host_total=220e9,
        link=_NV18,
        between_nodes=50e9,
    ),
    # FlashAttention-2's paper (https://arxiv.org/abs/2307.08691): up to 73% of the peak forward and 63% backward,
    # causal about a tenth less. 12 NVLinks where the H200 has 18 faster ones; PCIe 4; 200 Gb/s a GPU.
    "A100": Hardware(
        name="A100",
        memory=79.2 * GIB,
        peak=PEAK_BF16["A100"],
        matmul=260e12,
        kernels={"torch_flash": {64: (185e12, 165e12), 128: (205e12, 178e12)}},
        bandwidth=1.75e12,
        host_link=24e9,
        host_total=100e9,
        link={1 << 20: 10e9, 1 << 24: 130e9, 1 << 26: 180e9, 1 << 28: 205e9, 1 << 30: 235e9},
        between_nodes=25e9,
    ),
    # Two cores of a server, for runs without a GPU: order of magnitude only.
    "CPU": Hardware(
        name="CPU",
        memory=16 * GIB,
        peak=2e11,
        matmul=1e11,
        kernels={"cpu_flash": {64: (5e10, 4e10)}},
        bandwidth=1e10,
        host_link=1e10,
        host_total=1e10,
        link={1 << 20: 1e9, 1 << 30: 1e9},
        between_nodes=1e8,
        adam=1e8,
        compiles=False,
        process=1 * GIB,
    ),
}


def find_hardware(name: str) -> Hardware:
    """The table's entry that occurs in a device's name; ValueError where there is none."""
    found = next((hardware for known, hardware in HARDWARE.items() if known.lower() in name.lower()), None)
    if found is None:
        raise ValueError(f"--gpu {name}: no figures; one of {', '.join(HARDWARE)}, or measure on the spot (--measure)")
    return found
