"""Inside Lightning: the optimization loop, the strategy mixin, and the names it is registered under."""
