"""The local Ray cluster: started, looked at and stopped from the command line."""
