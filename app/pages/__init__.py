"""Pages that a person opens: one look for reports, for the endpoint's page and for ``rayloom ui``."""
