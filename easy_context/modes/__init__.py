"""The registry of sequence-parallel modes.

One mode is one file and one name. Third parties add theirs without touching this package: either by calling
`register_mode(mode)`, or by an entry point of the group `easy_context.modes` that names a `Mode` instance.
"""

from importlib import import_module
from importlib.metadata import entry_points

from .base import AttentionContext, Mode, Residuals

__all__ = ["AttentionContext", "Mode", "Residuals", "available_modes", "get_mode", "register_mode"]

_BUILT_IN = ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "usp_attn", "data_parallel")
_registered: dict[str, Mode] = {}


def register_mode(mode: Mode) -> Mode:
    """Make `mode` available under `mode.name`. ValueError where the name is taken by another mode."""
    if mode.name in _BUILT_IN or _registered.get(mode.name, mode) is not mode:
        raise ValueError(f"a mode named {mode.name!r} exists already: give yours another name")
    _registered[mode.name] = mode
    return mode


def available_modes() -> list[str]:
    """Names of all modes: built in, registered, and offered by installed packages."""
    return [*_BUILT_IN, *sorted(set(_registered) | {point.name for point in _entry_points()})]


def get_mode(name: str) -> Mode:
    """The mode called `name`; ValueError that lists the known ones where there is none.

    "auto" is `usp_attn`, which does any number of ranks and heads, in the degrees of `init_seq_parallel`: what can be
    said before model and length are known. The planner (`easy_context.plan`), which train.py asks, knows them."""
    if name == "auto":
        name = "usp_attn"
    if name in _BUILT_IN:
        return import_module(f"{__name__}.{name}").MODE
    if name not in _registered:
        offered = {point.name: point for point in _entry_points()}
        if name not in offered:
            raise ValueError(f"unknown mode {name!r} (seq_algo / --parallel_mode): one of {available_modes()}")
        _registered[name] = offered[name].load()
    return _registered[name]


def _entry_points():
    return entry_points(group="easy_context.modes")
