"""The endpoints, one module for each subject. docs/protocol.md lists them.

The app finds every module here. A module defines a `router`, whose endpoints need a key, and optionally a
`link_router`, whose endpoints need a signed link instead. A new listing needs a journal function and one file here.
"""
