"""``rayloom ui``: a page of all runs and models in storage, live while they run."""
