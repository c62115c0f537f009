"""Ways from RAM into device memory."""
