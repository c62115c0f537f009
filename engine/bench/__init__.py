"""Measurements on the user's own machine: they return data, the app prints them.

`measure.py` times figures side by side, `machine/read_floor.py` what the memory delivers beside them, `layers.py` one
layer by the difference of layer counts. `machine/random_weights.py` makes weights of a real model's size,
`synthetic.py` a whole model of them; `subject.py` is any model that is measured, `peer/llama.py` llama.cpp beside it.
`history.py` saves what was found.
"""
