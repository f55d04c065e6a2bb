"""Starts worker processes on this machine, or on hosts whose agents have joined the group."""
