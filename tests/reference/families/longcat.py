"""LongCat-Flash; its small file is in tests/models/test_latent.py."""

from __future__ import annotations

from tests.reference.checkpoints import CARD, Published, kv

# of the experts that return their input, a third of 12 picks
PUBLISHED = {"longcat-flash": Published("560", "27", kv((56, 1, 576)), f"{CARD}; active: on average")}
