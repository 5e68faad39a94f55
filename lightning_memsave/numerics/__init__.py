"""Pure tensor functions: codes of few bits, blockwise maps, masks, positions, and rounding to 16 bits."""
