"""Everything that only a GPU can prove, as one script for a bare machine: see README.md."""
