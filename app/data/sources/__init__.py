"""The sources of a recipe: every format has one reader, whichever way the rows go on."""
