"""Rotary positions of long sequences: settings that last, float32 frequencies, lengths that are global.

* `set_rope` writes theta and scaling where transformers 5 reads them (`config.rope_parameters`); attributes such as
  `config.rope_theta` are ignored there in silence. What is set is saved with the model.
* Casting a model to bfloat16 (DeepSpeed's bf16 engine does) casts its inverse frequencies too, which puts the cosines
  at position 60,000 off by a quarter. `restore_frequencies` makes them anew in float32.
* Dynamic NTK and longrope derive their frequencies from the longest position they see. On a shard that is a local
  one: `GlobalLength` shows the module the longest position of the whole sequence as well.
"""

import torch


def set_rope(config, theta: float | None = None, scaling: dict | None = None):
    """Set the rotary base and scaling of a transformers config, in place, and return it.

    Args:
        config: any `PreTrainedConfig` with `rope_parameters`. Where these differ per layer type (Gemma 3), the
            full-attention layers are meant: those with a window keep theirs.
        theta: the new base; None keeps it. Scaling that the config has (llama3, yarn, longrope, ...) is kept.
        scaling: entries of `rope_parameters` to set, such as `{"rope_type": "yarn", "factor": 4.0}`.

    Raises ValueError for a config without rotary positions, a theta that is not positive, or an unknown rope type.
    Source: https://huggingface.co/docs/transformers/main/en/internal/rope_utils
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        raise ValueError(f"{type(text).__name__} has no rope_parameters: --rope-theta does not apply to it")
    if theta is not None and not theta > 0:
        raise ValueError(f"rope theta must be positive, not {theta}")
    if scaling and not (isinstance(scaling, dict) and "rope_type" in scaling):
        raise ValueError(f"rope scaling is a dictionary with a rope_type, such as yarn or linear: {scaling}")
    changes = {**(scaling or {}), **({} if theta is None else {"rope_theta": float(theta)})}
    rope_type = changes.get("rope_type", "default")
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"unknown rope_type {rope_type!r}: one of {['default', *ROPE_INIT_FUNCTIONS]}")
    if "full_attention" in parameters:
        text.rope_parameters = {**parameters, "full_attention": {**parameters["full_attention"], **changes}}
        return config
    text.rope_parameters = {**parameters, **changes}
    rope_type = text.rope_parameters.get("rope_type", "default")
    try:
        if rope_type != "default":
            ROPE_INIT_FUNCTIONS[rope_type](text, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        text.rope_parameters = parameters
        raise ValueError(f"rope scaling {rope_type!r} with {changes} gives no frequencies: {error!r}") from error
    return config


def rotary_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of a transformers model that turn positions into cosines and sines."""
    return [module for module in model.modules() if hasattr(module, "rope_type") and _frequencies(module)]


def restore_frequencies(rotary: torch.nn.Module) -> None:
    """Where a cast left a rotary module's frequencies in less than float32, compute them again from its config."""
    held = _frequencies(rotary)
    if all(buffer.dtype not in (torch.bfloat16, torch.float16) for buffer in held.values()):
        return
    fresh = _frequencies(type(rotary)(rotary.config))
    for name, buffer in held.items():
        setattr(rotary, name, fresh[name].to(buffer.device))


def _frequencies(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in module.named_buffers(recurse=False) if name.endswith("inv_freq")}


class GlobalLength:
    """While attached, a rotary module sees the longest position of the whole sequence besides the local ones."""

    def __init__(self, rotary: torch.nn.Module):
        self.longest: int | None = None
        self._handles = []
        types = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
        if any(kind == "longrope" or "dynamic" in kind for kind in types):
            self._handles = [
                rotary.register_forward_pre_hook(self._extend, with_kwargs=True),
                rotary.register_forward_hook(self._shorten),
            ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _extend(self, _, args, kwargs):
        if self.longest is None:
            return None
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        positions = torch.nn.functional.pad(positions, (0, 1), value=self.longest)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": positions}
        return (args[0], positions, *args[2:]), kwargs

    def _shorten(self, _module, _args, output):
        return None if self.longest is None else tuple(part[:, :-1] for part in output)
