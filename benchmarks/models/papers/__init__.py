"""Models of papers, written from their descriptions; weights are random."""
