"""Keys of `config.json` that no key of [model] copies, read and written (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpczero.huggingface.config import Config
from hpczero.model.shapes import head_dim, kv_heads, window
from hpczero.spec.schema import Model

Values = Mapping[str, Any]


class Conversion(Protocol):
    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        """Return keys of [model]; `found`: those that were read before."""

    def write(self, model: Model) -> dict[str, Any]: ...


class _HeadDim:
    """Heads of keys, and the width of a head: what hidden / heads is, rounded down, if not said."""

    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        hidden, heads = found["hidden"], found["heads"]
        known = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
        default = defaults.get("head_dim", hidden // heads if known else 0)
        kv = config.take("num_key_value_heads", default=defaults.get("num_key_value_heads", heads))
        return {"kv_heads": kv, "head_dim": config.take("head_dim", default=default)}

    def write(self, model: Model) -> dict[str, Any]:
        return {"num_key_value_heads": kv_heads(model), "head_dim": head_dim(model)}


_GATES = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu": "gelu_exact",
}


class _Activation:
    _KEYS = ("hidden_activation", "hidden_act")  # Gemma's, which comes first, and the others'

    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        of_gemma, of_others = (config.take(key) for key in self._KEYS)
        is_gemma = "query_pre_attn_scalar" in defaults
        default = "gelu_pytorch_tanh" if is_gemma else "silu"
        name = (of_gemma if is_gemma else of_others) or default
        if not isinstance(name, str) or name not in _GATES:
            raise config.refusal(self._KEYS[not is_gemma], "no model of hpczero has this gate")
        return {"activation": _GATES[name]}

    def write(self, model: Model) -> dict[str, Any]:
        name = next(name for name, ours in _GATES.items() if ours == model.activation)
        return dict.fromkeys(self._KEYS, name)


class _AttentionBias:
    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        has = config.take("attention_bias", default=False)
        return {"qkv_bias": has, "output_bias": has}

    def write(self, model: Model) -> dict[str, Any]:
        return {"attention_bias": model.qkv_bias}


_WIDEST = 10_000_000


class _GemmaScales:
    """The embedding grows by sqrt(hidden); queries shrink as heads of another width would have."""

    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        default = defaults["query_pre_attn_scalar"]
        width = config.take("query_pre_attn_scalar", default=default)
        hidden = found["hidden"]
        if not isinstance(width, int | float) or not 0 < width <= _WIDEST:
            raise config.refusal("query_pre_attn_scalar", "it must be a positive number")
        scale = hidden**0.5 if isinstance(hidden, int) and 0 < hidden <= _WIDEST else 1.0
        return {"embedding_scale": scale, "query_scale": width**-0.5}

    def write(self, model: Model) -> dict[str, Any]:
        width = model.query_scale**-2 if model.query_scale else head_dim(model)
        nearest = round(width)
        is_whole = nearest > 0 and nearest**-0.5 == model.query_scale
        return {"query_pre_attn_scalar": nearest if is_whole else width}


_SCALED = {
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original",
        "low_freq_factor": "rope_low",
        "high_freq_factor": "rope_high",
    },
    "yarn": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original",
        "beta_fast": "rope_fast",
        "beta_slow": "rope_slow",
        "attention_factor": "rope_attention",
    },
}


@dataclass(frozen=True)
class _Rotary:
    """Base, share and stretching of rotary positions, as newer and older versions say them.

    `local`: layers with a window have a base of their own, unstretched. `partly`: a share of each
    head may be turned; other architectures turn all of it, whatever is said.
    """

    local: bool = False
    partly: bool = False

    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        both = config.table("rope_parameters")
        of_global = both.table("full_attention") if both.has("full_attention") else both
        of_local = both.table("sliding_attention") if both.has("sliding_attention") else None
        base = of_global.take("rope_theta") or config.take("rope_theta", defaults["rope_theta"])
        config.take("rope_theta")
        keys = {"rope_base": base}
        if self.partly:
            share = config.take("partial_rotary_factor", default=1.0)
            keys["rope_fraction"] = of_global.take("partial_rotary_factor", default=share)
        else:
            of_global.demand("partial_rotary_factor", 1.0)
        if self.local:
            local_base = config.take("rope_local_base_freq", defaults["rope_local_base_freq"])
            if of_local is not None:
                local_base = of_local.take("rope_theta", default=local_base)
                of_local.demand("rope_type", "default")
                of_local.refuse_others()
            keys["rope_local_base"] = local_base
        elif of_local is not None:
            raise both.refusal("sliding_attention", "this architecture has no base for it")
        older = config.table("rope_scaling")
        scalings = [
            self._scaling(table, config, found["seq_len"])
            for table, is_there in ((of_global, of_global.has("rope_type")), (older, older.is_full))
            if is_there
        ]
        if len(scalings) == 2 and scalings[0] != scalings[1]:
            raise config.refusal("rope_scaling", "rope_parameters says something else")
        for table in (both, of_global, older):
            table.refuse_others()
        return keys | (scalings[0] if scalings else {})

    def _scaling(self, table: Config, config: Config, seq_len: Any) -> dict[str, Any]:
        name = table.take("rope_type") or table.take("type") or "default"
        table.take("type"), table.take("rope_type")
        original = config.take("original_max_position_embeddings")
        if name == "default":
            return {}
        if not isinstance(name, str) or name not in _SCALED or self.partly:
            raise table.refusal(
                "rope_type" if table.has("rope_type") else "type",
                "hpczero stretches positions by linear, llama3 and yarn, and those of partly "
                "rotated heads not at all",
            )
        keys: dict[str, Any] = {"rope_scaling": name}
        table.demand("truncate", True)
        for theirs, ours in _SCALED[name].items():
            value = table.take(theirs)
            if value is None and theirs == "original_max_position_embeddings":
                value = original or seq_len
            if value is not None:
                keys[ours] = value
        if name != "llama3":
            table.take("original_max_position_embeddings")
        return keys

    def write(self, model: Model) -> dict[str, Any]:
        """Say it in the words of newer versions, which ask for these alone, and in the older."""
        names = () if self.partly else _SCALED.get(model.rope_scaling, {}).items()
        scaling: dict[str, Any] = {theirs: getattr(model, ours) for theirs, ours in names}
        if not scaling.get("attention_factor", True):
            del scaling["attention_factor"]
        kind = {"rope_type": model.rope_scaling if scaling else "default"}
        share = {"partial_rotary_factor": model.rope_fraction} if self.partly else {}
        of_global = {**kind, "rope_theta": model.rope_base, **share, **scaling}
        older = {"rope_theta": model.rope_base, "rope_scaling": kind | scaling if scaling else None}
        if not self.local:
            return {"rope_parameters": of_global, **older, **share}
        local_base = model.rope_local_base or model.rope_base
        of_local = {"rope_type": "default", "rope_theta": local_base}
        both = {"full_attention": of_global, "sliding_attention": of_local}
        return {"rope_parameters": both, **older, "rope_local_base_freq": local_base}


# ---------------------------------------------------------------------- which layers have a window


def _layer_types(model: Model) -> list[str]:
    kinds = ("full_attention", "sliding_attention")
    return [kinds[window(model, index) > 0] for index in range(model.layers)]


def _windows(config: Config, size: Any, is_local: Sequence[bool]) -> dict[str, Any]:
    """Return the window and the pattern that give just these layers one."""
    if not any(is_local):
        return {"window": 0}
    if all(is_local):
        return {"window": size}
    for pattern in range(2, len(is_local) + 1):
        if all(local == ((at + 1) % pattern != 0) for at, local in enumerate(is_local)):
            return {"window": size, "window_pattern": pattern}
    raise config.refusal(
        "layer_types",
        "hpczero's models have a window in all layers, or in all but every n-th",
    )


def _said(config: Config, layers: Any, default: Sequence[bool]) -> Sequence[bool]:
    """Return which layers have a window, by `layer_types` where that is there."""
    types = config.take("layer_types")
    if types is None:
        return default
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise config.refusal("layer_types", f"each of {layers} layers has to be one of {known}")
    return [kind == "sliding_attention" for kind in types]


def _count(layers: Any) -> int:
    return layers if isinstance(layers, int) and 0 < layers <= 10_000 else 0


class _AllLayers:
    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        size = defaults.get("sliding_window")
        if config.has("sliding_window"):
            size = config.take("sliding_window")
        return {"window": size or 0}

    def write(self, model: Model) -> dict[str, Any]:
        return {"sliding_window": model.window or None}


class _FromALayerOn:
    """Qwen's: layers from one on, if windows are in use."""

    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        in_use = config.take("use_sliding_window", default=False)
        size = config.take("sliding_window", default=defaults["sliding_window"])
        first = config.take("max_window_layers", default=defaults["max_window_layers"])
        if not isinstance(in_use, bool):
            raise config.refusal("use_sliding_window", "it must be true or false")
        if not isinstance(first, int):
            raise config.refusal("max_window_layers", "it must be a number of layers")
        if not in_use:
            first = found["layers"]
        is_local = [at >= first for at in range(_count(found["layers"]))]
        return _windows(config, size, _said(config, found["layers"], is_local))

    def write(self, model: Model) -> dict[str, Any]:
        types = _layer_types(model)
        first = next((at for at, kind in enumerate(types) if kind[0] == "s"), model.layers)
        return {
            "use_sliding_window": model.window > 0,
            "sliding_window": model.window or None,
            "max_window_layers": first,
            "layer_types": types,
        }


class _Alternating:
    """Gemma's: all layers but every n-th."""

    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        size = config.take("sliding_window", default=defaults["sliding_window"])
        pattern = config.take("_sliding_window_pattern")
        pattern = config.take("sliding_window_pattern") or pattern
        pattern = pattern or defaults["sliding_window_pattern"]
        if not isinstance(pattern, int) or pattern < 1:
            raise config.refusal("sliding_window_pattern", "it must be a positive number")
        count = _count(found["layers"])
        is_local = [(at + 1) % pattern != 0 for at in range(count)]
        return _windows(config, size, _said(config, found["layers"], is_local))

    def write(self, model: Model) -> dict[str, Any]:
        return {"sliding_window": model.window or 4096, "layer_types": _layer_types(model)}


HEAD_DIM = _HeadDim()
ACTIVATION = _Activation()
ATTENTION_BIAS = _AttentionBias()
GEMMA_SCALES = _GemmaScales()
ROTARY = _Rotary()
PARTLY_ROTARY = _Rotary(partly=True)
ROTARY_AND_LOCAL = _Rotary(local=True)
ALL_LAYERS = _AllLayers()
FROM_A_LAYER_ON = _FromALayerOn()
ALTERNATING = _Alternating()
