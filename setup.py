"""Packaging: what easy_context needs, in ranges; requirements.txt has the exact versions that were tested."""

from pathlib import Path

from setuptools import find_packages, setup

extras = {
    # ZeRO-3 with offload; ninja compiles its CPU optimizer on first use
    "deepspeed": ["deepspeed>=0.18,<1", "ninja"],
    # FlashAttention for Hopper and Blackwell, pure Python, so far in pre-releases
    "flash": ["flash-attn-4>=4.0.0b1"],
    # the systems that the benchmarks compare with
    "peers": ["ring-flash-attn>=0.1.8", "yunchang>=0.6.4"],
    "lora": ["peft>=0.18,<1"],
    # unpacks the model that train_scripts/quickstart.sh starts from
    "quickstart": ["gguf>=0.17"],
}
extras["test"] = [
    *extras["deepspeed"],
    *extras["lora"],
    *extras["quickstart"],
    "pre-commit>=4",
    "pytest>=8",
    "pytest-xdist>=3",
    "pyyaml>=6",
    "ruff>=0.14",
]

setup(
    name="easy_context",
    version="0.1.0",
    description="Exact sequence parallelism and long-context training for unmodified Hugging Face models",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["easy_context", "easy_context.*"]),
    package_data={"easy_context": ["py.typed"]},
    entry_points={"console_scripts": ["easy-context=easy_context.planner.cli:main"]},
    install_requires=[
        "torch>=2.11,<3",
        "transformers>=5.0,<6",
        "accelerate>=1.12,<2",
        "datasets>=4.0,<6",
        "safetensors>=0.5,<1",
        "numpy>=1.26,<3",
        "matplotlib>=3.8,<4",
        "psutil>=5.9",
        "rich>=13",
        "tqdm>=4.66,<5",
    ],
    extras_require=extras,
)
