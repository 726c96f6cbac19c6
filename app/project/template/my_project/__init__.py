"""The model and the search space of my_project."""
