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


class Remembers(Adapt):
    """Keeps the cache of the layer to itself, from one step to the next."""

    def call(self, module, recorded):
        past = recorded.state.get("cache")
        output, cache = module(recorded.x, recorded.cos, recorded.sin, recorded.may_attend, past)
        recorded.state["cache"] = cache
        return output, cache


class Forgets(Remembers):
    """Breaks off in the second step."""

    def call(self, module, recorded):
        if recorded.step:
            raise RuntimeError("no room")
        return super().call(module, recorded)
