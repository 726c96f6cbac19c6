"""Search spaces for ``tune.space``: one file per family of models. The names in a space are keys of the recipe."""
