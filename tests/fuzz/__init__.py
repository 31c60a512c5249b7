"""Wrong input of every kind, at length: the same answer or a FastroofError (see README.md)."""
