"""One version of a model: its engine, processor and labels, and the answers that they give."""
