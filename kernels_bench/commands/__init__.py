"""The commands of ``kernels-bench``, a file each, named like it; every one has ``register(app)``."""
