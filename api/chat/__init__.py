"""Conversations: converts a client's messages to a prompt, and sampled text to an answer.

`conversation.py` holds the messages and tools of a request. `template.py` renders them with the model's chat template.
`answer.py` reads the sampled text with the parser of the model's family (`parsers/`, one file each). `openai.py`,
`responses.py` and `anthropic.py` write answers in the formats of their APIs.
"""
