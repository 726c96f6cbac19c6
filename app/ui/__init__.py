"""``rayloom ui``: pages that list all runs and models in storage, link to their reports, and compare runs."""
