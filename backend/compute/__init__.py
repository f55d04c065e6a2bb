"""Pure JAX: the model, its adapters, losses, optimizer, training steps and sampler.

`executor.Executor` is the one way in: worker processes load it by that name and give it commands. State goes in and
comes out; the executor holds it between commands. This file imports nothing, so that the API and the engine can read
`families` (which base models are served, and how their folders are read) without loading JAX.
"""
