"""The endpoints, one module for each subject. docs/protocol.md lists them.

The app finds every module here. A module has a `router`, whose endpoints need a key, and may have a `link_router`,
whose endpoints are opened by a signed link instead. A new listing is a journal function and one file here.
"""
