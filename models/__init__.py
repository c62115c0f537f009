"""What lies on disk: checkpoints, the packed layout, tokenizers. Of the kernels it knows the quantized layouts alone."""
