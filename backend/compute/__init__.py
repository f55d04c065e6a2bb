"""Pure JAX: the model, its adapters, losses, optimizer, training steps and sampler.

`executor.Executor` is the only entry point: worker processes load it by that name and send it commands. Functions take
state and return new state. The executor holds the state between commands. This file imports nothing, so the API and the
engine can import `families`, the list of supported model families, without loading JAX.
"""
