"""`python -m trainer_core ...` is the command line."""

from __future__ import annotations

import sys

from .cli import main

# Guarded: decoding processes import this module again when they are spawned.
if __name__ == "__main__":
    sys.exit(main())
