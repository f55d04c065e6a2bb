"""Parts of the endpoints for OpenAI's and Anthropic's clients: names of models, generation, images, and event streams.

`targets.py` resolves `model`, `generation.py` submits samples and reads them, `images.py` places images in prompts,
`sse.py` streams events, and `openai.py` defines the fields that OpenAI's endpoints share.
"""
