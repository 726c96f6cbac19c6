"""One version of a model: its engine, its labels and tokenizer, and what answers with them."""
