"""Several models behind one name: each answers the rows that it is sure of, the rest go on to the next."""
