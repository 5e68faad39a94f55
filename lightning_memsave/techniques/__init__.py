"""One stem per technique: its settings, what it does to a module or an optimizer, and its estimate."""
