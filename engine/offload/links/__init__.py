"""Links from RAM into device memory."""
