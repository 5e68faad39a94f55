"""Parts that the scripts share: measuring, rows, pairs of runs, and studies that go on where they stopped."""
