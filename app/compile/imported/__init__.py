"""Models that were trained elsewhere, made ready to be compiled, compared and published like one's own."""
