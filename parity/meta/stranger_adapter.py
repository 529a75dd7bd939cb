"""How the layer with a signature of its own is built and called."""

import parity


class Adapt(parity.Adapter):
    def build(self, cls, constructed):
        config = constructed.config
        sizes = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        return cls(*sizes, config.attention_bias)

    def call(self, module, recorded):
        past = recorded.past[0] if recorded.past else None
        return module(recorded.x, recorded.cos, recorded.sin, recorded.may_attend, past)
