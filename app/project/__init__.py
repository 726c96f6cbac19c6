"""A project of a person's own: ``rayloom init`` writes it, from ``template``."""
