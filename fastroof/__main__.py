"""``python -m fastroof``: the command line."""

from __future__ import annotations

from fastroof.cli import main

if __name__ == "__main__":
    main()
