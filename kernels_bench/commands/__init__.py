"""The commands of ``kernels-bench``, one module a group; each has ``register(app)``."""
