"""The protocol of the driver, its workers and the hosts' agents: messages, frames, and the handshake."""
