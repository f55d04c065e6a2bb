"""What exists, by name, and its bounds: plain facts that requests, engine and workers share. Nothing here loads JAX."""
