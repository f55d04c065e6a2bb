"""The HTTP edge. It speaks the tinker wire protocol.

A handler parses, authorises, makes one journal call and answers. The engine finds the work in the journal.
"""

from tinkerflow.api.app import create_app
from tinkerflow.api.serve import serve

__all__ = ["create_app", "serve"]
