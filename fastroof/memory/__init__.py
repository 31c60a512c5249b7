"""GPU memory of a plan: weights, workspaces, and the room for KV cache."""
