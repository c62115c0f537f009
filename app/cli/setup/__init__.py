"""`floe-chat setup`: a model from anywhere, packed for this machine."""
