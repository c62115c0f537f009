"""What lies on disk: checkpoints, packed models, tokenizers. Of the kernels it knows the layouts alone."""
