"""Sizes and lengths as people write them on a command line: argparse types."""

import argparse
import re

_BYTES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_TOKENS = {"": 1, "K": 2**10, "M": 2**20}


def size(text: str) -> float:
    """Bytes: 80GB, 64GiB, 1TB, 512e9."""
    return _number(text, r"([\d.e+]+)\s*([KMGT]?I?)B?", _BYTES, "a size such as 80GB or 64GiB")


def tokens(text: str) -> int:
    """Tokens: 131072, 128K (x 1024), 1M (x 1024 x 1024)."""
    return int(_number(text, r"([\d.]+)\s*([KM]?)", _TOKENS, "a number of tokens such as 131072, 128K or 1M"))


def _number(text: str, form: str, units: dict, wanted: str) -> float:
    found = re.fullmatch(form, text.strip().replace(",", ""), re.IGNORECASE)
    try:
        return float(found[1]) * units[found[2].upper()]
    except (TypeError, ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
