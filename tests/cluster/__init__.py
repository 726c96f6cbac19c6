"""Clusters of several machines, which are namespaces of this one."""
