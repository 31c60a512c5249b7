"""Step times for Vidur, whose releases have two interfaces: pick the module by how Vidur was installed.

``fastroof.backends.vidur.native`` serves the package on PyPI (0.0.26, with a native core),
``fastroof.backends.vidur.tree`` the source tree on GitHub and its forks; ``terms`` is what they share.
"""
