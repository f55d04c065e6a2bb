"""How the driver, its workers and the agents of hosts speak to each other: messages, frames, and the handshake."""
