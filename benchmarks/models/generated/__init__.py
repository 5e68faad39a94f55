"""Data that is generated from a seed: nothing is downloaded, and anybody gets the same."""
