"""Starts worker processes on this machine, or on hosts whose agents joined the group."""
