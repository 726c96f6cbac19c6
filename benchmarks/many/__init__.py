"""What runs, versions and deployed models cost when there are many."""
