"""Cascades: several models behind one name. Each answers the rows that it is sure of, and passes on the rest."""
