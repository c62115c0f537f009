"""The numerical operations (`operations.py`), what they are defined as (`reference.py`) and the quantized layouts."""
