"""Files on disk: checkpoints, packed models, tokenizers. Imports only the layouts of the kernels."""
