"""Conversations: a client's messages become a prompt, and sampled text becomes an answer.

What the wire forms of OpenAI and Anthropic share, and nothing of the two forms themselves. The way of a request:
`conversation.py` holds its messages and tools, `template.py` renders them by the model's own chat template, and
`answer.py` reads what is sampled through the parser of the model's family (`parsers/`, one file each).
"""
