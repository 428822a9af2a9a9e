"""What a plan needs to know of a model: the sizes of a dense decoder, and the parameters that follow from them.

Read from whatever there is: a short name (`known_models`), a `config.json` or its directory, a hub name, a
configuration object, a model. Mixtures of experts and layers other than attention + MLP have another arithmetic and
are refused by name; so is whatever else has other parameters than its sizes make, which transformers is asked for by
building the model without memory, except for families that are known to follow the rule.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

from .known_models import KNOWN_MODELS

# Whose config.json says all that is needed, and means what is read here (the tests compare them with models).
_KNOWN = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"}
# Families whose MLP has two matrices instead of three.
_UNGATED = {"gpt_neox", "gptj", "gpt2", "opt", "phi", "starcoder2", "falcon", "nemotron", "persimmon"}
_UNGATED |= {"arcee", "apertus", "jais2", "nanochat"}
# Families whose heads a memory plan cannot group: q, k and v in one projection, or norms over all heads.
_ONE_HEAD_GROUP = {"phi3", "olmo2", "olmo3"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size", "moe_num_experts")
_OTHER_LAYERS = (
    "kv_lora_rank",
    "ssm_state_size",
    "mamba_d_state",
    "attn_layer_period",
    "state_size",
    "hidden_size_per_layer_input",
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes in elements; `windows` has per layer how many tokens a query sees, None for all before it."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tied: bool = False
    gated: bool = True
    windows: tuple[int | None, ...] = ()
    one_head_group: bool = False

    @property
    def attention_size(self) -> int:
        """Width of the attention output, which need not be `hidden`."""
        return self.heads * self.head_size

    @property
    def projection_weights(self) -> int:
        """Weights of a layer's q, k and v."""
        return self.hidden * (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def down_weights(self) -> int:
        """Weights of the matrix that ends a layer; no backward needs its product."""
        return self.hidden * self.intermediate

    @property
    def finish_weights(self) -> int:
        """Weights of a layer's output projection and MLP."""
        return self.attention_size * self.hidden + (3 if self.gated else 2) * self.down_weights

    @property
    def layer_weights(self) -> int:
        return self.projection_weights + self.finish_weights

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def linear_weights(self) -> int:
        """Weights that every token is multiplied with."""
        return self.layers * self.layer_weights + self.head_weights

    @property
    def parameters(self) -> int:
        """All of them, but for biases."""
        embeddings = self.head_weights * (1 if self.tied else 2)
        return self.layers * (self.layer_weights + 2 * self.hidden) + embeddings + self.hidden

    def lora_parameters(self, rank: int) -> int:
        """Of adapters on all linear layers but the head."""
        e, m, kv = self.hidden, self.intermediate, self.kv_heads * self.head_size
        attention = 2 * (e + self.attention_size) + 2 * (e + kv)
        return self.layers * rank * (attention + (3 if self.gated else 2) * (e + m))

    def pairs(self, seq_length: int) -> list[float]:
        """Per layer the (query, key) pairs of a causal sequence."""
        whole = seq_length**2 / 2
        return [
            whole if window is None or window >= seq_length else window * seq_length - window**2 / 2
            for window in self.windows or (None,) * self.layers
        ]

    @classmethod
    def of(cls, model) -> "ModelShape":
        """Of a short name, path, hub name, configuration, model, or `ModelShape`.

        Raises:
            ValueError: a mixture of experts, another kind of layer, or sizes that are missing.
        """
        if isinstance(model, cls):
            return model
        if isinstance(model, (str, Path)):
            return cls.from_dict(*_read(str(model)))
        config = getattr(model, "config", model)
        return cls._of_config(config.get_text_config(), type(model).__name__)

    @classmethod
    def from_dict(cls, config: dict, name: str) -> "ModelShape":
        """Of the content of a `config.json`."""
        config = {**config, **(config.get("text_config") or {})}
        family = config.get("model_type")
        if family in _KNOWN:
            return cls._read_off(config, name)
        from transformers import CONFIG_MAPPING, AutoConfig

        if family not in CONFIG_MAPPING:
            raise ValueError(f"{name}: transformers has no model_type {family!r}: not modelled")
        return cls._of_config(AutoConfig.for_model(**config), name)  # with what a config.json leaves out

    @classmethod
    def _of_config(cls, config, name: str) -> "ModelShape":
        shape = cls._read_off(config.to_dict(), name)
        if config.model_type not in _KNOWN:
            _compare(shape, config)
        return shape

    @classmethod
    def _read_off(cls, config: dict, name: str) -> "ModelShape":
        family = config["model_type"]
        if found := next((key for key in _EXPERTS if config.get(key)), None):
            raise ValueError(f"{name}: {family} is a mixture of experts ({found}={config[found]}): only dense models")
        kinds = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
        found = next((key for key in _OTHER_LAYERS if config.get(key)), None) or next(iter(kinds), None)
        if found:
            raise ValueError(f"{name}: {family} has layers other than attention and MLP ({found}): not modelled")

        def size(*keys: str) -> int:
            value = next((config[key] for key in keys if config.get(key) is not None), None)
            if value is None:
                raise ValueError(f"{name}: config.json of {family} has no {' or '.join(keys)}")
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {' or '.join(keys)} of config.json must be at least 1, not {value!r}")
            return value

        hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
        return cls(
            name=name,
            hidden=hidden,
            intermediate=config.get("intermediate_size") or config.get("n_inner") or 4 * hidden,
            layers=size("num_hidden_layers", "n_layer"),
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or hidden // heads,
            vocab=size("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", family.startswith("gemma"))),
            gated=family not in _UNGATED,
            windows=_windows(config, size("num_hidden_layers", "n_layer")),
            one_head_group=family in _ONE_HEAD_GROUP,
        )


def _compare(shape: ModelShape, config) -> None:
    """Raises ValueError where the model's layers have other parameters than `shape` says."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ValueError(f"{shape.name}: no causal language model of {config.model_type}: not modelled")
    with torch.device("meta"):
        model = kind(copy.deepcopy(config))  # its `from_config` would share weights out under ZeRO-3
    apart = {part.weight for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    if (head := model.get_output_embeddings()) is not None:
        apart.add(head.weight)
    real = sum(weight.numel() for weight in model.parameters() if weight not in apart)
    counted = shape.parameters - shape.head_weights * (1 if shape.tied else 2)
    if abs(counted / real - 1) > 0.03:
        raise ValueError(
            f"{shape.name}: {config.model_type} has {real:,} parameters beside embeddings and head, attention and MLP "
            f"of its sizes have {counted:,}: not modelled"
        )


def _windows(config: dict, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    if window is None or "sliding_attention" not in kinds:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read(model: str) -> tuple[dict, str]:
    """Content of a configuration, and what to call it."""
    if model.lower() in KNOWN_MODELS:
        return KNOWN_MODELS[model.lower()], model.lower()
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _content(path), path.resolve().parent.name
    if path.suffix == ".json" or path.is_absolute() or model.startswith("."):
        raise ValueError(f"--model {model}: no such file; known without one: {', '.join(KNOWN_MODELS)}")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model).to_dict(), model
    except OSError as error:
        known = ", ".join(KNOWN_MODELS)
        raise ValueError(f"--model {model}: neither a file nor on the hub; known without one: {known}") from error


def _content(path: Path) -> dict:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--model {path}: no config.json, {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--model {path}: no config.json, but a {type(config).__name__}")
    return config
