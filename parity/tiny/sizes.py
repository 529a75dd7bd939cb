"""Tiny configurations, lopsided on purpose: no two axes of a layer share a size, so that a swap is an error of shape.

Values are chosen by the name of a configuration's field, so that a new family gets them without being listed here.
Fields that are not sizes get values that are not their defaults, since a field that is read but unused, or not read at
all, shows only then.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import transformers

Config = dict[str, Any]

SIZES: Mapping[str, int] = {
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "n_embd": 36,
    "n_inner": 44,
    "n_head": 6,
    "n_layer": 2,
    "n_positions": 64,
    "type_vocab_size": 3,
    "num_local_experts": 5,
    "n_routed_experts": 12,
    "n_group": 3,
    "moe_intermediate_size": 24,
    "q_lora_rank": 18,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 4,
    "v_head_dim": 9,
    "state_size": 5,
    "conv_kernel": 3,
    "time_step_rank": 7,
}
OTHERS: Mapping[str, Any] = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-3),
    # Half of what passes, so that dropout which is active in evaluation shows.
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.5),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout"), 0.5),
    "activation_function": "gelu",
    "apply_residual_connection_post_layernorm": True,
    "scale_attn_by_inverse_layer_idx": True,
    "reorder_and_upcast_attn": True,
    "sliding_window": 5,
    "use_sliding_window": True,
    "mlp_only_layers": [0],
    "num_experts_per_tok": 3,
    "router_jitter_noise": 0.1,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.75,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # With 8 channels the four wavelengths are 6, 30, 140 and 664: kept, blended, and two divided by the factor.
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
BESIDE_EXPERTS: Mapping[str, int] = {"hidden_size": 40, "intermediate_size": 56}
"""Rows of whole 16 bytes in half precision: the reference's product of all experts at once wants them."""
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
"""For latent attention, whose softmax scale reads it."""


@cache
def fields(model_type: str) -> frozenset[str]:
    """The fields of a model type's configuration, with rope keys in the spelling of transformers 5."""
    known = transformers.AutoConfig.for_model(model_type).to_dict().keys()
    return frozenset(known | {"rope_parameters"} if "rope_theta" in known else known)


def config(model_type: str, **changes: Any) -> Config:
    """The lopsided configuration of a model type, as keyword arguments of its configuration class.

    Rope keys are in the spelling of transformers 5.

    Args:
        model_type: Hugging Face's name.
        changes: fields that shall have another value.
    """
    known = fields(model_type)
    lopsided = {name: value for name, value in {**SIZES, **OTHERS}.items() if name in known}
    if "num_experts_per_tok" in known:
        lopsided |= BESIDE_EXPERTS
    if "kv_lora_rank" in known:
        lopsided |= {"num_key_value_heads": SIZES["num_attention_heads"], "rope_parameters": YARN}
        del lopsided["head_dim"]  # another name of the part that turns
    if "mlp_only_layers" in known:
        del lopsided["num_local_experts"]  # transformers has renamed it, and reads the old name, which checkpoints have
        lopsided |= {"num_experts": SIZES["num_local_experts"], "head_dim": SIZES["head_dim"], "norm_topk_prob": True}
        lopsided["moe_intermediate_size"] = 16  # there are 24 rows of keys
    return {"model_type": model_type, **lopsided, **changes}
