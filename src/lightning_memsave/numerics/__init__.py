"""Pure tensor functions: blockwise quantisation to a code map."""
